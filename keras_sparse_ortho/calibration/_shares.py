"""Densities of the kernels of a trained model by the errors that calibration data show."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.optimize import isotonic_regression

from keras_sparse_ortho.budgets import Budget, allocate
from keras_sparse_ortho.calibration._layerwise import (
    GramStop,
    as_matrices,
    calibration_batches,
    rows_of,
    sweep,
)
from keras_sparse_ortho.calibration._solve import Entries, damped, obs_rounds, relative_error
from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.orthogonal import live_count

# Measured densities of a kernel, and the least one relative to that of the model.
_POINTS = 12
_LEAST = 0.2
# One of so many rows judges the kernels that are made from the others.
_HOLD_OUT = 4

Curve = tuple[np.ndarray, np.ndarray]
"""Live entries, ascending, and the error with each."""


def budget_by_error(
    model: Any, weights: Sequence[PrunableWeight], density: float, data: Any, verbose: int = 0
) -> Budget:
    """Densities of least total error with exactly `round(density * size)` live entries in all.

    The least sum over the kernels of `e_k(c_k) = tr (V - W)^T H (V - W) / tr W^T H W` over the
    counts `c_k`, where `V` is what OBS makes of the kernel with so many live entries of three rows
    in four, and the error is that on the fourth. It is measured at twelve counts, and linear in
    between on its lower convex hull. Kernels that do not multiply inputs get the density of all.

    Reference:

    - Frantar and Alistarh, "SPDY: Accurate Pruning with Speedup Guarantees" (ICML 2022), arXiv
      2201.13096, for budgets by measured errors
    """
    curves: dict[str, Curve] = {}

    def record(weight: PrunableWeight, gram: Any, across: Any, held: Any) -> None:
        curves[weight.path] = _curve(weight, gram, gram if held is None else held, density)

    stops = [
        GramStop(weight, rows, functools.partial(record, weight), hold_out=_HOLD_OUT)
        for weight in weights
        if (rows := rows_of(weight)) is not None
    ]
    sweep(model, calibration_batches(data), stops, verbose)
    sizes = {weight.path: weight.size for weight in weights if weight.path in curves}
    share = _by_error(curves, sizes, density)
    relative = [share.get(weight.path, density) for weight in weights]
    return allocate(weights, density, relative, orthogonal=False)


def _curve(weight: PrunableWeight, gram: Any, judge: Any, density: float) -> Curve:
    """Errors of OBS on its way from dense to a fifth of the density, on rows that it has not seen.

    On its own rows the error of a kernel with more inputs than rows is close to 0.
    """
    kernel = as_matrices(weight.finite_raw_value(), weight.layout)
    least = _LEAST * density
    grid = [live_count(least ** (k / _POINTS), weight.size) for k in range(1, _POINTS + 1)]
    counts = sorted({max(count, 1) for count in grid}, reverse=True)
    pattern, normal = Entries(), damped(gram)
    precision = pattern.precision(np.linalg.inv(normal))
    rounds = obs_rounds(kernel.astype(np.float64), normal, precision, counts, pattern)
    errors = [relative_error(value, kernel, judge) for value, _ in rounds]
    return np.array([*counts[::-1], weight.size], float), np.array([*errors[::-1], 0.0])


def _by_error(
    curves: Mapping[str, Curve], sizes: Mapping[str, int], density: float
) -> dict[str, float]:
    """Live fractions of the least total error: the steepest parts of the hulls first."""
    counts, parts = {}, []
    for path, (at, errors) in curves.items():
        counts[path], widths = at[0], np.diff(at)
        # The slopes of a lower convex hull are the rising ones that are nearest to those given.
        slopes = isotonic_regression(np.diff(errors) / widths, weights=widths).x
        parts += [(slope, path, more) for slope, more in zip(slopes, widths, strict=True)]
    left = density * sum(sizes.values()) - sum(counts.values())
    for _, path, more in sorted(parts):
        taken = min(more, max(left, 0.0))
        counts[path] += taken
        left -= taken
    return {path: count / sizes[path] for path, count in counts.items()}
