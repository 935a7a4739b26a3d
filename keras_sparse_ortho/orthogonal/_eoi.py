"""EOI: one sparse, exactly (semi-)orthogonal matrix, `[I | 0]` times random Givens rotations.

The supports alone decide the number of rotations. While columns have few live entries, whole levels
of disjoint rotations are multiplied as sparse matrices; later two contiguous rows of the transpose
are rotated at a time. Neither uses BLAS, whose last bit differs between processors.
"""

import dataclasses
import math

import numpy as np
import scipy.sparse

from keras_sparse_ortho.errors import DensityError
from keras_sparse_ortho.orthogonal._counts import rotations_for_density

# From this width on sparse products are faster up to a density of 0.4. Denser kernels use them up
# to 0.1: the sparse form of a dense matrix takes more memory than the matrix.
_SPARSE_WIDTH = 256
_SPARSE_UNTIL = 0.4
_SPARSE_FIRST = 0.1
# Roots z of the closed form of `expected_density`. More exact ones may change pinned kernels.
_ROOTS = {_SPARSE_UNTIL: 1.063, _SPARSE_FIRST: 8.172}
# Rows multiplied, or columns transposed, at a time: few enough for the cache.
_ROW_BLOCK = 256
_TILE = 64
_ROTATION = np.dtype([("first", int), ("second", int), ("cos", float), ("sin", float)])


@dataclasses.dataclass(frozen=True)
class DrawOptions:
    """How a kernel is drawn; with `cover`, no output and no input is zero, as far as it can be."""

    rng: np.random.Generator
    gain: float = 1.0
    cover: bool = True

    def __post_init__(self) -> None:
        if not math.isfinite(self.gain):
            raise ValueError(f"`gain` must be finite. Received: gain={self.gain!r}")


