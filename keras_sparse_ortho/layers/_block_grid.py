"""`BlockGrid`: which blocks of a kernel are live, and how they are sharded."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np

from keras_sparse_ortho._checks import check_density, check_integer
from keras_sparse_ortho._gathers import reshape
from keras_sparse_ortho._keras_internals import Axes, axes_at, mesh_size
from keras_sparse_ortho._types import Tensor
from keras_sparse_ortho.errors import DensityError, LayoutError
from keras_sparse_ortho.orthogonal import (
    Block,
    RegularBlocks,
    block_count,
    check_pattern,
    complete,
    fan_step,
    from_blocks,
    regular_pattern,
    to_blocks,
    whole_blocks,
)

_LARGEST_MISS = (
    0.25  # the part of a density by which the nearest grid may be off
)
_LARGEST_NAMED_DIVISOR = 256  # in errors
LARGEST = 2**31 - 1  # sides, and live entries, are numbered by int32

Counts = tuple[tuple[int, ...], tuple[int, ...]]
"""The live blocks of each output block, and of each input block."""


@dataclasses.dataclass(frozen=True)
class Lines:
    """One side of a pattern: how many live blocks each of its lines of blocks has.

    Lines of one count form a group, whose blocks are one array `(lines, count, ...)`. *Slots*
    number live blocks by group, counts ascending, then by line.

    Args:
        counts: tuple of int. Live blocks of each line.
    """

    counts: tuple[int, ...]

    @functools.cached_property
    def groups(self) -> list[np.ndarray]:
        """The lines of each group, int32; those without blocks are in none."""
        counts = np.asarray(self.counts)
        group_counts = np.unique(counts[counts > 0])
        return [
            np.flatnonzero(counts == count).astype(np.int32)
            for count in group_counts
        ]

    @functools.cached_property
    def are_regular(self) -> bool:
        """Whether all lines have one count."""
        return len(set(self.counts)) == 1

    @functools.cached_property
    def have_empty(self) -> bool:
        """Whether a line has no blocks."""
        # torch.compile answers `0 in counts` wrongly where it takes counts as open sizes (2.13).
        return min(self.counts) == 0

    @functools.cached_property
    def place(self) -> np.ndarray:
        """Where each line is in the order of the groups; behind all of them if it has no blocks."""
        order = np.concatenate(self.groups)
        places = np.full(len(self.counts), len(order), dtype=np.int32)
        places[order] = np.arange(len(order))
        return places

    @functools.cached_property
    def of_slots(self) -> np.ndarray:
        """The line of each slot."""
        order = np.concatenate(self.groups)
        return np.repeat(order, np.asarray(self.counts)[order])

    @functools.cached_property
    def first_and_count(self) -> np.ndarray:
        """The first slot of each line and the number of its slots, int32 `(lines, 2)`.

        The slots of a line follow each other, in regular patterns and in any other.
        """
        counts = np.asarray(self.counts, dtype=np.int32)
        order = np.argsort(counts, kind="stable")
        firsts = np.empty_like(counts)
        firsts[order] = np.cumsum(counts[order]) - counts[order]
        return np.stack([firsts, counts], axis=1)

    @functools.cached_property
    def spans(self) -> list[slice]:
        """The slots of each group."""
        sizes = [len(lines) * self.counts[lines[0]] for lines in self.groups]
        ends = np.cumsum([0, *sizes]).tolist()
        return [slice(start, stop) for start, stop in itertools.pairwise(ends)]

    def pieces(self, slots: Tensor) -> list[Tensor]:
        """Values of slots `(N, ...)` as tensors `(lines, count, ...)` for each group."""
        pieces = []
        for lines, span in zip(self.groups, self.spans, strict=True):
            piece = slots if self.are_regular else slots[span]
            shape = (len(lines), self.counts[lines[0]], *slots.shape[1:])
            pieces.append(reshape(piece, shape))
        return pieces


@dataclasses.dataclass(frozen=True)
class BlockGrid:
    """A kernel `(*taps, inputs, outputs)` of live blocks, in any pattern.

    The `(inputs, outputs)` matrix is cut into `I x J` blocks of `rows x cols`, live at all taps or
    at none. In a regular pattern each of the `J` output blocks has `fan_in` live blocks,
    `inputs_of[j]`, and each of the `I` input blocks is used by `fan_out = J fan_in / I` of them.

    Args:
        inputs: int. Inputs of the matrix.
        outputs: int. Its outputs.
        rows: int. Inputs of a block.
        cols: int. Outputs of a block.
        fan_in: int. Live blocks of each output block, in a regular pattern.
        taps: tuple of int. Spatial axes of the kernel.
        counts: Live blocks of each output block and of each input block, in another pattern.
    """

    inputs: int
    outputs: int
    rows: int
    cols: int
    fan_in: int = 0
    taps: tuple[int, ...] = ()
    counts: Counts | None = None

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
        rows, cols = block
        all_inputs = block_count(inputs, rows)
        dense = cls(
            inputs, outputs, rows, cols, fan_in=all_inputs, taps=tuple(taps)
        )
        dense.check_sides()
        step = fan_step(dense.in_blocks, dense.out_blocks)
        fan_in = max(round(density * all_inputs / step) * step, step)
        if abs(fan_in / all_inputs - density) > _LARGEST_MISS * density:
            fan_below = math.floor(density * all_inputs / step) * step
            possible = [
                fan / all_inputs for fan in (fan_below, fan_below + step) if fan
            ]
            raise DensityError(
                f"Blocks of {rows} x {cols} in a kernel of {inputs} inputs x {outputs} "
                f"outputs are regular both ways at multiples of the density "
                f"{step / all_inputs:.6g}: "
                f"the nearest {'ones are' if len(possible) > 1 else 'one is'} "
                f"{' and '.join(f'{value:.6g}' for value in possible)}. Smaller blocks allow more. "
                f"Received: density={density!r}"
            )
        return dataclasses.replace(dense, fan_in=fan_in)

    def check_sides(self) -> None:
        """Refuses sides that the block does not divide, or that no memory could hold."""
        if max(self.inputs, self.outputs, *self.taps) > LARGEST:
            raise LayoutError(
                f"A side has at most {LARGEST} entries. Received: {self.shape}"
            )
        if Block(self.rows, self.cols, regular=True).divides(self.shape):
            return
        if self.inputs % self.rows:
            side, size, width = "inputs", self.inputs, self.rows
        else:
            side, size, width = "outputs", self.outputs, self.cols
        size_below = size // width * width
        sizes = " and ".join(
            str(value) for value in (size_below, size_below + width) if value
        )
        largest_divisor = min(size - 1, _LARGEST_NAMED_DIVISOR)
        divisors = [
            str(k) for k in range(2, largest_divisor + 1) if size % k == 0
        ]
        hint = (
            f"Or take blocks of one of {', '.join(divisors)}."
            if divisors
            else ""
        )
        raise LayoutError(
            f"Blocks need {side} that {width} divides: {sizes} are nearest. {hint} "
            f"Received: {size} {side}"
        )

    @property
    def in_blocks(self) -> int:
        """`I`, the input blocks."""
        return block_count(self.inputs, self.rows)

    @property
    def out_blocks(self) -> int:
        """`J`, the output blocks."""
        return block_count(self.outputs, self.cols)

    @functools.cached_property
    def of_outputs(self) -> Lines:
        """The lines of output blocks."""
        if self.counts is not None:
            return Lines(self.counts[0])
        return Lines((self.fan_in,) * self.out_blocks)

    @functools.cached_property
    def of_inputs(self) -> Lines:
        """The lines of input blocks."""
        if self.counts is not None:
            return Lines(self.counts[1])
        fan_out = self.out_blocks * self.fan_in // self.in_blocks
        return Lines((fan_out,) * self.in_blocks)

    @property
    def live_blocks(self) -> int:
        """The number of live blocks."""
        if self.counts is not None:
            return sum(self.counts[0])
        return self.fan_in * self.out_blocks

    @property
    def density(self) -> float:
        """The live fraction of blocks."""
        return self.live_blocks / (self.in_blocks * self.out_blocks)

    @property
    def live(self) -> int:
        """Live entries, without padding."""
        short_outputs = self.of_outputs.counts[
            whole_blocks(self.outputs, self.cols) :
        ]
        short_inputs = self.of_inputs.counts[
            whole_blocks(self.inputs, self.rows) :
        ]
        padding = sum(short_outputs) * self.rows + sum(short_inputs) * self.cols
        return math.prod(self.taps) * (
            self.live_blocks * self.rows * self.cols - padding
        )

    @property
    def padded(self) -> tuple[int, int]:
        """Inputs and outputs with the padding of blocks that have one less."""
        return self.in_blocks * self.rows, self.out_blocks * self.cols

    @property
    def shape(self) -> tuple[int, ...]:
        """`(*taps, inputs, outputs)`."""
        return (*self.taps, self.inputs, self.outputs)

    @property
    def places_shape(self) -> tuple[int, ...]:
        """`(J, fan_in)`, the live blocks of each output block, or `(N,)`."""
        if self.counts is not None:
            return (self.live_blocks,)
        return self.out_blocks, self.fan_in

    @property
    def blocks_shape(self) -> tuple[int, ...]:
        """`(J, fan_in, *taps, rows, cols)` or `(N, *taps, rows, cols)`."""
        return (*self.places_shape, *self.taps, self.rows, self.cols)

    def columns_order(self) -> tuple[int, ...]:
        """The axes of `(J, k, *taps, r, c)` as `(*taps, k, r, J, c)`: each output in a column."""
        rank = len(self.taps)
        return (*range(2, 2 + rank), 1, rank + 2, 0, rank + 3)

    def side_by_side(
        self, drawn: RegularBlocks
    ) -> tuple[np.ndarray, np.ndarray]:
        """Blocks `(J, k, *taps, r, c)` and `inputs_of` of a draw, whose gates follow each other."""
        blocks = drawn.with_taps()[0]
        inputs_of = drawn.inputs_of[0]
        return blocks.reshape(self.blocks_shape), inputs_of.reshape(
            -1, self.fan_in
        )

    def draw_pattern(self, seed: int) -> np.ndarray:
        """A random `inputs_of`; LayoutError for counts that no pattern has."""
        rng = np.random.default_rng(seed)
        if self.counts is None:
            return regular_pattern(
                self.in_blocks, self.out_blocks, self.fan_in, rng
            )
        live = np.zeros((self.out_blocks, self.in_blocks), dtype=bool)
        output_counts, input_counts = map(np.asarray, self.counts)
        has_all_lines = (len(output_counts), len(input_counts)) == live.shape
        has_one_sum = output_counts.sum() == input_counts.sum() > 0
        if not (
            has_all_lines
            and has_one_sum
            and complete(live, output_counts, input_counts, rng)
        ):
            raise LayoutError(
                f"`counts` must say how many live blocks each of {len(live)} output blocks and "
                f"each of {self.in_blocks} input blocks has, such that there is a pattern. "
                f"Received: {self.counts}"
            )
        return self.pattern(live.T)

    def pattern(self, live: np.ndarray) -> np.ndarray:
        """`inputs_of` of live blocks `(I, J)`."""
        order = np.concatenate(self.of_outputs.groups)
        return (
            np.nonzero(live.T[order])[1]
            .reshape(self.places_shape)
            .astype(np.int32)
        )

    def slots_of(self, inputs_of: np.ndarray) -> np.ndarray:
        """The slots of each input block, `(I, J fan_in / I)`, or `(N,)` by groups of these."""
        order = np.argsort(
            self.of_inputs.place[inputs_of.ravel()], kind="stable"
        )
        shape = (-1,) if self.counts is not None else (self.in_blocks, -1)
        return order.reshape(shape).astype(np.int32)

    def check_pattern(
        self, inputs_of: Sequence[int] | np.ndarray
    ) -> np.ndarray:
        """`inputs_of` as an int32 array; ValueError if it is not one for this grid."""
        pattern = np.asarray(inputs_of)
        if pattern.shape != self.places_shape:
            raise ValueError(
                f"`inputs_of` must have the shape {self.places_shape}: an input block for each "
                f"live block. Received: shape {pattern.shape}"
            )
        check_pattern(
            pattern.ravel(), self.of_outputs.of_slots, self.of_inputs.counts
        )
        return pattern.astype(np.int32)

    def at_places(
        self, values: np.ndarray, inputs_of: np.ndarray
    ) -> np.ndarray:
        """Values of live blocks in an array of all blocks `(J, I, ...)`, zero elsewhere."""
        value_shape = values.shape[len(self.places_shape) :]
        table = np.zeros(
            (self.out_blocks, self.in_blocks, *value_shape), values.dtype
        )
        table[self.of_outputs.of_slots, inputs_of.ravel()] = values.reshape(
            -1, *value_shape
        )
        return table

    def kernel(self, blocks: np.ndarray, inputs_of: np.ndarray) -> np.ndarray:
        """The kernel with these live blocks, zero elsewhere."""
        dense = self.at_places(blocks, inputs_of).transpose(
            self.columns_order()
        )
        return from_blocks(dense, self.inputs, self.outputs)

    def mask(self, inputs_of: np.ndarray) -> np.ndarray:
        """The mask of a kernel with these live blocks."""
        return self.kernel(np.ones(self.blocks_shape, dtype=bool), inputs_of)

    def blocks(self, kernel: np.ndarray, inputs_of: np.ndarray) -> np.ndarray:
        """The live blocks of a dense kernel; the inverse of `kernel`."""
        split = to_blocks(kernel, self.rows, self.cols)
        table = split.transpose(np.argsort(self.columns_order()))
        return table[self.of_outputs.of_slots, inputs_of.ravel()].reshape(
            self.blocks_shape
        )


def pattern_of(
    mask: np.ndarray, block: tuple[int, int], parts: int = 1
) -> tuple[BlockGrid, np.ndarray]:
    """Finds the live blocks of a mask.

    Args:
        mask: bool array `(*taps, inputs, outputs)`, with the matrices of all gates side by side.
        block: `(rows, cols)`.
        parts: int. Number of these matrices.

    Returns:
        The grid, and its `inputs_of`.

    Raises LayoutError for blocks that are live in part.
    """
    *taps, inputs, outputs = mask.shape
    grid = BlockGrid(inputs, outputs, *block, taps=tuple(taps))
    grid.check_sides()
    block_axes_of_table = (*range(len(taps)), len(taps) + 1, len(taps) + 3)
    live = np.asarray(
        to_blocks(mask, *block, fill=True).all(axis=block_axes_of_table)
    )
    touched = to_blocks(mask, *block, fill=False).any(axis=block_axes_of_table)
    partly_live = int((live != touched).sum())
    if partly_live or not live.any():
        raise LayoutError(
            f"The mask is not one of whole blocks of {block[0]} x {block[1]} that are live at all "
            f"taps. Received: {partly_live} blocks that are live in part, {live.sum()} live ones"
        )
    output_counts = tuple(live.sum(axis=0).tolist())
    input_counts = tuple(live.sum(axis=1).tolist())
    step = fan_step(grid.in_blocks, grid.out_blocks // parts)
    is_even = len(set(output_counts)) == len(set(input_counts)) == 1
    if is_even and output_counts[0] % step == 0:
        grid = dataclasses.replace(grid, fan_in=output_counts[0])
    else:
        grid = dataclasses.replace(grid, counts=(output_counts, input_counts))
    return grid, grid.pattern(live)


def check_block(block: int | Sequence[int]) -> tuple[int, int]:
    """`block` as `(rows, cols)`: a positive integer for both, or a pair of them."""
    pair = tuple(block) if isinstance(block, tuple | list) else (block, block)
    if len(pair) != 2:
        raise ValueError(
            f"`block` must be an integer or a pair (rows, cols). Received: {block=}"
        )
    return check_integer("block", pair[0]), check_integer("block", pair[1])


def checked_counts(counts: Sequence[Sequence[int]]) -> Counts:
    """Counts as tuples; ValueError unless they are two lists of integers."""
    if not isinstance(counts, tuple | list) or len(counts) != 2:
        raise ValueError(
            "`counts` must be a pair: the live blocks of each output block, and of each input "
            f"block. Received: counts={counts!r}"
        )
    output_counts, input_counts = (
        tuple(check_integer("counts", count, least=0) for count in side)
        for side in counts
    )
    return output_counts, input_counts


def block_axes(
    path: str, grid: BlockGrid
) -> tuple[Axes | None, Axes | None, Axes | None]:
    """The mesh axes of `blocks`, `inputs_of` and `slots_of` of a layer; `None` without a layout.

    A `LayoutMap` entry for the replaced layer's kernel, `"hidden/kernel"`, shards output blocks
    along its mesh axis. An entry for `"hidden/blocks"`, `(J, k, *taps, r, c)`, takes precedence.

    Args:
        path: str. Path of the layer.
        grid: BlockGrid of its kernel.
    """
    rank = len(grid.blocks_shape)
    blocks_entry = axes_at(f"{path}/blocks")
    layer_entry = axes_at(path)
    # The path of gates is that of their kernel, whose entry also matches what is below it.
    if blocks_entry is None or blocks_entry == layer_entry:
        kernel_entry = layer_entry or axes_at(f"{path}/kernel")
        if kernel_entry is None:
            return None, None, None
        sharded_axes = [
            axis for axis in reversed(kernel_entry) if axis is not None
        ]
        blocks_entry = (sharded_axes[0] if sharded_axes else None,)
    axis = blocks_entry[0] if blocks_entry else None
    if axis is not None and grid.blocks_shape[0] % mesh_size(axis):
        kind = "output" if grid.counts is None else "live"
        raise LayoutError(
            f"The blocks of {path!r} are sharded by output blocks, whose number must be "
            f"a multiple of the {mesh_size(axis)} devices along {axis!r}. To replicate them, "
            f"give '{path}/blocks' an entry in the LayoutMap, such as {(None,) * rank}. "
            f"Received: {grid.blocks_shape[0]} {kind} blocks"
        )
    replicated = (None,) * len(grid.places_shape)
    missing_axes = (None,) * (rank - len(blocks_entry))
    return blocks_entry + missing_axes, (axis, *replicated[1:]), replicated
