"""The density of a matrix after a number of random rotations, and the inverse."""

import math

import numpy as np
import scipy.optimize
import scipy.special

from keras_sparse_ortho._checks import check_density, check_integer
from keras_sparse_ortho.errors import DensityError

# Beyond this z, e^z may overflow, and a short continued fraction is exact to float64.
_LARGE_ROOT = 500.0
_FRACTION_TERMS = 20


def expected_density(
    rotations: int, width: int, rows: int | None = None, *, exact: bool = True
) -> float:
    """Expected density of an orthogonal matrix after random Givens rotations.

    A row with `k` of `m` live entries gains one when a rotation pairs a live with a dead column.
    Exactly, by the Markov chain of the live entries `K_t` of a row,

        d(t) = E[K_t] / m,   P(k -> k + 1) = 2 k (m - k) / (m (m - 1)),

    in `O(m t)`; or in closed form, within about one rotation of it,

        d(t) = 1 - z e^z E_r(z),   z = (m + 1 - r) exp(-2 t / (m - 1)),

    with `E_r` the exponential integral of order `r = K_0`: 1 at the published start `[I | 0]`, and
    `m / n` at the covering start of an `n x m` matrix, whose rows begin with `floor(m / n)` entries
    or one more (both are weighted by their share).

    Args:
        rotations: Number of random rotations `t`, at least 0, without the covering ones.
        width: Number of columns `m` that are rotated, at least 1: the larger of the two sides.
        rows: Number of rows `n` of a matrix with the covering start, in [1, width]. Default: the
            published start, which for square matrices is the same.
        exact: Whether to run the chain (default) or use the closed form.

    Returns:
        The expected density, in [1 / n, 1]. Single draws vary (standard deviation 0.0043 at
        m = 1024, d = 0.1), so `exact_orthogonal` counts entries instead.

    Example:

    >>> round(expected_density(2470, 1024), 3)
    0.1
    >>> expected_density(0, 1024, rows=256), round(expected_density(1723, 1024, rows=256), 3)
    (0.00390625, 0.1)

    Reference:

    - Nowak et al., "Sparser, Better, Deeper, Stronger" (ICML 2024), arXiv 2406.01755
    """
    count, m, n = _check_arguments(rotations, width, rows)
    if m == 1:
        return 1.0
    if not exact:
        return _closed_form(count, m, n)
    k = np.arange(1.0, m + 1)
    gain = 2.0 * k * (m - k) / (m * (m - 1.0))
    probability = np.zeros(m)
    for entries, share in _entries_at_start(m, n):
        probability[entries - 1] = share
    moved = np.empty(m)
    for _ in range(count):
        np.multiply(probability, gain, out=moved)
        probability -= moved
        probability[1:] += moved[:-1]
    return float(probability @ k) / m


def rotations_for_density(density: float, width: int, rows: int | None = None) -> int:
    """Number of random rotations that are expected to reach `density`, rounded down.

    Inverts the closed form of `expected_density` by root finding; its other arguments are those.
    DensityError below `1 / n`, which the matrix has at the start, and at 1, which is reached only
    in the limit.

    >>> [rotations_for_density(d, 1024) for d in (0.05, 0.1, 0.5)]
    [2064, 2471, 3798]
    >>> [rotations_for_density(d, 1024, rows=256) for d in (0.05, 0.1, 0.5)]
    [1335, 1723, 2898]
    """
    value = check_density(density)
    _, m, n = _check_arguments(0, width, rows)
    if value < 1.0 / n or value == 1.0:
        raise DensityError(
            f"`density` must be in [1 / {'width' if rows is None else 'rows'}, 1), here "
            f"[{1.0 / n:.6g}, 1). Received: density={density!r}, width={width}, rows={rows}"
        )
    if value <= _closed_form(0.0, m, n):
        return 0
    # At the upper end z < e^-60: no density below 1 needs more rotations.
    most = (m - 1) / 2 * (math.log(m) + 60.0)
    return math.floor(
        scipy.optimize.brentq(lambda t: _closed_form(t, m, n) - value, 0.0, most, xtol=1e-9)
    )


def _entries_at_start(m: int, n: int) -> list[tuple[int, float]]:
    """The numbers of entries that rows begin with, each with its share of the rows."""
    entries, more = divmod(m, n)
    return [(entries, 1 - more / n)] + ([(entries + 1, more / n)] if more else [])


def _closed_form(rotations: float, m: int, n: int) -> float:
    decay = math.exp(-2.0 * rotations / (m - 1))
    return math.fsum(
        share * (1.0 - _scaled(r, (m + 1 - r) * decay)) for r, share in _entries_at_start(m, n)
    )


def _scaled(r: int, z: float) -> float:
    """`z e^z E_r(z)`."""
    if z <= _LARGE_ROOT:
        return float(z * math.exp(z) * scipy.special.expn(r, z))
    fraction = z + r + 2.0 * _FRACTION_TERMS
    for k in range(_FRACTION_TERMS, 0, -1):
        fraction = z + r + 2.0 * (k - 1) - k * (r + k - 1) / fraction
    return z / fraction


def _check_arguments(rotations: int, width: int, rows: int | None) -> tuple[int, int, int]:
    count, m = check_integer("rotations", rotations, 0), check_integer("width", width)
    n = m if rows is None else check_integer("rows", rows)
    if n > m:
        raise ValueError(f"`rows` must be at most `width`. Received: rows={rows}, width={width}")
    return count, m, n
