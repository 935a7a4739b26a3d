"""The mask of one weight, as SET and RigL move its entries."""

from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._ranking import ranks_on_device
from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.callbacks._block_moves import block_layer
from keras_sparse_ortho.callbacks._drop_and_grow import drop_and_grow
from keras_sparse_ortho.callbacks._structured_moves import move
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.initializers import ExactOrthogonal, layout_for
from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.parametrizations import FixedMask


def fixed_mask(weight: PrunableWeight) -> FixedMask:
    """The FixedMask of a weight that has one."""
    mask: FixedMask = weight.parametrization
    return mask


def moves_on_device(weight: PrunableWeight) -> bool:
    """Whether the entries of a weight are ranked where they are: single entries of a mask."""
    if block_layer(weight) is not None or fixed_mask(weight).compact:
        return False
    return _structure(weight) is None and ranks_on_device(weight.variable)


def _structure(weight: PrunableWeight) -> Any:
    """What drew the mask of a weight with a structure; else `None`."""
    drawn_by = fixed_mask(weight).drawn_by
    if not isinstance(drawn_by, ExactOrthogonal) or drawn_by.structure is None:
        return None
    return drawn_by


def all_finite(scores: Any) -> bool:
    if isinstance(scores, np.ndarray):
        return bool(np.isfinite(scores).all())
    if keras.backend.standardize_dtype(scores.dtype).startswith("int"):
        return True
    return bool(to_numpy(keras.ops.all(keras.ops.isfinite(scores))))


def moved_entries(
    weight: PrunableWeight,
    mask: np.ndarray,
    count: int,
    scores: np.ndarray,
    rng: np.random.Generator,
) -> np.ndarray:
    """The mask after `count` entries have moved, within the structure that it was drawn with."""
    value = weight.finite_raw_value()
    drawn_by = _structure(weight)
    if drawn_by is None:
        return drop_and_grow(value, mask, count, scores, rng)
    layout = layout_for(weight, drawn_by)
    canonical = [np.ascontiguousarray(layout.to_canonical(a)) for a in (value, mask, scores)]
    after = move(drawn_by.structure, canonical[0], canonical[1], count, canonical[2], rng)
    if np.count_nonzero(after) != np.count_nonzero(mask):
        raise NotPrunableError(
            f"The mask of '{weight.path}' does not have the structure of its initializer; give it "
            f"one that has, or `exclude` the weight. Received: structure={drawn_by.structure}"
        )
    return np.ascontiguousarray(layout.from_canonical(after, weight.shape))
