"""Least squares on a mask: by iterations, or directly for outputs with few live entries."""

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import scipy.linalg

CLOSE = 1e-3
"""The tolerance of values that are only compared."""

# Neighbours with one mask for which a direct solution takes less time.
_WIDE = 8
# Outputs are solved one by one for more inputs, and for fewer cubes of live entries over squares of
# inputs: else iterations take less time.
_FEW_INPUTS = 64
_DIRECT = 100
_CHECK_EVERY = 4
_REFINEMENTS: tuple[type, ...] = (np.float32, np.float32, np.float64)
# of squared residuals in one refinement
_REDUCTION: dict[type, float] = {
    np.float32: 1e-7,
    np.float64: 0.0,
}

Array = np.ndarray


def add_to_diagonal(
    matrices: Array, addition: float | np.floating | Array
) -> None:
    """Adds to the diagonals of square matrices `(M, k, k)`, in place."""
    diagonal = np.arange(matrices.shape[-1])
    matrices[:, diagonal, diagonal] += addition


def with_diagonal(
    matrices: Array, addition: float | np.floating | Array
) -> Array:
    """Copies of square matrices `(M, k, k)` with an addition to their diagonals."""
    shifted = matrices.copy()
    add_to_diagonal(shifted, addition)
    return shifted


@contextlib.contextmanager
def shifted_diagonal(matrices: Array, addition: float) -> Iterator[None]:
    """Inside, square matrices have an addition on their diagonals: no copy of them is made."""
    diagonal = np.arange(matrices.shape[-1])
    entries = matrices[:, diagonal, diagonal]
    add_to_diagonal(matrices, addition)
    try:
        yield
    finally:
        matrices[:, diagonal, diagonal] = entries


def least_squares(
    kernel: Array,
    mask: Array,
    normal: Array,
    start: Array,
    tolerance: float,
) -> Array:
    """The live entries `argmin tr (V - W)^T H (V - W)` over `V` that are zero off the mask.

    They are solved directly where that takes less time than iterations: where many neighbours have
    one mask, and where outputs have few live entries.

    Args:
        kernel: array `(M, k, outputs)`. `W`.
        mask: bool array of its shape.
        normal: array `(M, k, k)` or `(1, k, k)`. `H`.
        start: array as `kernel`, where iterations begin.
        tolerance: float. The largest preconditioned residuals, relative to those of zeros.
    """
    outputs = mask.shape[-1]
    differs = (mask[..., 1:] != mask[..., :-1]).any(axis=(0, 1))
    groups = np.split(np.arange(outputs), np.flatnonzero(differs) + 1)
    has_few_groups = _WIDE * len(groups) <= outputs
    if has_few_groups or _solves_fast(mask, tolerance):
        return _solve_directly(kernel, mask, normal, groups)
    return _solve_by_iterations(kernel, mask, normal, start, tolerance)


def _solves_fast(mask: Array, tolerance: float) -> bool:
    """Whether a solution for each output takes less time than exact conjugate gradients."""
    _, inputs, _ = mask.shape
    if tolerance >= CLOSE or inputs < _FEW_INPUTS:
        return False
    live_counts = np.count_nonzero(mask, axis=1)
    cubes = np.mean(live_counts.astype(float) ** 3)
    return bool(cubes <= _DIRECT * inputs**2)


def _solve_directly(
    full: Array,
    mask: Array,
    normal: Array,
    groups: Sequence[Array],
) -> Array:
    """Least squares on a mask, solved at once for each group of outputs with one mask."""
    values = np.zeros_like(full)
    target = normal @ full
    for matrix in range(len(mask)):
        hessian = normal[matrix % len(normal)]
        for outputs in groups:
            live = np.flatnonzero(mask[matrix, :, outputs[0]])
            entries = np.ix_(live, outputs)
            square = np.ix_(live, live)
            if live.size:
                values[matrix][entries] = _solve_positive(
                    hessian[square], target[matrix][entries]
                )
    return values


def solve_positive(matrices: Array, right: Array) -> Array:
    """`A^-1 B` of positive definite matrices `(M, k, k)` and `B` of shape `(M, k, outputs)`."""
    if len(matrices) == len(right) == 1:
        return _solve_positive(matrices[0], right[0])[None]
    return np.linalg.solve(matrices, right)


def _solve_positive(matrix: Array, right: Array) -> Array:
    """`A^-1 B` by Cholesky's decomposition: LAPACK itself, as SciPy's checks would take longer."""
    _, solution, failed = scipy.linalg.lapack.dposv(matrix, right, lower=True)
    if failed:  # rounding has made an eigenvalue negative
        return np.linalg.solve(matrix, right)
    return solution


def _solve_by_iterations(
    full: Array,
    live: Array,
    normal: Array,
    start: Array,
    tolerance: float,
) -> Array:
    """Conjugate gradients for all columns at once, until preconditioned residuals are small.

    Iterations in float32 take half of the time. Residuals are computed in float64, so the tolerance
    is that of float64.
    """
    target = live * (normal @ full)
    scale = 1.0 / np.diagonal(normal, axis1=-2, axis2=-1)[..., None]
    goal = tolerance**2 * _dots(target, scale * target)
    values = start * live
    for dtype in _REFINEMENTS if tolerance < CLOSE else _REFINEMENTS[:1]:
        residual = target - live * (normal @ values)
        values = values + _conjugate_gradients(
            residual,
            live,
            normal,
            goal,
            dtype,
        )
    return values


def _conjugate_gradients(
    residual: Array,
    live: Array,
    normal: Array,
    goal: Array,
    dtype: type,
) -> Array:
    """The correction that reduces residuals to the goal, or as far as the type allows.

    Args:
        residual: array `(M, k, outputs)`.
        live: bool array. The mask.
        normal: array. The Hessian.
        goal: array `(M, 1, outputs)`. The square of each preconditioned residual.
        dtype: type. The type to iterate in.
    """
    correction: Array = np.zeros(residual.shape, dtype)
    residual = residual.astype(dtype)
    normal = normal.astype(dtype)
    scale = 1.0 / np.diagonal(normal, axis1=-2, axis2=-1)[..., None]
    step = scale * residual
    power = _dots(residual, step)
    goal = np.maximum(goal, _REDUCTION[dtype] * power).astype(dtype)
    for number in range(2 * residual.shape[-2] + 100):
        if number % _CHECK_EVERY == 0 and np.all(power <= goal):
            break
        image = normal @ step
        image *= live
        length = _ratio(power, _dots(step, image))
        correction += length * step
        image *= length
        residual -= image
        ahead = scale * residual
        next_power = _dots(residual, ahead)
        step *= _ratio(next_power, power)
        step += ahead
        power = next_power
    return correction


def _dots(
    first: Array,
    second: Array,
) -> Array:
    """The inner product of each pair of columns."""
    return np.sum(first * second, axis=-2, keepdims=True)


def _ratio(
    above: Array,
    below: Array,
) -> Array:
    """`above / below`, or 0 where `below` is not positive."""
    positive = below > 0
    divisor = np.where(positive, below, 1.0)
    return np.where(positive, above / divisor, 0.0)
