"""Products with live blocks, features first or, at each token of a sequence, features last.

Each group of lines of blocks with equal counts is one batched product, forward and backward,
without padding or scatter; a regular pattern is one group. Transformers have features last, and
XLA on a CPU takes 2 to 7 ns an entry to transpose them, but half a ns to move whole rows of blocks.
"""

import dataclasses
import math
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._gathers import (
    concatenate,
    divisor_near,
    gather,
    inverse_permutation,
    kept,
    made_once,
    map_chunks,
    matmul,
    reshape,
    transpose,
    with_gradient,
    written,
)
from keras_sparse_ortho._keras_internals import DeferredVariables, value_in_scope
from keras_sparse_ortho.layers._block_grid import BlockGrid, Lines
from keras_sparse_ortho.orthogonal import block_count, whole_blocks

ops = keras.ops

_CHUNK_BYTES = 3 * 2**19  # gathered inputs that fit a core's cache beside weights and results
_USUAL_COLUMNS = 128  # where their number is not known when the call is traced


@dataclasses.dataclass(frozen=True)
class BlockOperands:
    """Live blocks of a grid `(*lead, *taps, r, c)`, and their places, integers."""

    grid: BlockGrid
    blocks: Any
    inputs_of: Any
    slots_of: Any

    @property
    def by_slot(self) -> tuple[Any, list[Any]]:
        """The blocks `(N, *taps, r, c)`, and the places `(N,)`."""
        inside = self.grid.blocks_shape[len(self.grid.places_shape) :]
        places = [ops.reshape(places, (-1,)) for places in (self.inputs_of, self.slots_of)]
        return ops.reshape(self.blocks, (self.grid.live_blocks, *inside)), places


class WholeKernel:
    """A placeholder for the kernel with all its blocks, whose value in a scope is computed with."""

    def __init__(self) -> None:
        self._variable: Any = None

    def variable(self, grid: BlockGrid, dtype: str) -> Any:
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
        places = pattern, whole.slots_of(pattern)
        return BlockOperands(whole, ops.cast(given, dtype), *map(ops.convert_to_tensor, places))


def _whole(grid: BlockGrid) -> BlockGrid:
    return dataclasses.replace(grid, fan_in=grid.in_blocks, counts=None)


def divided(x: Any, lines: Lines) -> list[Any]:
    """The part of lines `(J, ...)` in each group of them."""
    return [x] if lines.are_regular else [gather(x, own) for own in lines.groups]


def joined(parts: list[Any], lines: Lines, axis: int = 0) -> Any:
    """The inverse of `divided`, along any axis; zero for lines without blocks."""
    if lines.are_regular:
        return parts[0]
    if 0 in lines.counts:
        parts = [*parts, ops.zeros_like(ops.split(parts[0], [1], axis=axis)[0])]
    return gather(concatenate(parts, axis=axis), lines.place, axis)


def stacked(parts: list[Any], shape: tuple[int, ...] = ()) -> Any:
    """Parts one below the other, each as `(-1, *shape)`."""
    parts = [reshape(part, (-1, *shape)) for part in parts] if shape else parts
    return parts[0] if len(parts) == 1 else concatenate(parts)


def _outputs_of(grid: BlockGrid, slots: Any) -> Any:
    lines = grid.of_outputs
    return slots // lines.counts[0] if lines.are_regular else gather(lines.of_slots, slots)


def _lines(blocks: Any) -> Any:
    """`(m, k, r, c)` as `(m, k r, c)`."""
    count, fan_in, rows, cols = blocks.shape
    return reshape(blocks, (count, fan_in * rows, cols))


def _gathered(x: Any, found: Any) -> Any:
    """`(m, k r, n)`: the blocks of `x`, `(I, r, n)`, that each of `(m, k)` rows names."""
    rows, several = x.shape[1], found.shape
    return reshape(
        gather(x, reshape(found, (-1,))), (several[0], several[1] * rows, ops.shape(x)[2])
    )


