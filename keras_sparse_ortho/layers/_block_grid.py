"""`BlockGrid`: which blocks of a kernel are live, and how they are sharded."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_sparse_ortho._checks import check_density, check_integer
from keras_sparse_ortho._keras_internals import Axes, axes_at, mesh_size
from keras_sparse_ortho.errors import DensityError, LayoutError
from keras_sparse_ortho.kernels import KernelLayout
from keras_sparse_ortho.orthogonal import (
    Block,
    RegularBlocks,
    block_count,
    check_regular,
    fan_step,
    from_blocks,
    regular_pattern,
    to_blocks,
)

# A density is met as well as the grid allows, if that is not off by more than this part of it.
_FURTHEST = 0.25
# Sides, and live entries, are numbered by int32.
LARGEST = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class BlockGrid:
    """A kernel `(*taps, inputs, outputs)` of live blocks that are regular both ways.

    The `(inputs, outputs)` matrix is cut into `I x J` blocks of `rows x cols`, `in_blocks x
    out_blocks`. Each of the `J` output blocks has exactly `fan_in` live blocks, `inputs_of[j]`, and
    each of the `I` input blocks is used by exactly `fan_out = J fan_in / I` of them. A live block
    is so at all taps.
    """

    inputs: int
    outputs: int
    rows: int
    cols: int
    fan_in: int
    taps: tuple[int, ...] = ()

    @classmethod
    def for_density(
        cls,
        inputs: int,
        outputs: int,
        block: tuple[int, int],
        density: float,
        taps: Sequence[int] = (),
    ) -> "BlockGrid":
        """The grid nearest to a density; DensityError if it is off by more than a quarter."""
        density = check_density(density)
        dense = cls(inputs, outputs, *block, fan_in=block_count(inputs, block[0]), taps=(*taps,))
        dense.check_sides()
        blocks, step = dense.in_blocks, dense.fan_in_step
        fan_in = max(round(density * blocks / step) * step, step)
        if abs(fan_in / blocks - density) > _FURTHEST * density:
            below = math.floor(density * blocks / step) * step
            near = [k / blocks for k in (below, below + step) if k]
            raise DensityError(
                f"Blocks of {block[0]} x {block[1]} in a kernel of {inputs} inputs x {outputs} "
                f"outputs are regular both ways at multiples of the density {step / blocks:.6g}: "
                f"the nearest {'ones are' if len(near) > 1 else 'one is'} "
                f"{' and '.join(f'{value:.6g}' for value in near)}. Smaller blocks allow more. "
                f"Received: density={density!r}"
            )
        return dataclasses.replace(dense, fan_in=fan_in)

    def check_sides(self) -> None:
        """Refuses sides that the block does not divide, and those that no memory could hold."""
        if max(self.inputs, self.outputs, *self.taps) > LARGEST:
            raise LayoutError(
                f"Each side of a kernel has at most {LARGEST} entries. Received: {self.shape}"
            )
        if not Block(self.rows, self.cols, regular=True).divides(self.shape):
            _check_side("inputs", self.inputs, self.rows)
            _check_side("outputs", self.outputs, self.cols)

    @property
    def in_blocks(self) -> int:
        return block_count(self.inputs, self.rows)

    @property
    def out_blocks(self) -> int:
        return block_count(self.outputs, self.cols)

    @property
    def fan_out(self) -> int:
        return self.out_blocks * self.fan_in // self.in_blocks

    @property
    def fan_in_step(self) -> int:
        """`fan_in` must be a multiple of this, or `fan_out` is no integer."""
        return fan_step(self.in_blocks, self.out_blocks)

    @property
    def density(self) -> float:
        return self.fan_in / self.in_blocks

    @property
    def live(self) -> int:
        """Live entries."""
        return math.prod(self.shape) * self.fan_in // self.in_blocks

    @property
    def padded(self) -> tuple[int, int]:
        """Inputs and outputs with the padding of blocks that have one less."""
        return self.in_blocks * self.rows, self.out_blocks * self.cols

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.taps, self.inputs, self.outputs)

    @property
    def blocks_shape(self) -> tuple[int, ...]:
        """`(J, fan_in, *taps, rows, cols)`: the live blocks of each output block."""
        return (self.out_blocks, self.fan_in, *self.taps, self.rows, self.cols)

    @property
    def columns_shape(self) -> tuple[int, ...]:
        """`(*taps, fan_in rows, outputs)`: the live entries of each output in a column."""
        return (*self.taps, self.fan_in * self.rows, self.padded[1])

    def columns_order(self) -> tuple[int, ...]:
        """The axes of `blocks_shape` in the order of `columns_shape`."""
        taps = range(2, 2 + len(self.taps))
        return (*taps, 1, len(self.taps) + 2, 0, len(self.taps) + 3)

    def side_by_side(self, drawn: RegularBlocks) -> tuple[np.ndarray, np.ndarray]:
        """Blocks `(J, k, *taps, r, c)` and `inputs_of` of a draw, whose gates follow each other."""
        blocks, inputs_of = drawn.with_taps()[0], drawn.inputs_of[0]
        return blocks.reshape(self.blocks_shape), inputs_of.reshape(-1, self.fan_in)

    def draw_pattern(self, seed: int) -> np.ndarray:
        """A random `inputs_of`."""
        rng = np.random.default_rng(seed)
        return regular_pattern(self.in_blocks, self.out_blocks, self.fan_in, rng)

    def check_pattern(self, inputs_of: Any) -> np.ndarray:
        """`inputs_of` as an int32 array; ValueError if it is not one for this grid."""
        pattern = np.asarray(inputs_of)
        if pattern.shape != (self.out_blocks, self.fan_in):
            raise ValueError(
                f"`inputs_of` must have the shape {(self.out_blocks, self.fan_in)}: {self.fan_in} "
                f"input blocks for each output block. Received: shape {pattern.shape}"
            )
        check_regular(pattern, self.in_blocks)
        return pattern.astype(np.int32)

    def whole(self, blocks: np.ndarray, inputs_of: np.ndarray) -> np.ndarray:
        """All blocks `(J, I, *taps, rows, cols)`, zero but for the live ones."""
        dense = np.zeros(
            (self.out_blocks, self.in_blocks, *self.taps, self.rows, self.cols), blocks.dtype
        )
        dense[np.arange(self.out_blocks)[:, None], inputs_of] = blocks
        return dense

    def kernel(self, blocks: np.ndarray, inputs_of: np.ndarray) -> np.ndarray:
        """The kernel with these live blocks, zero elsewhere."""
        dense = self.whole(blocks, inputs_of).transpose(self.columns_order())
        return from_blocks(dense, self.inputs, self.outputs)

    def mask(self, inputs_of: np.ndarray) -> np.ndarray:
        """Which entries of the kernel are live."""
        return self.kernel(np.ones(self.blocks_shape, dtype=bool), inputs_of)

    def blocks(self, kernel: np.ndarray, inputs_of: np.ndarray) -> np.ndarray:
        """The live blocks of a kernel."""
        split = to_blocks(kernel, self.rows, self.cols)
        ordered = split.transpose(np.argsort(self.columns_order()))
        return ordered[np.arange(self.out_blocks)[:, None], inputs_of]


def pattern_of(mask: np.ndarray, block: tuple[int, int]) -> tuple[BlockGrid, np.ndarray]:
    """The grid and `inputs_of` of a mask; LayoutError unless it is one of whole regular blocks."""
    *taps, inputs, outputs = mask.shape
    BlockGrid(inputs, outputs, *block, fan_in=1).check_sides()
    inside = (*range(len(taps)), len(taps) + 1, len(taps) + 3)
    live = to_blocks(mask, *block, fill=True).all(axis=inside)
    in_part = int((live != to_blocks(mask, *block, fill=False).any(axis=inside)).sum())
    if in_part:
        raise LayoutError(
            f"The mask is not one of whole blocks of {block[0]} x {block[1]} that are live at all "
            f"taps. Received: {in_part} blocks that are live in part"
        )
    fan_in, fan_out = live.sum(axis=0), live.sum(axis=1)
    if len({*fan_in.tolist()}) > 1 or len({*fan_out.tolist()}) > 1 or not fan_in.any():
        raise LayoutError(
            f"Blocks of {block[0]} x {block[1]} must be as many in every line of blocks, both ways"
            f". Received: from {fan_in.min()} to {fan_in.max()} for an output block, from "
            f"{fan_out.min()} to {fan_out.max()} for an input block"
        )
    grid = BlockGrid(inputs, outputs, *block, fan_in=int(fan_in[0]), taps=tuple(taps))
    return grid, np.nonzero(live.T)[1].reshape(grid.out_blocks, grid.fan_in).astype(np.int32)


def check_mask(mask: np.ndarray, block: tuple[int, int], layout: KernelLayout | None) -> None:
    """Raises LayoutError unless a mask is of whole regular blocks, as many in all matrices."""
    canonical = (layout or KernelLayout.convolution()).to_canonical(mask)
    matrices = canonical.reshape(-1, *canonical.shape[2:])
    fans = sorted({pattern_of(matrix, block)[0].fan_in for matrix in matrices})
    if len(fans) > 1:
        raise LayoutError(
            "Each matrix of a kernel must have as many live blocks in a line. "
            f"Received: {fans[0]} to {fans[-1]}"
        )


def check_block(block: Any) -> tuple[int, int]:
    """`block` as `(rows, cols)`: a positive integer for both, or a pair of them."""
    pair = tuple(block) if isinstance(block, tuple | list) else (block, block)
    if len(pair) != 2:
        raise ValueError(
            f"`block` must be an integer or a pair (rows, cols). Received: block={block!r}"
        )
    return check_integer("block", pair[0]), check_integer("block", pair[1])


def _check_side(side: str, size: int, step: int) -> None:
    if size % step:
        below = size // step * step
        near = " and ".join(str(value) for value in (below, below + step) if value)
        divisors = ", ".join(str(k) for k in range(2, min(size, 257)) if size % k == 0)
        raise LayoutError(
            f"Blocks need {side} that {step} divides: {near} are nearest. "
            f"{f'Or take blocks of one of {divisors}.' if divisors else ''} "
            f"Received: {size} {side}"
        )


def block_axes(path: str, grid: BlockGrid) -> tuple[Axes | None, Axes | None, Axes | None]:
    """The mesh axes of `blocks`, `inputs_of` and `slots_of` of a layer; `None` without a layout.

    A `LayoutMap` entry for the kernel of the replaced layer, `"hidden/kernel"`, also applies to its
    blocks: they are sharded by output blocks along the same mesh axis. An entry for
    `"hidden/blocks"`, `(J, k, *taps, r, c)`, takes precedence.
    """
    rank = len(grid.blocks_shape)
    given, whole = axes_at(f"{path}/blocks"), axes_at(path)
    # The path of gates is that of their kernel, whose entry also matches what is below it.
    if given is None or given == whole:
        kernel = whole or axes_at(f"{path}/kernel")
        if kernel is None:
            return None, None, None
        used = [axis for axis in reversed(kernel) if axis is not None]
        given = (used[0] if used else None,)
    axis = given[0] if given else None
    if axis is not None and grid.out_blocks % mesh_size(axis):
        raise LayoutError(
            f"The blocks of '{path}' are sharded by output blocks, whose number must be "
            f"a multiple of the {mesh_size(axis)} devices along '{axis}'. To replicate them, "
            f"give '{path}/blocks' an entry in the LayoutMap, such as {(None,) * rank}. "
            f"Received: {grid.out_blocks} output blocks"
        )
    return given + (None,) * (rank - len(given)), (axis, None), (None, None)
