"""Densities of the kernels of a trained model from calibration data: by measured errors, by OWL."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.budgets import Budget, allocate
from keras_sparse_ortho.calibration._patterns import Entries
from keras_sparse_ortho.calibration._rows import GramStop, Moments, as_matrices, linear_kernel
from keras_sparse_ortho.calibration._solve import obs_rounds, relative_error, wanda
from keras_sparse_ortho.calibration._sweep import calibration_batches, sweep
from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.orthogonal import live_count

BUDGETS_OF_DATA = ("error", "owl")
"""The budgets that need inputs of each layer."""

# Measured densities of a kernel, and the least one relative to that of the model.
_POINTS = 12
_LEAST = 0.2
# One of so many rows judges the kernels that are made from the others.
_HOLD_OUT = 4
# Of the paper: outliers are this many times the mean; densities differ by at most this.
_OUTLIER = 5.0
_MOST = 0.08

Curve = tuple[np.ndarray, np.ndarray]
"""Live entries, ascending, and the error with each."""


def budget_of_data(
    name: str,
    model: Any,
    weights: Sequence[PrunableWeight],
    density: float,
    data: Any,
    verbose: int = 0,
) -> Budget:
    """Densities of the kernels with exactly `round(density * size)` live entries in all.

    `"error"`: the least sum over the kernels of

        e_k(c_k) = tr (V - W)^T H (V - W) / tr W^T H W

    over the counts `c_k`, where `V` is what OBS makes of the kernel with so many live entries, on
    the inputs of the given model: `V` of three rows in four, the error on the fourth, which is
    held out. It is measured at twelve counts, down to a fifth of the density,
    and linear in between on its lower convex hull, where the best counts are exact.

    `"owl"`: the more of its scores `|w_i| norm(X_i)` are above five times their mean, the denser
    is a kernel, by at most 0.08 (and at most half of the density) more or less than all together.

    Kernels that do not multiply the inputs of their layers get the density of all.

    References:

    - Yin et al., "Outlier Weighed Layerwise Sparsity (OWL)" (ICML 2024), arXiv 2310.05175
    - Frantar and Alistarh, "SPDY: Accurate Pruning with Speedup Guarantees" (ICML 2022), arXiv
      2201.13096, for budgets by measured errors
    """
    found: dict[str, Any] = {}

    def record(weight: PrunableWeight, moments: Moments) -> None:
        by_error = name == "error"
        found[weight.path] = (
            _curve(weight, moments, density) if by_error else _outliers(weight, moments)
        )

    kernels = [linear_kernel(weight, weight.owner) for weight in weights]
    stops = [
        GramStop(
            k, functools.partial(record, k.weight), hold_out=_HOLD_OUT if name == "error" else 1
        )
        for k in kernels
        if k is not None
    ]
    sweep(model, calibration_batches(data), stops, verbose)
    if not found:
        return allocate(weights, density, [1.0] * len(weights), orthogonal=False)
    sizes = {weight.path: weight.size for weight in weights if weight.path in found}
    share = _by_error(found, sizes, density) if name == "error" else _by_outliers(found, density)
    relative = [share.get(weight.path, density) for weight in weights]
    return allocate(weights, density, relative, orthogonal=False)


def _curve(weight: PrunableWeight, moments: Moments, density: float) -> Curve:
    """Errors of OBS on its way from dense to a fifth of the density, on rows that it has not seen.

    On its own rows the error of a kernel with more inputs than rows is close to 0.
    """
    judge = moments.gram if moments.held is None else moments.held
    kernel = as_matrices(weight.finite_raw_value(), weight.layout)
    least = _LEAST * density
    grid = [live_count(least ** (k / _POINTS), weight.size) for k in range(1, _POINTS + 1)]
    counts = sorted({max(count, 1) for count in grid}, reverse=True)
    errors = [
        relative_error(to_numpy(value), kernel, judge)
        for value, _ in obs_rounds(kernel, counts, moments.gram, Entries())
    ]
    return np.array([*counts[::-1], weight.size], float), np.array([*errors[::-1], 0.0])


def _by_error(
    curves: Mapping[str, Curve], sizes: Mapping[str, int], density: float
) -> dict[str, float]:
    """Live fractions of the least total error: the steepest parts of the hulls first."""
    counts, parts = {}, []
    for path, curve in curves.items():
        at, errors = _hull(*curve)
        counts[path] = at[0]
        slopes = np.diff(errors) / np.diff(at)
        parts += [(s, path, more) for s, more in zip(slopes, np.diff(at), strict=True)]
    left = density * sum(sizes.values()) - sum(counts.values())
    for _, path, more in sorted(parts):
        taken = min(more, max(left, 0.0))
        counts[path] += taken
        left -= taken
    return {path: count / sizes[path] for path, count in counts.items()}


def _hull(counts: np.ndarray, errors: np.ndarray) -> Curve:
    """The corners of the lower convex hull of a curve."""
    kept: list[int] = []
    for k in range(len(counts)):
        while len(kept) > 1:
            i, j = kept[-2:]
            before = (errors[j] - errors[i]) * (counts[k] - counts[i])
            if before < (errors[k] - errors[i]) * (counts[j] - counts[i]):
                break
            kept.pop()
        kept.append(k)
    return counts[kept], errors[kept]


def _outliers(weight: PrunableWeight, moments: Moments) -> tuple[int, float]:
    """Entries of a kernel, and the fraction of them whose scores are outliers."""
    scores = wanda(as_matrices(weight.finite_raw_value(), weight.layout), moments.gram)
    return weight.size, float(np.mean(scores > _OUTLIER * scores.mean()))


def _by_outliers(found: Mapping[str, tuple[int, float]], density: float) -> dict[str, float]:
    sizes, ratios = (np.array(column, float) for column in zip(*found.values(), strict=True))
    spread = np.ptp(ratios)
    moved = (ratios - ratios.min()) / spread if spread > 0 else np.zeros_like(ratios)
    moved = 2 * min(_MOST, density / 2, 1 - density) * moved
    moved -= np.average(moved, weights=sizes)
    return dict(zip(found, density + moved, strict=True))
