"""Counts: of live entries, of masks that have them, and of the rotations that lead to a density."""

import math
import operator
from collections.abc import Sequence

import numpy as np
import scipy.optimize
import scipy.special
from numpy.random import Generator

from keras_sparse_ortho._checks import (
    check_density,
    check_integer,
    other_keywords,
)
from keras_sparse_ortho.errors import DensityError

_LIST_DEAD_BELOW = (
    0.25  # of dead entries; listing them is then faster than rejection
)
_LARGE_ROOT = (
    500.0  # beyond it e^z may overflow, and a short continued fraction is exact
)
_FRACTION_TERMS = 20
_MANY_VALUES = 2**16  # of which a sample is sorted first, about
_SAMPLE = 2**13


def live_count(
    density: float,
    size: int,
) -> int:
    """Number of live entries, `round(density * size)`, ties to even (Python's `round`)."""
    return round(check_density(density) * size)


def apportion(
    total: int,
    weights: Sequence[float],
) -> list[int]:
    """Splits `total` in proportion to `weights` by largest remainder, ties to the earlier one."""
    scale = math.fsum(weights)
    if not scale > 0:
        raise ValueError(
            f"`weights` must have a positive sum. Received: weights={weights}"
        )
    shares = [total * weight / scale for weight in weights]
    counts = list(map(math.floor, shares))
    overshoots = list(map(operator.sub, counts, shares))
    # Stable for ties.
    by_remainder = sorted(range(len(counts)), key=overshoots.__getitem__)
    missing = total - sum(counts)
    for k in by_remainder[:missing]:
        counts[k] += 1
    return counts


def unmask_at_random(
    mask: np.ndarray,
    count: int,
    rng: Generator,
) -> None:
    """Sets uniformly drawn dead entries live, in place, until `mask` has `count` live ones."""
    flat = mask.reshape(-1)
    assert np.shares_memory(flat, mask), mask.strides
    live = int(np.count_nonzero(mask))
    missing = count - live
    dead = flat.size - live
    assert missing >= 0, missing
    if missing in (0, dead):
        flat |= missing > 0
    elif missing > dead // 2 or dead < _LIST_DEAD_BELOW * flat.size:
        dead_places = np.flatnonzero(~flat)
        lots = rng.random(dead)
        order = np.argpartition(lots, missing - 1)
        drawn = order[:missing]
        flat[dead_places[drawn]] = True
    else:
        while missing:
            places = rng.random(missing) * flat.size
            flat[places.astype(np.int64)] = True
            missing = count - int(np.count_nonzero(mask))


def largest_mask(
    scores: np.ndarray,
    count: int,
) -> np.ndarray:
    """A bool mask of the `count` largest entries, ties to the lower flat index."""
    return largest_masks([scores], count)[0]


def largest_masks(
    scores: Sequence[np.ndarray],
    count: int,
) -> list[np.ndarray]:
    """Masks of the `count` largest entries over all arrays, ties to earlier arrays and indices."""
    size = sum(score.size for score in scores)
    if not 0 <= count <= size:
        raise ValueError(
            f"`count` must be in [0, {size}]. Received: count={count}"
        )
    if not all(np.isfinite(score).all() for score in scores):
        raise ValueError(
            "Scores must be finite to be ranked. Received: infinite or NaN scores"
        )
    if count in (0, size):
        return [np.full(score.shape, count > 0) for score in scores]
    threshold = _kth_largest(scores, count)
    masks = [np.ascontiguousarray(score > threshold) for score in scores]
    missing = count - sum(map(np.count_nonzero, masks))
    for score, mask in zip(scores, masks, strict=True):
        ties = np.flatnonzero(score == threshold)
        ties = ties[:missing]
        mask.reshape(-1)[ties] = True
        missing -= ties.size
    return masks


def _kth_largest(
    scores: Sequence[np.ndarray],
    k: int,
) -> float:
    """The `k`-th largest value of all arrays.

    A sample of many values says between which two it lies, with the odds of six standard
    deviations. Only the values between them are partitioned (Floyd and Rivest, 1975).
    """
    arrays = [score.reshape(-1) for score in scores]
    size = sum(array.size for array in arrays)
    if size >= _MANY_VALUES:
        low, high = _bracket(arrays, k / size)
        above = sum(np.count_nonzero(array > high) for array in arrays)
        between = [array[(array >= low) & (array <= high)] for array in arrays]
        place = k - int(above)
        if 1 <= place <= sum(map(len, between)):
            return _kth_of(np.concatenate(between), place)
    return _kth_of(np.concatenate(arrays), k)


def _bracket(
    arrays: Sequence[np.ndarray],
    share: float,
) -> tuple[float, float]:
    """Two values between which the value lies that a share of all values reaches.

    Args:
        arrays: Flat arrays.
        share: float in (0, 1).
    """
    size = sum(array.size for array in arrays)
    stride = size // _SAMPLE | 1  # odd: kernels have even widths
    sample = np.concatenate([array[::stride] for array in arrays])
    sample.sort()
    place = round((1.0 - share) * sample.size)
    reach = 3 * math.isqrt(sample.size)
    low = -math.inf if place < reach else sample[place - reach]
    high = math.inf
    if place + reach < sample.size:
        high = sample[place + reach]
    return low, high


