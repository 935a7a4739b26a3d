"""`BestAtDensity` and `finish`: epochs at the density asked for, or that density at once."""

from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._checks import other_keywords
from keras_sparse_ortho._optimizer_slots import zero_slots
from keras_sparse_ortho._types import Config
from keras_sparse_ortho.callbacks._target_density import ThresholdSteering
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.models import model_gap, prunable_weights, watch_saving
from keras_sparse_ortho.parametrizations import LearntThreshold, ScheduledMask

_WAIT = ("on_epoch_end", "on_train_batch_end")


class BestAtDensity(keras.callbacks.Callback):
    """Hides from a callback the epochs that end before the requested density is reached.

    The loss is best early, when the model is dense: `EarlyStopping` would restore that, and
    `ModelCheckpoint` keep it. Wrapped, they only see epochs that end at the final density.

    Args:
        callback: A Keras callback, such as `EarlyStopping(restore_best_weights=True)`,
            `ModelCheckpoint(save_best_only=True)` or `ReduceLROnPlateau()`. Until then its
            `on_epoch_end` and `on_train_batch_end` are not called; everything else is.

    Limits: the density is checked after epochs, not batches; before, logs lack what
    `ReduceLROnPlateau` adds.

    Examples:
        >>> import keras, numpy as np, keras_sparse_ortho as kso
        >>> dense = keras.Sequential([keras.Input((64,)), keras.layers.Dense(32)])
        >>> model = kso.parametrize(dense, kso.SoftThreshold)
        >>> model.compile("sgd", "mse")
        >>> stop = keras.callbacks.EarlyStopping("loss", patience=1, restore_best_weights=True)
        >>> history = model.fit(np.ones((64, 64)), np.ones((64, 32)), verbose=0, epochs=4,
        ...                     callbacks=[kso.callbacks.TargetDensity(0.125), BestAtDensity(stop)])
        >>> kso.prunable_weights(model)
        [<dense/kernel shape=(64, 32), density=0.125>]
    """

    @other_keywords
    def __init__(self, callback: keras.callbacks.Callback) -> None:
        super().__init__()
        if not isinstance(callback, keras.callbacks.Callback):
            raise ValueError(
                f"`callback` must be a Keras callback. Received: {callback=}"
            )
        self.callback = callback
        # Keras waits in each step for callbacks that are not safe.
        kind, base = type(callback), keras.callbacks.Callback
        ends = [name for name in dir(base) if name.endswith("batch_end")]
        default = all(
            getattr(kind, name) is getattr(base, name) for name in ends
        )
        self.async_safe = default or getattr(callback, "async_safe", False)
        self._reached = False
        for name in dir(callback):
            if name.startswith("on_") and name not in _WAIT:
                setattr(self, name, getattr(callback, name))

    def set_params(self, params: dict[str, Any]) -> None:
        super().set_params(params)
        self.callback.set_params(params)

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        self.callback.set_model(model)
        self._reached = False

    def on_epoch_end(self, epoch: int, logs: Config | None = None) -> None:
        self._reached = model_gap(self.model) is None
        if self._reached:
            self.callback.on_epoch_end(epoch, logs)

    def on_train_batch_end(
        self, batch: int, logs: Config | None = None
    ) -> None:
        if self._reached:
            self.callback.on_train_batch_end(batch, logs)


@other_keywords
def finish(model: keras.Model, density: float | None = None) -> Any:
    """Brings a model to its requested density without training, in place; returns it.

    It does what the end of the schedule does: a scheduled mask keeps its `round(d * size)` largest
    magnitudes; learnt thresholds leave `round(d * size)` entries of the whole model live, and fix
    them. Moments of entries that die are reset. Use it for runs that ended early and for weights of
    an earlier epoch, and train on for some epochs.

    Args:
        model: A Keras model with such parametrizations.
        density: float in (0, 1]. For learnt thresholds: the global density. Default: that of
            `TargetDensity`.

    Raises NotPrunableError for a model without such parametrizations, thresholds without a density,
    scheduled masks, which have their own, with one, and weights that are not finite.

    Limits: entries that are 0 stay 0, so the density never rises.

    Examples:
        >>> import keras, keras_sparse_ortho as kso
        >>> dense = keras.Sequential([keras.Input((64,)), keras.layers.Dense(32)])
        >>> model = kso.parametrize(dense, kso.MagnitudeMask(kso.schedules.Cubic(0.125)))
        >>> kso.prunable_weights(finish(model))  # as at the end of a run
        [<dense/kernel shape=(64, 32), density=0.125>]
    """
    parametrizations = [
        weight.parametrization for weight in prunable_weights(model)
    ]
    masks = [p for p in parametrizations if isinstance(p, ScheduledMask)]
    thresholds = [p for p in parametrizations if isinstance(p, LearntThreshold)]
    if not masks and not thresholds:
        raise NotPrunableError(
            "finish() is for learnt thresholds and masks on a schedule, see "
            f"keras_sparse_ortho.parametrize. Received: model={model.name!r} without any"
        )
    if density is not None and not thresholds:
        raise NotPrunableError(
            "Masks on a schedule have the density with which it ends: make the model again with "
            f"another, or call `kso.prune(strip(model), density)`. Received: {density=}"
        )
    targets_of_all = (
        [density]
        if density is not None
        else [t.target_density for t in thresholds]
    )
    targets = {target for target in targets_of_all if target is not None}
    if thresholds and len(targets) != 1:
        raise NotPrunableError(
            "finish() needs a `density` for thresholds that TargetDensity has not steered to one. "
            f"Received: model={model.name!r}, density=None"
        )
    optimizer = getattr(model, "optimizer", None)
    for mask in masks:
        live, final = mask.counts()
        if live != final:  # from step 0 on, the mask counts as updated
            reset, _ = mask.update(
                max(mask.last_updated, 0), mask.schedule.density
            )
            zero_slots(optimizer, mask.weight.variable, reset)
    if thresholds:
        (target,) = targets
        steering = ThresholdSteering(target)
        steering.take(thresholds)
        # All of them if another run has frozen them at another density.
        for threshold, live_mask in steering.cut(
            steering.thresholds or thresholds, target, freeze=True
        ):
            zero_slots(optimizer, threshold.steered, np.logical_not(live_mask))
        for threshold in thresholds:
            threshold.aim(target, freeze=True)
    watch_saving(model, False)
    return model
