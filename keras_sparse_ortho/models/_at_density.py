"""Warnings about models that are not at the density asked for."""

import functools
import warnings
import weakref
from typing import Any

import keras

from keras_sparse_ortho._keras_internals import before_save, in_fit, level_of_user
from keras_sparse_ortho.errors import DensityWarning
from keras_sparse_ortho.models._prunable_weights import prunable_weights
from keras_sparse_ortho.parametrizations import DensityGap, density_gap, warn_unless_updated

# Which of these it was, only the end of `fit` can tell.
_POSSIBLE = (
    "training ended before their schedule did, or weights of an earlier epoch were restored or "
    "saved as the best"
)


def model_gap(model: Any, *, begun: bool = False) -> DensityGap | None:
    """How far a model is from the density that it was asked for; see `density_gap`."""
    return density_gap([w.parametrization for w in prunable_weights(model)], begun=begun)


def warn_of_gap(gap: DensityGap, reason: str) -> None:
    """Warns that weights are not at the density asked for, and says what to do."""
    warnings.warn(
        f"The weights are not at the density asked for: {reason}. Train on, or call "
        f"keras_sparse_ortho.finish(model), which brings them there at once. Received: {gap}",
        DensityWarning,
        stacklevel=level_of_user(),
    )


def warn_unless_at_density(model: Any) -> None:
    """Warns if training has begun, is not going on, and the density asked for is not there."""
    if not isinstance(model, keras.Model):  # a layer has a part of the density of its model
        return
    if in_fit(model):
        return
    warn_unless_updated(model)
    gap = model_gap(model, begun=True)
    if gap is not None:
        warn_of_gap(gap, _POSSIBLE)


def watch_saving(model: Any, watch: bool) -> None:
    """Warns whenever the model is saved and is not at the density asked for; or not any more."""
    if not watch:
        before_save(model, None)
        return
    reference = weakref.ref(model)
    before_save(model, functools.partial(_warn_in_save, reference))


def _warn_in_save(reference: Any) -> None:
    model = reference()
    if model is not None:
        warn_unless_at_density(model)
