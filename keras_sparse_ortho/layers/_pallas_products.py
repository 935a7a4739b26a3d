"""Products with live blocks as kernels of Pallas, lowered by Triton: forward and both gradients.

Whole arrays are handed to a kernel, whose programs read and write tiles of them. Tiles have sides
that are powers of two, and masks at the ends of a batch and of a block. Sums are in float32;
products of float32 on a GPU have the precision of `jax_default_matmul_precision`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pallas_triton

from keras_sparse_ortho._types import Tensor
from keras_sparse_ortho.layers._kernel_tiles import (
    Tile,
    block_tile,
    line_tile,
)

_STAGES = 3  # tiles that are read ahead


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """The sizes that a kernel is compiled for.

    Args:
        batch: int. Rows of inputs and outputs.
        height: int. Entries of a block that are summed over, or its rows.
        width: int. Entries of a block along the result, or its columns.
        tile: Tile of one program.
    """

    batch: int
    height: int
    width: int
    tile: Tile

    @property
    def steps_down(self) -> int:
        """Steps through the height of a block."""
        return pl.cdiv(self.height, self.tile.depth)

    @property
    def tiles_across(self) -> int:
        """Tiles along the width of a block."""
        return pl.cdiv(self.width, self.tile.cols)


def line_products(
    x: Tensor,
    blocks: Tensor,
    sources: Tensor,
    slots: Tensor,
    lines: Tensor,
    *,
    transposed: bool,
    interpret: bool,
) -> Tensor:
    """Returns `Y[j] = sum_e X[sources[e]] W[slots[e]]` over the entries `e` of each line `j`.

    Args:
        x: Tensor `(n, sources * r)`.
        blocks: Tensor `(N, r, c)`, or `(N, c, r)` if `transposed`.
        sources: Integers `(N,)`, the block of `x` of each entry.
        slots: Integers `(N,)`, the live block of each entry.
        lines: Integers `(lines, 2)`, the first entry of each line and their number.
        transposed: bool. Whether to multiply by `W^T`.
        interpret: bool. Whether to run the kernel as operations of JAX.

    Returns:
        Tensor `(n, lines * c)` of the dtype of `x`.
    """
    height, width = blocks.shape[1:]
    if transposed:
        height, width = width, height
    batch, line_count = x.shape[0], lines.shape[0]
    tile = line_tile(batch, height, width, line_count, x.dtype.itemsize)
    sizes = _Sizes(batch, height, width, tile)
    kernel = functools.partial(_line_kernel, sizes=sizes, transposed=transposed)
    row_tiles = pl.cdiv(batch, tile.rows)
    return pl.pallas_call(
        kernel,
        # Programs side by side read the same rows.
        grid=(line_count * sizes.tiles_across, row_tiles),
        out_shape=jax.ShapeDtypeStruct((batch, line_count * width), x.dtype),
        compiler_params=_compiler_params(tile),
        interpret=interpret,
        name="kso_line_products",
    )(x, blocks, sources, slots, lines)


def _line_kernel(
    x_ref: Tensor,
    blocks_ref: Tensor,
    sources_ref: Tensor,
    slots_ref: Tensor,
    lines_ref: Tensor,
    outputs_ref: Tensor,
    *,
    sizes: _Sizes,
    transposed: bool,
) -> None:
    """One tile of one line: a sum over its live blocks, each in steps of the tile's depth."""
    tile = sizes.tile
    line, tile_number = _quotient(pl.program_id(0), sizes.tiles_across)
    first_row = pl.program_id(1) * tile.rows
    first_col = tile_number * tile.cols
    is_row = _below(first_row, tile.rows, sizes.batch)
    is_col = _below(first_col, tile.cols, sizes.width)
    row_span = pl.ds(first_row, tile.rows)
    col_span = pl.ds(first_col, tile.cols)
    first_entry = lines_ref[line, 0]

    def add_step(step: Tensor, total: Tensor) -> Tensor:
        place, step_in_block = _quotient(step, sizes.steps_down)
        entry = first_entry + place
        slot = slots_ref[entry]
        top = step_in_block * tile.depth
        is_summed = _below(top, tile.depth, sizes.height)
        depth_span = pl.ds(top, tile.depth)
        source = sources_ref[entry] * sizes.height + top
        x = _load(
            x_ref.at[row_span, pl.ds(source, tile.depth)], is_row, is_summed
        )
        if transposed:
            weights_ref = blocks_ref.at[slot, col_span, depth_span]
            weights = _load(weights_ref, is_col, is_summed)
        else:
            weights_ref = blocks_ref.at[slot, depth_span, col_span]
            weights = _load(weights_ref, is_summed, is_col)
        return total + pallas_triton.dot(x, weights, trans_b=transposed)

    zeros = jnp.zeros((tile.rows, tile.cols), jnp.float32)
    steps = lines_ref[line, 1] * sizes.steps_down
    total = jax.lax.fori_loop(0, steps, add_step, zeros)
    first_output = line * sizes.width + first_col
    _store(
        outputs_ref.at[row_span, pl.ds(first_output, tile.cols)],
        total,
        is_row,
        is_col,
    )


