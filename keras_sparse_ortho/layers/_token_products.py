"""Products with live blocks at each token of a sequence, in the order that its neighbours have.

Layers of a Transformer read and write features last. A product with features first would transpose
its inputs and outputs, which costs XLA on a CPU 2 to 7 ns an entry; moving whole rows of blocks, as
here, costs half a ns.
"""

import dataclasses
from typing import Any

import keras

from keras_sparse_ortho._gathers import gather, inverse_permutation, kept, with_gradient
from keras_sparse_ortho.layers._blocks import (
    BlockGrid,
    BlockOperands,
    padded_blocks,
    product_features_first,
    spread_blocks,
    without_padding,
)

ops = keras.ops

# Where more is gathered than this many times the inputs and outputs, products in chunks are faster.
_MOST_GATHERED = 1.5


def _gathers_little(grid: BlockGrid) -> bool:
    """Whether products without chunks are the faster ones."""
    gathered = grid.live / max(grid.rows, grid.cols)
    return gathered <= _MOST_GATHERED * (grid.inputs + grid.outputs)


def product_by_token(x: Any, kernel: BlockOperands) -> Any:
    """`x K` for `x` of shape `(n, inputs)` between layers that have features last."""
    x = kept(x, kernel.inputs_of)
    if _gathers_little(kernel.grid):
        outputs = product_of_rows(x, kernel)
    else:
        outputs = ops.transpose(product_features_first(ops.transpose(x), kernel))
    return kept(outputs, kernel.inputs_of)


def product_of_rows(x: Any, kernel: BlockOperands) -> Any:
    """`x K` for `x` of shape `(n, inputs)`.

    Gathered are the blocks of the side on which they are narrower. For blocks of `r <= c`, with the
    live blocks of an output block one below the other, `A[j]` of shape `(k r, c)`,

        Y[j] = G[j] A[j],    G[j] = (X[inputs_of[j, 0]], ..., X[inputs_of[j, k - 1]]),
        dA[j] = G[j]^T dY[j],    dX[i] = sum over slots of i of the columns of dY[j] A[j]^T,

    so that `density * inputs * outputs / c` values are gathered per token, forward and backward.
    For `r > c` the same is done with the transposed kernel.
    """
    grid = kernel.grid
    x = padded_blocks(x, 1, grid.inputs, grid.rows)
    sides = _Sides(grid.rows, grid.cols, narrow_inputs=grid.rows <= grid.cols)
    lines, places, slots = _by_wide_side(kernel, sides.narrow_inputs)
    outputs = with_gradient(sides.product, sides.gradient, [x, lines], [places, slots])
    return without_padding(outputs, 1, grid.outputs, grid.cols)


def _by_wide_side(kernel: BlockOperands, narrow_inputs: bool) -> tuple[Any, Any, Any]:
    """`A`, the narrow blocks that each of its matrices gathers, and the slots of each of them."""
    grid = kernel.grid
    count, fan_in, rows, cols = grid.blocks_shape
    if narrow_inputs:
        lines = ops.reshape(kernel.blocks, (count, fan_in * rows, cols))
        return lines, kernel.inputs_of, kernel.slots_of
    order = ops.reshape(kernel.slots_of, (-1,))
    slots = ops.reshape(inverse_permutation(order), (count, fan_in))
    blocks = ops.reshape(ops.transpose(kernel.blocks, (0, 1, 3, 2)), (count * fan_in, cols, rows))
    blocks = spread_blocks(blocks, kernel.slots_of, ops.reshape(slots, (-1, 1)), 0)
    lines = ops.reshape(blocks, (grid.in_blocks, grid.fan_out * cols, rows))
    return lines, kernel.slots_of // fan_in, slots


@dataclasses.dataclass(frozen=True)
class _Sides:
    """The product `(n, inputs) -> (n, outputs)` and its gradient, for blocks of `rows x cols`."""

    rows: int
    cols: int
    narrow_inputs: bool

    def product(self, x: Any, lines: Any, places: Any, slots: Any) -> Any:
        parts = _parts(x, self.rows)
        if self.narrow_inputs:
            return _whole(ops.matmul(_gathered(parts, places), lines))
        return _whole(_summed(ops.matmul(parts, _transposed(lines)), slots, self.cols))

    def gradient(
        self, x: Any, lines: Any, places: Any, slots: Any, upstream: Any
    ) -> tuple[Any, Any]:
        parts, above = _parts(x, self.rows), _parts(upstream, self.cols)
        if self.narrow_inputs:
            found = _summed(ops.matmul(above, _transposed(lines)), slots, self.rows)
            of_lines = ops.matmul(_transposed(_gathered(parts, places)), above)
        else:
            gathered = _gathered(above, places)
            found = ops.matmul(gathered, lines)
            of_lines = ops.matmul(_transposed(gathered), parts)
        return _whole(found), of_lines


def _parts(x: Any, width: int) -> Any:
    """`(n, I width)` as `(I, n, width)`."""
    return ops.transpose(ops.reshape(x, (-1, x.shape[1] // width, width)), (1, 0, 2))


def _whole(parts: Any) -> Any:
    """The inverse of `_parts`."""
    count, _, width = parts.shape
    return ops.reshape(ops.transpose(parts, (1, 0, 2)), (-1, count * width))


def _transposed(matrices: Any) -> Any:
    return ops.transpose(matrices, (0, 2, 1))


def _gathered(parts: Any, places: Any) -> Any:
    """`(m, n, k width)`: the parts that each of `(m, k)` rows names, side by side."""
    (count, several), width = places.shape, parts.shape[2]
    found = gather(parts, ops.reshape(places, (-1,)))
    found = ops.reshape(found, (count, several, -1, width))
    return ops.reshape(ops.transpose(found, (0, 2, 1, 3)), (count, -1, several * width))


def _summed(product: Any, slots: Any, width: int) -> Any:
    """`(I, n, width)`: the columns of `(m, n, k width)` in the slots `(I, o)`, summed."""
    count, _, columns = product.shape
    fan = columns // width
    split = ops.reshape(product, (count, -1, fan, width))
    split = ops.transpose(split, (0, 2, 1, 3))
    split = ops.reshape(split, (count * fan, -1, width))
    found = gather(split, ops.reshape(slots, (-1,)))
    return ops.sum(ops.reshape(found, (*slots.shape, -1, width)), axis=1)
