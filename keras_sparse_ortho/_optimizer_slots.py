"""Optimizer slots (moments, averages) of entries that were dropped, grown or moved."""

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._keras_internals import Slot, optimizer_slots, slot_pairs
from keras_sparse_ortho._values import assign, placed, to_numpy


def zero_slots(optimizer: Any, variable: Any, entries: Any) -> None:
    """Resets the slots of entries (a bool array, or `None`), which stale momentum would move."""
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
    converted: Callable[[Any, np.ndarray, float], np.ndarray],
) -> None:
    """Copies step count and slots to an optimizer of the same class, built for other variables.

    By `id` of an old variable, `partners` has the new one. `converted(variable, slot, start)` is a
    slot of the old variable, which starts from `start`, in the shape of the new one.
    """
    for slot, target, variable, start in slot_pairs(old, new, partners):
        assign(target, converted(variable, to_numpy(slot), start))


def moved(array: np.ndarray, source: np.ndarray, fill: float) -> np.ndarray:
    """An array whose leading axes, those of `source`, were moved as in `move_slots`."""
    inner = array.shape[source.ndim :]
    before = array.reshape(-1, *inner)
    kept = source.reshape(*source.shape, *(1 for _ in inner)) >= 0
    return np.where(kept, before[source], np.asarray(fill, array.dtype))
