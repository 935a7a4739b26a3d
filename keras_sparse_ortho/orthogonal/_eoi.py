"""EOI: one sparse, exactly (semi-)orthogonal matrix, `[I | 0]` times random Givens rotations.

First the number of rotations is decided, from their supports alone; then they are multiplied. A
rotation costs as much as its two columns have live entries. While these are few, whole levels of
disjoint rotations are multiplied as sparse matrices; once columns are mostly full, two contiguous
rows of the transpose are rotated at a time. Neither uses BLAS, whose results differ between
processors in the last bit.
"""

import math

import numpy as np
import scipy.sparse

from keras_sparse_ortho.errors import DensityError
from keras_sparse_ortho.orthogonal._density_law import rotations_for_density
from keras_sparse_ortho.orthogonal._rotations import (
    AngleLaw,
    DrawOptions,
    Rotations,
    Supports,
    cos_sin,
    rotate_rows,
    schedule,
)

# From this width on the sparse product is faster than dense row rotations up to a density of 0.4.
# A denser kernel uses it only up to 0.1: the sparse form of a dense matrix would take more memory
# than the matrix.
_SPARSE_WIDTH = 256
_SPARSE_UNTIL = 0.4
_SPARSE_FIRST = 0.1
# Roots z of the closed form of `expected_density` at these densities. A more exact root may change
# the last bit of kernels whose digests are pinned.
_ROOTS = {_SPARSE_UNTIL: 1.063, _SPARSE_FIRST: 8.172}
# Rows that are multiplied, or columns that are transposed, at a time: few enough for the cache.
_ROW_BLOCK = 256
_TILE = 64


def write_orthogonal(out: np.ndarray, count: int, options: DrawOptions) -> None:
    """Writes `gain` times a sparse orthogonal matrix into a zeroed C-contiguous 2-D array.

    Its support has at most `count` entries. With `cover`, as many empty columns as that allows get
    an entry first.
    """
    rng, gain, angles = options.rng, options.gain, options.angles
    rows, width = sorted(out.shape)
    if count < rows:
        raise DensityError(f"An orthogonal {rows} x {width} matrix has at least {rows} entries.")
    if width == 1:
        out[0, 0] = gain if rng.random() < 0.5 else -gain
        return
    start = covering_rotations(rows, width if options.cover else rows, count, rng, angles)
    sequence = start + _draw_until(rows, width, count, rng, angles, start)
    sparse = _sparse_part(len(sequence), rows, width, len(start))
    tall = out.shape[0] > out.shape[1]
    if 0 < len(sequence) <= sparse:
        _write_sparse(out, gain, sequence, transposed=tall)
        return
    columns = np.zeros((width, rows))
    if first := sequence[:sparse]:
        _write_sparse(columns, gain, first, transposed=True)
    else:
        np.fill_diagonal(columns, gain)
    rotate_rows(columns, sequence[sparse:])
    if tall:
        out[...] = columns
    else:
        for at in range(0, width, _TILE):  # in tiles that stay in the cache
            out[:, at : at + _TILE] = columns[at : at + _TILE].T


