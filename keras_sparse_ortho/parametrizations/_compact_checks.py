"""What cannot be stored compactly, and what cannot be loaded."""

import keras
import numpy as np

from keras_sparse_ortho._keras_internals import saves_by_itself
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.kernels import PrunableWeight

_LARGEST = 2**31 - 1


def refuse_compact(weight: PrunableWeight) -> None:
    """Raises for a weight that cannot be stored compactly, with the reason."""
    reason = None
    constraint = weight.variable.constraint
    if weight.size > _LARGEST:
        reason = f"its flat indices are no int32. Received: {weight.size} entries"
    elif constraint is not None and type(constraint) is not keras.constraints.NonNeg:
        reason = (
            "its constraint needs the dense kernel after every update; leave the weight masked. "
            f"Received: constraint={constraint!r}"
        )
    elif saves_by_itself(weight.owner):
        reason = (
            "the class of its layer saves variables in a way of its own, which would read the "
            f"kernel; leave the weight masked. Received: {type(weight.owner).__name__}"
        )
    if reason is not None:
        raise NotPrunableError(f"The weight '{weight.path}' cannot be stored compactly: {reason}")


def check_stored(path: str, size: int, live: int, indices: np.ndarray, values: np.ndarray) -> None:
    """Raises unless indices and values of a file are those of a kernel.

    Args:
        path: Path of the weight, for the error.
        size: Number of its entries.
        live: Number of its live entries.
        indices: The indices, which must be strictly increasing.
        values: The values.
    """
    wrong = None
    if indices.shape != (live,) or values.shape != (live,):
        wrong = f"indices of shape {indices.shape}, values of shape {values.shape}"
    elif not np.issubdtype(indices.dtype, np.integer):
        wrong = f"indices of dtype {indices.dtype}"
    elif indices.min() < 0 or indices.max() >= size:
        wrong = f"indices from {indices.min()} to {indices.max()}"
    elif (steps := np.diff(indices.astype(np.int64)) <= 0).any():
        at = int(np.flatnonzero(steps)[0])
        wrong = f"{indices[at]} and then {indices[at + 1]}, at {at}"
    if wrong is not None:
        raise ValueError(
            f"The stored indices of '{path}' must be {live} integers in [0, {size}), strictly "
            f"increasing; the file is damaged, or of another model. Received: {wrong}"
        )
