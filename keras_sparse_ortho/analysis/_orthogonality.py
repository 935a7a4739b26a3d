"""`orthogonality_error`: how far a kernel is from orthogonal."""

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
    layout = KernelLayout.convolution() if layout is None else layout
    canonical = layout.to_canonical(np.asarray(kernel, dtype=np.float64))
    *spatial, rows, columns = canonical.shape[2:]
    if taps == "all":
        spatial, rows = [], math.prod(spatial) * rows
    worst = 0.0
    for matrix in canonical.reshape(-1, *spatial, rows, columns):
        if rows < columns:
            matrix = np.swapaxes(matrix, -1, -2)
        gram = _gram_by_shift(matrix, (*spatial,) or (1,))
        square = float(np.mean(np.diagonal(gram[0]))) if gain is None else gain**2
        if square == 0.0:
            return math.inf
        gram[0] -= square * np.eye(gram.shape[-1])
        worst = max(worst, float(np.abs(gram).max()) / square)
    return worst


def _gram_by_shift(matrix: np.ndarray, taps: tuple[int, ...]) -> np.ndarray:
    """`sum_s K_s^T K_(s + shift)` for every shift with overlapping taps, shift 0 first."""
    rows, columns = matrix.shape[-2:]
    flat: np.ndarray = matrix.reshape(-1, rows, columns)
    live = [tap for tap in range(len(flat)) if flat[tap].any()]
    places = np.stack(np.unravel_index(np.arange(len(flat)), taps), axis=-1)
    none: tuple[int, ...] = (0,) * len(taps)
    grams: dict[tuple[int, ...], np.ndarray] = {none: np.zeros((columns, columns))}
    for a in live:
        for b in live:
            shift = tuple(int(step) for step in places[b] - places[a])
            product = flat[a].T @ flat[b]
            grams[shift] = grams[shift] + product if shift in grams else product
    return np.stack([grams.pop(none), *grams.values()])
