"""Products with live blocks as kernels of Triton: the tiles of `_pallas_products.py` on torch.

Triton is imported here alone; torch works without it. `interpreted=True` runs a kernel by Triton's
interpreter, in NumPy. That multiplies bfloat16 as the integers of its bits and cuts sums off, so
these are given to it as float32, in which products of two are exact.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from keras_sparse_ortho.layers._kernel_tiles import (
    Tile,
    block_tile,
    line_tile,
)

_STAGES = 3  # tiles that are read ahead


def line_products(
    x: torch.Tensor,
    blocks: torch.Tensor,
    sources: torch.Tensor,
    slots: torch.Tensor,
    lines: torch.Tensor,
    *,
    transposed: bool,
    interpreted: bool,
) -> torch.Tensor:
    """Returns `Y[j] = sum_e X[sources[e]] W[slots[e]]` over the entries `e` of each line `j`.

    The arguments are those of the function of this name in `_pallas_products.py`.
    """
    if interpreted and x.dtype == torch.bfloat16:
        outputs = line_products(
            x.float(),
            blocks.float(),
            sources,
            slots,
            lines,
            transposed=transposed,
            interpreted=True,
        )
        return outputs.to(x.dtype)
    x, blocks = x.contiguous(), blocks.contiguous()
    height, width = blocks.shape[1:]
    row_stride, col_stride = width, 1
    if transposed:
        height, width = width, height
        row_stride, col_stride = 1, height
    batch, line_count = x.shape[0], lines.shape[0]
    tile = line_tile(batch, height, width, line_count, x.element_size())
    outputs = x.new_empty((batch, line_count * width))
    tiles_across = math.ceil(width / tile.cols)
    grid = (line_count * tiles_across, math.ceil(batch / tile.rows))
    _run(
        _line_program,
        grid,
        tile,
        interpreted,
        *(x, blocks, sources, slots, lines, outputs),
        *(batch, x.shape[1], outputs.shape[1]),
        HEIGHT=height,
        WIDTH=width,
        ROW_STRIDE=row_stride,
        COL_STRIDE=col_stride,
    )
    return outputs


def block_gradients(
    x: torch.Tensor,
    upstream: torch.Tensor,
    inputs_of: torch.Tensor,
    outputs_of: torch.Tensor,
    *,
    shape: tuple[int, int],
    interpreted: bool,
) -> torch.Tensor:
    """Returns `dW[s] = X[inputs_of[s]]^T dY[outputs_of[s]]` for each live block `s`.

    The arguments are those of the function of this name in `_pallas_products.py`.
    """
    if interpreted and x.dtype == torch.bfloat16:
        gradient = block_gradients(
            x.float(),
            upstream.float(),
            inputs_of,
            outputs_of,
            shape=shape,
            interpreted=True,
        )
        return gradient.to(x.dtype)
    x, upstream = x.contiguous(), upstream.contiguous()
    height, width = shape
    batch, block_count = x.shape[0], inputs_of.shape[0]
    tile = block_tile(batch, *shape, block_count, x.element_size())
    gradient = x.new_empty((block_count, *shape))
    tiles_down = math.ceil(height / tile.rows)
    grid = (block_count, tiles_down * math.ceil(width / tile.cols))
    _run(
        _block_program,
        grid,
        tile,
        interpreted,
        *(x, upstream, inputs_of, outputs_of, gradient),
        *(batch, x.shape[1], upstream.shape[1]),
        HEIGHT=height,
        WIDTH=width,
    )
    return gradient


def _run(
    kernel: Callable[..., None],
    grid: tuple[int, int],
    tile: Tile,
    interpreted: bool,
    *arguments: torch.Tensor | int,
    **sizes: int,
) -> None:
    """Runs a kernel on a grid of programs."""
    x = arguments[0]
    assert isinstance(x, torch.Tensor)
    sides = {"ROWS": tile.rows, "DEPTH": tile.depth, "COLS": tile.cols}
    if interpreted:
        _interpreted(kernel)[grid](*arguments, **sizes, **sides, TF32=False)
        return
    is_tf32 = torch.get_float32_matmul_precision() != "highest"
    # Triton launches on the current device.
    with torch.cuda.device(x.device):
        _compiled(kernel)[grid](
            *arguments,
            **sizes,
            **sides,
            TF32=is_tf32,
            num_warps=tile.warps,
            num_stages=_STAGES,
        )


@functools.cache
def _compiled(kernel: Callable[..., None]) -> Any:
    return triton.jit(kernel)


@functools.cache
def _interpreted(kernel: Callable[..., None]) -> Any:
    return InterpretedFunction(kernel)


# Triton reads annotations as its types.
def _line_program(  # type: ignore[no-untyped-def]
    x_ptr,
    blocks_ptr,
    sources_ptr,
    slots_ptr,
    lines_ptr,
    outputs_ptr,
    batch,
    inputs,
    outputs,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    COL_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    COLS: tl.constexpr,
    TF32: tl.constexpr,
):
    """One tile of one line: a sum over its live blocks, each in steps of the tile's depth."""
    tiles_across = (WIDTH + COLS - 1) // COLS
    parts = (HEIGHT + DEPTH - 1) // DEPTH
    line = tl.program_id(0) // tiles_across
    first_col = (tl.program_id(0) % tiles_across) * COLS
    rows = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    cols = first_col + tl.arange(0, COLS)
    is_row = rows[:, None] < batch
    is_col = cols[None, :] < WIDTH
    first_entry = tl.load(lines_ptr + 2 * line)
    count = tl.load(lines_ptr + 2 * line + 1)
    total = tl.full((ROWS, COLS), 0.0, tl.float32)
    for step in range(0, count * parts):
        entry = first_entry + step // parts
        slot = tl.load(slots_ptr + entry).to(tl.int64)
        source = tl.load(sources_ptr + entry)
        depth = (step % parts) * DEPTH + tl.arange(0, DEPTH)
        is_depth = depth < HEIGHT
        x_places = rows[:, None] * inputs + source * HEIGHT + depth[None, :]
        x = tl.load(x_ptr + x_places, is_row & is_depth[None, :], 0.0)
        in_block = depth[:, None] * ROW_STRIDE + cols[None, :] * COL_STRIDE
        weights_ptr = blocks_ptr + slot * (HEIGHT * WIDTH) + in_block
        weights = tl.load(weights_ptr, is_depth[:, None] & is_col, 0.0)
        if TF32:
            total = tl.dot(x, weights, total, input_precision="tf32")
        else:
            total = tl.dot(x, weights, total, input_precision="ieee")
    places = rows[:, None] * outputs + line * WIDTH + cols[None, :]
    values = total.to(outputs_ptr.dtype.element_ty)
    tl.store(outputs_ptr + places, values, is_row & is_col)


