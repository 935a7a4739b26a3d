"""Sparse orthogonal rows whose columns all have the same norm.

With `n` rows and `m` columns every column has the squared norm `n / m` (an equal-norm Parseval
frame). A start of chosen angles has this property, and the random rotations that follow keep it.

The start (for `m >= 2 n`) deals the norm 1 of one row after the other out to columns: `n / m` to
each column of its own, and what is left, `x < n / m`, to a column that is rotated by 45 degrees
with one of the next row that has `2 n / m - x`; then both have `n / m`. For `n < m < 2 n` these
rotations make `m - n` other rows, and the rows wanted are what they make of the rest of the
identity: in an orthogonal `m x m` matrix the columns of one part have equal norms if those of the
other part do.

Random rotations keep the norms if the two columns are orthogonal and equally long. Columns whose
supports are disjoint are, so the columns of the start fall into classes of disjoint ones; a
rotation within a class leaves all columns of the class orthogonal, by any angle.
Rotations of rows keep the norms in any case. They come last, where classes are too small to reach
the density.

No such matrix has fewer than `m + 2 (n - gcd(n, m))` entries, and the start for `m >= 2 n` has
just as many. Proof: two rows that share a single column are not orthogonal. So if rows are taken
one after the other, each connected to those before it, each shares at least two columns with
them, and `p` connected rows on `q` columns have `q + 2 (p - 1)` entries or more. The squares of
these entries sum to `p` by rows and to `q n / m` by columns; so `p` is a multiple of
`n / gcd(n, m)`, and there are at most `gcd(n, m)` connected parts.

Reference:

- Casazza, Heinecke, Krahmer, Kutyniok, "Optimally sparse frames" (IEEE Transactions on Information
  Theory, 2011), arXiv 1009.3663, for the start (spectral tetris)
- Bendel and Mickey, "Population correlation matrices for sampling experiments" (1978), and
  Dhillon, Heath, Sustik, Tropp, "Generalized finite algorithms for constructing Hermitian matrices
  with prescribed diagonals and spectra" (2005), for norms by chosen rotations in general
"""

import dataclasses
import functools
import heapq
import math
from collections.abc import Callable

import numpy as np

from keras_sparse_ortho.orthogonal._product import (
    SPARSE_UNTIL,
    SPARSE_WIDTH,
    rotate_rows,
    write_product,
)
from keras_sparse_ortho.orthogonal._rotations import AngleLaw, Rotations, cos_sin
from keras_sparse_ortho.orthogonal._supports import Supports

# So many rotations as the width, three times over, multiply a sparse support by e^6. Where they
# add less than this share to it, the classes are full.
_SATURATED = 0.05


@functools.lru_cache(maxsize=4096)
def equal_norms_count(rows: int, width: int) -> int:
    """Entries of the start: the fewest that there can be, unless `rows < width < 2 rows`."""
    if rows == width or width >= 2 * rows:
        return width + 2 * (rows - math.gcd(rows, width))
    supports = Supports(rows, width)
    supports.apply(equal_norms_start(rows, width, np.random.default_rng(0))[0])
    return supports.live


def equal_norms_start(
    rows: int, width: int, rng: np.random.Generator
) -> tuple[Rotations, np.ndarray]:
    """Rotations of `[I | 0]` to columns of equal norms, and the class of each column.

    Rows, columns and signs are in random order.
    """
    complement = width < 2 * rows
    plan = _Plan(width - rows if complement else rows, width)
    # A column in which a line begins stands where the identity has the entry of this line.
    others = np.setdiff1d(np.arange(width), plan.begins)
    lines_first = np.concatenate([plan.begins, others])
    few, many = np.argsort(rng.random(plan.lines)), np.argsort(rng.random(width - plan.lines))
    place = np.empty(width, dtype=np.int64)
    place[lines_first] = (
        np.concatenate([rows + few, many]) if complement else np.concatenate([few, rows + many])
    )
    classes = np.empty(width, dtype=np.int64)
    classes[place] = plan.classes()
    pairs = place[np.array(plan.pairs, dtype=np.int64).reshape(-1, 2)]
    shares = np.array(plan.shares)
    cos, sin = np.sqrt([shares, 1.0 - shares]) * np.where(rng.random((2, len(shares))) < 0.5, -1, 1)
    return Rotations(pairs[:, 0], pairs[:, 1], cos, sin), classes


