"""Approximate isometry (AI): masked matrices whose live entries make them nearly orthogonal."""

import math

import numpy as np
from scipy import optimize

from keras_sparse_ortho._checks import check_integer, other_keywords
from keras_sparse_ortho.orthogonal._kernel import KernelLayout

_KEPT_PAIRS = 10  # of steps and gradients, by L-BFGS


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
    kernel = np.asarray(kernel)
    mask = np.asarray(mask)
    _check_arguments(kernel, mask, gain, tolerance, min_decrease)
    check_integer("max_iterations", max_iterations)
    layout = layout or KernelLayout.convolution()
    batch, part_count, *_, outputs = canonical_shape = layout.canonical_shape(
        kernel.shape
    )
    is_tall = math.prod(canonical_shape[2:-1]) > outputs

    def matrices(array: np.ndarray) -> np.ndarray:
        """`(count, shorter side, longer side)`."""
        flat = layout.to_canonical(array).reshape(
            batch * part_count, -1, outputs
        )
        if is_tall:
            flat = flat.swapaxes(1, 2)
        return np.ascontiguousarray(flat)

    values = matrices(np.where(mask, kernel, 0)).astype(np.float64)
    live = np.flatnonzero(matrices(mask))
    objective = _Objective(values, live, gain)
    _minimize(objective, max_iterations, tolerance, min_decrease)
    if is_tall:
        values = values.swapaxes(1, 2)
    canonical = values.reshape(canonical_shape)
    return np.ascontiguousarray(layout.from_canonical(canonical, kernel.shape))


def _check_arguments(
    kernel: np.ndarray,
    mask: np.ndarray,
    gain: float,
    tolerance: float,
    min_decrease: float,
) -> None:
    """Raises a ValueError for arguments of `approximate_isometry` that are out of range."""
    if mask.dtype != bool or mask.shape != kernel.shape or not mask.any():
        raise ValueError(
            "`mask` must be a bool array of the kernel's shape with at least one live entry. "
            f"Received: mask of dtype {mask.dtype} and shape {mask.shape} with "
            f"{np.count_nonzero(mask)} live, kernel of shape {kernel.shape}"
        )
    if not np.isfinite(kernel).all():
        raise ValueError(
            "`kernel` must be finite. Received: infinite or NaN entries"
        )
    if not (math.isfinite(gain) and gain > 0):
        raise ValueError(f"`gain` must be positive. Received: {gain=}")
    if not (tolerance >= 0 and 0 <= min_decrease < 1):
        raise ValueError(
            "`tolerance` must not be negative, and `min_decrease` be in [0, 1). "
            f"Received: {tolerance=}, {min_decrease=}"
        )


class _Objective:
    """`f` of `approximate_isometry`, relative to that of a kernel of zeros, and its gradient.

    Args:
        values: float64 array `(count, shorter side, longer side)`. It is changed in place: it has
            the entries of the latest call.
        live: int array. Flat indices of the live entries.
        gain: float. Scale of the kernel.
    """

    def __init__(
        self,
        values: np.ndarray,
        live: np.ndarray,
        gain: float,
    ) -> None:
        self.values = values
        self.live = live
        self.gain = gain
        count, shorter, _ = values.shape
        self.scale = count * shorter * gain**4
        self.diagonal = np.arange(shorter)

    @property
    def entries(self) -> np.ndarray:
        """The live entries."""
        return self.values.reshape(-1)[self.live]

    @entries.setter
    def entries(self, entries: np.ndarray) -> None:
        self.values.reshape(-1)[self.live] = entries

    def __call__(self, entries: np.ndarray) -> tuple[float, np.ndarray]:
        self.entries = entries
        excess = self.values @ self.values.swapaxes(1, 2)
        excess[:, self.diagonal, self.diagonal] -= self.gain**2
        slope = (excess @ self.values).reshape(-1)[self.live]
        loss = float(np.square(excess).sum()) / self.scale
        return loss, slope * (4.0 / self.scale)


def _minimize(
    objective: _Objective,
    max_iterations: int,
    tolerance: float,
    min_decrease: float,
) -> None:
    """Minimizes the objective by L-BFGS, from its values, which it changes in place."""
    entries = objective.entries
    loss, _ = objective(entries)
    if math.sqrt(loss) <= tolerance:
        return

    def stop_early(intermediate_result: optimize.OptimizeResult) -> None:
        nonlocal loss
        loss_before = loss
        loss = float(intermediate_result.fun)
        decrease = loss_before - loss
        if (
            math.sqrt(loss) <= tolerance
            or decrease < min_decrease * loss_before
        ):
            raise StopIteration

    options = {
        "maxiter": max_iterations,
        "maxfun": 20 * max_iterations,
        "maxcor": _KEPT_PAIRS,
        "ftol": 0.0,
        "gtol": 0.0,
    }
    result = optimize.minimize(
        objective,
        entries,
        jac=True,
        method="L-BFGS-B",
        callback=stop_early,
        options=options,
    )
    objective.entries = result.x
