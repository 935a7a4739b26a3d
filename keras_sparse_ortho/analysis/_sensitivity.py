"""`sensitivity`: what each layer of a trained model loses at several densities, and rounded."""

import dataclasses
import io
from collections.abc import Sequence
from typing import Any

import rich.console
import rich.table

from keras_sparse_ortho._checks import check_density
from keras_sparse_ortho.calibration import calibration_batches, error_table
from keras_sparse_ortho.kernels import Selection
from keras_sparse_ortho.pruning import measurable, shows_progress

_INTEGERS = ("int8", "int4")


@dataclasses.dataclass(frozen=True, repr=False)
class Sensitivity:
    """Relative squared errors `errors[path][column]`; a column is a density, `"int8"` or `"int4"`.

    It prints as a table.
    """

    errors: dict[str, dict[float | str, float]]

    def __str__(self) -> str:
        columns = [*next(iter(self.errors.values()))]
        table = rich.table.Table("error of", *map(str, columns), box=None)
        for path, errors in self.errors.items():
            table.add_row(path, *(f"{errors[column]:.2g}" for column in columns))
        stream = io.StringIO()
        rich.console.Console(file=stream, width=120).print(table)
        return stream.getvalue().rstrip()

    __repr__ = __str__

    def plot(self) -> Any:
        """A figure of matplotlib: a line for each kernel, the error over the density."""
        from matplotlib.figure import Figure

        figure = Figure(layout="constrained")
        axes = figure.subplots()
        for path, errors in self.errors.items():
            points = [(x, y) for x, y in errors.items() if not isinstance(x, str)]
            axes.plot(*zip(*points, strict=True), marker="o", label=path)
        axes.set(xscale="log", yscale="log", xlabel="density", ylabel="relative squared error")
        axes.legend()
        return figure


def sensitivity(
    model: Any,
    data: Any,
    *,
    densities: Sequence[float] = (0.5, 0.3, 0.2, 0.1, 0.05),
    include: Selection = None,
    exclude: Selection = None,
) -> Sensitivity:
    """Measures what each layer of a trained model loses when its kernel is pruned or rounded.

    For the kernel `W` and the inputs `X` of its layer in the model as given, the error is
    `|X (V - W)|^2 / |X W|^2` on every fourth row of data. `V` is what `prune(score="obs")` makes of
    the other rows, or `W` in int8 or int4. `budget="error"` measures the same at densities of its
    own. Errors of layers add up roughly; no layer makes up for another here.

    Args:
        model: A built Keras model with dense kernels.
        data: A few hundred rows of inputs, as for `prune`.
        densities: Live fractions in (0, 1].
        include: Which kernels, as for `sparsify`.
        exclude: Which kernels not.

    Returns:
        A `Sensitivity`: prints as a table, `errors` has the figures, `plot()` draws them with
        matplotlib (`pip install keras-sparse-ortho[plot]`). The model stays as it was.

    Raises:
        DensityError: A density outside (0, 1].
        NotPrunableError: A model without kernels that can be measured.

    Warns:
        UserWarning: Kernels that cannot be measured; fewer than 16 different rows.

    Limits: as long as `prune(score="obs")` takes, or less.

    Example:

    >>> import keras, numpy as np
    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, name="a")])
    >>> x = np.random.default_rng(0).normal(size=(64, 8))
    >>> errors = sensitivity(model, x, densities=(0.5, 0.25)).errors["a/kernel"]
    >>> list(errors), errors[0.25] > errors[0.5] > errors["int8"]
    ([0.5, 0.25, 'int8', 'int4'], True)
    """
    shares, batches = [check_density(share) for share in densities], calibration_batches(data)
    weights = measurable(model, batches, include, exclude)
    rows = error_table(model, weights, shares, batches, _INTEGERS, shows_progress())
    return Sensitivity({w.path: row for w, row in zip(weights, rows, strict=True)})