def rotations_of(first: np.ndarray, second: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Givens rotations of column pairs by uniform angles, in the order of their application."""
    # (i, j, cos, sin) makes `a_i, a_j` `cos a_i + sin a_j` and `-sin a_i + cos a_j`.
    found = np.empty(len(first), _ROTATION)
    found["first"], found["second"] = first, second
    found["cos"], found["sin"] = cos_sin(len(first), rng)
    return found


def random_rotations(width: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Rotations of uniformly drawn pairs of distinct columns."""
    first = (rng.random(count) * width).astype(np.int64)
    second = (rng.random(count) * (width - 1)).astype(np.int64)
    second += second >= first
    return rotations_of(first, second, rng)


def pairs_of(rotations: np.ndarray) -> list[tuple[int, int]]:
    return rotations[["first", "second"]].tolist()


def cos_sin(count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines of uniform angles by von Neumann's method, the same bits everywhere."""
    points = np.empty((0, 2))
    while len(points) < count:
        draws = 2.0 * rng.random((math.ceil(1.3 * (count - len(points))) + 8, 2)) - 1.0
        radius2 = draws[:, 0] ** 2 + draws[:, 1] ** 2
        # The lower bound keeps the quotient below free of underflow.
        points = np.concatenate([points, draws[(radius2 <= 1.0) & (radius2 > 1e-12)]])
    x, y = points[:count, 0], points[:count, 1]
    radius2 = x * x + y * y
    return (x * x - y * y) / radius2, 2.0 * x * y / radius2


def rotate_rows(transposed: np.ndarray, rotations: np.ndarray) -> None:
    """Applies column rotations to a matrix given by its float64 transpose, in place."""
    rows = list(transposed)
    from_x = np.empty(transposed.shape[1])
    from_y = np.empty(transposed.shape[1])
    for i, j, cos, sin in rotations.tolist():
        x, y = rows[i], rows[j]
        np.multiply(x, sin, out=from_x)
        np.multiply(y, sin, out=from_y)
        np.multiply(x, cos, out=x)
        np.multiply(y, cos, out=y)
        np.add(x, from_y, out=x)
        np.subtract(y, from_x, out=y)


def random_orthogonal(count: int, size: int, rng: np.random.Generator) -> np.ndarray:
    """`count` dense orthogonal `size x size` matrices: every pair of rows is rotated once."""
    # This is not the Haar measure, but no entry is zero, and no BLAS makes bits differ.
    signs = np.where(rng.random((count, size)) < 0.5, -1.0, 1.0)
    matrices = np.zeros((count, size, size))
    matrices[:, np.arange(size), np.arange(size)] = signs
    players = size + size % 2
    circle = np.arange(1, players)
    for _ in range(players - 1 if size > 1 else 0):
        seats = np.concatenate([[0], circle])
        first, second = seats[: players // 2], seats[: players // 2 - 1 : -1]
        paired = (first < size) & (second < size)  # with an odd size one row sits out each round
        first, second = first[paired], second[paired]
        cos, sin = (v.reshape(count, -1, 1) for v in cos_sin(count * len(first), rng))
        x, y = matrices[:, first], matrices[:, second]
        matrices[:, first], matrices[:, second] = cos * x + sin * y, cos * y - sin * x
        circle = np.roll(circle, 1)
    return matrices


def unite(bits: list[int], rotations: np.ndarray) -> int:
    """Gives both columns of each rotation the union of their supports; returns the live count."""
    # A support is a bitset: a rotation costs one `|` of integers.
    for i, j in pairs_of(rotations):
        bits[i] = bits[j] = bits[i] | bits[j]
    return sum(map(int.bit_count, bits))


def draw_until(bits: list[int], limit: int, rng: np.random.Generator, safe: int = 0) -> np.ndarray:
    """Random rotations up to the first that takes the supports `bits` over `limit` live entries."""
    # The first `safe` ones are counted only once, afterwards.
    width = len(bits)
    chunk = max(3 * width, 64)
    drawn, at = random_rotations(width, chunk, rng), 0
    while len(drawn) < safe:
        drawn = np.concatenate([drawn, random_rotations(width, chunk, rng)])
    if unite(ahead := list(bits), drawn[:safe]) <= limit:
        bits, at = ahead, safe
    counts = [column.bit_count() for column in bits]
    live = sum(counts)
    while True:
        for i, j in pairs_of(drawn[at:]):
            union = bits[i] | bits[j]
            count = union.bit_count()
            gained = 2 * count - counts[i] - counts[j]
            if live == limit or live + gained > limit:
                return drawn[:at]
            live += gained
            bits[i] = bits[j] = union
            counts[i] = counts[j] = count
            at += 1
        if live == limit:
            return drawn
        drawn = np.concatenate([drawn, random_rotations(width, chunk, rng)])


def schedule(rotations: np.ndarray, width: int) -> np.ndarray:
    """Earliest level of each rotation; rotations of one level are disjoint."""
    last = [-1] * width
    levels = []
    for i, j in pairs_of(rotations):
        level = (last[i] if last[i] > last[j] else last[j]) + 1
        last[i] = last[j] = level
        levels.append(level)
    return np.array(levels, dtype=np.int64)


def write_orthogonal(out: np.ndarray, count: int, options: DrawOptions) -> None:
    """Writes `gain` times a sparse orthogonal matrix of at most `count` entries into zeros."""
    rng, gain = options.rng, options.gain
    rows, width = sorted(out.shape)
    if count < rows:
        raise DensityError(f"An orthogonal {rows} x {width} matrix has at least {rows} entries.")
    if width == 1:
        out[0, 0] = gain if rng.random() < 0.5 else -gain
        return
    start = covering_rotations(rows, width if options.cover else rows, count, rng)
    supports = [1 << k if k < rows else 0 for k in range(width)]  # of [I | 0]
    live, safe = unite(supports, start), 0
    if live < 0.75 * count < 0.75 * out.size:  # expected to reach three quarters of the density
        safe = rotations_for_density(0.75 * count / out.size, width, rows if len(start) else None)
    sequence = np.concatenate([start, draw_until(supports, count, rng, safe)])
    sparse = _sparse_part(len(sequence), rows, width, len(start))
    tall = out.shape[0] > out.shape[1]
    if 0 < len(sequence) <= sparse:
        _write_sparse(out, gain, sequence, transposed=tall)
        return
    columns = np.zeros((width, rows))
    if len(first := sequence[:sparse]):
        _write_sparse(columns, gain, first, transposed=True)
    else:
        np.fill_diagonal(columns, gain)
    rotate_rows(columns, sequence[sparse:])
    if tall:
        out[...] = columns
    else:
        for at in range(0, width, _TILE):  # in tiles that stay in the cache
            out[:, at : at + _TILE] = columns[at : at + _TILE].T


def covering_rotations(rows: int, width: int, limit: int, rng: np.random.Generator) -> np.ndarray:
    """Rotations that give empty columns of `[I | 0]` an entry: all, or random ones to `limit`."""
    # Each round doubles the nonempty columns, which keeps their norms about equal.
    order = np.arange(width)
    order[rows:] = rows + np.argsort(rng.random(width - rows))
    place = np.arange(rows, min(width, limit))
    exponent = np.frexp(place // rows)[1].astype(np.int64)
    source = place - (rows << (exponent - 1))  # the largest `rows * 2^k <= place` is taken away
    return rotations_of(order[source], order[place], rng)


def _sparse_part(rotations: int, rows: int, width: int, covering: int) -> int:
    """How many of the rotations to multiply as sparse matrices."""

    def at(density: float) -> int:
        if not covering:
            return int((width - 1) / 2 * math.log(width / _ROOTS[density]))
        return covering + rotations_for_density(density, width, rows) if density * rows > 1 else 0

    if width < _SPARSE_WIDTH:
        return 0
    return rotations if rotations <= at(_SPARSE_UNTIL) else at(_SPARSE_FIRST)


def _sparse_factors(
    rotations: np.ndarray, rows: int, width: int
) -> tuple[scipy.sparse.csr_array, scipy.sparse.csr_array]:
    """Two sparse factors of `[I | 0] G_1 ... G_t`, `(rows, width)` and `(width, width)`."""
    # A balanced tree of stacks of blocks in bit-reversed order: left factors come first.
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


def _write_sparse(out: np.ndarray, gain: float, rotations: np.ndarray, *, transposed: bool) -> None:
    """Writes `gain` times the product, or its transpose, into a zeroed array."""
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
    rotations: np.ndarray, width: int
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
    i, j = start + rotations["first"], start + rotations["second"]

    entries = np.ones(blocks * width, dtype=np.int32)
    entries[i] = entries[j] = 2
    indptr = np.zeros(blocks * width + 1, dtype=np.int32)
    np.cumsum(entries, out=indptr[1:])
    indices = np.empty(indptr[-1], dtype=np.int32)
    data = np.ones(indptr[-1])
    indices[indptr[:-1]] = np.tile(np.arange(width, dtype=np.int32), blocks)
    data[indptr[i]] = data[indptr[j]] = rotations["cos"]
    indices[indptr[i] + 1], data[indptr[i] + 1] = rotations["second"], -rotations["sin"]
    indices[indptr[j] + 1], data[indptr[j] + 1] = rotations["first"], rotations["sin"]
    return indptr, indices, data, blocks
