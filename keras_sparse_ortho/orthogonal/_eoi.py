"""EOI: one sparse, exactly (semi-)orthogonal matrix, `[I | 0]` times random Givens rotations.

The supports alone decide the number of rotations. While columns have few live entries, whole levels
of disjoint rotations are multiplied as sparse matrices; later two contiguous rows of the transpose
are rotated at a time. Neither uses BLAS, whose last bit differs between processors.
"""

import dataclasses
import math

import numpy as np
from numpy.random import Generator
from scipy.sparse import csr_array

from keras_sparse_ortho.errors import DensityError
from keras_sparse_ortho.orthogonal._counts import rotations_for_density

# From this width on sparse products are faster up to a density of 0.4. Denser kernels use them up
# to 0.1: the sparse form of a dense matrix takes more memory than the matrix.
_SPARSE_WIDTH = 256
_SPARSE_UNTIL = 0.4
_SPARSE_FIRST = 0.1
# Roots z of the closed form of `expected_density`. More exact ones may change pinned kernels.
_ROOTS = {_SPARSE_UNTIL: 1.063, _SPARSE_FIRST: 8.172}
_SAFE_PART = 0.75  # of the density: rotations up to it are counted at once
_ROWS_AT_ONCE = 256  # rows multiplied, or columns transposed, at a time: few enough for the cache
_COLUMNS_AT_ONCE = 64
_SMALLEST_RADIUS2 = 1e-12  # keeps the quotient of `cos_sin` free of underflow
_ROTATION = np.dtype(
    [
        ("first", int),
        ("second", int),
        ("cos", float),
        ("sin", float),
    ]
)


@dataclasses.dataclass(frozen=True)
class DrawOptions:
    """How a kernel is drawn.

    Args:
        rng: NumPy generator.
        gain: float. Scale of the kernel, finite.
        cover: bool. Whether no output and no input may be zero, as far as the count allows.
    """

    rng: Generator
    gain: float = 1.0
    cover: bool = True

    def __post_init__(self) -> None:
        if not math.isfinite(self.gain):
            raise ValueError(
                f"`gain` must be finite. Received: gain={self.gain!r}"
            )


