"""Optimizer slots (moments, averages) of entries that were dropped, grown or moved."""

from collections.abc import Callable, Mapping

import keras
import numpy as np

from keras_sparse_ortho._keras_internals import (
    Slot,
    optimizer_slots,
    slot_pairs,
)
from keras_sparse_ortho._types import Optimizer, TensorLike
from keras_sparse_ortho._values import assign, placed, to_numpy


def zero_slots(
    optimizer: Optimizer | None,
    variable: keras.Variable,
    entries: TensorLike | None,
) -> None:
    """Resets the slots of entries, which stale momentum would move.

    Args:
        optimizer: Optimizer of Keras or torch, or `None`.
        variable: Variable whose slots are reset.
        entries: bool array of the variable's shape, or `None` for no entries.
    """
    if optimizer is None or entries is None:
        return
    slots = optimizer_slots(optimizer, variable)
    if not slots:
        return
    mask = placed(entries, variable)
    for slot in slots:
        value = keras.ops.convert_to_tensor(slot.tensor)
        start = keras.ops.cast(slot.start, value.dtype)
        _write(slot, keras.ops.where(mask, start, value))


def move_slots(
    optimizer: Optimizer | None, variable: keras.Variable, source: np.ndarray
) -> None:
    """Moves slots with values or blocks.

    Args:
        optimizer: Optimizer of Keras or torch, or `None`.
        variable: Variable whose entries were moved.
        source: int array. The flat index before of each entry or block, -1 if it is new.
    """
    if optimizer is None:
        return
    for slot in optimizer_slots(optimizer, variable):
        _write(slot, moved(to_numpy(slot.tensor), source, slot.start))


def _write(slot: Slot, value: TensorLike) -> None:
    if isinstance(slot.tensor, keras.Variable):
        assign(slot.tensor, value)
    else:  # a tensor of a torch optimizer
        slot.tensor.copy_(keras.ops.convert_to_tensor(value))


def copy_slots(
    old: Optimizer,
    new: Optimizer,
    partners: Mapping[int, keras.Variable],
    converted: Callable[[keras.Variable, np.ndarray, float], np.ndarray],
) -> None:
    """Copies step count and slots to an optimizer of the same class, built for other variables.

    Args:
        old: Optimizer to copy from.
        new: Optimizer to copy to.
        partners: dict from the `id` of an old variable to the new one.
        converted: callable `(variable, slot, start) -> slot`. A slot of the old variable, which
            starts from `start`, in the shape of the new one.
    """
    for slot, target, variable, start in slot_pairs(old, new, partners):
        assign(target, converted(variable, to_numpy(slot), start))


def moved(array: np.ndarray, source: np.ndarray, fill: float) -> np.ndarray:
    """An array whose leading axes, those of `source`, were moved as in `move_slots`."""
    entry_shape = array.shape[source.ndim :]
    entries = array.reshape(-1, *entry_shape)
    is_moved = source.reshape(*source.shape, *(1 for _ in entry_shape)) >= 0
    return np.where(is_moved, entries[source], np.asarray(fill, array.dtype))
