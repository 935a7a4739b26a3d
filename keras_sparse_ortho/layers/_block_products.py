"""Products with live blocks, features first or, at each token of a sequence, features last.

Layers of a Transformer read and write features last. A product with features first would transpose
its inputs and outputs, which costs XLA on a CPU 2 to 7 ns an entry; moving whole rows of blocks
costs half a ns.
"""

import dataclasses
import math
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._gathers import (
    divisor_near,
    gather,
    inverse_permutation,
    kept,
    made_once,
    map_chunks,
    with_gradient,
)
from keras_sparse_ortho._keras_internals import DeferredVariables, value_in_scope
from keras_sparse_ortho.layers._block_grid import BlockGrid
from keras_sparse_ortho.orthogonal import block_count, slots_of, whole_blocks

ops = keras.ops

# Gathered inputs in a chunk: they fit a core's cache beside weights and results.
_CHUNK_BYTES = 3 * 2**19
# Columns assumed where their number is not known when the call is traced.
_USUAL_COLUMNS = 128


@dataclasses.dataclass(frozen=True)
class BlockOperands:
    """Blocks `(J, k, *taps, r, c)`, and where they stand: `(J, k)` and `(I, J k / I)` integers."""

    grid: BlockGrid
    blocks: Any
    inputs_of: Any
    slots_of: Any


