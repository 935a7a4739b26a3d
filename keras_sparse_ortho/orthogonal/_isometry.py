"""Approximate isometry (AI): masked matrices whose live entries make them nearly orthogonal."""

import math

import numpy as np
from scipy.optimize import OptimizeResult, minimize

from keras_sparse_ortho._checks import check_integer, other_keywords
from keras_sparse_ortho.orthogonal._kernel import KernelLayout

_MEMORY = 10  # pairs of steps and gradients that L-BFGS keeps


@other_keywords
def approximate_isometry(
    kernel: np.ndarray,
    mask: np.ndarray,
    *,
    gain: float = 1.0,
    layout: KernelLayout | None = None,
    max_iterations: int = 1000,
    tolerance: float = 1e-5,
    min_decrease: float = 1e-6,
) -> np.ndarray:
    """Moves the live entries of a kernel towards an isometry (AI); returns it in float64.

    Minimizes by L-BFGS, over the live entries and summed over the matrices `W` of the kernel,

        f(W) = ||W W^T - gain^2 I||_F^2

    with the smaller Gram matrix. A convolution has one matrix `outputs x (taps * inputs)` for each
    group. `f` never rises.

    Args:
        kernel: array. Start, of any Keras shape; entries outside the mask become 0.
        mask: bool array of the same shape.
        gain: float. Scale of the kernel, positive.
        layout: KernelLayout. Meaning of the axes. Default: `(*spatial, in, out)`.
        max_iterations: int. Most iterations of L-BFGS, each one or two evaluations of `f`.
        tolerance: float. The error to stop at: `sqrt(f / (matrices * n)) / gain^2` with `n` the
            shorter side, which is 1 for a kernel of zeros.
        min_decrease: float. Stop at a smaller relative decrease in an iteration; 0 never stops.

    Raises ValueError for a mask of another shape or without a live entry, a kernel that is not
    finite, or an argument out of range.

    Limits: a local minimum need not be an isometry. With far fewer live entries than the `n (n + 1)
    / 2` equations most of them shrink towards 0, as do some singular values. An iteration costs two
    dense matrix products; for small ones set `OPENBLAS_NUM_THREADS=1`.

    Examples:
        >>> rng = np.random.default_rng(0)
        >>> mask = rng.random((16, 32)) < 0.5
        >>> kernel = approximate_isometry(rng.normal(size=(16, 32)), mask)
        >>> bool(np.allclose(kernel @ kernel.T, np.eye(16), atol=1e-3)), bool(kernel[~mask].any())
        (True, False)

    Reference: Lee et al., "A Signal Propagation Perspective for Pruning Neural Networks at
    Initialization" (ICLR 2020), arXiv 1906.06307. (There: 1000 to 10000 steps of SGD or Adam.)
    """
    kernel, mask = np.asarray(kernel), np.asarray(mask)
    if mask.dtype != bool or mask.shape != kernel.shape or not mask.any():
        raise ValueError(
            "`mask` must be a bool array of the kernel's shape with at least one live entry. "
            f"Received: mask of dtype {mask.dtype} and shape {mask.shape} with "
            f"{np.count_nonzero(mask)} live, kernel of shape {kernel.shape}"
        )
    if not np.isfinite(kernel).all():
        raise ValueError("`kernel` must be finite. Received: infinite or NaN entries")
    if not (math.isfinite(gain) and gain > 0):
        raise ValueError(f"`gain` must be positive. Received: {gain=}")
    check_integer("max_iterations", max_iterations)
    if not (tolerance >= 0 and 0 <= min_decrease < 1):
        raise ValueError(
            "`tolerance` must not be negative, and `min_decrease` be in [0, 1). "
            f"Received: {tolerance=}, {min_decrease=}"
        )
    layout = KernelLayout.convolution() if layout is None else layout
    batch, parts, *_, outputs = canonical = layout.canonical_shape(kernel.shape)

    tall = math.prod(canonical[2:-1]) > outputs

    def matrices(values: np.ndarray) -> np.ndarray:
        """`(count, shorter side, longer side)`."""
        flat = layout.to_canonical(values).reshape(batch * parts, -1, outputs)
        return np.ascontiguousarray(flat.swapaxes(1, 2) if tall else flat)

    live = np.flatnonzero(matrices(mask))
    values = matrices(np.where(mask, kernel, 0)).astype(np.float64)
    scale = math.prod(values.shape[:2]) * gain**4  # f of a kernel of zeros
    diagonal = np.arange(values.shape[1])

    def objective(entries: np.ndarray) -> tuple[float, np.ndarray]:
        values.reshape(-1)[live] = entries
        rest = values @ values.swapaxes(1, 2)
        rest[:, diagonal, diagonal] -= gain**2
        slope = (rest @ values).reshape(-1)[live]
        return float(np.square(rest).sum()) / scale, slope * (4.0 / scale)

    start = values.reshape(-1)[live]
    before = objective(start)[0]

    def after(intermediate_result: OptimizeResult) -> None:
        nonlocal before
        now = float(intermediate_result.fun)
        enough = math.sqrt(now) <= tolerance or before - now < min_decrease * before
        before = now
        if enough:
            raise StopIteration

    if math.sqrt(before) > tolerance:
        limits = {"maxiter": max_iterations, "maxfun": 20 * max_iterations}
        options = {**limits, "maxcor": _MEMORY, "ftol": 0.0, "gtol": 0.0}
        start = minimize(
            objective, start, jac=True, method="L-BFGS-B", callback=after, options=options
        ).x
    values.reshape(-1)[live] = start
    result = values.swapaxes(1, 2) if tall else values
    return np.ascontiguousarray(layout.from_canonical(result.reshape(canonical), kernel.shape))
