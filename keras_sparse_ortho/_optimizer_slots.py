"""Optimizer slots (moments, averages) of entries that were dropped, grown or moved."""

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._keras_internals import Slot, optimizer_slots, slot_pairs
from keras_sparse_ortho._values import assign, placed, to_numpy


def zero_slots(optimizer: Any, variable: Any, entries: Any) -> None:
    """Resets the slots of some entries of a weight to their initial values.

    After a mask change stale momentum would go on moving dropped raw weights, and push grown ones
    along an old gradient. `entries` is a bool array or tensor, or `None` for none.
    """
    if optimizer is None or entries is None:
        return
    slots = optimizer_slots(optimizer, variable)
    chosen = placed(entries, variable) if slots else None
    for slot in slots:
        value = keras.ops.convert_to_tensor(slot.tensor)
        _write(slot, keras.ops.where(chosen, keras.ops.cast(slot.start, value.dtype), value))


def move_slots(optimizer: Any, variable: Any, source: np.ndarray) -> None:
    """Moves slots with values or blocks; `source` has each one's flat index before, -1 if new."""
    for slot in () if optimizer is None else optimizer_slots(optimizer, variable):
        _write(slot, moved(to_numpy(slot.tensor), source, slot.start))


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
