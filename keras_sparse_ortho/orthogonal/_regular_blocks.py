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
from typing import Any

import numpy as np

from keras_sparse_ortho.orthogonal._eoi import DrawOptions, cos_sin, random_orthogonal
from keras_sparse_ortho.orthogonal._kernel import center_of
from keras_sparse_ortho.orthogonal._regular_pattern import (
    block_count,
    clear_padding,
    complete,
    fan_step,
    from_blocks,
)

_ROUNDS = 4  # rotations of every column of a wide start, after which no two are parallel
_LARGEST = 64  # larger blocks begin as smaller ones: rotating all pairs of rows takes cubic time
_AT_ONCE = 1 << 17  # entries that are rotated at once, which bounds temporary memory
# Sizes of cells. Their products are at most a seventh below any number; larger cells would leave
# disconnected parts.
_CELLS = (5, 3, 2)
_TRIES = 3  # choices of cell sizes, where supports overlap or cannot be completed


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
        return math.prod(self.canonical_shape) * self.blocks.shape[3] // self.in_blocks

    def with_taps(self) -> np.ndarray:
        """The live blocks at all taps, `(batch, parts, J, k, *taps, r, c)`."""
        taps, (*outer, rows, cols) = self.canonical_shape[2:-2], self.blocks.shape
        if not taps:
            return self.blocks
        values = np.zeros((*outer, *taps, rows, cols), self.blocks.dtype)
        values[(slice(None),) * 4 + center_of(self.canonical_shape)] = self.blocks
        return values

    def dense(self) -> np.ndarray:
        """The dense kernel in its canonical shape, for small ones."""
        kernel = np.zeros(self.canonical_shape, self.blocks.dtype)
        kernel[(slice(None),) * 2 + center_of(self.canonical_shape)] = self._matrices(self.blocks)
        return kernel

    def mask(self) -> np.ndarray:
        """The dense bool mask in the canonical shape, for small kernels."""
        live = self._matrices(np.ones(self.blocks.shape, dtype=bool))
        taps = tuple(range(2, len(self.canonical_shape) - 2))
        return np.broadcast_to(np.expand_dims(live, taps), self.canonical_shape).copy()

    def _matrices(self, values: np.ndarray) -> np.ndarray:
        """Values of the live blocks at one tap as dense matrices."""
        *outer, lines, _, rows, cols = values.shape
        by_block = np.zeros((*outer, lines, self.in_blocks, rows, cols), values.dtype)
        np.put_along_axis(by_block, self.inputs_of[..., None, None], values, axis=3)
        return from_blocks(by_block.transpose(0, 1, 3, 4, 2, 5), *self.canonical_shape[-2:])


@dataclasses.dataclass(frozen=True)
class _MixingPlan:
    """The lines and groups of a start, the levels that mix it, and the pattern of the result."""

    lines: np.ndarray  # line numbers `(d, lines / d)` of each dense matrix of the start
    groups: np.ndarray  # its group numbers `(d, groups / d)`, ascending
    levels: list[list[list[int]]]  # cells of lines, for each level
    live: np.ndarray  # bool `(lines, groups)`, the regular pattern

    @classmethod
    def draw(cls, lines: int, groups: int, times: int, rng: np.random.Generator) -> "_MixingPlan":
        """A pattern with `times` times the least fans, `1 <= times <= gcd(lines, groups)`."""
        parts = math.gcd(lines, groups)
        lines_of = rng.random(lines).argsort().reshape(parts, -1)
        groups_of = np.sort(rng.random(groups).argsort().reshape(parts, -1), axis=1)
        start = [0] * lines
        for own_lines, own_groups in zip(lines_of.tolist(), groups_of.tolist(), strict=True):
            for line in own_lines:
                start[line] = sum(1 << group for group in own_groups)
        best, reached = None, 0
        for fan, sizes in _cell_sizes(lines, times)[:_TRIES]:
            if reached * parts >= 0.95 * fan * lines * groups:  # few draws reach the bound `fan`
                break
            levels, live, found = _levels(start, sizes, groups, times, rng)
            if best is None or found > reached:
                best, reached = cls(lines_of, groups_of, levels, live), found
        assert best is not None
        return best


