"""Exactly orthogonal kernels of regular blocks, drawn and stored as their live blocks alone.

The matrix has orthonormal rows; its longer side is cut into `lines`, the shorter one into `groups`.
The start is `d = gcd(lines, groups)` dense matrices of `lines / d` lines and `groups / d` groups
each, the sparsest regular pattern. Each level divides the lines into cells of at most `q` and mixes
each cell by orthogonal matrices; its lines get the union of their supports. So fans grow at most
`q`-fold, and levels whose product is at most `times` keep them within `times` those of the start.
Zero blocks fill up the rest.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.random import Generator
from numpy.typing import DTypeLike

from keras_sparse_ortho.orthogonal._eoi import (
    DrawOptions,
    cos_sin,
    random_orthogonal,
    rotated,
)
from keras_sparse_ortho.orthogonal._kernel import center_of
from keras_sparse_ortho.orthogonal._regular_pattern import (
    BlockGrid,
    block_count,
    clear_padding,
    complete,
    fan_step,
    from_blocks,
    shuffled,
)

_WIDE_START_ROUNDS = (
    4  # rotations of every column, after which no two are parallel
)
_LARGEST_DENSE = 64  # larger blocks begin as smaller ones: rotating all row pairs takes cubic time
# That are rotated at once, which bounds temporary memory.
_ENTRIES_AT_ONCE = 1 << 17
# Their products are at most a seventh below any number; larger cells would leave disconnected
# parts.
_CELL_SIZES = (5, 3, 2)
_MOST_CHOICES = (
    3  # of cell sizes, where supports overlap or cannot be completed
)
_GOOD_FAN = 0.95  # part of the bound on the fan that few draws reach

Cells = list[list[int]]
"""A level: the lines of each cell."""


@dataclasses.dataclass(frozen=True, eq=False)
class RegularBlocks:
    """The live blocks of a kernel with the same number of them in every block line.

    With `I` input blocks of `r` inputs and `J` output blocks of `c` outputs, output block `j` has
    `k` live input blocks, and each input block `J k / I` live output blocks:

        y[j] = sum_l  x[inputs_of[j, l]] @ blocks[j, l]

    A convolution has them at all taps: `blocks` are those of the center tap, others begin as zeros
    and are not stored. A side that is not divided is padded with zeros, see `Block`.
    """

    blocks: np.ndarray  # (batch, parts, J, k, r, c)
    inputs_of: np.ndarray  # int32 (batch, parts, J, k), ascending in each line
    canonical_shape: tuple[int, ...]  # (batch, parts, *taps, inputs, outputs)

    @property
    def in_blocks(self) -> int:
        return block_count(self.canonical_shape[-2], self.blocks.shape[-2])

    @property
    def density(self) -> float:
        """Live fraction, the same for every line, matrix and tap."""
        return self.inputs_of.shape[-1] / self.in_blocks

    @property
    def live(self) -> int:
        return (
            math.prod(self.canonical_shape)
            * self.blocks.shape[3]
            // self.in_blocks
        )

    def with_taps(self) -> np.ndarray:
        """The live blocks at all taps, `(batch, parts, J, k, *taps, r, c)`."""
        taps = self.canonical_shape[2:-2]
        if not taps:
            return self.blocks
        *outer, rows, cols = self.blocks.shape
        values = np.zeros((*outer, *taps, rows, cols), self.blocks.dtype)
        every_block = (slice(None),) * len(outer)
        values[every_block + center_of(self.canonical_shape)] = self.blocks
        return values

    def dense(self) -> np.ndarray:
        """The dense kernel in its canonical shape, for small ones."""
        kernel = np.zeros(self.canonical_shape, self.blocks.dtype)
        every_matrix = (slice(None),) * 2
        kernel[every_matrix + center_of(self.canonical_shape)] = self._matrices(
            self.blocks
        )
        return kernel

    def mask(self) -> np.ndarray:
        """The dense bool mask in the canonical shape, for small kernels."""
        live = self._matrices(np.ones(self.blocks.shape, dtype=bool))
        tap_axes = tuple(range(2, len(self.canonical_shape) - 2))
        at_a_tap = np.expand_dims(live, tap_axes)
        return np.broadcast_to(at_a_tap, self.canonical_shape).copy()

    def _matrices(self, values: np.ndarray) -> np.ndarray:
        """Values of the live blocks at one tap as dense matrices."""
        *outer, lines, _, rows, cols = values.shape
        by_block = np.zeros(
            (*outer, lines, self.in_blocks, rows, cols), values.dtype
        )
        np.put_along_axis(
            by_block, self.inputs_of[..., None, None], values, axis=3
        )
        inputs, outputs = self.canonical_shape[-2:]
        return from_blocks(
            by_block.transpose(0, 1, 3, 4, 2, 5), inputs, outputs
        )


@dataclasses.dataclass(frozen=True)
class _MixingPlan:
    """The lines and groups of a start, the levels that mix it, and the pattern of the result."""

    # Line numbers `(d, lines / d)` of each dense matrix of the start.
    lines: np.ndarray
    groups: np.ndarray  # its group numbers `(d, groups / d)`, ascending
    levels: list[Cells]
    live: np.ndarray  # bool `(lines, groups)`, the regular pattern

    @classmethod
    def draw(
        cls,
        lines: int,
        groups: int,
        times: int,
        rng: Generator,
    ) -> "_MixingPlan":
        """A pattern with `times` times the least fans, `1 <= times <= gcd(lines, groups)`."""
        part_count = math.gcd(lines, groups)
        lines_of = shuffled(lines, rng).reshape(part_count, -1)
        groups_of = shuffled(groups, rng).reshape(part_count, -1)
        groups_of.sort(axis=1)
        start = [0] * lines
        for part_lines, part_groups in zip(
            lines_of.tolist(), groups_of.tolist(), strict=True
        ):
            support = sum(1 << group for group in part_groups)
            for line in part_lines:
                start[line] = support
        best_plan = None
        most_live = 0
        for fan, sizes in _cell_sizes(lines, times)[:_MOST_CHOICES]:
            if most_live * part_count >= _GOOD_FAN * fan * lines * groups:
                break
            levels, live, united = _levels(start, sizes, groups, times, rng)
            if best_plan is None or united > most_live:
                best_plan = cls(lines_of, groups_of, levels, live)
                most_live = united
        assert best_plan is not None
        return best_plan


def _cell_sizes(
    lines: int,
    times: int,
) -> list[tuple[float, list[int]]]:
    """Mean fan and sizes of the cells of each level; larger fans first, then more levels."""
    mean_sizes = {size: _mean_size(lines, size) for size in _CELL_SIZES}
    choices = []
    for levels in itertools.product(
        range(times.bit_length()), repeat=len(_CELL_SIZES)
    ):
        sizes: list[int] = []
        for size, count in zip(_CELL_SIZES, levels, strict=True):
            sizes += [size] * count
        if math.prod(sizes) <= times:
            fan = math.prod(mean_sizes[size] for size in sizes)
            choices.append((fan, sizes))
    # Rounded: the same order on every machine.
    return sorted(
        choices,
        key=lambda choice: (-round(choice[0], 6), -len(choice[1]), choice[1]),
    )


def _mean_size(
    lines: int,
    size: int,
) -> float:
    """Mean over the lines of the size of their cell, for cells of at most `size`."""
    cells = -(-lines // size)
    smaller, larger_cells = divmod(lines, cells)
    smaller_cells = cells - larger_cells
    larger = smaller + 1
    squares = smaller_cells * smaller**2 + larger_cells * larger**2
    return squares / lines


def _levels(
    start: list[int],
    sizes: list[int],
    groups: int,
    times: int,
    rng: Generator,
) -> tuple[list[Cells], np.ndarray, int]:
    """Draws levels whose supports can be completed to a regular pattern.

    Unequal fans may be impossible to complete. Then cells are dropped, in the end all: the regular
    start has an integer flow that completes it, as it has a fractional one.

    Args:
        start: list of int. The groups of each line at the start, as a bitset.
        sizes: list of int. Size of the cells of each level.
        groups: int.
        times: int. Fans in multiples of the least.
        rng: NumPy generator.

    Returns:
        The levels, the pattern `(lines, groups)`, and the size of the supports before completion.
    """
    lines = len(start)
    part_count = math.gcd(lines, groups)
    line_fan = times * groups // part_count
    group_fan = times * lines // part_count
    supports = list(start)
    levels = [_mix(supports, size, rng) for size in sizes]
    # Where all blocks are live every union fits, and no block needs to be zero.
    while times == part_count and min(map(int.bit_count, supports)) < groups:
        levels.append(_mix(supports, 2, rng))
    dropped = 0
    while True:
        live = _as_bools(supports, groups)
        united = int(live.sum())
        if complete(live, line_fan, group_fan, rng):
            return levels, live, united
        levels[-1].sort(key=len, reverse=True)
        drop = max(1, dropped // 2)
        del levels[-1][-drop:]
        dropped += drop
        if not levels[-1]:
            levels.pop()
            dropped = 0
        supports = list(start)
        for cell in itertools.chain.from_iterable(levels):
            _unite(supports, cell)


def _as_bools(
    supports: list[int],
    groups: int,
) -> np.ndarray:
    """Bitsets of groups as a bool array `(lines, groups)`."""
    width = -(-groups // 8)
    packed = b"".join(support.to_bytes(width, "little") for support in supports)
    rows = np.frombuffer(packed, dtype=np.uint8).reshape(-1, width)
    bits = np.unpackbits(rows, axis=1, count=groups, bitorder="little")
    return bits.astype(bool)


def _mix(
    supports: list[int],
    size: int,
    rng: Generator,
) -> Cells:
    """Divides lines into cells of at most `size`, of small overlap, and unites their supports."""
    lines = len(supports)
    count = -(-lines // size)
    smaller, larger_cells = divmod(lines, count)
    waiting = shuffled(lines, rng).tolist()
    cells = []
    for place in range(count):
        cell_size = smaller + (place < larger_cells)
        cell = [waiting.pop()]
        union = supports[cell[0]]
        while len(cell) < cell_size:
            line = waiting.pop(_least_overlap(supports, waiting, union))
            union |= supports[line]
            cell.append(line)
        _unite(supports, cell)
        cells.append(cell)
    return cells


def _least_overlap(
    supports: list[int],
    waiting: list[int],
    union: int,
) -> int:
    """The place of the waiting line that has least in common with a union, the last of equals."""
    best_place = 0
    least_common = len(supports) + union.bit_length()
    for place in range(len(waiting) - 1, -1, -1):
        common = (supports[waiting[place]] & union).bit_count()
        if common < least_common:
            best_place = place
            least_common = common
        if not common:
            break
    return best_place


def _unite(
    supports: list[int],
    cell: list[int],
) -> None:
    """Gives all lines of a cell the union of their supports, in place."""
    union = 0
    for line in cell:
        union |= supports[line]
    for line in cell:
        supports[line] = union


def draw_regular(
    canonical_shape: Sequence[int],
    rows: int,
    cols: int,
    fan_in: int,
    options: DrawOptions,
    dtype: DTypeLike = np.float64,
) -> RegularBlocks:
    """Draws a kernel with `fan_in` live input blocks for each output block; in float64 inside.

    Args:
        canonical_shape: tuple of int.
        rows: int. Inputs of a block.
        cols: int. Outputs of a block.
        fan_in: int. A multiple of `fan_step`.
        options: DrawOptions. All outputs and inputs are covered in any case.
        dtype: Floating type of the blocks.
    """
    shape = tuple(int(size) for size in canonical_shape)
    batch, part_count, *_, inputs, outputs = shape
    input_blocks = block_count(inputs, rows)
    output_blocks = block_count(outputs, cols)
    grid = BlockGrid.of(input_blocks, output_blocks, rows, cols)
    times = fan_in // fan_step(input_blocks, output_blocks)
    blocks = np.zeros(
        (batch, part_count, output_blocks, fan_in, rows, cols), dtype=dtype
    )
    inputs_of = np.empty(blocks.shape[:4], dtype=np.int32)
    outputs_of = np.arange(output_blocks)[:, None].repeat(fan_in, axis=1)
    for matrix in np.ndindex(batch, part_count):
        plan = _MixingPlan.draw(
            grid.lines,
            grid.groups,
            times,
            options.rng,
        )
        live = plan.live if grid.is_wide else plan.live.T
        _, live_inputs = np.nonzero(live)
        inputs_of[matrix] = live_inputs.reshape(output_blocks, fan_in)
        _write_blocks(blocks[matrix], inputs_of[matrix], plan, grid, options)
        # Only the shorter side may be padded; the other rows stay orthonormal.
        clear_padding(
            blocks[matrix], inputs_of[matrix], outputs_of, inputs, outputs
        )
    return RegularBlocks(blocks, inputs_of, shape)


def _write_blocks(
    blocks: np.ndarray,
    inputs_of: np.ndarray,
    plan: _MixingPlan,
    grid: BlockGrid,
    options: DrawOptions,
) -> None:
    """Writes the values of one matrix into its zeroed blocks `(J, k, r, c)`."""
    rows, cols = blocks.shape[-2:]
    by_slot = blocks.reshape(-1, rows, cols)
    slot_order = np.arange(len(by_slot))
    if not grid.is_wide:
        slot_order = inputs_of.ravel().argsort(kind="stable")
    slots = slot_order.reshape(grid.lines, -1)
    supports, values = _mixed(plan, grid, options.rng)
    for line in range(grid.lines):
        live_groups = np.flatnonzero(plan.live[line])
        places = np.searchsorted(live_groups, supports[line])
        line_blocks = options.gain * values[line]
        if grid.is_wide:
            line_blocks = line_blocks.swapaxes(1, 2)
        by_slot[slots[line, places]] = line_blocks
        values[line] = np.empty(0)  # frees its memory


def _mixed(
    plan: _MixingPlan,
    grid: BlockGrid,
    rng: Generator,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The groups of each line, ascending, and their values `(fan, line_size, group_size)`."""
    supports, values = _start(plan, grid, rng)
    for cells in plan.levels:
        for size in sorted({len(cell) for cell in cells} - {1}):
            equal_cells = [cell for cell in cells if len(cell) == size]
            count = len(equal_cells)
            mixers = random_orthogonal(count * grid.line_size, size, rng)
            mixers = mixers.reshape(count, grid.line_size, size, size)
            for cell, mixer in zip(equal_cells, mixers, strict=True):
                _mix_cell(supports, values, cell, mixer)
    return supports, values


