"""Products with live blocks, features last: `x K` for rows `x`, such as tokens of a sequence.

Transformers have features last, and XLA on a CPU takes 2 to 7 ns an entry to transpose them, but
half a ns to move whole rows of blocks.
"""

import keras

from keras_sparse_ortho._gathers import (
    gather,
    inverse_permutation,
    matmul,
    reshape,
    transpose,
    with_gradient,
)
from keras_sparse_ortho._types import Tensor
from keras_sparse_ortho.layers._block_grid import BlockGrid, Lines
from keras_sparse_ortho.layers._block_operands import (
    BlockOperands,
    drop_padding,
    join_lines,
    lines_of_blocks,
    outputs_of_slots,
    pad_blocks,
    split_lines,
    stack,
    transpose_matrices,
)
from keras_sparse_ortho.layers._block_sizes import warn_if_slow

ops = keras.ops


def spread_blocks(
    x: Tensor, places: Tensor, slots: Tensor, lines: Lines, axis: int
) -> Tensor:
    """Returns the blocks of `x` along an axis that `places` name.

        Y[.., s, ..] = X[.., places[s], ..],    dX[.., i, ..] = sum_s dY[.., s, ..]

    The gradient sums over the slots `s` of each line of `x`, which it gathers.

    Args:
        x: Tensor with the lines along `axis`.
        places: Tensor `(N,)` of integers, a line for each slot.
        slots: Tensor `(N,)` of integers, the slots of each line, by groups of lines.
        lines: Lines of `x`.
        axis: int.
    """

    def spread(x: Tensor, places: Tensor, slots: Tensor) -> Tensor:
        return gather(x, places, axis)

    def collect(
        x: Tensor, places: Tensor, slots: Tensor, upstream: Tensor
    ) -> tuple[Tensor]:
        sums = []
        for group_slots in lines.pieces(slots):
            total = gather(upstream, group_slots[:, 0], axis)
            for number in range(1, group_slots.shape[1]):
                total = total + gather(upstream, group_slots[:, number], axis)
            sums.append(total)
        return (join_lines(sums, lines, axis),)

    return with_gradient(spread, collect, [x], [places, slots])


def product_of_rows(x: Tensor, kernel: BlockOperands) -> Tensor:
    """Returns `x K` for `x` of shape `(n, inputs)`, gathering blocks of the narrower side.

    For blocks of `r <= c`, with the live blocks of an output block one below the other, `A[j]` of
    shape `(k r, c)`,

        Y[j] = G[j] A[j],    G[j] = (X[inputs_of[j, 0]], ..., X[inputs_of[j, k - 1]]),
        dA[j] = G[j]^T dY[j],    dX[i] = sum over slots of i of the columns of dY[j] A[j]^T:

    `density * inputs * outputs / c` values per token, forward and backward. For `r > c` the same
    with the transposed kernel.

    Args:
        x: Tensor of shape `(n, inputs)`.
        kernel: BlockOperands of the kernel `K`, without taps.
    """
    grid = kernel.grid
    blocks = kernel.blocks_by_slot
    places, slots = kernel.places_by_slot
    rule: _NarrowInputs | _NarrowOutputs
    if grid.rows <= grid.cols:
        rule = _NarrowInputs(grid)
    else:
        rule = _NarrowOutputs(grid)
        order = slots
        slots = reshape(inverse_permutation(order), (-1,))
        places = outputs_of_slots(grid, order)
        single_lines = Lines((1,) * grid.live_blocks)
        blocks = spread_blocks(
            transpose(blocks, (0, 2, 1)), order, slots, single_lines, 0
        )
    x = pad_blocks(x, 1, grid.inputs, grid.rows)
    outputs = with_gradient(
        rule.product, rule.gradient, [x, blocks], [places, slots]
    )
    return drop_padding(outputs, 1, grid.outputs, grid.cols)


class _Rows:
    """Products between blocks of rows `(lines, n, width)`, for kernels whose lines are matrices.

    Args:
        matrix_lines: Lines that have a matrix `A` each.
        gathered_lines: Lines of the other side, which is gathered from.
        width: int. Entries of a block of the gathered side.
    """

    def __init__(
        self, matrix_lines: Lines, gathered_lines: Lines, width: int
    ) -> None:
        self._matrix_lines = matrix_lines
        self._gathered_lines = gathered_lines
        self._width = width

    def _gather(self, parts: Tensor, places: Tensor) -> list[Tensor]:
        """`G` of each group of lines."""
        return [
            gather_rows(parts, piece)
            for piece in self._matrix_lines.pieces(places)
        ]

    def _times_matrices(self, gathered: list[Tensor], blocks: Tensor) -> Tensor:
        """`G A` of all lines."""
        pieces = self._matrix_lines.pieces(blocks)
        products = [
            matmul(rows, lines_of_blocks(piece))
            for rows, piece in zip(gathered, pieces, strict=True)
        ]
        return join_lines(products, self._matrix_lines)

    def _times_transposed(
        self, parts: Tensor, blocks: Tensor, slots: Tensor
    ) -> Tensor:
        """The columns of `parts A^T`, summed over the slots of each gathered line."""
        groups = split_lines(parts, self._matrix_lines)
        pieces = self._matrix_lines.pieces(blocks)
        products = [
            matmul(rows, transpose_matrices(lines_of_blocks(piece)))
            for rows, piece in zip(groups, pieces, strict=True)
        ]
        return _sum_columns(products, slots, self._width, self._gathered_lines)

    def _matrices_gradient(
        self, gathered: list[Tensor], upstream: Tensor
    ) -> list[Tensor]:
        """`G^T dY` of each group of lines."""
        groups = split_lines(upstream, self._matrix_lines)
        return [
            matmul(transpose_matrices(rows), group)
            for rows, group in zip(gathered, groups, strict=True)
        ]


