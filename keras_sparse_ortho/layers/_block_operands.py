"""Operands of products with live blocks: blocks with their places, groups of lines, padding."""

import dataclasses

import keras
import numpy as np

from keras_sparse_ortho._gathers import concatenate, gather, reshape, transpose
from keras_sparse_ortho._keras_internals import (
    DeferredVariables,
    value_in_scope,
)
from keras_sparse_ortho._types import Tensor, TensorLike
from keras_sparse_ortho.layers._block_grid import BlockGrid, Lines
from keras_sparse_ortho.orthogonal import block_count, whole_blocks

ops = keras.ops


@dataclasses.dataclass(frozen=True)
class BlockOperands:
    """The live blocks of a grid and their places.

    Args:
        grid: BlockGrid that they are of.
        blocks: Tensor of shape `grid.blocks_shape`.
        inputs_of: Integers, the input block of each live block.
        slots_of: Integers, the live blocks of each input block.
    """

    grid: BlockGrid
    blocks: TensorLike
    inputs_of: TensorLike
    slots_of: TensorLike

    @property
    def blocks_by_slot(self) -> Tensor:
        """The blocks as `(N, *taps, r, c)`."""
        block_shape = self.grid.blocks_shape[len(self.grid.places_shape) :]
        return ops.reshape(self.blocks, (self.grid.live_blocks, *block_shape))

    @property
    def places_by_slot(self) -> list[Tensor]:
        """`inputs_of` and `slots_of` as `(N,)`."""
        return [
            ops.reshape(places, (-1,))
            for places in (self.inputs_of, self.slots_of)
        ]


class WholeKernel:
    """A placeholder for the kernel with all its blocks, whose value in a scope is computed with."""

    def __init__(self) -> None:
        self._variable: keras.Variable | None = None

    def variable(self, grid: BlockGrid, dtype: str) -> keras.Variable:
        """The variable that stands for the kernel; it never holds an array."""
        if self._variable is None:
            with DeferredVariables().creating():
                self._variable = keras.Variable(
                    "zeros",
                    shape=_whole(grid).blocks_shape,
                    dtype=dtype,
                    name="whole_kernel",
                )
        return self._variable

    def operands(self, grid: BlockGrid, dtype: str) -> BlockOperands | None:
        """All blocks, if the enclosing scope has them."""
        if self._variable is None:
            return None
        kernel = value_in_scope(self._variable)
        if kernel is None:
            return None
        whole_grid = _whole(grid)
        pattern = np.tile(
            np.arange(grid.in_blocks, dtype=np.int32), (grid.out_blocks, 1)
        )
        return BlockOperands(
            whole_grid,
            ops.cast(kernel, dtype),
            ops.convert_to_tensor(pattern),
            ops.convert_to_tensor(whole_grid.slots_of(pattern)),
        )


def _whole(grid: BlockGrid) -> BlockGrid:
    return dataclasses.replace(grid, fan_in=grid.in_blocks, counts=None)


def split_lines(x: Tensor, lines: Lines) -> list[Tensor]:
    """Returns the part of lines `(J, ...)` in each group of them."""
    if lines.are_regular:
        return [x]
    return [gather(x, group) for group in lines.groups]


def join_lines(products: list[Tensor], lines: Lines, axis: int = 0) -> Tensor:
    """Inverts `split_lines` along any axis; lines without blocks are zero."""
    if lines.are_regular:
        return products[0]
    if lines.have_empty:
        first_line, *_ = ops.split(products[0], [1], axis=axis)
        products = [*products, ops.zeros_like(first_line)]
    return gather(concatenate(products, axis=axis), lines.place, axis)


def stack(matrices: list[Tensor], shape: tuple[int, ...] = ()) -> Tensor:
    """Stacks parts one below the other, each as `(-1, *shape)` if there is a shape."""
    if shape:
        matrices = [reshape(matrix, (-1, *shape)) for matrix in matrices]
    return matrices[0] if len(matrices) == 1 else concatenate(matrices)


def outputs_of_slots(grid: BlockGrid, slots: Tensor) -> Tensor:
    """Returns the output block of each slot."""
    lines = grid.of_outputs
    if lines.are_regular:
        return slots // lines.counts[0]
    return gather(lines.of_slots, slots)


def lines_of_blocks(blocks: Tensor) -> Tensor:
    """Puts the blocks `(m, k, r, c)` of each line one below the other: `(m, k r, c)`."""
    count, fan_in, rows, cols = blocks.shape
    return reshape(blocks, (count, fan_in * rows, cols))


def transpose_matrices(matrices: Tensor) -> Tensor:
    """Transposes the last two of three axes."""
    return transpose(matrices, (0, 2, 1))


def pad_blocks(x: Tensor, axis: int, side: int, width: int) -> Tensor:
    """Appends a zero to each block of an axis that has one entry less than `width`."""
    return _resize_blocks(x, axis, side, width, before=width - 1, after=width)


def drop_padding(x: Tensor, axis: int, side: int, width: int) -> Tensor:
    """Inverts `pad_blocks`."""
    return _resize_blocks(x, axis, side, width, before=width, after=width - 1)


def _resize_blocks(
    x: Tensor, axis: int, side: int, width: int, *, before: int, after: int
) -> Tensor:
    """Changes the entries of the shorter blocks of an axis from `before` to `after`."""
    count = block_count(side, width)
    whole_count = whole_blocks(side, width)
    if whole_count == count:
        return x
    whole_part, short_part = ops.split(x, [whole_count * width], axis=axis)
    shape = list(ops.shape(short_part))
    if axis:
        shape[0] = -1  # no shape depends on the batch, for files
    short_blocks = reshape(
        short_part,
        [*shape[:axis], count - whole_count, before, *shape[axis + 1 :]],
    )
    if after > before:
        padding = [[0, 0] for _ in short_blocks.shape]
        padding[axis + 1][1] = 1
        short_blocks = ops.pad(short_blocks, padding)
    else:
        short_blocks, _ = ops.split(short_blocks, [after], axis=axis + 1)
    shape[axis] = (count - whole_count) * after
    return concatenate([whole_part, reshape(short_blocks, shape)], axis=axis)
