"""What an optimizer remembers of entries that were dropped, grown or moved."""

from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._keras_internals import optimizer_slots


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
    forgotten = keras.ops.convert_to_tensor(entries) if slots else None
    for slot, start in slots:
        slot.assign(keras.ops.where(forgotten, keras.ops.cast(start, slot.dtype), slot.value))


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
        slot.assign(moved(keras.ops.convert_to_numpy(slot), source, start))


def moved(array: np.ndarray, source: np.ndarray, fill: float) -> np.ndarray:
    """An array whose leading axes, those of `source`, have been moved as in `move_slots`.

    What is new is `fill`.
    """
    inner = array.shape[source.ndim :]
    before = array.reshape(-1, *inner)
    kept = source.reshape(*source.shape, *(1 for _ in inner)) >= 0
    return np.where(kept, before[source], np.asarray(fill, array.dtype))
