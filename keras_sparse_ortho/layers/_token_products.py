"""`product_by_token`: the faster of two products for layers of sequences, features last."""

import keras

from keras_sparse_ortho._gathers import written_both_ways
from keras_sparse_ortho._types import Tensor
from keras_sparse_ortho.layers._block_grid import BlockGrid
from keras_sparse_ortho.layers._block_operands import BlockOperands
from keras_sparse_ortho.layers._block_products import product_features_first
from keras_sparse_ortho.layers._fused_products import (
    fused_product,
    takes_kernels,
)
from keras_sparse_ortho.layers._row_products import product_of_rows

ops = keras.ops

_MOST_GATHERED = 1.5  # times inputs and outputs; beyond it chunks are faster


def product_by_token(x: Tensor, kernel: BlockOperands) -> Tensor:
    """Returns `x K` for `x` of shape `(n, inputs)` between layers that have features last."""
    if takes_kernels(x):
        return fused_product(x, kernel)
    x = written_both_ways(x, kernel.inputs_of)
    if gathers_little(kernel.grid):
        outputs = product_of_rows(x, kernel)
    else:
        outputs = ops.transpose(
            product_features_first(ops.transpose(x), kernel)
        )
    return written_both_ways(outputs, kernel.inputs_of)


def gathers_little(grid: BlockGrid) -> bool:
    """Whether products of rows gather few values beside inputs and outputs."""
    gathered = grid.live / max(grid.rows, grid.cols)
    return gathered <= _MOST_GATHERED * (grid.inputs + grid.outputs)