def _start(
    plan: _MixingPlan,
    grid: BlockGrid,
    rng: Generator,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Groups and values of each line in the dense matrices of the start."""
    part_count, lines_each = plan.lines.shape
    groups_each = plan.groups.shape[1]
    width = lines_each * grid.line_size
    dense = _dense_rows(part_count, groups_each, grid.group_size, width, rng)
    dense = dense.reshape(
        part_count,
        lines_each,
        grid.line_size,
        groups_each,
        grid.group_size,
    )
    dense = dense.swapaxes(2, 3)
    supports = [np.empty(0)] * grid.lines
    values = [np.empty(0)] * grid.lines
    for matrix, lines in enumerate(plan.lines.tolist()):
        for place, line in enumerate(lines):
            supports[line] = plan.groups[matrix]
            values[line] = dense[matrix, place]
    return supports, values


def _mix_cell(
    supports: list[np.ndarray],
    values: list[np.ndarray],
    cell: list[int],
    mixer: np.ndarray,
) -> None:
    """Mixes the lines of a cell, in place.

    Args:
        supports: list of int arrays. The groups of each line, ascending.
        values: list of arrays `(fan, line_size, group_size)`. The values of each line.
        cell: list of int. The lines.
        mixer: array `(line_size, size, size)`. An orthogonal matrix for each row of a line.
    """
    union = np.unique(np.concatenate([supports[line] for line in cell]))
    _, line_size, group_size = values[cell[0]].shape
    mixed = np.zeros((len(cell), len(union), line_size, group_size))
    for k, line in enumerate(cell):
        places = np.searchsorted(union, supports[line])
        weights = mixer[:, :, k].T
        mixed[:, places] += weights[:, None, :, None] * values[line]
    for k, line in enumerate(cell):
        supports[line] = union
        values[line] = mixed[k]


def _dense_rows(
    count: int,
    groups: int,
    size: int,
    width: int,
    rng: Generator,
) -> np.ndarray:
    """Draws dense orthonormal rows.

    Dense blocks on the diagonal share their norm with the columns beyond. Then random pairs of
    columns are rotated until each has entries in all rows.

    Args:
        count: int. Number of matrices.
        groups: int. Blocks on the diagonal of each.
        size: int. Rows of a block.
        width: int. Columns, at least `groups * size`.
        rng: NumPy generator.

    Returns:
        Array `(count, width, groups * size)`, the transposed matrices.
    """
    while size > _LARGEST_DENSE and size % 2 == 0:
        groups *= 2
        size //= 2
    rows = groups * size
    columns = np.zeros((count, width, rows))
    has_group = np.zeros((width, groups), dtype=bool)
    for group in range(groups):
        begin = group * size
        end = begin + size
        has_group[begin:end, group] = True
    step = _ENTRIES_AT_ONCE // (groups * size**2)
    step = max(1, step)
    for start in range(0, count, step):
        stop = start + step
        _write_diagonal(columns[start:stop], groups, size, rng)
    filled = rows
    while filled < width:
        end = min(2 * filled, width)
        empty = np.arange(filled, end)
        _rotate(columns, has_group, empty - filled, empty, rng)
        filled += len(empty)
    rounds = 0
    if width > size:
        rounds = (groups - 1).bit_length() + _WIDE_START_ROUNDS
    half = width // 2
    while rounds > 0 or not has_group.all():
        order = shuffled(width, rng)
        partners = order[half : 2 * half]
        _rotate(columns, has_group, order[:half], partners, rng)
        rounds -= 1
    return columns


def _write_diagonal(
    columns: np.ndarray,
    groups: int,
    size: int,
    rng: Generator,
) -> None:
    """Writes dense orthogonal blocks on the diagonals of zeroed matrices."""
    blocks = random_orthogonal(len(columns) * groups, size, rng)
    blocks = blocks.reshape(len(columns), groups, size, size)
    for group in range(groups):
        rows = slice(group * size, (group + 1) * size)
        columns[:, rows, rows] = blocks[:, group]


def _rotate(
    columns: np.ndarray,
    has_group: np.ndarray,
    sources: np.ndarray,
    targets: np.ndarray,
    rng: Generator,
) -> None:
    """Rotates disjoint pairs of columns of every matrix in place, by an angle for each pair.

    Args:
        columns: array `(count, width, rows)`.
        has_group: bool array `(width, groups)`. The groups in which columns have entries.
        sources: int array. A column of each pair.
        targets: int array. The other one.
        rng: NumPy generator.
    """
    count = len(columns)
    cos, sin = cos_sin((count, len(sources), 1), rng)
    step = max(1, _ENTRIES_AT_ONCE // columns[0].size)
    for start in range(0, count, step):
        matrices = slice(start, start + step)
        x = columns[matrices, sources]
        y = columns[matrices, targets]
        x, y = rotated(x, y, cos[matrices], sin[matrices])
        columns[matrices, sources] = x
        columns[matrices, targets] = y
    united = has_group[sources] | has_group[targets]
    has_group[sources] = united
    has_group[targets] = united
