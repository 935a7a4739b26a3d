"""Where the entries or blocks of one weight move in an update of SET or RigL."""

from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._ranking import ranks_on_device
from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.callbacks._drop_and_grow import drop_and_grow, move, move_regular
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.initializers import ExactOrthogonal, layout_for
from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.layers import BlockSparseLayer
from keras_sparse_ortho.parametrizations import FixedMask


def fixed_mask(weight: PrunableWeight) -> FixedMask:
    """The FixedMask of a weight that has one."""
    mask: FixedMask = weight.parametrization
    return mask


def moves_on_device(weight: PrunableWeight) -> bool:
    """Whether the entries of a weight are ranked where they are: only masks without structure."""
    if block_layer(weight) is not None or fixed_mask(weight).compact:
        return False
    return _structure(weight) is None and ranks_on_device(weight.variable)


def _structure(weight: PrunableWeight) -> Any:
    """The initializer that drew the mask, if it has a structure; else `None`."""
    drawn_by = fixed_mask(weight).drawn_by
    if not isinstance(drawn_by, ExactOrthogonal) or drawn_by.structure is None:
        return None
    return drawn_by


def all_finite(scores: Any) -> bool:
    """Whether all scores, in NumPy or a tensor, are finite."""
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
    """The mask after `count` entries have moved, within the structure it was drawn with."""
    value = weight.finite_raw_value()
    drawn_by = _structure(weight)
    if drawn_by is None:
        return drop_and_grow(value, mask, count, scores, rng)
    layout = layout_for(weight, drawn_by)
    canonical = [np.ascontiguousarray(layout.to_canonical(a)) for a in (value, mask, scores)]
    after = move(drawn_by.structure, canonical[0], canonical[1], count, canonical[2], rng)
    if np.count_nonzero(after) != np.count_nonzero(mask):
        raise NotPrunableError(
            f"The mask of '{weight.path}' does not have the structure of its initializer: set "
            f"another mask, or `exclude` the weight. Received: structure={drawn_by.structure}"
        )
    return np.ascontiguousarray(layout.from_canonical(after, weight.shape))


def block_layer(weight: PrunableWeight) -> BlockSparseLayer | None:
    """The layer of a weight that is stored as its live blocks; `None` for other weights."""
    movable = weight.storage is not None and weight.storage.movable
    return weight.owner if movable and weight.parametrization is None else None


def places_shape(weight: PrunableWeight) -> tuple[int, ...]:
    """The shape of the scores of a weight: one for each entry, or for each block `(I, J)`."""
    layer = block_layer(weight)
    return weight.shape if layer is None else (layer.grid.in_blocks, layer.grid.out_blocks)


def block_sums(blocks: np.ndarray) -> np.ndarray:
    """`sum |w|` over each block: `(J, k, *taps, r, c)` to `(J, k)`."""
    return np.asarray(np.abs(blocks).sum(axis=tuple(range(2, blocks.ndim))))


def moved_blocks(
    layer: BlockSparseLayer, fraction: float, scores: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Which blocks are live, `(I, J)`, after a fraction of them has moved; see `move_regular`."""
    grid, pattern = layer.grid, to_numpy(layer.inputs_of)
    sums = block_sums(to_numpy(layer.blocks))
    if not np.isfinite(sums).all():
        raise NotPrunableError(
            f"The blocks of '{layer.name}' are not finite. "
            f"Received: {np.count_nonzero(~np.isfinite(sums))} blocks with infinite or NaN entries"
        )
    live = np.zeros((grid.in_blocks, grid.out_blocks), dtype=bool)
    magnitudes = np.zeros(live.shape, dtype=sums.dtype)
    outputs = np.arange(grid.out_blocks)[:, None]
    live[pattern, outputs], magnitudes[pattern, outputs] = True, sums
    count = int(fraction * grid.live) // (grid.live // pattern.size)
    return move_regular(magnitudes[None], live[None], count, scores[None], rng)[0]