def write_equal_norms(
    out: np.ndarray,
    count: int,
    gain: float,
    rng: np.random.Generator,
    angles: AngleLaw = None,
) -> None:
    """Writes `gain` times an orthogonal matrix with columns of equal norms into a zeroed wide one.

    Its support holds at most `count` entries, which must be `equal_norms_count` at least.
    """
    rows, width = out.shape
    start, classes = equal_norms_start(rows, width, rng)
    supports = Supports(rows, width)
    supports.apply(start)
    within, saturated = _draw_while_fits(
        supports,
        count,
        lambda size: draw_within_classes(classes, size, rng, angles),
        width,
        least_growth=_SATURATED,
    )
    sequence = start + within
    if width < SPARSE_WIDTH:
        sparse = 0
    elif supports.live <= SPARSE_UNTIL * out.size:
        sparse = len(sequence)
    else:
        sparse = len(sequence) // 2
    if not saturated or rows == 1:
        write_product(out, gain, sequence, sparse)
        return
    of_rows, _ = _draw_while_fits(
        supports.transposed(rows), count, lambda size: Rotations.draw(rows, size, rng, angles), rows
    )
    values = np.zeros(out.shape)
    write_product(values, gain, sequence, sparse)
    rotate_rows(values, of_rows)
    out[...] = values


def _draw_while_fits(
    supports: Supports,
    limit: int,
    draw: Callable[[int], Rotations],
    width: int,
    least_growth: float = 0.0,
) -> tuple[Rotations, bool]:
    """Draws and applies rotations up to the first that does not fit, or to where growth ends.

    Also tells whether it was growth that ended.
    """
    chunk = max(3 * width, 64)
    applied = Rotations.none()
    while True:
        live = supports.live
        drawn = draw(chunk)
        fitting, done = supports.apply_while_fits(drawn, limit)
        applied += drawn[:fitting]
        if done:
            return applied, False
        if supports.live < (1.0 + least_growth) * live or not len(drawn):
            return applied, True


def draw_within_classes(
    classes: np.ndarray, count: int, rng: np.random.Generator, angles: AngleLaw = None
) -> Rotations:
    """Random rotations of a column, any of those that have one, with another of its class."""
    order = np.argsort(classes, kind="stable")
    sizes = np.bincount(classes)
    size = sizes[classes[order]]
    begin = (np.cumsum(sizes) - sizes)[classes[order]]
    order, begin, size = (array[size > 1] for array in (order, begin, size))
    # Places count from the first column that has another one in its class.
    begin -= np.concatenate([[0], np.cumsum(sizes == 1)])[:-1][classes[order]]
    if not len(order):
        return Rotations.none()
    first = (rng.random(count) * len(order)).astype(np.int64)
    step = 1 + (rng.random(count) * (size[first] - 1)).astype(np.int64)
    second = begin[first] + (first - begin[first] + step) % size[first]
    return Rotations(order[first], order[second], *cos_sin(angles, count, rng))


@dataclasses.dataclass
class _Plan:
    """The start for `width >= 2 * lines`, with lines and columns in their natural order.

    Squares are counted in units of `1 / width`, so that a line has `width` of them, a column
    `lines`, and all of this is exact.
    """

    lines: int
    width: int

    def __post_init__(self) -> None:
        self.pairs: list[tuple[int, int]] = []
        self.shares: list[float] = []
        self.begins: list[int] = []
        self._spans: list[tuple[int, int]] = []
        joined: list[tuple[int, int]] = []
        carried = 0
        for line in range(self.lines):
            squares = [2 * self.lines - carried] if carried else []
            left = self.width - sum(squares)
            first = len(self._spans)
            if carried:
                joined.append((first - 1, first))
                self._spans.append((line - 1, line))
            own, carried = divmod(left, self.lines)
            squares += [self.lines] * own
            self._spans += [(line, line)] * own
            if carried:
                squares.append(carried)
                self._spans.append((line, line + 1))
            self.begins.append(first)
            self._split(first, squares)
        self.pairs += joined
        self.shares += [0.5] * len(joined)

    def _split(self, first: int, squares: list[int]) -> None:
        """Deals a line out to consecutive columns, by halves, so that all get there soon."""
        sums = [0]
        for square in squares:
            sums.append(sums[-1] + square)
        open_parts = [(0, len(squares))]
        while open_parts:
            low, high = open_parts.pop()
            if high - low < 2:
                continue
            middle = (low + high) // 2
            self.pairs.append((first + low, first + middle))
            self.shares.append((sums[middle] - sums[low]) / (sums[high] - sums[low]))
            open_parts += [(low, middle), (middle, high)]

    def classes(self) -> np.ndarray:
        """A class for each column, such that no two of a class have a line in common."""
        free: list[int] = []
        ending: dict[int, list[int]] = {}
        classes = np.empty(self.width, dtype=np.int64)
        known, done = 0, -1
        # By the line in which they begin; those that go on first, as they leave the fewest.
        spans = self._spans
        for column in sorted(range(self.width), key=lambda k: (spans[k][0], -spans[k][1])):
            first, last = spans[column]
            while done < first - 1:
                done += 1
                for k in ending.pop(done, []):
                    heapq.heappush(free, k)
            if free:
                classes[column] = heapq.heappop(free)
            else:
                classes[column] = known
                known += 1
            ending.setdefault(last, []).append(int(classes[column]))
        return classes
