"""Products with live blocks, features first: `K^T x` for columns `x`.

Each group of lines of blocks with equal counts is one batched product, forward and backward,
without padding or scatter; a regular pattern is one group.
"""

import math
from collections.abc import Callable

import keras

from keras_sparse_ortho._gathers import (
    divisor_near,
    gather,
    made_once,
    map_chunks,
    matmul,
    reshape,
    with_gradient,
    written,
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
from keras_sparse_ortho.layers._row_products import gather_rows

ops = keras.ops

# Gathered inputs that fit a core's cache beside weights and results.
_CHUNK_BYTES = 3 * 2**19
_USUAL_COLUMNS = 128  # where their number is not known when the call is traced

GroupProduct = Callable[[Tensor, Tensor], Tensor]
"""`(places, other) -> product` of a group of lines."""


def product_features_first(x: Tensor, kernel: BlockOperands) -> Tensor:
    """Returns `K^T x` for `x` of shape `(inputs, n)`.

    Each output block `j` is computed from its live input blocks:

        Y[j] = sum_l W[j, l]^T X[inputs_of[j, l]]
        dW[j, l] = X[inputs_of[j, l]] dY[j]^T,    dX[i] = sum_s W[s] dY[j(s)]

    over the slots `s` of input block `i`, with the output block `j(s)` of each. JAX has derivatives
    of any order, but no forward mode.

    Args:
        x: Tensor of shape `(inputs, n)`.
        kernel: BlockOperands of the kernel `K`, without taps.
    """
    grid = kernel.grid
    columns = x.shape[1] if x.shape[1] is not None else ops.shape(x)[1]
    x = pad_blocks(x, 0, grid.inputs, grid.rows)
    x = reshape(x, (grid.in_blocks, grid.rows, columns))
    rule = _FeaturesFirst(grid)
    outputs = with_gradient(
        rule.product,
        rule.gradient,
        [x, kernel.blocks_by_slot],
        kernel.places_by_slot,
    )
    outputs = reshape(outputs, (grid.padded[1], columns))
    return drop_padding(outputs, 0, grid.outputs, grid.cols)


class _FeaturesFirst:
    """The product of one grid and its gradient; `x` is `(I, r, n)`, blocks are `(N, r, c)`."""

    def __init__(self, grid: BlockGrid) -> None:
        self._grid = grid
        self._outputs = grid.of_outputs
        self._inputs = grid.of_inputs

    def product(
        self, x: Tensor, blocks: Tensor, places: Tensor, slots: Tensor
    ) -> Tensor:
        """`(J, c, n)`."""
        x = self._read_once(x, places)

        def product_of_group(
            group_places: Tensor, group_blocks: Tensor
        ) -> Tensor:
            # Transposed by chunks: no second copy of all blocks.
            weights = transpose_matrices(lines_of_blocks(group_blocks))
            return matmul(weights, _gather_lines(x, group_places))

        group_blocks = self._outputs.pieces(blocks)
        products = _by_groups(
            product_of_group, self._outputs, places, group_blocks, x, like=x
        )
        return join_lines(products, self._outputs)

    def gradient(
        self,
        x: Tensor,
        blocks: Tensor,
        places: Tensor,
        slots: Tensor,
        upstream: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The gradients of `x` and of the blocks."""
        warn_if_slow(self._grid, x.shape[-1])
        x = self._read_once(x, places)
        upstream = self._read_once(upstream, places)
        blocks_gradient = self._blocks_gradient(x, places, upstream)

        def product_of_group(
            group_slots: Tensor, group_outputs: Tensor
        ) -> Tensor:
            weights = gather_rows(blocks, group_slots)
            return matmul(weights, _gather_lines(upstream, group_outputs))

        group_outputs = self._inputs.pieces(outputs_of_slots(self._grid, slots))
        products = _by_groups(
            product_of_group,
            self._inputs,
            slots,
            group_outputs,
            upstream,
            like=upstream,
        )
        x_gradient = join_lines(products, self._inputs)
        return x_gradient, reshape(blocks_gradient, blocks.shape)

    def _blocks_gradient(
        self, x: Tensor, places: Tensor, upstream: Tensor
    ) -> Tensor:
        """`dW`, a product for each group of output blocks, or one for all live blocks."""
        if self._outputs.are_regular or keras.backend.backend() != "tensorflow":

            def product_of_group(
                group_places: Tensor, group_upstream: Tensor
            ) -> Tensor:
                return matmul(
                    _gather_lines(x, group_places),
                    transpose_matrices(group_upstream),
                )

            group_upstream = split_lines(upstream, self._outputs)
            products = _by_groups(
                product_of_group,
                self._outputs,
                places,
                group_upstream,
                x,
                like=upstream,
            )
            return stack(products, (self._grid.rows, self._grid.cols))

        # One product is slower on TensorFlow, and compiles in half the time.
        def product_of_blocks(
            block_places: Tensor, block_outputs: Tensor
        ) -> Tensor:
            block_upstream = gather(upstream, block_outputs)
            return matmul(
                gather(x, block_places), transpose_matrices(block_upstream)
            )

        outputs = ops.convert_to_tensor(self._outputs.of_slots)
        chunks = _chunk_count(x, outputs[:, None])
        return map_chunks(
            product_of_blocks, [places, outputs], chunks, upstream
        )

    def _read_once(self, value: Tensor, places: Tensor) -> Tensor:
        """Keeps XLA from computing a value again in each gather."""
        # Enough for loops over chunks; into other gathers XLA fuses it.
        value = made_once(value)
        return value if self._grid.counts is None else written(value, places)


def _gather_lines(x: Tensor, places: Tensor) -> Tensor:
    """`(m, k r, n)`: the blocks of `x`, `(I, r, n)`, that each of `(m, k)` rows names."""
    line_count, fan = places.shape
    blocks = gather(x, reshape(places, (-1,)))
    return reshape(blocks, (line_count, fan * x.shape[1], ops.shape(x)[2]))


def _chunk_count(x: Tensor, places: Tensor) -> int:
    """The chunks of lines whose gathered inputs fit the cache."""
    rows, columns = x.shape[1:3]
    # None, or a symbol of jax.export.
    if not (isinstance(columns, int) and columns):
        columns = _USUAL_COLUMNS
    is_half = keras.backend.standardize_dtype(x.dtype).endswith("float16")
    line_count, fan = places.shape
    line_bytes = fan * rows * columns * (2 if is_half else 4)
    # A batched product of a single matrix would be one product for all cores.
    most_chunks = max(1, line_count // 2)
    target = min(math.ceil(line_count * line_bytes / _CHUNK_BYTES), most_chunks)
    return divisor_near(line_count, target)


def _by_groups(
    product: GroupProduct,
    lines: Lines,
    places: Tensor,
    others: list[Tensor],
    x: Tensor,
    *,
    like: Tensor,
) -> list[Tensor]:
    """The products of the groups of lines, one after the other; a single group in chunks.

    XLA would gather for all groups first, and lose the cache: each group waits for the one before.

    Args:
        product: callable `(places, other) -> tensor` for a group. It gathers from `x`.
        lines: Lines that are grouped.
        places: Tensor `(N,)` of integers, by slot.
        others: list of tensors, one for each group.
        x: Tensor that is gathered from.
        like: Tensor of the result's dtype.
    """
    pieces = lines.pieces(places)
    if lines.are_regular:
        chunks = _chunk_count(x, pieces[0])
        return [map_chunks(product, [pieces[0], others[0]], chunks, like)]
    products: list[Tensor] = []
    for group_places, operand in zip(pieces, others, strict=True):
        if products and keras.backend.backend() != "torch":
            is_lost = ops.isnan(products[-1][0, 0, 0])  # what XLA cannot know
            group_places = ops.where(
                is_lost, ops.zeros_like(group_places), group_places
            )
            # Places, by which the product gathers, too.
            if len(operand.shape) == 2:
                operand = ops.where(is_lost, ops.zeros_like(operand), operand)
        products.append(product(group_places, operand))
    return products