def cos_sin(
    shape: int | tuple[int, ...],
    rng: Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines of uniform angles by von Neumann's method, the same bits everywhere.

    A uniform point `(x, y)` of the unit disk has half the angle: `cos = (x^2 - y^2) / r^2` and
    `sin = 2 x y / r^2`, with `r^2 = x^2 + y^2`.

    Args:
        shape: int or tuple of int. Shape of both arrays.
        rng: NumPy generator.
    """
    count = int(np.prod(shape))
    points = np.empty((0, 2))
    while len(points) < count:
        missing = count - len(points)
        candidates = math.ceil(1.3 * missing) + 8
        draws = 2.0 * rng.random((candidates, 2)) - 1.0
        x, y = draws.T
        radius2 = x * x + y * y
        in_disk = (radius2 <= 1.0) & (radius2 > _SMALLEST_RADIUS2)
        points = np.concatenate([points, draws[in_disk]])
    x, y = points[:count].T
    radius2 = x * x + y * y
    cos = (x * x - y * y) / radius2
    sin = 2.0 * x * y / radius2
    return cos.reshape(shape), sin.reshape(shape)


def rotated(
    x: np.ndarray,
    y: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns what a Givens rotation makes of `x` and `y`."""
    x_rotated = cos * x + sin * y
    y_rotated = cos * y - sin * x
    return x_rotated, y_rotated


def rotations_of(
    first: np.ndarray,
    second: np.ndarray,
    rng: Generator,
) -> np.ndarray:
    """Givens rotations of column pairs by uniform angles, in the order of their application.

    A rotation `(i, j, cos, sin)` makes the columns `a_i, a_j`

        cos a_i + sin a_j    and    -sin a_i + cos a_j.

    Args:
        first: int array. The columns `i`.
        second: int array. The columns `j`, other than `i`.
        rng: NumPy generator of the angles.
    """
    rotations = np.empty(len(first), _ROTATION)
    rotations["first"] = first
    rotations["second"] = second
    cos, sin = cos_sin(len(first), rng)
    rotations["cos"] = cos
    rotations["sin"] = sin
    return rotations


def random_rotations(
    width: int,
    count: int,
    rng: Generator,
) -> np.ndarray:
    """Rotations of uniformly drawn pairs of distinct columns."""
    columns = rng.random(count) * width
    columns = columns.astype(np.int64)
    partners = rng.random(count) * (width - 1)
    partners = partners.astype(np.int64)
    partners += partners >= columns
    return rotations_of(columns, partners, rng)


def pairs_of(rotations: np.ndarray) -> list[tuple[int, int]]:
    """The two columns of each rotation."""
    return rotations[["first", "second"]].tolist()


def rotate_rows(
    transposed: np.ndarray,
    rotations: np.ndarray,
) -> None:
    """Applies column rotations to a matrix given by its float64 transpose, in place."""
    rows = list(transposed)
    from_x = np.empty(transposed.shape[1])
    from_y = np.empty(transposed.shape[1])
    for i, j, cos, sin in rotations.tolist():
        x = rows[i]
        y = rows[j]
        np.multiply(x, sin, out=from_x)
        np.multiply(y, sin, out=from_y)
        np.multiply(x, cos, out=x)
        np.multiply(y, cos, out=y)
        np.add(x, from_y, out=x)
        np.subtract(y, from_x, out=y)


def random_orthogonal(
    count: int,
    size: int,
    rng: Generator,
) -> np.ndarray:
    """Draws `count` dense orthogonal `size x size` matrices: every pair of rows is rotated once.

    Pairs are formed as in a round-robin tournament: row 0 keeps its seat, the others move on by one
    seat each round, and opposite seats are a pair. This is not the Haar measure, but no entry is
    zero, and no BLAS makes bits differ.
    """
    matrices = np.zeros((count, size, size))
    diagonal = np.arange(size)
    negative = rng.random((count, size)) < 0.5
    matrices[:, diagonal, diagonal] = np.where(negative, -1.0, 1.0)
    if size == 1:
        return matrices
    players = size + size % 2
    half = players // 2
    circle = np.arange(1, players)
    for _ in range(players - 1):
        seats = np.concatenate([[0], circle])
        rows = seats[:half]
        opposite = seats[: half - 1 : -1]
        # With an odd size one row sits out each round.
        paired = np.maximum(rows, opposite) < size
        rows = rows[paired]
        opposite = opposite[paired]
        cos, sin = cos_sin((count, len(rows), 1), rng)
        x = matrices[:, rows]
        y = matrices[:, opposite]
        matrices[:, rows], matrices[:, opposite] = rotated(x, y, cos, sin)
        circle = np.roll(circle, 1)
    return matrices


def unite(
    supports: list[int],
    rotations: np.ndarray,
) -> int:
    """Gives both columns of each rotation the union of their supports, in place.

    Args:
        supports: list of int. The live rows of each column as a bitset, so that a rotation costs
            one `|` of integers.
        rotations: Rotations, in their order.

    Returns:
        The live count of all columns afterwards.
    """
    for i, j in pairs_of(rotations):
        supports[i] = supports[j] = supports[i] | supports[j]
    return sum(map(int.bit_count, supports))


def draw_until(
    supports: list[int],
    limit: int,
    rng: Generator,
    safe: int = 0,
) -> np.ndarray:
    """Random rotations up to the first that takes the supports over `limit` live entries.

    Args:
        supports: list of int. The live rows of each column as a bitset, see `unite`.
        limit: int. Most live entries.
        rng: NumPy generator.
        safe: int. Number of first rotations that are expected to stay below the limit. Their
            entries are counted only once, after the last of them.
    """
    width = len(supports)
    chunk = max(3 * width, 64)
    rotations = random_rotations(width, chunk, rng)
    while len(rotations) < safe:
        more = random_rotations(width, chunk, rng)
        rotations = np.concatenate([rotations, more])
    applied = 0
    columns = list(supports)
    if unite(columns, rotations[:safe]) <= limit:
        applied = safe
    else:
        columns = list(supports)
    counts = [column.bit_count() for column in columns]
    live = sum(counts)
    while True:
        for i, j in pairs_of(rotations[applied:]):
            union = columns[i] | columns[j]
            count = union.bit_count()
            live_after = live + 2 * count - counts[i] - counts[j]
            if live == limit or live_after > limit:
                return rotations[:applied]
            live = live_after
            columns[i] = columns[j] = union
            counts[i] = counts[j] = count
            applied += 1
        if live == limit:
            return rotations
        more = random_rotations(width, chunk, rng)
        rotations = np.concatenate([rotations, more])


def schedule(
    rotations: np.ndarray,
    width: int,
) -> np.ndarray:
    """Earliest level of each rotation; rotations of one level are disjoint."""
    latest = [-1] * width
    levels = []
    for i, j in pairs_of(rotations):
        level = latest[i]
        if latest[j] > level:
            level = latest[j]
        level += 1
        latest[i] = level
        latest[j] = level
        levels.append(level)
    return np.array(levels, dtype=np.int64)


def write_orthogonal(
    out: np.ndarray,
    count: int,
    options: DrawOptions,
) -> None:
    """Writes `gain` times a sparse orthogonal matrix of at most `count` entries into zeros.

    Args:
        out: array of zeros, 2-D. Rows are orthonormal (times the gain) if it is wide, columns if
            it is tall.
        count: int. Most live entries, at least the shorter side.
        options: DrawOptions.

    Raises DensityError for a smaller count.
    """
    rng = options.rng
    gain = options.gain
    rows, width = sorted(out.shape)
    if count < rows:
        raise DensityError(
            f"An orthogonal {rows} x {width} matrix has at least {rows} entries."
        )
    if width == 1:
        out[0, 0] = gain if rng.random() < 0.5 else -gain
        return
    rotations, covering = _draw_rotations(rows, width, count, options)
    sparse = _sparse_part(len(rotations), rows, width, covering)
    is_tall = out.shape[0] > out.shape[1]
    if 0 < len(rotations) <= sparse:
        _write_sparse(out, gain, rotations, transposed=is_tall)
        return
    columns = np.zeros((width, rows))
    if sparse:
        _write_sparse(columns, gain, rotations[:sparse], transposed=True)
    else:
        np.fill_diagonal(columns, gain)
    rotate_rows(columns, rotations[sparse:])
    if is_tall:
        out[...] = columns
        return
    for start in range(0, width, _COLUMNS_AT_ONCE):
        stop = start + _COLUMNS_AT_ONCE
        out[:, start:stop] = columns[start:stop].T


def _draw_rotations(
    rows: int,
    width: int,
    count: int,
    options: DrawOptions,
) -> tuple[np.ndarray, int]:
    """The rotations of `[I | 0]` for at most `count` entries, and how many of them cover."""
    columns_to_fill = width if options.cover else rows
    covering = covering_rotations(rows, columns_to_fill, count, options.rng)
    supports = [1 << k if k < rows else 0 for k in range(width)]  # of [I | 0]
    live = unite(supports, covering)
    size = rows * width
    safe_count = _SAFE_PART * count
    safe = 0
    if live < safe_count and count < size:
        covered_rows = rows if len(covering) else None
        safe = rotations_for_density(safe_count / size, width, covered_rows)
    random = draw_until(supports, count, options.rng, safe)
    rotations = np.concatenate([covering, random])
    return rotations, len(covering)


def covering_rotations(
    rows: int,
    width: int,
    limit: int,
    rng: Generator,
) -> np.ndarray:
    """Rotations that give empty columns of `[I | 0]` an entry: all, or random ones to `limit`.

    Each round doubles the nonempty columns, which keeps their norms about equal: place `p` gets its
    entries from place `p - rows 2^k`, with the largest `rows 2^k <= p`.
    """
    empty = np.argsort(rng.random(width - rows))
    order = np.arange(width)
    order[rows:] = rows + empty
    places = np.arange(rows, min(width, limit))
    _, exponents = np.frexp(places // rows)
    doublings = exponents.astype(np.int64) - 1
    sources = places - (rows << doublings)
    return rotations_of(order[sources], order[places], rng)


def _sparse_part(
    rotations: int,
    rows: int,
    width: int,
    covering: int,
) -> int:
    """How many of the rotations to multiply as sparse matrices."""
    if width < _SPARSE_WIDTH:
        return 0
    if rotations <= _rotations_until(_SPARSE_UNTIL, rows, width, covering):
        return rotations
    return _rotations_until(_SPARSE_FIRST, rows, width, covering)


def _rotations_until(
    density: float,
    rows: int,
    width: int,
    covering: int,
) -> int:
    """How many rotations, the `covering` ones first, are expected to reach a density."""
    if not covering:
        growth = math.log(width / _ROOTS[density])
        return int((width - 1) / 2 * growth)
    if density * rows <= 1:
        return 0
    return covering + rotations_for_density(density, width, rows)


def _write_sparse(
    out: np.ndarray,
    gain: float,
    rotations: np.ndarray,
    *,
    transposed: bool,
) -> None:
    """Writes `gain` times the product, or its transpose, into a zeroed array."""
    rows, width = out.shape
    if transposed:
        rows, width = width, rows
    factor, other_factor = _sparse_factors(rotations, rows, width)
    if transposed:
        factor, other_factor = other_factor.T.tocsr(), factor.T.tocsr()
    factor = factor * gain
    columns = out.shape[1]
    for start in range(0, out.shape[0], _ROWS_AT_ONCE):
        stop = start + _ROWS_AT_ONCE
        target = out[start:stop]
        product = factor[start:stop] @ other_factor
        entries = np.diff(product.indptr)
        places = np.arange(0, target.size, columns).repeat(entries)
        places += product.indices
        target.reshape(-1)[places] = product.data


def _sparse_factors(
    rotations: np.ndarray,
    rows: int,
    width: int,
) -> tuple[csr_array, csr_array]:
    """Two sparse factors of `[I | 0] G_1 ... G_t`, `(rows, width)` and `(width, width)`.

    The levels are multiplied along a balanced binary tree, all products of a step of it as one:
    `_level_stack` puts the left factor of each product into the first half of the stack.
    """
    indptr, indices, data, blocks = _level_stack(rotations, width)
    while True:
        blocks //= 2
        half = blocks * width
        middle = indptr[half]
        # Left block b meets the rows of right block b.
        left_indptr = indptr[: half + 1]
        entries = np.diff(left_indptr[::width])
        shift = np.arange(0, half, width, dtype=np.int32)
        left_columns = indices[:middle] + shift.repeat(entries)
        left_factor = csr_array(
            (data[:middle], left_columns, left_indptr),
            shape=(half, half),
        )
        right_indptr = indptr[half:] - middle
        right_factor = csr_array(
            (data[middle:], indices[middle:], right_indptr),
            shape=(half, width),
        )
        if blocks == 1:
            return left_factor[:rows], right_factor
        product = left_factor @ right_factor
        indptr = product.indptr
        indices = product.indices
        data = product.data


def _level_stack(
    rotations: np.ndarray,
    width: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """The levels of both halves of the sequence as one CSR stack in bit-reversed order.

    Returns:
        `indptr`, `indices` and `data` of the stack, and its number of blocks, a power of two.
    """
    middle = len(rotations) // 2
    early_levels = schedule(rotations[:middle], width)
    late_levels = schedule(rotations[middle:], width)
    block = np.concatenate([early_levels, late_levels])
    deepest = int(block.max(initial=1))
    bits = deepest.bit_length()
    blocks = 2 << bits
    block[middle:] += 1 << bits
    reversed_bits = np.zeros_like(block)
    for k in range(bits + 1):
        bit = (block >> k) & 1
        reversed_bits |= bit << (bits - k)
    block_starts = reversed_bits * width
    rows = block_starts + rotations["first"]
    partners = block_starts + rotations["second"]

    size = blocks * width
    entries = np.ones(size, dtype=np.int32)
    entries[rows] = 2
    entries[partners] = 2
    indptr = np.zeros(size + 1, dtype=np.int32)
    np.cumsum(entries, out=indptr[1:])
    indices = np.empty(indptr[-1], dtype=np.int32)
    data = np.ones(indptr[-1])
    diagonal = np.arange(width, dtype=np.int32)
    indices[indptr[:-1]] = np.tile(diagonal, blocks)
    # A rotated row has its cosine on the diagonal, then a sine in the column of its partner.
    at_row = indptr[rows]
    at_partner = indptr[partners]
    data[at_row] = rotations["cos"]
    data[at_partner] = rotations["cos"]
    data[at_row + 1] = -rotations["sin"]
    data[at_partner + 1] = rotations["sin"]
    indices[at_row + 1] = rotations["second"]
    indices[at_partner + 1] = rotations["first"]
    return indptr, indices, data, blocks
