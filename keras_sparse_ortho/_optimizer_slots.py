"""Optimizer slots (moments, averages) of entries that were dropped, grown or moved."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._keras_internals import Slot, optimizer_slots, slot_pairs
from keras_sparse_ortho._values import assign, placed, to_numpy


@dataclasses.dataclass(frozen=True)
class WarmStart:
    """An optimizer whose means of squared gradients do not start from 0 for grown entries.

    They start from the mean of those entries of the weight that stay live.
    """

    optimizer: Any


def zero_slots(optimizer: Any, variable: Any, entries: Any) -> None:
    """Resets the slots of some entries of a weight to their initial values.

    After a mask change stale momentum would go on moving dropped raw weights, and push grown ones
    along an old gradient. `entries` is a bool array or tensor, or `None` for none.
    """
    optimizer, _ = _unpacked(optimizer)
    if optimizer is None or entries is None:
        return
    slots = optimizer_slots(optimizer, variable)
    chosen = placed(entries, variable) if slots else None
    for slot in slots:
        value = keras.ops.convert_to_tensor(slot.tensor)
        _write(slot, keras.ops.where(chosen, keras.ops.cast(slot.start, value.dtype), value))


def warm_slots(optimizer: Any, variable: Any, before: Any, live: Any) -> None:
    """Starts entries that are live now and were not `before` as a `WarmStart` says."""
    optimizer, warm = _unpacked(optimizer)
    if not warm or optimizer is None:
        return
    ops = keras.ops
    for slot in optimizer_slots(optimizer, variable):
        if slot.is_square:
            value = ops.convert_to_tensor(slot.tensor)
            kept = ops.cast(ops.logical_and(before, live), value.dtype)
            mean = ops.sum(value * kept) / ops.maximum(ops.sum(kept), 1)
            grown = ops.logical_and(live, ops.logical_not(before))
            _write(slot, ops.where(grown, mean, value))


def move_slots(optimizer: Any, variable: Any, source: np.ndarray) -> None:
    """Moves slots with live values, or blocks `(J, k, *taps, r, c)`; resets those of new ones.

    `source` has the flat index of each value or `(J, k)` block before, -1 if it is new.
    """
    optimizer, warm = _unpacked(optimizer)
    if optimizer is None:
        return
    for slot in optimizer_slots(optimizer, variable):
        value = to_numpy(slot.tensor)
        start = slot.start
        if warm and slot.is_square:
            rows = value.reshape(-1, *value.shape[source.ndim :])
            kept = rows[source[source >= 0]]
            start = float(kept.mean()) if kept.size else start
        _write(slot, moved(value, source, start))


def _unpacked(optimizer: Any) -> tuple[Any, bool]:
    """The optimizer, and whether grown entries have a `WarmStart`."""
    warm = isinstance(optimizer, WarmStart)
    return (optimizer.optimizer, True) if warm else (optimizer, False)


def _write(slot: Slot, value: Any) -> None:
    if isinstance(slot.tensor, keras.Variable):
        assign(slot.tensor, value)
    else:
        slot.tensor.copy_(keras.ops.convert_to_tensor(value))


def copy_slots(
    old: Any,
    new: Any,
    partners: Mapping[int, Any],
    converted: Mapping[int, Callable[[np.ndarray, float], np.ndarray]],
) -> None:
    """Copies step count and slots to an optimizer of the same class, built for other variables.

    `partners` maps the `id` of a variable of the old one to that of the new one; `converted` the
    `id` of one whose partner has another shape to a function of a slot's array and initial value.
    """
    for slot, target, variable, start in slot_pairs(old, new, partners):
        array = to_numpy(slot)
        if id(variable) in converted:
            array = converted[id(variable)](array, start)
        assign(target, array)


def moved(array: np.ndarray, source: np.ndarray, fill: float) -> np.ndarray:
    """An array whose leading axes, those of `source`, were moved as in `move_slots`."""
    inner = array.shape[source.ndim :]
    before = array.reshape(-1, *inner)
    kept = source.reshape(*source.shape, *(1 for _ in inner)) >= 0
    return np.where(kept, before[source], np.asarray(fill, array.dtype))