def _chunks(x: Any, found: Any) -> int:
    rows, columns = x.shape[1:3]
    if not (isinstance(columns, int) and columns):  # None, or a symbol of jax.export
        columns = _USUAL_COLUMNS
    item = 2 if keras.backend.standardize_dtype(x.dtype).endswith("float16") else 4
    of_one = found.shape[1] * rows * columns * item
    # A batched product of a single matrix would be one product for all cores.
    most = max(1, found.shape[0] // 2)
    wanted = min(math.ceil(found.shape[0] * of_one / _CHUNK_BYTES), most)
    return divisor_near(found.shape[0], wanted)


def _by_groups(
    product: Any, lines: Lines, places: Any, others: list[Any], x: Any, like: Any
) -> list[Any]:
    """`product(places, other)` of each group of lines, which gathers from `x`."""
    # One after the other, a single group in chunks: XLA would gather all first, and lose the cache.
    groups = [*zip(lines.pieces(places), others, strict=True)]
    if lines.are_regular:
        return [map_chunks(product, groups[0], _chunks(x, groups[0][0]), like)]
    parts: list[Any] = []
    for found, own in groups:
        if parts and keras.backend.backend() != "torch":
            lost = ops.isnan(parts[-1][0, 0, 0])  # what XLA cannot know
            found = ops.where(lost, ops.zeros_like(found), found)
            if len(own.shape) == 2:  # other places, by which it gathers, too
                own = ops.where(lost, ops.zeros_like(own), own)
        parts.append(product(found, own))
    return parts


def spread_blocks(x: Any, places: Any, slots: Any, lines: Lines, axis: int) -> Any:
    """The blocks of `x` along an axis that `places` name, its gradient gathered by `slots`.

        Y[.., s, ..] = X[.., places[s], ..],    dX[.., i, ..] = sum_s dY[.., s, ..]

    over the slots `s` of each line of `x`, for layers such as convolutions.
    """

    def spread(x: Any, places: Any, slots: Any) -> Any:
        return gather(x, places, axis)

    def collect(x: Any, places: Any, slots: Any, upstream: Any) -> tuple[Any]:
        parts = []
        for own in lines.pieces(slots):
            total = gather(upstream, own[:, 0], axis)
            for slot in range(1, own.shape[1]):
                total = total + gather(upstream, own[:, slot], axis)
            parts.append(total)
        return (joined(parts, lines, axis),)

    return with_gradient(spread, collect, [x], [places, slots])


def product_features_first(x: Any, kernel: BlockOperands) -> Any:
    """`K^T x` for `x` of shape `(inputs, n)`: output block `j` from its live input blocks.

        Y[j] = sum_l W[j, l]^T X[inputs_of[j, l]]
        dW[j, l] = X[inputs_of[j, l]] dY[j]^T,    dX[i] = sum_s W[s] dY[j(s)]

    over the slots `s` of input block `i`, with the output block `j(s)` of each. JAX has derivatives
    of any order, but no forward mode.
    """
    grid = kernel.grid
    of_outputs, of_inputs = grid.of_outputs, grid.of_inputs

    def once(value: Any, places: Any) -> Any:
        value = made_once(value)  # enough for loops over chunks; into other gathers XLA fuses it
        return value if grid.counts is None else written(value, places)

    def product(x: Any, blocks: Any, places: Any, slots: Any) -> Any:
        x = once(x, places)

        def of_group(found: Any, w: Any) -> Any:  # by chunks: no second copy of all blocks
            return matmul(_transposed(_lines(w)), _gathered(x, found))

        own = of_outputs.pieces(blocks)
        return joined(_by_groups(of_group, of_outputs, places, own, x, x), of_outputs)

    def gradient(x: Any, blocks: Any, places: Any, slots: Any, upstream: Any) -> tuple[Any, Any]:
        x, upstream = once(x, places), once(upstream, places)

        def of_blocks(found: Any, dy: Any) -> Any:
            return matmul(_gathered(x, found), _transposed(dy))

        def of_single(found: Any, outputs: Any) -> Any:
            return matmul(gather(x, found), _transposed(gather(upstream, outputs)))

        def of_x(found: Any, outputs: Any) -> Any:
            return matmul(_gathered_rows(blocks, found), _gathered(upstream, outputs))

        if of_outputs.are_regular or keras.backend.backend() != "tensorflow":
            own = divided(upstream, of_outputs)
            parts = _by_groups(of_blocks, of_outputs, places, own, x, upstream)
            grown = stacked(parts, blocks.shape[1:])
        else:  # one product is slower, and compiles in half the time
            lines = ops.convert_to_tensor(of_outputs.of_slots)
            chunks = _chunks(x, lines[:, None])
            grown = map_chunks(of_single, [places, lines], chunks, upstream)
        outputs = of_inputs.pieces(_outputs_of(grid, slots))
        parts = _by_groups(of_x, of_inputs, slots, outputs, upstream, upstream)
        whole = joined(parts, of_inputs)
        return whole, reshape(grown, blocks.shape)

    columns = x.shape[1] if x.shape[1] is not None else ops.shape(x)[1]
    x = padded_blocks(x, 0, grid.inputs, grid.rows)
    x = reshape(x, (grid.in_blocks, grid.rows, columns))
    blocks, places = kernel.by_slot
    outputs = with_gradient(product, gradient, [x, blocks], places)
    outputs = reshape(outputs, (grid.padded[1], columns))
    return without_padding(outputs, 0, grid.outputs, grid.cols)


def padded_blocks(x: Any, axis: int, side: int, width: int) -> Any:
    """Appends a zero to each block of an axis that has one entry less than `width`."""
    return _resized(x, axis, side, width, width - 1, width)


def without_padding(x: Any, axis: int, side: int, width: int) -> Any:
    return _resized(x, axis, side, width, width, width - 1)


def _resized(x: Any, axis: int, side: int, width: int, before: int, after: int) -> Any:
    count, whole = block_count(side, width), whole_blocks(side, width)
    if whole == count:
        return x
    first, rest = ops.split(x, [whole * width], axis=axis)
    shape = list(ops.shape(rest))
    if axis:
        shape[0] = -1  # no shape depends on the batch, for files
    rest = reshape(rest, [*shape[:axis], count - whole, before, *shape[axis + 1 :]])
    if after > before:
        ends = [[0, 0] for _ in rest.shape]
        ends[axis + 1][1] = 1
        rest = ops.pad(rest, ends)
    else:
        rest, _ = ops.split(rest, [after], axis=axis + 1)
    shape[axis] = (count - whole) * after
    return concatenate([first, reshape(rest, shape)], axis=axis)


# --- features last: products at each token --------------------------------------------------------

_MOST_GATHERED = 1.5  # times inputs and outputs; beyond it chunks are faster


def _gathers_little(grid: BlockGrid) -> bool:
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
    """`x K` for `x` of shape `(n, inputs)`, gathering blocks of the narrower side.

    For blocks of `r <= c`, with the live blocks of an output block one below the other, `A[j]` of
    shape `(k r, c)`,

        Y[j] = G[j] A[j],    G[j] = (X[inputs_of[j, 0]], ..., X[inputs_of[j, k - 1]]),
        dA[j] = G[j]^T dY[j],    dX[i] = sum over slots of i of the columns of dY[j] A[j]^T:

    `density * inputs * outputs / c` values per token, forward and backward. For `r > c` the same
    with the transposed kernel.
    """
    grid, rows, cols = kernel.grid, kernel.grid.rows, kernel.grid.cols
    narrow_inputs = rows <= cols
    # Lines with a matrix `A` each; the side they gather from; its width.
    near, far, width = grid.of_outputs, grid.of_inputs, rows
    if not narrow_inputs:
        near, far, width = far, near, cols

    def gathered(parts: Any, places: Any) -> list[Any]:
        return [_gathered_rows(parts, own) for own in near.pieces(places)]

    def from_gathered(found: list[Any], blocks: Any) -> Any:
        pairs = zip(found, near.pieces(blocks), strict=True)
        return joined([matmul(g, _lines(own)) for g, own in pairs], near)

    def summed(parts: Any, blocks: Any, slots: Any) -> Any:
        pairs = zip(divided(parts, near), near.pieces(blocks), strict=True)
        products = [matmul(own, _transposed(_lines(w))) for own, w in pairs]
        return _summed(products, far.pieces(slots), width, far)

    def product(x: Any, blocks: Any, places: Any, slots: Any) -> Any:
        parts = _blocks_of(x, rows)
        if narrow_inputs:
            return _side_by_side(from_gathered(gathered(parts, places), blocks))
        return _side_by_side(summed(parts, blocks, slots))

    def gradient(x: Any, blocks: Any, places: Any, slots: Any, upstream: Any) -> tuple[Any, Any]:
        parts, above = _blocks_of(x, rows), _blocks_of(upstream, cols)
        if narrow_inputs:
            found, parts = summed(above, blocks, slots), gathered(parts, places)
        else:
            above, parts = parts, gathered(above, places)
            found = from_gathered(parts, blocks)
        pairs = zip(parts, divided(above, near), strict=True)
        grown = [matmul(_transposed(g), own) for g, own in pairs]
        return _side_by_side(found), stacked(grown, blocks.shape[1:])

    blocks, (places, slots) = kernel.by_slot
    if not narrow_inputs:
        order, slots = slots, reshape(inverse_permutation(slots), (-1,))
        blocks, places = transpose(blocks, (0, 2, 1)), _outputs_of(grid, order)
        blocks = spread_blocks(blocks, order, slots, Lines((1,) * grid.live_blocks), 0)
    x = padded_blocks(x, 1, grid.inputs, rows)
    outputs = with_gradient(product, gradient, [x, blocks], [places, slots])
    return without_padding(outputs, 1, grid.outputs, cols)


def _blocks_of(x: Any, width: int) -> Any:
    """`(n, I width)` as `(I, n, width)`."""
    return transpose(reshape(x, (-1, x.shape[1] // width, width)), (1, 0, 2))


def _side_by_side(parts: Any) -> Any:
    """The inverse of `_blocks_of`."""
    count, _, width = parts.shape
    return reshape(transpose(parts, (1, 0, 2)), (-1, count * width))


def _transposed(matrices: Any) -> Any:
    return transpose(matrices, (0, 2, 1))


def _gathered_rows(parts: Any, places: Any) -> Any:
    """`(m, n, k width)`: the parts that each of `(m, k)` rows names, side by side."""
    (count, several), width = places.shape, parts.shape[2]
    found = gather(parts, reshape(places, (-1,)))
    found = reshape(found, (count, several, -1, width))
    return reshape(transpose(found, (0, 2, 1, 3)), (count, -1, several * width))


def _summed(products: list[Any], slots: list[Any], width: int, lines: Lines) -> Any:
    """`(I, n, width)`: the columns of `(m, n, k width)` in the slots of each line, summed."""
    parts = []
    for product in products:
        count, _, columns = product.shape
        fan = columns // width
        split = reshape(product, (count, -1, fan, width))
        split = transpose(split, (0, 2, 1, 3))
        parts.append(reshape(split, (count * fan, -1, width)))
    split = stacked(parts)
    found = [reshape(gather(split, reshape(own, (-1,))), (*own.shape, -1, width)) for own in slots]
    return joined([ops.sum(own, axis=1) for own in found], lines)