def block_gradients(
    x: Tensor,
    upstream: Tensor,
    inputs_of: Tensor,
    outputs_of: Tensor,
    *,
    shape: tuple[int, int],
    interpret: bool,
) -> Tensor:
    """Returns `dW[s] = X[inputs_of[s]]^T dY[outputs_of[s]]` for each live block `s`.

    Args:
        x: Tensor `(n, inputs)`.
        upstream: Tensor `(n, outputs)`.
        inputs_of: Integers `(N,)`.
        outputs_of: Integers `(N,)`.
        shape: `(r, c)` of a block.
        interpret: bool. Whether to run the kernel as operations of JAX.

    Returns:
        Tensor `(N, r, c)` of the dtype of `x`.
    """
    batch, block_count = x.shape[0], inputs_of.shape[0]
    tile = block_tile(batch, *shape, block_count, x.dtype.itemsize)
    sizes = _Sizes(batch, *shape, tile)
    tiles_down = pl.cdiv(sizes.height, tile.rows)
    return pl.pallas_call(
        functools.partial(_block_kernel, sizes=sizes),
        grid=(block_count, tiles_down * sizes.tiles_across),
        out_shape=jax.ShapeDtypeStruct((block_count, *shape), x.dtype),
        compiler_params=_compiler_params(tile),
        interpret=interpret,
        name="kso_block_gradients",
    )(x, upstream, inputs_of, outputs_of)


def _block_kernel(
    x_ref: Tensor,
    upstream_ref: Tensor,
    inputs_ref: Tensor,
    outputs_ref: Tensor,
    gradient_ref: Tensor,
    *,
    sizes: _Sizes,
) -> None:
    """One tile of one block's gradient: a sum over the batch."""
    tile = sizes.tile
    slot = pl.program_id(0)
    down, across = _quotient(pl.program_id(1), sizes.tiles_across)
    first_row, first_col = down * tile.rows, across * tile.cols
    is_row = _below(first_row, tile.rows, sizes.height)
    is_col = _below(first_col, tile.cols, sizes.width)
    first_input = inputs_ref[slot] * sizes.height + first_row
    first_output = outputs_ref[slot] * sizes.width + first_col

    def add_step(step: Tensor, total: Tensor) -> Tensor:
        first_sample = step * tile.depth
        is_sample = _below(first_sample, tile.depth, sizes.batch)
        samples = pl.ds(first_sample, tile.depth)
        x = _load(
            x_ref.at[samples, pl.ds(first_input, tile.rows)], is_sample, is_row
        )
        upstream = _load(
            upstream_ref.at[samples, pl.ds(first_output, tile.cols)],
            is_sample,
            is_col,
        )
        return total + pallas_triton.dot(x, upstream, trans_a=True)

    zeros = jnp.zeros((tile.rows, tile.cols), jnp.float32)
    steps = pl.cdiv(sizes.batch, tile.depth)
    total = jax.lax.fori_loop(0, steps, add_step, zeros)
    row_span = pl.ds(first_row, tile.rows)
    col_span = pl.ds(first_col, tile.cols)
    _store(gradient_ref.at[slot, row_span, col_span], total, is_row, is_col)


def _quotient(number: Tensor, divisor: int) -> tuple[Tensor, Tensor]:
    """The quotient and the rest of a number that is not negative."""
    typed_divisor = np.int32(divisor)
    quotient = jax.lax.div(number, typed_divisor)
    return quotient, jax.lax.rem(number, typed_divisor)


def _below(first: Tensor, count: int, end: int) -> Tensor | None:
    """Which of `first, first + 1, ..` are below `end`; `None` where all are."""
    if end % count == 0:
        return None
    return first + jnp.arange(count) < end


def _mask(is_row: Tensor | None, is_col: Tensor | None) -> Tensor | None:
    """The mask of a tile from those of its sides."""
    if is_row is not None and is_col is not None:
        return is_row[:, None] & is_col[None, :]
    if is_row is not None:
        return is_row[:, None]
    if is_col is not None:
        return is_col[None, :]
    return None


def _load(ref: Tensor, is_row: Tensor | None, is_col: Tensor | None) -> Tensor:
    """The values of a tile, zero where its mask is not set."""
    mask = _mask(is_row, is_col)
    if mask is None:
        return pallas_triton.load(ref)
    mask = jnp.broadcast_to(mask, ref.shape)
    return pallas_triton.load(ref, mask=mask, other=0.0)


def _store(
    ref: Tensor, value: Tensor, is_row: Tensor | None, is_col: Tensor | None
) -> None:
    """Writes a tile where its mask is set."""
    mask = _mask(is_row, is_col)
    if mask is not None:
        mask = jnp.broadcast_to(mask, value.shape)
    pallas_triton.store(ref, value.astype(ref.dtype), mask=mask)


def _compiler_params(tile: Tile) -> pallas_triton.CompilerParams:
    """The settings of Triton, by which Pallas lowers a kernel for a GPU."""
    return pallas_triton.CompilerParams(
        num_warps=tile.warps, num_stages=_STAGES
    )
