"""How dense a matrix is after so many random rotations, and the reverse.

A row with `k` of `m` live entries gains one in a rotation that pairs a live with a dead column,
of probability `p_k = 2 k (m - k) / (m (m - 1))`, and else keeps `k`. The expected density is
`E[K_t] / m` from `K_0 = 1`, whatever the number of rows.
"""

import math
import operator

import numpy as np
import scipy.optimize
import scipy.special

from keras_sparse_ortho.errors import DensityError
from keras_sparse_ortho.orthogonal._counts import check_density


def expected_density(rotations: int, width: int, *, exact: bool = True) -> float:
    """Expected live fraction of an orthogonal matrix after random Givens rotations.

    Exactly, by the Markov chain of the live entries `K_t` of one row,

        d(t) = E[K_t] / m,   P(k -> k + 1) = 2 k (m - k) / (m (m - 1)),

    in `O(m t)`; or in closed form, within about one rotation of it,

        d(t) = 1 - z e^z E1(z),   z = m exp(-2 t / (m - 1)).

    Args:
        rotations: Number of rotations `t`, at least 0.
        width: Number of columns `m` that are rotated, at least 1: the larger of the two sides.
        exact: Whether to run the chain (default) or take the closed form.

    Returns:
        The expected density, in [1 / m, 1]. A single draw scatters around it (standard deviation
        0.0043 at m = 1024, d = 0.1), which is why `exact_orthogonal` stops on the count itself.

    Example:

    >>> round(expected_density(2470, 1024), 3)
    0.1

    Reference:

    - Nowak et al., "Sparser, Better, Deeper, Stronger" (ICML 2024), arXiv 2406.01755
    """
    count, m = _check_count(rotations, "rotations", 0), _check_count(width, "width", 1)
    if m == 1:
        return 1.0
    if not exact:
        return _closed_form(m * math.exp(-2.0 * count / (m - 1)))
    k = np.arange(1.0, m + 1)
    gain = 2.0 * k * (m - k) / (m * (m - 1.0))
    probability = np.zeros(m)
    probability[0] = 1.0
    moved = np.empty(m)
    for _ in range(count):
        np.multiply(probability, gain, out=moved)
        probability -= moved
        probability[1:] += moved[:-1]
    return float(probability @ k) / m


def rotations_for_density(density: float, width: int) -> int:
    """Number of random rotations that are expected to reach `density`.

    Inverts the closed form of `expected_density`: `t = (m - 1) / 2 * ln(m / z)` with `z` the root
    of `1 - z e^z E1(z) = d`, rounded down. The exact chain differs by about one rotation.

    Args:
        density: Live fraction, in [1 / width, 1).
        width: Number of columns `m` that are rotated: the larger of the two sides.

    Raises:
        DensityError: A density under `1 / width`, which no orthogonal matrix has, or 1, which is
            only reached in the limit.

    Example:

    >>> [rotations_for_density(d, 1024) for d in (0.05, 0.1, 0.5)]
    [2064, 2471, 3798]
    """
    value, m = check_density(density), _check_count(width, "width", 1)
    if value < 1.0 / m or value == 1.0:
        raise DensityError(
            f"`density` must be in [1 / width, 1), here [{1.0 / m:.6g}, 1). "
            f"Received: density={density!r}, width={width}"
        )
    if value <= _closed_form(float(m)):
        return 0
    log_z = scipy.optimize.brentq(
        lambda x: _closed_form(math.exp(x)) - value, -60.0, math.log(m), xtol=1e-12
    )
    return math.floor((m - 1) / 2 * (math.log(m) - log_z))


def _closed_form(z: float) -> float:
    # exp1 underflows beyond z = 700; there the asymptotic series is exact to float64.
    if z > 500.0:
        return 1.0 / z - 2.0 / z**2 + 6.0 / z**3 - 24.0 / z**4 + 120.0 / z**5
    return float(1.0 - z * math.exp(z) * scipy.special.exp1(z))


def _check_count(value: int, name: str, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise ValueError(f"`{name}` must be an integer >= {least}. Received: {name}={value!r}")
    return number