def _cell_sizes(lines: int, times: int) -> list[tuple[float, list[int]]]:
    """Mean fan and sizes of the cells of each level; larger fans first, then more levels."""
    means = {}
    for size in _CELLS:
        cells = -(-lines // size)
        small, larger = divmod(lines, cells)
        means[size] = ((cells - larger) * small**2 + larger * (small + 1) ** 2) / lines
    found = []
    for powers in itertools.product(range(times.bit_length()), repeat=len(_CELLS)):
        sizes = [n for n, power in zip(_CELLS, powers, strict=True) for _ in range(power)]
        if math.prod(sizes) <= times:
            found.append((math.prod(means[size] for size in sizes), sizes))
    # Rounded: the same order on every machine.
    return sorted(found, key=lambda entry: (-round(entry[0], 6), -len(entry[1]), entry[1]))


def _levels(
    start: list[int], sizes: list[int], groups: int, times: int, rng: np.random.Generator
) -> tuple[list[list[list[int]]], np.ndarray, int]:
    """Levels whose supports can be completed to a pattern; the pattern; the size of supports."""
    lines = len(start)
    parts = math.gcd(lines, groups)
    bits = list(start)
    levels = [_mix(bits, size, rng) for size in sizes]
    # Where all blocks are live every union fits, and no block needs to be zero.
    while times == parts and min(line.bit_count() for line in bits) < groups:
        levels.append(_mix(bits, 2, rng))
    dropped = 0
    while True:
        width = -(-groups // 8)
        packed = b"".join(line.to_bytes(width, "little") for line in bits)
        rows = np.frombuffer(packed, dtype=np.uint8).reshape(-1, width)
        live = np.unpackbits(rows, axis=1, count=groups, bitorder="little").astype(bool)
        found = int(live.sum())
        if complete(live, times * groups // parts, times * lines // parts, rng):
            return levels, live, found
        # Unequal fans may be impossible to complete. Then drop cells, in the end all: the regular
        # start has an integer flow that completes it, as it has a fractional one.
        levels[-1].sort(key=len, reverse=True)
        more = max(1, dropped // 2)
        del levels[-1][-more:]
        dropped += more
        if not levels[-1]:
            levels.pop()
            dropped = 0
        bits = list(start)
        for cell in itertools.chain.from_iterable(levels):
            _unite(bits, cell)


def _mix(bits: list[int], size: int, rng: np.random.Generator) -> list[list[int]]:
    """Divides lines into cells of at most `size`, of small overlap, and unites their supports."""
    lines = len(bits)
    count = -(-lines // size)
    order = rng.random(lines).argsort().tolist()
    cells = []
    for place in range(count):
        cell = [order.pop()]
        union = bits[cell[0]]
        while len(cell) < lines // count + (place < lines % count):
            best, least = 0, lines + union.bit_length()
            for k in range(len(order) - 1, -1, -1):
                common = (bits[order[k]] & union).bit_count()
                if common < least:
                    best, least = k, common
                if not common:
                    break
            line = order.pop(best)
            union |= bits[line]
            cell.append(line)
        _unite(bits, cell)
        cells.append(cell)
    return cells


def _unite(bits: list[int], cell: list[int]) -> None:
    union = 0
    for line in cell:
        union |= bits[line]
    for line in cell:
        bits[line] = union


def draw_regular(
    canonical_shape: Sequence[int],
    rows: int,
    cols: int,
    fan_in: int,
    options: DrawOptions,
    dtype: Any = np.float64,
) -> RegularBlocks:
    """Draws a kernel with `fan_in` live input blocks for each output block; in float64 inside."""
    batch, parts, *_, inputs, outputs = (int(size) for size in canonical_shape)
    input_blocks, output_blocks = block_count(inputs, rows), block_count(outputs, cols)
    sides = inputs, outputs
    inputs, outputs = input_blocks * rows, output_blocks * cols
    blocks = np.empty((batch, parts, output_blocks, fan_in, rows, cols), dtype=dtype)
    inputs_of = np.empty(blocks.shape[:4], dtype=np.int32)
    times = fan_in // fan_step(input_blocks, output_blocks)
    # Lines are on the longer side; in a square matrix, on the side with the smaller blocks.
    wide = outputs > inputs or (outputs == inputs and cols <= rows)
    lines, groups = (output_blocks, input_blocks) if wide else (input_blocks, output_blocks)
    b, a = (cols, rows) if wide else (rows, cols)
    for matrix in np.ndindex(batch, parts):
        plan = _MixingPlan.draw(lines, groups, times, options.rng)
        live = plan.live if wide else plan.live.T
        inputs_of[matrix] = np.nonzero(live)[1].reshape(output_blocks, fan_in)
        own = inputs_of[matrix].ravel().argsort(kind="stable")
        slots = (np.arange(len(own)) if wide else own).reshape(lines, -1)
        supports, values = _mixed(plan, b, a, options.rng)
        flat = blocks[matrix].reshape(-1, rows, cols)
        flat[...] = 0.0
        for line in range(lines):
            places = np.searchsorted(np.flatnonzero(plan.live[line]), supports[line])
            value = options.gain * values[line]
            flat[slots[line, places]] = value.swapaxes(1, 2) if wide else value
            values[line] = np.empty(0)
        # Only the shorter side may be padded; the other rows stay orthonormal.
        outputs_of = np.repeat(np.arange(output_blocks)[:, None], fan_in, axis=1)
        clear_padding(blocks[matrix], inputs_of[matrix], outputs_of, *sides)
    shape = tuple(int(size) for size in canonical_shape)
    return RegularBlocks(blocks, inputs_of, shape)


def _mixed(
    plan: _MixingPlan, b: int, a: int, rng: np.random.Generator
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The groups of each line, ascending, and their values `(fan, b, a)`."""
    parts, lines_each = plan.lines.shape
    groups_each = plan.groups.shape[1]
    start = _dense_rows(parts, groups_each, a, lines_each * b, rng)
    start = start.reshape(parts, lines_each, b, groups_each, a).swapaxes(2, 3)
    supports: list[np.ndarray] = [np.empty(0)] * plan.lines.size
    values: list[np.ndarray] = [np.empty(0)] * plan.lines.size
    for part, lines in enumerate(plan.lines.tolist()):
        for place, line in enumerate(lines):
            supports[line], values[line] = plan.groups[part], start[part, place]
    for cells in plan.levels:
        for size in sorted({len(cell) for cell in cells} - {1}):
            chosen = [cell for cell in cells if len(cell) == size]
            mixers = random_orthogonal(len(chosen) * b, size, rng)
            mixers = mixers.reshape(len(chosen), b, size, size)
            for cell, mixer in zip(chosen, mixers, strict=True):
                union = np.unique(np.concatenate([supports[line] for line in cell]))
                mixed = np.zeros((size, len(union), b, a))
                for k, line in enumerate(cell):
                    places = np.searchsorted(union, supports[line])
                    mixed[:, places] += mixer[:, :, k].T[:, None, :, None] * values[line]
                for k, line in enumerate(cell):
                    supports[line], values[line] = union, mixed[k]
    return supports, values


def _dense_rows(
    count: int, groups: int, size: int, width: int, rng: np.random.Generator
) -> np.ndarray:
    """Dense orthonormal rows, transposed: `(count, width, groups * size)`; `width` is longer."""
    # Dense blocks on the diagonal share their norm with the columns beyond; then random pairs of
    # columns are rotated until each has entries in all rows.
    while size > _LARGEST and size % 2 == 0:
        groups, size = 2 * groups, size // 2
    rows = groups * size
    columns = np.zeros((count, width, rows))
    reached = np.zeros((width, groups), dtype=bool)
    step = max(1, _AT_ONCE // (groups * size**2))
    for k in range(0, count, step):
        some = columns[k : k + step]
        blocks = random_orthogonal(len(some) * groups, size, rng)
        blocks = blocks.reshape(len(some), groups, size, size)
        for group in range(groups):
            part = slice(group * size, (group + 1) * size)
            some[:, part, part] = blocks[:, group]
            reached[part, group] = True
    filled = rows
    while filled < width:
        new = np.arange(filled, min(2 * filled, width))
        _rotate(columns, reached, new - filled, new, rng)
        filled += len(new)
    left = (groups - 1).bit_length() + _ROUNDS if width > size else 0
    half = width // 2
    while left > 0 or not reached.all():
        order = rng.random(width).argsort()
        _rotate(columns, reached, order[:half], order[half : 2 * half], rng)
        left -= 1
    return columns


def _rotate(
    columns: np.ndarray,
    reached: np.ndarray,
    first: np.ndarray,
    second: np.ndarray,
    rng: np.random.Generator,
) -> None:
    """Rotates disjoint pairs of columns of every matrix in place, by an angle for each pair."""
    count = len(columns)
    cos, sin = (v.reshape(count, -1, 1) for v in cos_sin(count * len(first), rng))
    step = max(1, _AT_ONCE // columns[0].size)
    for k in range(0, count, step):
        part, c, s = (v[k : k + step] for v in (columns, cos, sin))
        x, y = part[:, first], part[:, second]
        part[:, first], part[:, second] = c * x + s * y, c * y - s * x
    reached[first] = reached[second] = reached[first] | reached[second]
