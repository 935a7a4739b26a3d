"""Whether weights are at the density that was asked for, and warnings where they are not."""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import keras

from keras_sparse_ortho._keras_internals import before_save, in_fit, warn_user
from keras_sparse_ortho.errors import DensityWarning
from keras_sparse_ortho.models._prunable_weights import prunable_weights
from keras_sparse_ortho.orthogonal import live_count
from keras_sparse_ortho.parametrizations import (
    LearntThreshold,
    ScheduledMask,
    warn_unless_updated,
)

_DRIFT = 0.02  # of the count asked for, by which thresholds that still learn may drift
_DENSE = 0.95  # above this density learnt thresholds have done nothing worth it


@dataclasses.dataclass(frozen=True)
class DensityGap:
    """Weights that are not at the density asked for: how many of `size` entries or ranks live."""

    live: int
    asked: int
    size: int

    def __str__(self) -> str:
        return (
            f"density={self.live / self.size:.4g} ({self.live} of {self.size} live), where "
            f"{self.asked / self.size:.4g} ({self.asked}) was asked for"
        )


def density_gap(
    parametrizations: Iterable[Any], *, begun: bool = False
) -> DensityGap | None:
    """How far weights are from the density asked for; `None` if they have it, or none was asked."""
    # That of a `ScheduledMask` is the final one of its schedule; thresholds steered together share
    # one, frozen if `TargetDensity` freezes. With `begun` masks never updated are left out.
    candidates = list(parametrizations)
    masks = [p for p in candidates if isinstance(p, ScheduledMask)]
    if begun:
        masks = [mask for mask in masks if mask.last_updated >= 0]
    counts = [(*mask.counts(), mask.weight.size) for mask in masks]
    missed = any(live != goal for live, goal, _ in counts)
    thresholds = [p for p in candidates if isinstance(p, LearntThreshold)]
    steered = [p for p in thresholds if p.target_density is not None]
    if steered:
        live, size = _total_counts(steered)
        # All have the same, except in a model assembled from several.
        density = max(p.target_density or 0.0 for p in steered)
        goal = live_count(density, size)
        counts.append((live, goal, size))
        moving = [threshold for threshold in steered if not threshold.frozen]
        slack = max(threshold.dies_at_once for threshold in steered)
        drift = max(slack, _DRIFT * goal) if moving else slack
        missed |= abs(live - goal) > drift or any(
            t.target_is_frozen for t in moving
        )
    if not missed:
        return None
    lives, goals, sizes = zip(*counts, strict=True)
    return DensityGap(sum(lives), sum(goals), sum(sizes))


def _total_counts(thresholds: Iterable[LearntThreshold]) -> tuple[int, int]:
    """The live entries or ranks of some thresholds, and all of them."""
    counts = [threshold.counts() for threshold in thresholds]
    lives, sizes = zip(*counts, strict=True)
    return sum(lives), sum(sizes)


def model_gap(model: keras.Model, *, begun: bool = False) -> DensityGap | None:
    return density_gap(
        [w.parametrization for w in prunable_weights(model)], begun=begun
    )


def warn_of_gap(gap: DensityGap, reason: str) -> None:
    warn_user(
        f"The weights are not at the density asked for: {reason}. Train on, or call "
        f"keras_sparse_ortho.finish(model), which brings them there at once. Received: {gap}",
        DensityWarning,
    )


def warn_unless_at_density(model: keras.Model) -> None:
    """Warns if training has begun, is not going on, and the density asked for is not there."""
    # A layer has a part of the density of its model.
    if not isinstance(model, keras.Model) or in_fit(model):
        return
    warn_unless_updated(model)
    _warn_of_dense_thresholds(model)
    gap = model_gap(model, begun=True)
    if gap is not None:
        # Which of these it was, only the end of `fit` can tell.
        warn_of_gap(
            gap,
            "training ended before their schedule did, or weights of an earlier epoch were "
            "restored or saved as the best",
        )


def _warn_of_dense_thresholds(model: keras.Model) -> None:
    """Warns of trained thresholds without `TargetDensity` that have left nearly all entries."""
    parametrizations = [w.parametrization for w in prunable_weights(model)]
    alone = [
        p
        for p in parametrizations
        if isinstance(p, LearntThreshold) and p.target_density is None
    ]
    moving = [p for p in alone if not p.frozen]
    if not any(threshold.is_trained for threshold in moving):
        return
    live, size = _total_counts(moving)
    if live > _DENSE * size:
        warn_user(
            "Training has left nearly all entries above their learnt thresholds. Without "
            "keras_sparse_ortho.callbacks.TargetDensity(density) the density depends on "
            "`weight_decay` and `s_init`: train with that callback, or call "
            "keras_sparse_ortho.finish(model, density). "
            f"Received: density={live / size:.4g} ({live} of {size} live)",
            DensityWarning,
        )


def watch_saving(model: keras.Model, watch: bool) -> None:
    """Warns whenever the model is saved and is not at the density asked for; or not any more."""
    before_save(
        model,
        functools.partial(warn_unless_at_density, model) if watch else None,
    )
