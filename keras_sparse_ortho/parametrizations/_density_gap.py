"""`density_gap`: whether weights are at the density that was asked for."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from keras_sparse_ortho.orthogonal import live_count
from keras_sparse_ortho.parametrizations._learnt_threshold import LearntThreshold
from keras_sparse_ortho.parametrizations._scheduled_mask import ScheduledMask

# The fraction of the count asked for by which thresholds that still learn may drift.
_DRIFT = 0.02


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


def density_gap(parametrizations: Iterable[Any], *, begun: bool = False) -> DensityGap | None:
    """How far weights are from the density asked for; `None` if they have it, or none was asked.

    A `ScheduledMask` should have the final density of its schedule; all thresholds that
    `TargetDensity` steers together should have its density, and be frozen if it freezes. With
    `begun` masks that were never updated are left out.
    """
    found = list(parametrizations)
    masks = [p for p in found if isinstance(p, ScheduledMask)]
    if begun:
        masks = [mask for mask in masks if mask.last_updated >= 0]
    counts = [(*mask.counts(), mask.weight.size) for mask in masks]
    missed = any(live != asked for live, asked, _ in counts)
    thresholds = [p for p in found if isinstance(p, LearntThreshold)]
    steered = [p for p in thresholds if p.target_density is not None]
    if steered:
        live, size = (sum(part) for part in zip(*(p.counts() for p in steered), strict=True))
        # All have the same, except in a model assembled from several.
        asked = live_count(max(p.target_density or 0.0 for p in steered), size)
        counts.append((live, asked, size))
        moving = [threshold for threshold in steered if not threshold.frozen]
        slack = max(threshold.dies_at_once for threshold in steered)
        drift = max(slack, _DRIFT * asked) if moving else slack
        missed |= abs(live - asked) > drift or any(t.target_is_frozen for t in moving)
    if not missed:
        return None
    return DensityGap(*(sum(part) for part in zip(*counts, strict=True)))
