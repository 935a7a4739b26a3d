"""Drawing exactly orthogonal kernels of regular blocks, live blocks only."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_sparse_ortho.orthogonal._dense_blocks import random_orthogonal
from keras_sparse_ortho.orthogonal._regular_blocks import RegularBlocks
from keras_sparse_ortho.orthogonal._regular_pattern import fan_step, slots_of
from keras_sparse_ortho.orthogonal._regular_supports import RegularSupports
from keras_sparse_ortho.orthogonal._rotations import AngleLaw, cos_sin

# Rotations of every column of a start that is wider than high, after which no two are parallel.
_ROUNDS = 4
# Larger blocks begin as smaller ones: a tournament of all pairs of rows costs their cube.
_LARGEST = 64
# Entries of the matrices that are rotated at once, so that they and what is computed stay small.
_AT_ONCE = 1 << 17


def draw_regular(
    canonical_shape: Sequence[int],
    rows: int,
    cols: int,
    fan_in: int,
    gain: float,
    rng: np.random.Generator,
    angles: AngleLaw = None,
    dtype: Any = np.float64,
) -> RegularBlocks:
    """Exactly orthogonal matrices of regular blocks, each drawn on its own.

    Memory: the result, and about 1.3 float64 copies of the live blocks. No line is dead.

    Args:
        canonical_shape: `(batch, parts, *taps, inputs, outputs)`; `rows` divides the inputs, `cols`
            the outputs.
        rows: Inputs in a block.
        cols: Outputs in a block.
        fan_in: Live input blocks of each output block; see `check_fan`.
        gain: Scale of the kernel.
        rng: NumPy generator.
        angles: Law of the rotation angles.
        dtype: Floating type of the blocks. All arithmetic is in float64.
    """
    batch, parts, *_, inputs, outputs = (int(size) for size in canonical_shape)
    input_blocks, output_blocks = inputs // rows, outputs // cols
    blocks = np.empty((batch, parts, output_blocks, fan_in, rows, cols), dtype=dtype)
    inputs_of = np.empty(blocks.shape[:4], dtype=np.int32)
    times = fan_in // fan_step(input_blocks, output_blocks)
    # Lines are those of the longer side; of a square matrix, of the side with the finer blocks.
    wide = outputs > inputs or (outputs == inputs and cols <= rows)
    lines, groups = (output_blocks, input_blocks) if wide else (input_blocks, output_blocks)
    b, a = (cols, rows) if wide else (rows, cols)
    for matrix in np.ndindex(batch, parts):
        plan = RegularSupports.draw(lines, groups, times, rng)
        live = plan.live if wide else plan.live.T
        inputs_of[matrix] = np.nonzero(live)[1].reshape(output_blocks, fan_in)
        if wide:
            slots = np.arange(output_blocks * fan_in).reshape(output_blocks, fan_in)
        else:
            slots = slots_of(inputs_of[matrix], input_blocks)
        supports, values = _mixed(plan, b, a, rng, angles)
        flat = blocks[matrix].reshape(-1, rows, cols)
        flat[...] = 0.0
        for line in range(lines):
            places = np.searchsorted(np.flatnonzero(plan.live[line]), supports[line])
            value = gain * values[line]
            flat[slots[line, places]] = value.swapaxes(1, 2) if wide else value
            values[line] = np.empty(0)
    shape = tuple(int(size) for size in canonical_shape)
    return RegularBlocks(blocks, inputs_of, slots_of(inputs_of, input_blocks), shape)


def _mixed(
    plan: RegularSupports, b: int, a: int, rng: np.random.Generator, angles: AngleLaw
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The groups of each line, ascending, and their values `(fan, b, a)`.

    The `q` lines of a cell are mixed entry by entry: entry `t` of them all by an orthogonal
    `q x q` matrix of its own, so that rows stay orthonormal.
    """
    parts, lines_each = plan.lines.shape
    groups_each = plan.groups.shape[1]
    start = dense_rows(parts, groups_each, a, lines_each * b, rng, angles)
    start = start.reshape(parts, lines_each, b, groups_each, a).swapaxes(2, 3)
    supports: list[np.ndarray] = [np.empty(0)] * plan.lines.size
    values: list[np.ndarray] = [np.empty(0)] * plan.lines.size
    for part, lines in enumerate(plan.lines.tolist()):
        for place, line in enumerate(lines):
            supports[line], values[line] = plan.groups[part], start[part, place]
    for cells in plan.levels:
        for size in sorted({len(cell) for cell in cells} - {1}):
            chosen = [cell for cell in cells if len(cell) == size]
            mixers = random_orthogonal(len(chosen) * b, size, rng, angles)
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


def dense_rows(
    count: int, groups: int, size: int, width: int, rng: np.random.Generator, angles: AngleLaw
) -> np.ndarray:
    """Dense orthonormal rows, transposed: `(count, width, groups * size)`, `width` the longer side.

    Dense blocks of `size` (or less) on the diagonal; the columns beyond get halves of them; then
    random pairs of columns are rotated until every column reaches all rows, and some rounds more.
    """
    while size > _LARGEST and size % 2 == 0:
        groups, size = 2 * groups, size // 2
    rows = groups * size
    columns = np.zeros((count, width, rows))
    reached = np.zeros((width, groups), dtype=bool)
    step = max(1, _AT_ONCE // (groups * size**2))
    for k in range(0, count, step):
        some = columns[k : k + step]
        blocks = random_orthogonal(len(some) * groups, size, rng, angles)
        blocks = blocks.reshape(len(some), groups, size, size)
        for group in range(groups):
            part = slice(group * size, (group + 1) * size)
            some[:, part, part] = blocks[:, group]
            reached[part, group] = True
    filled = rows
    while filled < width:
        more = min(filled, width - filled)
        new = np.arange(filled, filled + more)
        _rotate(columns, reached, np.arange(more), new, rng, angles)
        filled += more
    left = (groups - 1).bit_length() + _ROUNDS if width > size else 0
    while left > 0 or not reached.all():
        order = rng.random(width).argsort()
        _rotate(
            columns, reached, order[: width // 2], order[width // 2 :][: width // 2], rng, angles
        )
        left -= 1
    return columns


def _rotate(
    columns: np.ndarray,
    reached: np.ndarray,
    first: np.ndarray,
    second: np.ndarray,
    rng: np.random.Generator,
    angles: AngleLaw,
) -> None:
    """Rotates disjoint pairs of columns of every matrix, in place, an angle for each."""
    count = len(columns)
    cos, sin = (v.reshape(count, -1, 1) for v in cos_sin(angles, count * len(first), rng))
    step = max(1, _AT_ONCE // columns[0].size)
    for k in range(0, count, step):
        part, c, s = (v[k : k + step] for v in (columns, cos, sin))
        x, y = part[:, first], part[:, second]
        part[:, first], part[:, second] = c * x + s * y, c * y - s * x
    reached[first] = reached[second] = reached[first] | reached[second]
