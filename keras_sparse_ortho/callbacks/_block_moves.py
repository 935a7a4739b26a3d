"""One update of dynamic sparse training on a layer that stores its live blocks only."""

import numpy as np

from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.callbacks._regular_moves import move_regular
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.layers import BlockSparseLayer


def block_layer(weight: PrunableWeight) -> BlockSparseLayer | None:
    """The layer of a weight that is stored as its live blocks; `None` for other weights."""
    movable = weight.storage is not None and weight.storage.movable
    return weight.owner if movable and weight.parametrization is None else None


def places_shape(weight: PrunableWeight) -> tuple[int, ...]:
    """The shape of one number for each place of a weight: an entry, or a block `(I, J)`."""
    layer = block_layer(weight)
    return weight.shape if layer is None else (layer.grid.in_blocks, layer.grid.out_blocks)


def block_sums(blocks: np.ndarray) -> np.ndarray:
    """`sum |w|` over each block: `(J, k, *taps, r, c)` to `(J, k)`."""
    return np.asarray(np.abs(blocks).sum(axis=tuple(range(2, blocks.ndim))))


def moved_blocks(
    layer: BlockSparseLayer, fraction: float, scores: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Drops a fraction of the live blocks, and joins the open ends anew; see `move_regular`.

    Args:
        layer: It is left as it is.
        fraction: Of the blocks to drop, those of smallest magnitude; rounded down.
        scores: A number for each block, `(I, J)`.
        rng: Decides between equals.

    Returns:
        Which blocks are live then, `(I, J)`.
    """
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