def covering_rotations(
    rows: int, width: int, limit: int, rng: np.random.Generator, angles: AngleLaw = None
) -> Rotations:
    """Rotations that give each empty column of `[I | 0]` one entry.

    Each round doubles the nonempty columns, so that `r` columns share the norm of a row after
    `log2(r)` rounds; rotating them all with the same column would leave the last one about `2^-r`
    of it. If `limit` is too low for all columns, those that stay empty are random.
    """
    order = np.arange(width)
    order[rows:] = rows + np.argsort(rng.random(width - rows))
    place = np.arange(rows, min(width, limit))
    # `source = place - rows * 2^k` with the largest `rows * 2^k <= place`.
    exponent = np.frexp(place // rows)[1].astype(np.int64)
    source = place - (rows << (exponent - 1))
    return Rotations(order[source], order[place], *cos_sin(angles, len(place), rng))


def _draw_until(
    rows: int, width: int, limit: int, rng: np.random.Generator, angles: AngleLaw, start: Rotations
) -> Rotations:
    """Random rotations after `start`, up to the first that takes the support over `limit`."""
    supports = Supports(rows, width)
    supports.apply(start)
    # Up to three quarters of the density, rotations are applied without counting: the closed form
    # gives their number, and one count afterwards shows whether they fit.
    safe = 0
    if limit < rows * width and 0.75 * limit > supports.live:
        density = 0.75 * limit / (rows * width)
        safe = rotations_for_density(density, width, rows if start else None)
    chunk = max(3 * width, 64)
    drawn = Rotations.draw(width, chunk, rng, angles)
    while len(drawn) < safe:
        drawn += Rotations.draw(width, chunk, rng, angles)
    if safe:
        ahead = Supports.of(supports.bits)
        ahead.apply(drawn[:safe])
        if ahead.live <= limit:
            supports = ahead
        else:
            safe = 0
    total, done = safe, False
    while True:
        applied, done = supports.apply_while_fits(drawn[total:], limit)
        total += applied
        if done:
            return drawn[:total]
        drawn += Rotations.draw(width, chunk, rng, angles)


def _sparse_part(rotations: int, rows: int, width: int, covering: int) -> int:
    """How many of the rotations to multiply as sparse matrices; the first ones are covering."""

    def at(density: float) -> int:
        if not covering:
            return int((width - 1) / 2 * math.log(width / _ROOTS[density]))
        return covering + rotations_for_density(density, width, rows) if density * rows > 1 else 0

    if width < _SPARSE_WIDTH:
        return 0
    return rotations if rotations <= at(_SPARSE_UNTIL) else at(_SPARSE_FIRST)


def _sparse_factors(
    rotations: Rotations, rows: int, width: int
) -> tuple[scipy.sparse.csr_array, scipy.sparse.csr_array]:
    """Two sparse factors of `[I | 0] G_1 ... G_t`, of shapes `(rows, width)` and `(width, width)`.

    The product is a balanced tree, each depth one multiplication of block-diagonal stacks. These
    are in bit-reversed order: their first half holds the left factors, their second the right ones.
    """
    indptr, indices, data, blocks = _level_stack(rotations, width)
    while True:
        blocks //= 2
        half = blocks * width
        middle = indptr[half]
        # Left block b meets the rows of right block b.
        shift = np.arange(blocks, dtype=np.int32) * np.int32(width)
        shift = np.repeat(shift, np.diff(indptr[: half + 1 : width]))
        left = scipy.sparse.csr_array(
            (data[:middle], indices[:middle] + shift, indptr[: half + 1]), shape=(half, half)
        )
        right = scipy.sparse.csr_array(
            (data[middle:], indices[middle:], indptr[half:] - middle), shape=(half, width)
        )
        if blocks == 1:
            return left[:rows], right
        product = left @ right
        indptr, indices, data = product.indptr, product.indices, product.data


def _write_sparse(out: np.ndarray, gain: float, rotations: Rotations, *, transposed: bool) -> None:
    """Writes `gain` times the product, or its transpose, into a zeroed C-contiguous array."""
    rows, width = out.shape[::-1] if transposed else out.shape
    left, right = _sparse_factors(rotations, rows, width)
    if transposed:
        left, right = right.T.tocsr(), left.T.tocsr()
    left = left * gain
    columns = out.shape[1]
    for start in range(0, out.shape[0], _ROW_BLOCK):
        part = out[start : start + _ROW_BLOCK]
        product = left[start : start + _ROW_BLOCK] @ right
        position = np.repeat(np.arange(0, part.size, columns), np.diff(product.indptr))
        position += product.indices
        part.reshape(-1)[position] = product.data


def _level_stack(
    rotations: Rotations, width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """The levels of both halves of the sequence as one CSR stack in bit-reversed order."""
    middle = len(rotations) // 2
    halves = [schedule(rotations[:middle], width), schedule(rotations[middle:], width)]
    deepest = max(int(levels.max(initial=0)) for levels in halves)
    bits = max(deepest, 1).bit_length()
    blocks = 2 << bits
    block = np.concatenate([halves[0], halves[1] + (1 << bits)])
    reversed_bits = np.zeros_like(block)
    for k in range(bits + 1):
        reversed_bits |= ((block >> k) & 1) << (bits - k)
    start = reversed_bits * width
    i, j = start + rotations.first, start + rotations.second

    entries = np.ones(blocks * width, dtype=np.int32)
    entries[i] = entries[j] = 2
    indptr = np.zeros(blocks * width + 1, dtype=np.int32)
    np.cumsum(entries, out=indptr[1:])
    indices = np.empty(indptr[-1], dtype=np.int32)
    data = np.ones(indptr[-1])
    indices[indptr[:-1]] = np.tile(np.arange(width, dtype=np.int32), blocks)
    data[indptr[i]] = data[indptr[j]] = rotations.cos
    indices[indptr[i] + 1], data[indptr[i] + 1] = rotations.second, -rotations.sin
    indices[indptr[j] + 1], data[indptr[j] + 1] = rotations.first, rotations.sin
    return indptr, indices, data, blocks
