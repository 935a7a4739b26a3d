"""`BlockGrid`: which blocks of a kernel are live, and how they are sharded."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_sparse_ortho._checks import check_density, check_integer
from keras_sparse_ortho._gathers import reshape
from keras_sparse_ortho._keras_internals import Axes, axes_at, mesh_size
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

_FURTHEST = 0.25  # the part of a density by which the nearest grid may be off
LARGEST = 2**31 - 1  # sides, and live entries, are numbered by int32

Counts = tuple[tuple[int, ...], tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Lines:
    """One side of a pattern: how many live blocks each of its lines of blocks has."""

    # Lines of one count form a group, whose blocks are one array `(lines, count, ...)`. *Slots*
    # number live blocks by group, counts ascending, then by line.

    counts: tuple[int, ...]

    @functools.cached_property
    def groups(self) -> list[np.ndarray]:
        """The lines of each group; those without blocks are in none."""
        counts = np.asarray(self.counts)
        found = [np.flatnonzero(counts == count) for count in np.unique(counts[counts > 0])]
        return [lines.astype(np.int32) for lines in found]

    @functools.cached_property
    def are_regular(self) -> bool:
        return len(set(self.counts)) == 1

    @functools.cached_property
    def place(self) -> np.ndarray:
        """Where each line is in the order of the groups; behind all of them if it has no blocks."""
        order = np.concatenate(self.groups)
        found = np.full(len(self.counts), len(order), dtype=np.int32)
        found[order] = np.arange(len(order))
        return found

    @functools.cached_property
    def of_slots(self) -> np.ndarray:
        order = np.concatenate(self.groups)
        return np.repeat(order, np.asarray(self.counts)[order])

    @functools.cached_property
    def spans(self) -> list[slice]:
        """The slots of each group."""
        sizes = [len(lines) * self.counts[lines[0]] for lines in self.groups]
        ends = np.cumsum([0, *sizes]).tolist()
        return [slice(*pair) for pair in itertools.pairwise(ends)]

    def pieces(self, slots: Any) -> list[Any]:
        """Values of slots `(N, ...)` as tensors `(lines, count, ...)` for each group."""
        found = []
        for lines, span in zip(self.groups, self.spans, strict=True):
            own = slots if self.are_regular else slots[span]
            shape = (len(lines), self.counts[lines[0]], *slots.shape[1:])
            found.append(reshape(own, shape))
        return found


@dataclasses.dataclass(frozen=True)
class BlockGrid:
    """A kernel `(*taps, inputs, outputs)` of live blocks, in any pattern.

    The `(inputs, outputs)` matrix is cut into `I x J` blocks of `rows x cols`, live at all taps or
    at none. In a regular pattern each of the `J` output blocks has `fan_in` live blocks,
    `inputs_of[j]`, and each of the `I` input blocks is used by `fan_out = J fan_in / I` of them.
    Another one has `counts`, those of output blocks and those of input blocks.
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
        dense = cls(inputs, outputs, *block, fan_in=block_count(inputs, block[0]), taps=(*taps,))
        dense.check_sides()
        blocks, step = dense.in_blocks, fan_step(dense.in_blocks, dense.out_blocks)
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
        """Refuses sides that the block does not divide, or that no memory could hold."""
        if max(self.inputs, self.outputs, *self.taps) > LARGEST:
            raise LayoutError(f"A side has at most {LARGEST} entries. Received: {self.shape}")
        if Block(self.rows, self.cols, regular=True).divides(self.shape):
            return
        sides = ("inputs", self.inputs, self.rows), ("outputs", self.outputs, self.cols)
        side, size, step = next(one for one in sides if one[1] % one[2])
        below = size // step * step
        near = " and ".join(str(value) for value in (below, below + step) if value)
        divisors = ", ".join(str(k) for k in range(2, min(size, 257)) if size % k == 0)
        raise LayoutError(
            f"Blocks need {side} that {step} divides: {near} are nearest. "
            f"{f'Or take blocks of one of {divisors}.' if divisors else ''} "
            f"Received: {size} {side}"
        )

    @property
    def in_blocks(self) -> int:
        return block_count(self.inputs, self.rows)

    @property
    def out_blocks(self) -> int:
        return block_count(self.outputs, self.cols)

    @functools.cached_property
    def of_outputs(self) -> Lines:
        return Lines(self.counts[0] if self.counts else (self.fan_in,) * self.out_blocks)

    @functools.cached_property
    def of_inputs(self) -> Lines:
        fan_out = self.out_blocks * self.fan_in // self.in_blocks
        return Lines(self.counts[1] if self.counts else (fan_out,) * self.in_blocks)

    @property
    def live_blocks(self) -> int:
        return sum(self.counts[0]) if self.counts else self.fan_in * self.out_blocks

    @property
    def density(self) -> float:
        return self.live_blocks / (self.in_blocks * self.out_blocks)

    @property
    def live(self) -> int:
        short = sum(self.of_outputs.counts[whole_blocks(self.outputs, self.cols) :]) * self.rows
        short += sum(self.of_inputs.counts[whole_blocks(self.inputs, self.rows) :]) * self.cols
        return math.prod(self.taps) * (self.live_blocks * self.rows * self.cols - short)

    @property
    def padded(self) -> tuple[int, int]:
        """Inputs and outputs with the padding of blocks that have one less."""
        return self.in_blocks * self.rows, self.out_blocks * self.cols

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.taps, self.inputs, self.outputs)

    @property
    def places_shape(self) -> tuple[int, ...]:
        """`(J, fan_in)`, the live blocks of each output block, or `(N,)`."""
        return (self.live_blocks,) if self.counts else (self.out_blocks, self.fan_in)

    @property
    def blocks_shape(self) -> tuple[int, ...]:
        """`(J, fan_in, *taps, rows, cols)` or `(N, *taps, rows, cols)`."""
        return (*self.places_shape, *self.taps, self.rows, self.cols)

    def columns_order(self) -> tuple[int, ...]:
        """The axes of `(J, k, *taps, r, c)` as `(*taps, k, r, J, c)`: each output in a column."""
        taps = range(2, 2 + len(self.taps))
        return (*taps, 1, len(self.taps) + 2, 0, len(self.taps) + 3)

    def side_by_side(self, drawn: RegularBlocks) -> tuple[np.ndarray, np.ndarray]:
        """Blocks `(J, k, *taps, r, c)` and `inputs_of` of a draw, whose gates follow each other."""
        blocks, inputs_of = drawn.with_taps()[0], drawn.inputs_of[0]
        return blocks.reshape(self.blocks_shape), inputs_of.reshape(-1, self.fan_in)

    def draw_pattern(self, seed: int) -> np.ndarray:
        """A random `inputs_of`; LayoutError for counts that no pattern has."""
        rng = np.random.default_rng(seed)
        if self.counts is None:
            return regular_pattern(self.in_blocks, self.out_blocks, self.fan_in, rng)
        live = np.zeros((self.out_blocks, self.in_blocks), dtype=bool)
        lines, groups = map(np.asarray, self.counts)
        whole = (len(lines), len(groups)) == live.shape and lines.sum() == groups.sum() > 0
        if not (whole and complete(live, lines, groups, rng)):
            raise LayoutError(
                f"`counts` must say how many live blocks each of {len(live)} output blocks and "
                f"each of {self.in_blocks} input blocks has, such that there is a pattern. "
                f"Received: {self.counts}"
            )
        return self.pattern(live.T)

    def pattern(self, live: np.ndarray) -> np.ndarray:
        """`inputs_of` of live blocks `(I, J)`."""
        order = np.concatenate(self.of_outputs.groups)
        return np.nonzero(live.T[order])[1].reshape(self.places_shape).astype(np.int32)

    def slots_of(self, inputs_of: np.ndarray) -> np.ndarray:
        """The slots of each input block, `(I, J fan_in / I)`, or `(N,)` by groups of these."""
        order = np.argsort(self.of_inputs.place[inputs_of.ravel()], kind="stable")
        lead = (-1,) if self.counts else (self.in_blocks, -1)
        return order.reshape(lead).astype(np.int32)

    def check_pattern(self, inputs_of: Any) -> np.ndarray:
        """`inputs_of` as an int32 array; ValueError if it is not one for this grid."""
        pattern = np.asarray(inputs_of)
        if pattern.shape != self.places_shape:
            raise ValueError(
                f"`inputs_of` must have the shape {self.places_shape}: an input block for each "
                f"live block. Received: shape {pattern.shape}"
            )
        check_pattern(pattern.ravel(), self.of_outputs.of_slots, self.of_inputs.counts)
        return pattern.astype(np.int32)

    def at_places(self, values: np.ndarray, inputs_of: np.ndarray) -> np.ndarray:
        """Values of live blocks in an array of all blocks `(J, I, ...)`, zero elsewhere."""
        inside = values.shape[len(self.places_shape) :]
        found = np.zeros((self.out_blocks, self.in_blocks, *inside), values.dtype)
        found[self.of_outputs.of_slots, inputs_of.ravel()] = values.reshape(-1, *inside)
        return found

    def kernel(self, blocks: np.ndarray, inputs_of: np.ndarray) -> np.ndarray:
        """The kernel with these live blocks, zero elsewhere."""
        dense = self.at_places(blocks, inputs_of).transpose(self.columns_order())
        return from_blocks(dense, self.inputs, self.outputs)

    def mask(self, inputs_of: np.ndarray) -> np.ndarray:
        return self.kernel(np.ones(self.blocks_shape, dtype=bool), inputs_of)

    def blocks(self, kernel: np.ndarray, inputs_of: np.ndarray) -> np.ndarray:
        split = to_blocks(kernel, self.rows, self.cols)
        ordered = split.transpose(np.argsort(self.columns_order()))
        return ordered[self.of_outputs.of_slots, inputs_of.ravel()].reshape(self.blocks_shape)