def _kth_of(values: np.ndarray, k: int) -> float:
    """The `k`-th largest of some values."""
    # Selection is slow among equal values, as pruned weights are: leave out the smallest.
    smallest = values.min()
    larger = values[values > smallest]
    if k > larger.size:
        return smallest
    place = larger.size - k
    larger.partition(place)
    return larger[place]


@other_keywords
def expected_density(
    rotations: int,
    width: int,
    rows: int | None = None,
) -> float:
    """Expected density of an orthogonal matrix after random Givens rotations.

    A row with `k` of `m` live entries gains one when a rotation pairs a live with a dead column:

        d(t) = E[K_t] / m,   P(k -> k + 1) = 2 k (m - k) / (m (m - 1)).

    Args:
        rotations: int. Random rotations `t`, at least 0, without the covering ones.
        width: int. Columns `m` that are rotated, at least 1: the larger of the two sides.
        rows: int in [1, width]. Rows `n` of a matrix with the covering start. Default: the
            published start, which for square matrices is the same.

    Returns:
        The expected density, in [1 / n, 1]; draws vary (deviation 0.0043 at m = 1024, d = 0.1).

    Examples:
        >>> round(expected_density(2470, 1024), 3)
        0.1
        >>> expected_density(0, 1024, rows=256), round(expected_density(1723, 1024, rows=256), 3)
        (0.00390625, 0.1)

    Reference: Nowak et al., "Sparser, Better, Deeper, Stronger" (ICML 2024), arXiv 2406.01755
    """
    count = check_integer("rotations", rotations, 0)
    m, n = _check_sides(width, rows)
    if m == 1:
        return 1.0
    k = np.arange(1.0, m + 1)
    pairs = m * (m - 1.0)
    gain = 2.0 * k * (m - k) / pairs
    probability = np.zeros(m)
    for entries, share in _entries_at_start(m, n):
        probability[entries - 1] = share
    moved = np.empty(m)
    for _ in range(count):
        np.multiply(probability, gain, out=moved)
        probability -= moved
        probability[1:] += moved[:-1]
    density = float(probability @ k) / m
    return min(max(density, 1.0 / n), 1.0)  # rounding leaves the interval


def rotations_for_density(
    density: float,
    width: int,
    rows: int | None = None,
) -> int:
    """Number of random rotations that are expected to reach `density`, rounded down.

    Inverts a closed form of `expected_density`, within about one rotation of it,

        d(t) = 1 - z e^z E_r(z),   z = (m + 1 - r) exp(-2 t / (m - 1)),

    with `E_r` the exponential integral of order `r = K_0`, the entries of a row at the start; rows
    that begin with one more are weighted by their share. DensityError below `1 / n`, and at 1.
    """
    value = check_density(density)
    m, n = _check_sides(width, rows)
    if value < 1.0 / n or value == 1.0:
        side = "width" if rows is None else "rows"
        raise DensityError(
            f"`density` must be in [1 / {side}, 1), here [{1.0 / n:.6g}, 1). "
            f"Received: density={density!r}, width={width}, rows={rows}"
        )
    if value <= _closed_form(0.0, m, n):
        return 0

    def excess(rotations: float) -> float:
        return _closed_form(rotations, m, n) - value

    # At the upper end z < e^-60: no density below 1 needs more rotations.
    upper_end = (m - 1) / 2 * (math.log(m) + 60.0)
    root = scipy.optimize.brentq(excess, 0.0, upper_end, xtol=1e-9)
    return math.floor(root)


def _entries_at_start(
    m: int,
    n: int,
) -> list[tuple[int, float]]:
    """The numbers of entries that rows begin with, and the share of rows with each."""
    entries, rows_with_more = divmod(m, n)
    share = rows_with_more / n
    if not rows_with_more:
        return [(entries, 1.0)]
    return [(entries, 1 - share), (entries + 1, share)]


def _closed_form(
    rotations: float,
    m: int,
    n: int,
) -> float:
    """Expected density after `rotations`, see `rotations_for_density`."""
    decay = math.exp(-2.0 * rotations / (m - 1))
    terms = []
    for r, share in _entries_at_start(m, n):
        z = (m + 1 - r) * decay
        terms.append(share * (1.0 - _scaled_integral(r, z)))
    return math.fsum(terms)


def _scaled_integral(
    r: int,
    z: float,
) -> float:
    """`z e^z E_r(z)`, for large `z` by a continued fraction."""
    if z <= _LARGE_ROOT:
        integral = scipy.special.expn(r, z)
        return float(z * math.exp(z) * integral)
    fraction = z + r + 2.0 * _FRACTION_TERMS
    for k in range(_FRACTION_TERMS, 0, -1):
        numerator = k * (r + k - 1)
        term = z + r + 2.0 * (k - 1)
        fraction = term - numerator / fraction
    return z / fraction


def _check_sides(
    width: int,
    rows: int | None,
) -> tuple[int, int]:
    """The longer and the shorter side of a matrix; by default they are equal."""
    m = check_integer("width", width)
    n = m
    if rows is not None:
        n = check_integer("rows", rows)
    if n > m:
        raise ValueError(
            f"`rows` must be at most `width`. Received: rows={rows}, width={width}"
        )
    return m, n
