"""What an optimizer remembers of entries that were dropped, grown or moved."""

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._keras_internals import optimizer_slots, slot_pairs
from keras_sparse_ortho._values import assign, placed, to_numpy


def zero_slots(optimizer: Any, variable: Any, entries: Any) -> None:
    """Resets moments and moving averages of some entries of a weight to where they started.

    After a mask change stale momentum would go on moving the raw weights of dropped entries, and
    would push grown ones in the direction of a gradient from before.

    Args:
        optimizer: A Keras optimizer, or `None`. One that is not built has no slots.
        variable: The raw weight.
        entries: Bool array or tensor of its shape: which entries to forget; `None` for none.
    """
    if optimizer is None or entries is None:
        return
    slots = optimizer_slots(optimizer, variable)
    forgotten = placed(entries, variable) if slots else None
    for slot, start in slots:
        start = keras.ops.cast(start, slot.dtype)
        assign(slot, keras.ops.where(forgotten, start, slot.value))


def move_slots(optimizer: Any, variable: Any, source: np.ndarray) -> None:
    """Moves moments and averages along with what is stored, and forgets those of new entries.

    Args:
        optimizer: A Keras optimizer, or `None`.
        variable: The live values of a kernel, or its live blocks `(J, k, *taps, r, c)`.
        source: For each value, or each of the `(J, k)` blocks, the flat index of where it was; -1
            for one that is new.
    """
    if optimizer is None:
        return
    for slot, start in optimizer_slots(optimizer, variable):
        assign(slot, moved(to_numpy(slot), source, start))


def copy_slots(
    old: Any,
    new: Any,
    partners: Mapping[int, Any],
    converted: Mapping[int, Callable[[np.ndarray, float], np.ndarray]],
) -> None:
    """Gives an optimizer what another of its class keeps: step count, moments, averages.

    Args:
        old: A built optimizer that `refuse_other_slots` lets pass.
        new: One of the same class and settings, built for other variables.
        partners: By `id` of a variable of the old one, that of the new one.
        converted: By `id` of those variables of the old one whose partner is of another shape: a
            function of a slot's array, and the value that the slot started from, to the new array.
    """
    for slot, target, variable, start in slot_pairs(old, new, partners):
        array = to_numpy(slot)
        if id(variable) in converted:
            array = converted[id(variable)](array, start)
        assign(target, array)


def moved(array: np.ndarray, source: np.ndarray, fill: float) -> np.ndarray:
    """An array whose leading axes, those of `source`, have been moved as in `move_slots`.

    What is new is `fill`.
    """
    inner = array.shape[source.ndim :]
    before = array.reshape(-1, *inner)
    kept = source.reshape(*source.shape, *(1 for _ in inner)) >= 0
    return np.where(kept, before[source], np.asarray(fill, array.dtype))
