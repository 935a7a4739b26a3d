"""`finish`: a model at the density that was asked for, now."""

from typing import Any

import keras

from keras_sparse_ortho._optimizer_slots import zero_slots
from keras_sparse_ortho.callbacks._offset_search import cut, entries_of
from keras_sparse_ortho.callbacks._threshold_steering import ThresholdSteering
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.models import prunable_weights, watch_saving
from keras_sparse_ortho.orthogonal import live_count
from keras_sparse_ortho.parametrizations import LearntThreshold, ScheduledMask
from keras_sparse_ortho.schedules import OneShot


def finish(model: Any, density: float | None = None) -> Any:
    """Brings a model to the density that was asked for, without training it.

    What the end of the schedule would have done is done now: a `MagnitudeMask` or
    `StraightThroughTopK` keeps the `round(d * size)` largest magnitudes, `d` being the density with
    which its schedule ends; learnt thresholds are set so that `round(d * size)` entries of the
    whole model are live, `d` being the density of `TargetDensity`, and these are fixed. The
    optimizer forgets the moments of what dies.

    For runs that ended before their schedule, and for weights of an earlier epoch. Entries that
    training has not made small are lost at once, so train on for some epochs; `UpdateMasks` and
    `TargetDensity` leave what is finished as it is.

    Args:
        model: A Keras model with such parametrizations. It is changed in place.
        density: For learnt thresholds: the global density, in (0, 1]. Default: the one that
            `TargetDensity` was asked for.

    Returns:
        The model.

    Raises:
        DensityError: A density outside (0, 1].
        NotPrunableError: A model without such parametrizations; thresholds of which no density was
            asked, or a density for scheduled masks, which have their own; weights that are not
            finite.

    Limits: entries that are 0 stay 0, so a density above that of the model is not reached.

    Example:

    >>> import keras
    >>> import keras_sparse_ortho as kso
    >>> dense = keras.Sequential([keras.Input((64,)), keras.layers.Dense(32)])
    >>> model = kso.parametrize(dense, kso.MagnitudeMask(kso.schedules.Cubic(0.125)))
    >>> kso.prunable_weights(finish(model))  # as at the end of a run
    [<dense/kernel shape=(64, 32), density=0.125>]
    """
    made = [weight.parametrization for weight in prunable_weights(model)]
    masks = [p for p in made if isinstance(p, ScheduledMask)]
    thresholds = [p for p in made if isinstance(p, LearntThreshold)]
    if not masks and not thresholds:
        raise NotPrunableError(
            "finish() is for thresholds that are learnt and masks on a schedule, see "
            f"keras_sparse_ortho.parametrize. Received: model={model.name!r} without any"
        )
    if density is not None and not thresholds:
        raise NotPrunableError(
            "Masks on a schedule have the density with which that ends: make the model again with "
            f"another, or `prune` it. Received: density={density!r}"
        )
    asked = density if density is not None or not thresholds else _asked(model, thresholds)
    for mask in masks:
        _finish_mask(model, mask)
    if thresholds:
        _finish_thresholds(model, thresholds, ThresholdSteering(asked or 0.0, OneShot(1.0)))
    watch_saving(model, False)
    return model


def _asked(model: Any, thresholds: list[LearntThreshold]) -> float:
    asked = {t.target_density for t in thresholds if t.target_density is not None}
    if len(asked) != 1:
        raise NotPrunableError(
            "finish() needs a `density` for thresholds that TargetDensity has not steered to one. "
            f"Received: model={model.name!r}, density=None"
        )
    return asked.pop()


def _finish_mask(model: Any, mask: ScheduledMask) -> None:
    live, final = mask.counts()
    if live == final:
        return
    # Of a mask that was never renewed it is known now that it was.
    renewal = mask.renew(max(mask.last_renewed, 0), mask.schedule.final_density)
    zero_slots(_optimizer(model), mask.weight.variable, renewal.forgotten)


def _finish_thresholds(
    model: Any, thresholds: list[LearntThreshold], steering: ThresholdSteering
) -> None:
    steering.take(thresholds)
    steering.lay_out(1)
    frozen = [threshold for threshold in thresholds if threshold.frozen]
    pairs: list[tuple[Any, Any]] = list(steering.steer(0))
    if len(frozen) == len(thresholds):  # by a run to another density
        entries = [entries_of(threshold) for threshold in thresholds]
        count = live_count(steering.final_density, sum(one.size for one in entries))
        masks = cut(entries, count).masks()
        pairs = [(t, t.freeze(mask)) for t, mask in zip(thresholds, masks, strict=True)]
    for threshold, live in pairs:
        zero_slots(_optimizer(model), threshold.steered, keras.ops.logical_not(live))
    for threshold in thresholds:
        threshold.aim(steering.final_density, freeze=True)


def _optimizer(model: Any) -> Any:
    return getattr(model, "optimizer", None)
