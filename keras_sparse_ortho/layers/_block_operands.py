"""What a layer of live blocks computes with: these blocks, or for a moment all of them."""

import dataclasses
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._keras_internals import DeferredVariables, value_in_scope
from keras_sparse_ortho.layers._block_grid import BlockGrid
from keras_sparse_ortho.orthogonal import slots_of

ops = keras.ops


@dataclasses.dataclass(frozen=True)
class BlockOperands:
    """Blocks, and where they stand.

    Args:
        grid: Of these blocks.
        blocks: `(J, k, *taps, r, c)`.
        inputs_of: `(J, k)` integers.
        slots_of: `(I, J k / I)` integers.
    """

    grid: BlockGrid
    blocks: Any
    inputs_of: Any
    slots_of: Any


class WholeKernel:
    """The place of a kernel with all its blocks, which holds no array.

    A scope that answers for `variable` makes the layer compute with a kernel in which every block
    is live, so that the gradient of blocks that are not live is known. Without one it is `None`.
    """

    def __init__(self) -> None:
        self._variable: Any = None

    def variable(self, grid: BlockGrid, dtype: str) -> Any:
        """The Keras variable, `(J, I, *taps, r, c)`, without a value."""
        if self._variable is None:
            with DeferredVariables().creating():
                self._variable = keras.Variable(
                    "zeros", shape=_whole(grid).blocks_shape, dtype=dtype, name="whole_kernel"
                )
        return self._variable

    def operands(self, grid: BlockGrid, dtype: str) -> BlockOperands | None:
        """All blocks, if the enclosing scope has them."""
        given = None if self._variable is None else value_in_scope(self._variable)
        if given is None:
            return None
        whole = _whole(grid)
        pattern = np.tile(np.arange(grid.in_blocks, dtype=np.int32), (grid.out_blocks, 1))
        places = (pattern, slots_of(pattern, grid.in_blocks))
        return BlockOperands(whole, ops.cast(given, dtype), *map(ops.convert_to_tensor, places))


def _whole(grid: BlockGrid) -> BlockGrid:
    return dataclasses.replace(grid, fan_in=grid.in_blocks)
