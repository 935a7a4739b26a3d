"""Orthogonal matrices whose live entries stand in blocks: in any, or on given ones."""

import math

import numpy as np
from numpy.random import Generator
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from keras_sparse_ortho.orthogonal._eoi import (
    DrawOptions,
    cos_sin,
    covering_rotations,
    draw_until,
    pairs_of,
    random_orthogonal,
    rotated,
    unite,
)
from keras_sparse_ortho.orthogonal._regular_pattern import BlockGrid, shuffled


def block_orthogonal(
    grid: BlockGrid,
    limit: int,
    options: DrawOptions,
) -> np.ndarray:
    """Draws an orthogonal matrix `(inputs, outputs)` of at most `limit` live blocks.

    Dense orthogonal blocks stand on the diagonal. Then pairs of lines are rotated, row `k` of one
    with row `k` of the other, by an angle for each row: first empty lines with others, then random
    pairs.

    Args:
        grid: BlockGrid. One of its block sides divides the other.
        limit: int. Most live blocks.
        options: DrawOptions. The gain is not applied.
    """
    matrix, supports = _diagonal_blocks(grid, options.rng)
    if grid.lines > 1:
        rotations = _line_rotations(supports, limit, options)
        angles = (len(rotations), grid.line_size, 1, 1)
        cos, sin = cos_sin(angles, options.rng)
        for k, (i, j) in enumerate(pairs_of(rotations)):
            matrix[i], matrix[j] = rotated(matrix[i], matrix[j], cos[k], sin[k])
    return _as_kernel(matrix, grid.is_wide)


def _diagonal_blocks(
    grid: BlockGrid,
    rng: Generator,
) -> tuple[np.ndarray, list[int]]:
    """Dense orthogonal blocks: `(lines, line_size, groups, group_size)`, and the lines' supports.

    A support is the bitset of a line's live groups. A line of larger blocks than those of the
    groups holds several groups, dealt out such that as many lines as possible are live.
    """
    size = grid.line_size
    group_size = grid.group_size
    matrix = np.zeros((grid.lines, size, grid.groups, group_size))
    supports = [0] * grid.lines
    if group_size <= size:
        count = min(grid.groups, grid.lines)
        slots = size // group_size
        dense = random_orthogonal(count, size, rng)
        dense = dense.reshape(count, size, slots, group_size)
        for group in range(grid.groups):
            slot, line = divmod(group, grid.lines)
            matrix[line, :, group] = dense[line, :, slot]
            supports[line] |= 1 << group
        return matrix, supports
    lines_each = group_size // size
    dense = random_orthogonal(grid.groups, group_size, rng)
    dense = dense.reshape(grid.groups, lines_each, size, group_size)
    for group in range(grid.groups):
        start = group * lines_each
        stop = start + lines_each
        lines = slice(start, stop)
        matrix[lines, :, group] = dense[group]
        supports[lines] = [1 << group] * lines_each
    return matrix, supports


def _line_rotations(
    supports: list[int],
    limit: int,
    options: DrawOptions,
) -> np.ndarray:
    """Rotations of lines that cover, and random ones up to `limit` live blocks."""
    # Lines that begin with blocks come first; if some are empty, the others have one each.
    filled = len(supports) - supports.count(0)
    to_fill = len(supports) if options.cover else filled
    spare = limit - sum(map(int.bit_count, supports))
    covering = covering_rotations(
        filled,
        to_fill,
        filled + spare,
        options.rng,
    )
    unite(supports, covering)
    random = draw_until(supports, limit, options.rng)
    return np.concatenate([covering, random])


def draw_on(
    live: np.ndarray,
    rows: int,
    cols: int,
    rng: Generator,
) -> np.ndarray:
    """Draws a matrix `(I rows, J cols)` on given blocks, see `GivenBlocks`.

    Args:
        live: bool array `(I, J)`. The live blocks.
        rows: int. Inputs of a block.
        cols: int. Outputs of a block.
        rng: NumPy generator.
    """
    size = math.gcd(rows, cols)
    pieces_of_row = rows // size
    pieces_of_col = cols // size
    pieces = live.repeat(pieces_of_row, axis=0)
    pieces = pieces.repeat(pieces_of_col, axis=1)
    is_wide = pieces.shape[1] > pieces.shape[0]
    if is_wide:
        pieces = pieces.T
    lines, groups = pieces.shape
    line_order = shuffled(lines, rng)
    group_order = shuffled(groups, rng)
    by_group = pieces.T[np.ix_(group_order, line_order)]
    graph = csr_array(by_group)
    matching = maximum_bipartite_matching(graph, perm_type="column")
    if matching.min() < 0:
        return _separate_blocks(live, rows, cols, rng)
    matched_lines = line_order[matching]
    matrix = np.zeros((lines, size, groups, size))
    matrix[matched_lines, :, group_order] = random_orthogonal(groups, size, rng)
    support = np.zeros_like(pieces)
    support[matched_lines, group_order] = True
    _rotate_within(matrix, support, pieces, rng)
    return _as_kernel(matrix, is_wide)


def _separate_blocks(
    live: np.ndarray,
    rows: int,
    cols: int,
    rng: Generator,
) -> np.ndarray:
    """Orthogonal blocks, each scaled by the fan of its outputs."""
    input_blocks, output_blocks = live.shape
    fans = live.sum(axis=0)
    _, outputs_of = np.nonzero(live)
    scale = np.sqrt(max(cols / rows, 1.0) / fans[outputs_of])
    dense = random_orthogonal(len(scale), max(rows, cols), rng)
    dense = dense[:, :rows, :cols]
    blocks = np.zeros((input_blocks, output_blocks, rows, cols))
    blocks[live] = scale[:, None, None] * dense
    blocks = blocks.swapaxes(1, 2)
    return blocks.reshape(input_blocks * rows, output_blocks * cols)


def _rotate_within(
    matrix: np.ndarray,
    support: np.ndarray,
    pieces: np.ndarray,
    rng: Generator,
) -> None:
    """Rotates pairs of lines while both may have the union of their supports, in place.

    Lines of small supports come first, empty ones before all, each with a line by which both grow
    most.

    Args:
        matrix: array `(lines, size, groups, size)`.
        support: bool array `(lines, groups)`. Where the matrix is not zero.
        pieces: bool array of the same shape. Where it may be nonzero.
        rng: NumPy generator.
    """
    lines, size, *_ = matrix.shape
    is_done = np.zeros(lines, dtype=bool)
    while not is_done.all():
        fans = support.sum(axis=1)
        order = fans + rng.random(lines) + pieces.size * is_done
        line = int(order.argmin())
        union = support | support[line]
        forbidden = ~(pieces & pieces[line])
        fits = ~(union & forbidden).any(axis=1)
        fans_of_pair = 2 * union.sum(axis=1) - fans
        grown = np.where(fits, fans_of_pair, 0)
        keys = grown + rng.random(lines)
        partner = int(keys.argmax())
        is_done[line] = True
        if grown[partner] > fans[line]:
            cos, sin = cos_sin((size, 1, 1), rng)
            x = matrix[line]
            y = matrix[partner]
            matrix[line], matrix[partner] = rotated(x, y, cos, sin)
            support[line] = union[partner]
            support[partner] = union[partner]
            is_done[line] = False
            is_done[partner] = False


def _as_kernel(
    matrix: np.ndarray,
    is_wide: bool,
) -> np.ndarray:
    """Lines `(lines, line_size, groups, group_size)` as a matrix `(inputs, outputs)`."""
    lines, line_size, *_ = matrix.shape
    flat = matrix.reshape(lines * line_size, -1)
    return flat.T if is_wide else flat
