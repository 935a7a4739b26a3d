"""`Sensitivity`: what kernels of a trained model lose by density; the budget of least error."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
from scipy.optimize import isotonic_regression

from keras_sparse_ortho._foreign_names import Answering
from keras_sparse_ortho._keras_internals import VariableOverrides
from keras_sparse_ortho._values import placed, to_numpy
from keras_sparse_ortho.budgets import Budget, allocate
from keras_sparse_ortho.calibration._moments import HOLD_OUT, Moments, samples_in, stop_of
from keras_sparse_ortho.calibration._patterns import Entries
from keras_sparse_ortho.calibration._rows import as_matrices, from_matrices
from keras_sparse_ortho.calibration._solve import errors_of, relative_error
from keras_sparse_ortho.calibration._sweep import sweep
from keras_sparse_ortho.errors import BudgetError
from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.orthogonal import depthwise_outputs, live_count

_POINTS = 8  # measured densities of a kernel
_LEAST = 0.2  # the least of them, relative to that of the model
_LEVELS = {"int8": 127, "int4": 7}


@dataclasses.dataclass(frozen=True, repr=False)
class Sensitivity(Answering):
    """Table of the errors of a trained model's kernels by density and in integers.

    It prints as a table, and is a `budget` for `prune` and `parametrize`.

    Args:
        errors: dict from path to the relative squared errors of the layer's outputs, by density and
            for `"int8"` and `"int4"`.
        gains: dict from path to how much of such an error is in the outputs of the model.
    """

    errors: dict[str, dict[float | str, float]]
    gains: dict[str, float]

    def __str__(self) -> str:
        columns = [*next(iter(self.errors.values()))]
        rows = [["error at", *(x if isinstance(x, str) else f"{x:.3g}" for x in columns), "gain"]]
        for path, own in self.errors.items():
            rows.append([path, *(f"{v:.2g}" for v in (*map(own.get, columns), self.gains[path]))])
        widths = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
        return "\n".join("".join(map(str.ljust, row, widths)).rstrip() for row in rows)

    __repr__ = __str__

    def plot(self) -> Any:
        """Plots the error of each kernel over the density; returns a Matplotlib figure."""
        from matplotlib.figure import Figure

        figure = Figure(layout="constrained")
        axes = figure.subplots()
        for path in self.errors:
            shares, errors = self._curve(path)
            axes.plot(shares[:-1], errors[:-1], marker="o", label=path)
        axes.set(xscale="log", yscale="log", xlabel="density", ylabel="relative squared error")
        axes.legend()
        return figure

    def predicted(self, densities: Mapping[str, float]) -> float:
        """The relative squared error of the model at a `Budget`: gains times errors."""
        found = 0.0
        for path, gain in self.gains.items():
            shares, errors = self._curve(path)
            found += gain * float(np.interp(densities.get(path, 1.0), shares, errors))
        return found

    def budget(self, weights: Sequence[PrunableWeight], density: float) -> Budget:
        """Densities of least total error with exactly `round(density * size)` live entries in all.

        Minimizes the sum of `g_k e_k(c_k)` over the counts `c_k`, with gains `g_k` and errors `e_k`
        on the lower convex hull of the measured ones. Budgets by measured errors: Frantar and
        Alistarh, "SPDY" (ICML 2022), arXiv 2201.13096.
        """
        counts, parts = {}, []
        for weight in weights:
            shares, errors = self._curve(weight.path)
            at = np.array([max(live_count(share, weight.size), 1) for share in shares], float)
            at, first = np.unique(at, return_index=True)
            counts[weight.path], widths = at[0], np.diff(at)
            slopes = self.gains[weight.path] * np.diff(errors[first]) / widths
            # The slopes of a lower convex hull are the nearest rising ones.
            slopes = isotonic_regression(slopes, weights=widths).x
            parts += [
                (slope, weight.path, more) for slope, more in zip(slopes, widths, strict=True)
            ]
        left = density * sum(weight.size for weight in weights) - sum(counts.values())
        for _, path, more in sorted(parts):  # the steepest first
            taken = min(more, max(left, 0.0))
            counts[path] += taken
            left -= taken
        relative = [counts[weight.path] / weight.size for weight in weights]
        return allocate(weights, density, relative, orthogonal=False)

    def _curve(self, path: str) -> tuple[np.ndarray, np.ndarray]:
        """Densities in rising order, 1 at the end, and their errors."""
        if path not in self.errors:
            raise BudgetError(
                f"The errors of {path!r} were not measured: `exclude` it, or call `sensitivity` "
                f"with it. Received: errors of {', '.join(self.errors)}"
            )
        known = {x: y for x, y in self.errors[path].items() if not isinstance(x, str)} | {1.0: 0.0}
        return np.array(sorted(known)), np.array([known[share] for share in sorted(known)])


def densities_around(density: float) -> list[float]:
    least = _LEAST * density
    return [least ** (k / _POINTS) for k in range(1, _POINTS + 1)]


def measured_errors(
    model: Any,
    weights: Sequence[PrunableWeight],
    densities: Sequence[float],
    batches: Sequence[Any],
    verbose: int = 0,
) -> Sensitivity:
    """For each kernel `W` the errors `tr (V - W)^T G (V - W) / tr W^T G W`, and the gains.

    `G` is `X^T X` of one row in four, `V` OBS' kernel from the others, or `W` in integers with a
    scale for each output; a gain is the model's error over that of its layer in int4.
    """
    found: dict[str, dict[float | str, float]] = {}
    gains: dict[str, float] = {}
    rows = lambda x: x[min(HOLD_OUT, x.shape[0]) - 1 :: HOLD_OUT]  # noqa: E731
    held_out = [keras.tree.map_structure(rows, batch) for batch in batches]
    given: list[np.ndarray] = []

    def outputs() -> list[np.ndarray]:
        found = [keras.tree.flatten(model(batch, training=False)) for batch in held_out]
        return [to_numpy(x).astype(np.float64) for tensors in found for x in tensors]

    def record(weight: PrunableWeight, used: Moments, held: Moments) -> None:
        kernel = as_matrices(weight.finite_raw_value(), weight.layout)
        counts = [max(live_count(share, weight.size), 1) for share in densities]
        pattern = Entries(floored=depthwise_outputs(weight.shape, weight.layout) > 0)
        errors = errors_of(kernel, counts, pattern, used, held)
        own: dict[Any, float] = dict(zip(densities, errors, strict=True))
        found[weight.path] = own
        for name, levels in _LEVELS.items():
            scale = np.abs(kernel).max(axis=-2, keepdims=True) / levels
            rounded = np.rint(kernel / np.where(scale > 0, scale, 1.0)) * scale
            own[name] = relative_error(rounded, kernel, (held if held.rows else used).gram)
        given.extend(() if given else outputs())
        coarse = from_matrices(rounded, weight.shape, weight.layout)
        # An override changes no variable: other threads may use the model.
        with VariableOverrides([(weight.variable, placed(coarse, weight.variable))]):
            lost = sum(np.sum((x - y) ** 2) for x, y in zip(outputs(), given, strict=True))
        whole = own[name] * sum(np.sum(y**2) for y in given)
        gains[weight.path] = float(lost / whole) if whole > 0 else 0.0

    samples = samples_in(batches)
    stops = [
        stop_of(model, weight, functools.partial(record, weight), samples) for weight in weights
    ]
    sweep(model, batches, stops, verbose)
    paths = [weight.path for weight in weights]
    return Sensitivity({path: found[path] for path in paths}, {path: gains[path] for path in paths})