class WholeKernel:
    """A placeholder for the kernel with all its blocks, without an array.

    Inside a scope that has a value for `variable`, the layer computes with a kernel whose blocks
    are all live, which gives the gradient of dead blocks. Elsewhere there are no such operands.
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


def _product(x: Any, blocks: Any, inputs_of: Any, slots_of: Any) -> Any:
    x = made_once(x)
    # Transposed chunk by chunk, so that there is no second copy of all blocks.
    return map_chunks(
        lambda w, found: ops.matmul(_transposed(_lines(w)), _gathered(x, found)),
        [blocks, inputs_of],
        _chunks(x, inputs_of),
        x,
    )


def _gradient(x: Any, blocks: Any, inputs_of: Any, slots_of: Any, upstream: Any) -> tuple[Any, Any]:
    count, fan_in, rows, cols = blocks.shape
    x, upstream = made_once(x), made_once(upstream)
    of_blocks = map_chunks(
        lambda dy, found: ops.matmul(_gathered(x, found), _transposed(dy)),
        [upstream, inputs_of],
        _chunks(x, inputs_of),
        upstream,
    )
    slots = ops.reshape(blocks, (count * fan_in, rows, cols))

    def of_inputs(found: Any) -> Any:
        return ops.matmul(_gathered_rows(slots, found), _gathered(upstream, found // fan_in))

    of_x = map_chunks(of_inputs, [slots_of], _chunks(upstream, slots_of), upstream)
    return of_x, ops.reshape(of_blocks, blocks.shape)


def _lines(blocks: Any) -> Any:
    """`(J, k, r, c)` as `(J, k r, c)`."""
    count, fan_in, rows, cols = blocks.shape
    return ops.reshape(blocks, (count, fan_in * rows, cols))


def _gathered(x: Any, found: Any) -> Any:
    """`(m, k r, n)`: the blocks of `x`, `(I, r, n)`, that each of `(m, k)` rows names."""
    rows, several = x.shape[1], found.shape
    return ops.reshape(
        gather(x, ops.reshape(found, (-1,))), (several[0], several[1] * rows, ops.shape(x)[2])
    )


def _chunks(x: Any, found: Any) -> int:
    """The number of chunks of the first axis of `found`."""
    rows, columns = x.shape[1:3]
    if not (isinstance(columns, int) and columns):  # None, or a symbol of jax.export
        columns = _USUAL_COLUMNS
    item = 2 if keras.backend.standardize_dtype(x.dtype).endswith("float16") else 4
    of_one = found.shape[1] * rows * columns * item
    # A batched product of a single matrix would be one product for all cores.
    most = max(1, found.shape[0] // 2)
    wanted = min(math.ceil(found.shape[0] * of_one / _CHUNK_BYTES), most)
    return divisor_near(found.shape[0], wanted)


def spread_blocks(x: Any, inputs_of: Any, slots_of: Any, axis: int) -> Any:
    """The blocks of `x` along an axis that `inputs_of` names, its gradient gathered by `slots_of`.

        Y[.., s, ..] = X[.., inputs_of[s], ..],    dX[.., i, ..] = sum_s dY[.., s, ..]

    over the slots `s = slots_of[i, .]`, for layers such as convolutions. `x` has `I` blocks along
    the axis, the result `J k`.
    """

    def spread(x: Any, inputs_of: Any, slots_of: Any) -> Any:
        return gather(x, ops.reshape(inputs_of, (-1,)), axis)

    def collect(x: Any, inputs_of: Any, slots_of: Any, upstream: Any) -> tuple[Any]:
        total = gather(upstream, slots_of[:, 0], axis)
        for slot in range(1, slots_of.shape[1]):
            total = total + gather(upstream, slots_of[:, slot], axis)
        return (total,)

    return with_gradient(spread, collect, [x], [inputs_of, slots_of])


def product_features_first(x: Any, kernel: BlockOperands) -> Any:
    """`K^T x` for `x` of shape `(inputs, n)`.

    Each output block comes from its `k` live input blocks,

        Y[j] = sum_l W[j, l]^T X[inputs_of[j, l]]

    and the gradients, without a scatter,

        dW[j, l] = X[inputs_of[j, l]] dY[j]^T,    dX[i] = sum_s W[s] dY[s // k]

    over the slots `s = slots_of[i, .]` of input block `i`. Both products with the weights are one
    batched product of gathered blocks, which are never kept: they are gathered once more for `dW`.
    On JAX there are derivatives of any order, but none in forward mode.
    """
    grid = kernel.grid
    columns = x.shape[1] if x.shape[1] is not None else ops.shape(x)[1]
    x = padded_blocks(x, 0, grid.inputs, grid.rows)
    x = ops.reshape(x, (grid.in_blocks, grid.rows, columns))
    places = [kernel.inputs_of, kernel.slots_of]
    outputs = with_gradient(_product, _gradient, [x, kernel.blocks], places)
    outputs = ops.reshape(outputs, (grid.padded[1], columns))
    return without_padding(outputs, 0, grid.outputs, grid.cols)


def padded_blocks(x: Any, axis: int, side: int, width: int) -> Any:
    """`x` with zeros at the end of each block of an axis that has one entry less than `width`."""
    return _resized(x, axis, side, width, width - 1, width)


def without_padding(x: Any, axis: int, side: int, width: int) -> Any:
    """The inverse of `padded_blocks`."""
    return _resized(x, axis, side, width, width, width - 1)


def _resized(x: Any, axis: int, side: int, width: int, before: int, after: int) -> Any:
    count, whole = block_count(side, width), whole_blocks(side, width)
    if whole == count:
        return x
    first, rest = ops.split(x, [whole * width], axis=axis)
    shape = list(ops.shape(rest))
    rest = ops.reshape(rest, [*shape[:axis], count - whole, before, *shape[axis + 1 :]])
    if after > before:
        ends = [[0, 0] for _ in rest.shape]
        ends[axis + 1][1] = 1
        rest = ops.pad(rest, ends)
    else:
        rest, _ = ops.split(rest, [after], axis=axis + 1)
    shape[axis] = (count - whole) * after
    return ops.concatenate([first, ops.reshape(rest, shape)], axis=axis)


# --- features last: products at each token --------------------------------------------------------

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
    grid, rows, cols = kernel.grid, kernel.grid.rows, kernel.grid.cols
    narrow_inputs = rows <= cols

    def product(x: Any, lines: Any, places: Any, slots: Any) -> Any:
        parts = _blocks_of(x, rows)
        if narrow_inputs:
            return _side_by_side(ops.matmul(_gathered_rows(parts, places), lines))
        return _side_by_side(_summed(ops.matmul(parts, _transposed(lines)), slots, cols))

    def gradient(x: Any, lines: Any, places: Any, slots: Any, upstream: Any) -> tuple[Any, Any]:
        parts, above = _blocks_of(x, rows), _blocks_of(upstream, cols)
        if narrow_inputs:
            found = _summed(ops.matmul(above, _transposed(lines)), slots, rows)
            of_lines = ops.matmul(_transposed(_gathered_rows(parts, places)), above)
        else:
            gathered = _gathered_rows(above, places)
            found = ops.matmul(gathered, lines)
            of_lines = ops.matmul(_transposed(gathered), parts)
        return _side_by_side(found), of_lines

    lines, *where = _by_wide_side(kernel, narrow_inputs)
    x = padded_blocks(x, 1, grid.inputs, rows)
    outputs = with_gradient(product, gradient, [x, lines], where)
    return without_padding(outputs, 1, grid.outputs, cols)


def _by_wide_side(kernel: BlockOperands, narrow_inputs: bool) -> tuple[Any, Any, Any]:
    """`A`, the narrow blocks that each of its matrices gathers, and the slots of each of them."""
    grid = kernel.grid
    count, fan_in, rows, cols = grid.blocks_shape
    if narrow_inputs:
        return _lines(kernel.blocks), kernel.inputs_of, kernel.slots_of
    order = ops.reshape(kernel.slots_of, (-1,))
    slots = ops.reshape(inverse_permutation(order), (count, fan_in))
    blocks = ops.reshape(ops.transpose(kernel.blocks, (0, 1, 3, 2)), (count * fan_in, cols, rows))
    blocks = spread_blocks(blocks, kernel.slots_of, ops.reshape(slots, (-1, 1)), 0)
    lines = ops.reshape(blocks, (grid.in_blocks, grid.fan_out * cols, rows))
    return lines, kernel.slots_of // fan_in, slots


def _blocks_of(x: Any, width: int) -> Any:
    """`(n, I width)` as `(I, n, width)`."""
    return ops.transpose(ops.reshape(x, (-1, x.shape[1] // width, width)), (1, 0, 2))


def _side_by_side(parts: Any) -> Any:
    """The inverse of `_blocks_of`."""
    count, _, width = parts.shape
    return ops.reshape(ops.transpose(parts, (1, 0, 2)), (-1, count * width))


def _transposed(matrices: Any) -> Any:
    return ops.transpose(matrices, (0, 2, 1))


def _gathered_rows(parts: Any, places: Any) -> Any:
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