def _block_program(  # type: ignore[no-untyped-def]
    x_ptr,
    upstream_ptr,
    inputs_ptr,
    outputs_ptr,
    gradient_ptr,
    batch,
    inputs,
    outputs,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    COLS: tl.constexpr,
    TF32: tl.constexpr,
):
    """One tile of one block's gradient: a sum over the batch."""
    tiles_across = (WIDTH + COLS - 1) // COLS
    slot = tl.program_id(0).to(tl.int64)
    rows = (tl.program_id(1) // tiles_across) * ROWS + tl.arange(0, ROWS)
    cols = (tl.program_id(1) % tiles_across) * COLS + tl.arange(0, COLS)
    is_row = rows < HEIGHT
    is_col = cols < WIDTH
    first_input = tl.load(inputs_ptr + slot) * HEIGHT
    first_output = tl.load(outputs_ptr + slot) * WIDTH
    total = tl.full((ROWS, COLS), 0.0, tl.float32)
    for first in range(0, batch, DEPTH):
        samples = (first + tl.arange(0, DEPTH)).to(tl.int64)
        is_sample = samples < batch
        # Read as a transposed tile.
        x_places = samples[None, :] * inputs + first_input + rows[:, None]
        x = tl.load(x_ptr + x_places, is_row[:, None] & is_sample[None, :], 0.0)
        places = samples[:, None] * outputs + first_output + cols[None, :]
        upstream = tl.load(
            upstream_ptr + places, is_sample[:, None] & is_col[None, :], 0.0
        )
        if TF32:
            total = tl.dot(x, upstream, total, input_precision="tf32")
        else:
            total = tl.dot(x, upstream, total, input_precision="ieee")
    in_block = rows[:, None] * WIDTH + cols[None, :]
    values = total.to(gradient_ptr.dtype.element_ty)
    tl.store(
        gradient_ptr + slot * (HEIGHT * WIDTH) + in_block,
        values,
        is_row[:, None] & is_col[None, :],
    )
