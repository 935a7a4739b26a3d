"""Densities of the kernels of a trained model by the errors that calibration data show."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.optimize import isotonic_regression

from keras_sparse_ortho.budgets import Budget, allocate
from keras_sparse_ortho.calibration._layerwise import sweep
from keras_sparse_ortho.calibration._rows import Moments, as_matrices, stop_of
from keras_sparse_ortho.calibration._solve import errors_of
from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.orthogonal import live_count

# Measured densities of a kernel, and the least one relative to that of the model.
_POINTS = 8
_LEAST = 0.2


def budget_by_error(
    model: Any,
    weights: Sequence[PrunableWeight],
    density: float,
    batches: Sequence[Any],
    verbose: int = 0,
) -> Budget:
    """Densities of least total error with exactly `round(density * size)` live entries in all.

    The least sum over the kernels of `e_k(c_k) = tr (V - W)^T G (V - W) / tr W^T G W` over the
    counts `c_k`, where `V` is what OBS makes of the kernel with so many live entries of three rows
    in four, and the error is that on the fourth. It is measured at eight counts, and linear in
    between on its lower convex hull.

    Reference:

    - Frantar and Alistarh, "SPDY: Accurate Pruning with Speedup Guarantees" (ICML 2022), arXiv
      2201.13096, for budgets by measured errors
    """
    least = _LEAST * density
    grid = [least ** (k / _POINTS) for k in range(1, _POINTS + 1)]
    curves: dict[str, tuple[np.ndarray, np.ndarray]] = {}  # live entries, errors

    def record(weight: PrunableWeight, used: Moments, held: Moments) -> None:
        kernel = as_matrices(weight.finite_raw_value(), weight.layout)
        counts = sorted({max(live_count(share, weight.size), 1) for share in grid})
        errors = [*errors_of(kernel, counts, used, held), 0.0]
        curves[weight.path] = np.array([*counts, weight.size], float), np.array(errors)

    stops = [stop_of(model, weight, functools.partial(record, weight)) for weight in weights]
    sweep(model, batches, stops, verbose)
    share = _by_error(curves, {weight.path: weight.size for weight in weights}, density)
    relative = [share[weight.path] for weight in weights]
    return allocate(weights, density, relative, orthogonal=False)


def _by_error(
    curves: Mapping[str, tuple[np.ndarray, np.ndarray]], sizes: Mapping[str, int], density: float
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