class _NarrowInputs(_Rows):
    """Rows of inputs are gathered, and each output block has a matrix: `r <= c`."""

    def __init__(self, grid: BlockGrid) -> None:
        super().__init__(grid.of_outputs, grid.of_inputs, grid.rows)
        self._grid = grid

    def product(
        self, x: Tensor, blocks: Tensor, places: Tensor, slots: Tensor
    ) -> Tensor:
        """`(n, outputs)`."""
        inputs = _blocks_of(x, self._grid.rows)
        return _side_by_side(
            self._times_matrices(self._gather(inputs, places), blocks)
        )

    def gradient(
        self,
        x: Tensor,
        blocks: Tensor,
        places: Tensor,
        slots: Tensor,
        upstream: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The gradients of `x` and of the blocks."""
        warn_if_slow(self._grid, x.shape[0])
        inputs = _blocks_of(x, self._grid.rows)
        outputs = _blocks_of(upstream, self._grid.cols)
        x_gradient = self._times_transposed(outputs, blocks, slots)
        matrices = self._matrices_gradient(
            self._gather(inputs, places), outputs
        )
        return _side_by_side(x_gradient), stack(matrices, blocks.shape[1:])


class _NarrowOutputs(_Rows):
    """Rows of outputs are gathered, and each input block has a matrix: `r > c`."""

    def __init__(self, grid: BlockGrid) -> None:
        super().__init__(grid.of_inputs, grid.of_outputs, grid.cols)
        self._grid = grid

    def product(
        self, x: Tensor, blocks: Tensor, places: Tensor, slots: Tensor
    ) -> Tensor:
        """`(n, outputs)`."""
        inputs = _blocks_of(x, self._grid.rows)
        return _side_by_side(self._times_transposed(inputs, blocks, slots))

    def gradient(
        self,
        x: Tensor,
        blocks: Tensor,
        places: Tensor,
        slots: Tensor,
        upstream: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The gradients of `x` and of the blocks."""
        warn_if_slow(self._grid, x.shape[0])
        inputs = _blocks_of(x, self._grid.rows)
        gathered = self._gather(_blocks_of(upstream, self._grid.cols), places)
        x_gradient = self._times_matrices(gathered, blocks)
        matrices = self._matrices_gradient(gathered, inputs)
        return _side_by_side(x_gradient), stack(matrices, blocks.shape[1:])


def _blocks_of(x: Tensor, width: int) -> Tensor:
    """`(n, I width)` as `(I, n, width)`."""
    return transpose(reshape(x, (-1, x.shape[1] // width, width)), (1, 0, 2))


def _side_by_side(parts: Tensor) -> Tensor:
    """The inverse of `_blocks_of`."""
    count, _, width = parts.shape
    return reshape(transpose(parts, (1, 0, 2)), (-1, count * width))


def gather_rows(parts: Tensor, places: Tensor) -> Tensor:
    """Returns the parts that each row of `places` names, side by side.

    Args:
        parts: Tensor of shape `(lines, n, width)`.
        places: Tensor of integers of shape `(m, k)`.

    Returns:
        Tensor of shape `(m, n, k width)`.
    """
    line_count, fan = places.shape
    width = parts.shape[2]
    gathered = gather(parts, reshape(places, (-1,)))
    gathered = reshape(gathered, (line_count, fan, -1, width))
    return reshape(
        transpose(gathered, (0, 2, 1, 3)), (line_count, -1, fan * width)
    )


def _sum_columns(
    products: list[Tensor], slots: Tensor, width: int, lines: Lines
) -> Tensor:
    """`(lines, n, width)`: the columns of `(m, n, k width)` in the slots of each line, summed."""
    columns_by_group = []
    for product in products:
        line_count, _, columns = product.shape
        fan = columns // width
        split = reshape(product, (line_count, -1, fan, width))
        split = transpose(split, (0, 2, 1, 3))
        columns_by_group.append(reshape(split, (line_count * fan, -1, width)))
    columns_by_slot = stack(columns_by_group)
    sums = []
    for group_slots in lines.pieces(slots):
        gathered = gather(columns_by_slot, reshape(group_slots, (-1,)))
        gathered = reshape(gathered, (*group_slots.shape, -1, width))
        sums.append(ops.sum(gathered, axis=1))
    return join_lines(sums, lines)
