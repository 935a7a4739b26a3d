"""`orthogonality_error`: how far a kernel is from orthogonal."""

import itertools
import math

import numpy as np

from keras_sparse_ortho._checks import other_keywords
from keras_sparse_ortho.initializers import KernelLayout


@other_keywords
def orthogonality_error(
    kernel: np.ndarray,
    layout: KernelLayout | None = None,
    gain: float | None = None,
    taps: str = "center",
) -> float:
    """Largest deviation of the Gram matrix from a multiple of the identity.

    For every matrix `K` of the kernel (one per group, gate and batch entry), with `G = K^T K` if it
    is tall and `K K^T` if it is wide, the error is `max |G - gain^2 I| / gain^2`: 0 if exactly
    orthogonal, infinite for zeros. A convolution is orthogonal if the sum over taps `s` of
    `K_s^T K_{s + shift}` is, for every shift: its operator with stride 1 and circular padding.

    Args:
        kernel: array. Kernel in Keras layout.
        layout: KernelLayout. Meaning of its axes. Default: `(*spatial, in, out)`.
        gain: float. The intended scale. Default: that of the kernel, `sqrt(mean(diag(G)))`.
        taps: str. `"all"` for one matrix `(taps * in, out)`, as in `exact_orthogonal`.

    Examples:
        >>> round(orthogonality_error(np.array([[1.0, 0.0], [0.1, 1.0]])), 2)
        0.1
    """
    if layout is None:
        layout = KernelLayout.convolution()
    values = np.asarray(kernel, dtype=np.float64)
    canonical = layout.to_canonical(values)
    *tap_counts, rows, columns = canonical.shape[2:]
    if taps == "all":
        rows *= math.prod(tap_counts)
        tap_counts = []
    matrices = canonical.reshape(-1, *tap_counts, rows, columns)
    if rows < columns:
        matrices = np.swapaxes(matrices, -1, -2)
    errors = [_error_of_matrix(matrix, gain) for matrix in matrices]
    return max(errors, default=0.0)


def _error_of_matrix(taps: np.ndarray, gain: float | None) -> float:
    """The error of one matrix for each tap, `(*taps, rows, columns)` with the more rows."""
    grams = _grams_by_shift(taps)
    if gain is None:
        squares = np.diagonal(grams[0])
        square = float(np.mean(squares))
    else:
        square = gain**2
    if square == 0.0:
        return math.inf
    identity = np.eye(grams.shape[-1])
    grams[0] -= square * identity
    deviation = float(np.max(np.abs(grams)))
    return deviation / square


def _grams_by_shift(taps: np.ndarray) -> np.ndarray:
    """`sum_s K_s^T K_(s + shift)` for every shift with overlapping taps, shift 0 first."""
    *tap_counts, _, columns = taps.shape
    zeros = np.zeros((columns, columns))
    no_shift = (0,) * len(tap_counts)
    grams = {no_shift: zeros}
    live_places = []
    for place in np.ndindex(*tap_counts):
        if taps[place].any():
            live_places.append(place)
    for place, shifted_place in itertools.product(live_places, repeat=2):
        difference = np.subtract(shifted_place, place)
        shift = tuple(difference.tolist())
        product = taps[place].T @ taps[shifted_place]
        gram = grams.get(shift, zeros)
        grams[shift] = gram + product
    return np.stack(list(grams.values()))
