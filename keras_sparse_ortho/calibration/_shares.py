"""`Sensitivity`: what kernels of a trained model lose by density; the budget of least error."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from scipy.optimize import isotonic_regression

from keras_sparse_ortho._foreign_names import Answering
from keras_sparse_ortho._keras_internals import (
    VariableOverrides,
    from_zero_states,
)
from keras_sparse_ortho._pictures import axes_or_new
from keras_sparse_ortho._values import placed, to_numpy, without_gradients
from keras_sparse_ortho.budgets import Budget, allocate
from keras_sparse_ortho.calibration._held_out import held_out_batches
from keras_sparse_ortho.calibration._moments import (
    Moments,
    samples_in,
    stop_of,
)
from keras_sparse_ortho.calibration._patterns import Entries
from keras_sparse_ortho.calibration._solve import errors_of, relative_error
from keras_sparse_ortho.calibration._sweep import change_each, sweep
from keras_sparse_ortho.errors import BudgetError
from keras_sparse_ortho.kernels import (
    PrunableWeight,
    as_matrices,
    from_matrices,
)
from keras_sparse_ortho.orthogonal import depthwise_outputs, live_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_POINTS = 8  # measured densities of a kernel
_LEAST_SHARE = 0.2  # the least of them, relative to that of the model
_LEVELS = {"int8": 127, "int4": 7}
_COARSE = "int4"


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
        """A line for each kernel: its errors, and its gain."""
        columns = [*next(iter(self.errors.values()))]
        heads = [
            column if isinstance(column, str) else f"{column:.3g}"
            for column in columns
        ]
        rows = [["error at", *heads, "gain"]]
        for path, errors in self.errors.items():
            numbers = [*map(errors.get, columns), self.gains[path]]
            cells = [f"{number:.2g}" for number in numbers]
            rows.append([path, *cells])
        widths = [
            max(map(len, column)) + 2 for column in zip(*rows, strict=True)
        ]
        lines = []
        for row in rows:
            padded = map(str.ljust, row, widths)
            lines.append("".join(padded).rstrip())
        return "\n".join(lines)

    __repr__ = __str__

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Plots the error of each kernel over the density.

        Args:
            ax: Matplotlib axes to draw on. Default: those of a new figure.

        Returns:
            The axes.
        """
        axes = axes_or_new(ax)
        for path in self.errors:
            shares, errors = self._curve(path)
            axes.plot(
                shares[:-1],
                errors[:-1],
                marker="o",
                label=path,
            )
        axes.set(
            xscale="log",
            yscale="log",
            xlabel="density",
            ylabel="relative squared error",
        )
        densities = shares[:-1]  # of the last kernel: all have the same
        axes.set_xticks(densities, [f"{density:g}" for density in densities])
        axes.minorticks_off()
        axes.legend()
        return axes

    def predicted(self, densities: Mapping[str, float]) -> float:
        """The relative squared error of the model at a `Budget`: gains times errors."""
        error = 0.0
        for path, gain in self.gains.items():
            shares, errors = self._curve(path)
            density = densities.get(path, 1.0)
            error += gain * float(np.interp(density, shares, errors))
        return error

    def budget(
        self,
        weights: Sequence[PrunableWeight],
        density: float,
    ) -> Budget:
        """Densities of least total error with exactly `round(density * size)` live entries in all.

        Minimizes the sum of `g_k e_k(c_k)` over the counts `c_k`, with gains `g_k` and errors `e_k`
        on the lower convex hull of the measured ones. Budgets by measured errors: Frantar and
        Alistarh, "SPDY" (ICML 2022), arXiv 2201.13096.
        """
        counts: dict[str, float] = {}
        pieces: list[tuple[float, str, float]] = []
        for weight in weights:
            shares, errors = self._curve(weight.path)
            exact = [max(live_count(share, weight.size), 1) for share in shares]
            points, first_places = np.unique(
                np.array(exact, float), return_index=True
            )
            counts[weight.path] = points[0]
            widths = np.diff(points)
            slopes = (
                self.gains[weight.path] * np.diff(errors[first_places]) / widths
            )
            # The slopes of a lower convex hull are the nearest rising ones.
            rising = isotonic_regression(slopes, weights=widths).x
            for slope, width in zip(rising, widths, strict=True):
                pieces.append((slope, weight.path, width))
        size = sum(weight.size for weight in weights)
        entries_to_share = density * size - sum(counts.values())
        for _, path, width in sorted(pieces):  # the steepest first
            entries = min(width, max(entries_to_share, 0.0))
            counts[path] += entries
            entries_to_share -= entries
        relative = [counts[weight.path] / weight.size for weight in weights]
        return allocate(
            weights,
            density,
            relative,
            orthogonal=False,
        )

    def _curve(self, path: str) -> tuple[np.ndarray, np.ndarray]:
        """Densities in rising order, 1 at the end, and their errors."""
        if path not in self.errors:
            raise BudgetError(
                f"The errors of {path!r} were not measured: `exclude` it, or call `sensitivity` "
                f"with it. Received: errors of {', '.join(self.errors)}"
            )
        by_density: dict[float, float] = {}
        for column, error in self.errors[path].items():
            if not isinstance(column, str):
                by_density[column] = error
        by_density[1.0] = 0.0
        shares = sorted(by_density)
        errors = [by_density[share] for share in shares]
        return np.array(shares), np.array(errors)