def pattern_of(
    mask: np.ndarray, block: tuple[int, int], parts: int = 1
) -> tuple[BlockGrid, np.ndarray]:
    """The grid and `inputs_of` of a mask of `parts` side by side; LayoutError for cut blocks."""
    *taps, inputs, outputs = mask.shape
    grid = BlockGrid(inputs, outputs, *block, taps=tuple(taps))
    grid.check_sides()
    inside = (*range(len(taps)), len(taps) + 1, len(taps) + 3)
    live = np.asarray(to_blocks(mask, *block, fill=True).all(axis=inside))
    in_part = int((live != to_blocks(mask, *block, fill=False).any(axis=inside)).sum())
    if in_part or not live.any():
        raise LayoutError(
            f"The mask is not one of whole blocks of {block[0]} x {block[1]} that are live at all "
            f"taps. Received: {in_part} blocks that are live in part, {live.sum()} live ones"
        )
    counts = tuple(live.sum(axis=0).tolist()), tuple(live.sum(axis=1).tolist())
    step = fan_step(grid.in_blocks, grid.out_blocks // parts)
    if len({*counts[0]}) == len({*counts[1]}) == 1 and counts[0][0] % step == 0:
        grid = dataclasses.replace(grid, fan_in=counts[0][0])
    else:
        grid = dataclasses.replace(grid, counts=counts)
    return grid, grid.pattern(live)


def check_block(block: Any) -> tuple[int, int]:
    """`block` as `(rows, cols)`: a positive integer for both, or a pair of them."""
    pair = tuple(block) if isinstance(block, tuple | list) else (block, block)
    if len(pair) != 2:
        raise ValueError(f"`block` must be an integer or a pair (rows, cols). Received: {block=}")
    return check_integer("block", pair[0]), check_integer("block", pair[1])


def checked_counts(counts: Any) -> Counts:
    if not isinstance(counts, tuple | list) or len(counts) != 2:
        raise ValueError(
            "`counts` must be a pair: the live blocks of each output block, and of each input "
            f"block. Received: counts={counts!r}"
        )
    lines, groups = ([check_integer("counts", k, least=0) for k in side] for side in counts)
    return tuple(lines), tuple(groups)


def block_axes(path: str, grid: BlockGrid) -> tuple[Axes | None, Axes | None, Axes | None]:
    """The mesh axes of `blocks`, `inputs_of` and `slots_of` of a layer; `None` without a layout."""
    # A `LayoutMap` entry for the replaced layer's kernel, `"hidden/kernel"`, shards output blocks
    # along its mesh axis. An entry for `"hidden/blocks"`, `(J, k, *taps, r, c)`, takes precedence.
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
    if axis is not None and grid.blocks_shape[0] % mesh_size(axis):
        raise LayoutError(
            f"The blocks of {path!r} are sharded by output blocks, whose number must be "
            f"a multiple of the {mesh_size(axis)} devices along {axis!r}. To replicate them, "
            f"give '{path}/blocks' an entry in the LayoutMap, such as {(None,) * rank}. "
            f"Received: {grid.blocks_shape[0]} {'live' if grid.counts else 'output'} blocks"
        )
    replicated = (None,) * len(grid.places_shape)
    return given + (None,) * (rank - len(given)), (axis, *replicated[1:]), replicated