def densities_around(density: float) -> list[float]:
    """The densities to measure for a budget of this density."""
    lowest = _LEAST_SHARE * density
    return [lowest ** (k / _POINTS) for k in range(1, _POINTS + 1)]


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
    errors: dict[str, dict[float | str, float]] = {}

    def record(
        weight: PrunableWeight,
        used: Moments,
        held: Moments,
    ) -> None:
        errors[weight.path] = _errors_of_layer(
            weight,
            densities,
            used,
            held,
        )

    samples = samples_in(batches)
    stops = []
    for weight in weights:
        stops.append(
            stop_of(
                model,
                weight,
                functools.partial(record, weight),
                samples,
            )
        )
    sweep(
        model,
        batches,
        stops,
        verbose,
    )
    lost = _lost_in_model(
        model,
        weights,
        stops,
        batches,
        verbose,
    )
    gains = {}
    for weight in weights:
        error = errors[weight.path][_COARSE]
        gains[weight.path] = lost[weight.path] / error if error > 0 else 0.0
    paths = [weight.path for weight in weights]
    return Sensitivity({path: errors[path] for path in paths}, gains)


def _errors_of_layer(
    weight: PrunableWeight,
    densities: Sequence[float],
    used: Moments,
    held: Moments,
) -> dict[float | str, float]:
    """The relative squared errors of a layer's outputs by density and type of integers."""
    kernel = as_matrices(weight.finite_raw_value(), weight.layout)
    counts = [max(live_count(share, weight.size), 1) for share in densities]
    pattern = Entries(
        floored=depthwise_outputs(weight.shape, weight.layout) > 0
    )
    pruned = errors_of(
        kernel,
        counts,
        pattern,
        used,
        held,
    )
    errors: dict[float | str, float] = dict(zip(densities, pruned, strict=True))
    judge = held if held.rows else used
    for name in _LEVELS:
        errors[name] = relative_error(
            _rounded(kernel, name), kernel, judge.gram
        )
    return errors


def _rounded(
    kernel: np.ndarray,
    integers: str,
) -> np.ndarray:
    """Matrices in integers of a type, with a scale for each output."""
    scale = np.abs(kernel).max(axis=-2, keepdims=True) / _LEVELS[integers]
    steps = np.rint(kernel / np.where(scale > 0, scale, 1.0))
    return steps * scale


def _lost_in_model(
    model: Any,
    weights: Sequence[PrunableWeight],
    stops: Sequence[Any],
    batches: Sequence[Any],
    verbose: int,
) -> dict[str, float]:
    """The relative squared error of the model with each kernel alone in int4, on held-out rows."""
    rows = held_out_batches(batches)
    with from_zero_states(model), without_gradients():
        outputs = [
            keras.tree.flatten(model(batch, training=False)) for batch in rows
        ]
    arrays = [
        to_numpy(tensor).astype(np.float64)
        for tensors in outputs
        for tensor in tensors
    ]
    total = sum(float(np.sum(array**2)) for array in arrays)
    by_path = {weight.path: weight for weight in weights}
    lost: dict[str, float] = {}

    def in_coarse_steps(stop: Any) -> VariableOverrides:
        # An override changes no variable: other threads may use the model.
        weight = by_path[stop.path]
        matrices = as_matrices(weight.finite_raw_value(), weight.layout)
        coarse = from_matrices(
            _rounded(matrices, _COARSE), weight.shape, weight.layout
        )
        return VariableOverrides(
            [(weight.variable, placed(coarse, weight.variable))]
        )

    def compare(
        stop: Any,
        changed: list[np.ndarray],
    ) -> None:
        squares = 0.0
        for array, changed_array in zip(arrays, changed, strict=True):
            squares += float(np.sum((changed_array - array) ** 2))
        lost[stop.path] = squares / total if total > 0 else 0.0

    change_each(
        model,
        rows,
        stops,
        in_coarse_steps,
        compare,
        verbose,
    )
    return lost
