"""`plot_history`: densities and thresholds of every layer over time."""

import csv
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

_QUANTITIES = ("density", "threshold")


def plot_history(history: Any, prefix: str = "") -> Any:
    """Draws densities, and learnt thresholds, of all kernels over the epochs.

    Args:
        history: What `callbacks.DensityLogger(per_layer=True)` has logged: the `History` that
            `fit` returns, its dict, or the path of a file of `keras.callbacks.CSVLogger`.
        prefix: The prefix that the logger was given.

    Returns:
        A Matplotlib figure, with one axis for densities and one for thresholds, if there are any;
        save it with `savefig`.

    Raises:
        ImportError: Matplotlib is missing; it comes with the extra `plot`.
        ValueError: A history without densities.

    Example:

    >>> figure = plot_history({"density": [1.0, 0.5, 0.1], "density/head/kernel": [1.0, 0.7, 0.4]})
    >>> [line.get_label() for line in figure.axes[0].lines]
    ['all kernels', 'head/kernel']
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "Plots need Matplotlib: install the extra `keras-sparse-ortho[plot]`. "
            f"Received: {error}"
        ) from error
    series = _series(history)
    shown = [name for name in _QUANTITIES if f"{prefix}{name}" in series]
    if "density" not in shown:
        raise ValueError(
            f"The history must hold what callbacks.DensityLogger logs. Received: {sorted(series)}"
        )
    figure = Figure(figsize=(6.4 * len(shown), 4.8), layout="constrained")
    for number, name in enumerate(shown, 1):
        axis = figure.add_subplot(1, len(shown), number)
        start = f"{prefix}{name}/"
        for key, values in series.items():
            if key == f"{prefix}{name}":
                axis.plot(range(1, len(values) + 1), values, "k", label="all kernels")
            elif key.startswith(start):
                axis.plot(range(1, len(values) + 1), values, label=key.removeprefix(start))
        axis.set(xlabel="epoch", ylabel=name, yscale="log")
        axis.legend(fontsize="small")
    return figure


def _series(history: Any) -> Mapping[str, Sequence[float]]:
    if isinstance(history, str | os.PathLike):
        with pathlib.Path(history).open(newline="", encoding="utf-8") as stream:
            rows = list(csv.DictReader(stream))
        # CSVLogger writes NA where there is no value, as for metrics of validation.
        return {
            key: [math.nan if row[key] == "NA" else float(row[key]) for row in rows]
            for key in (rows[0] if rows else {})
        }
    table: Mapping[str, Sequence[float]] = getattr(history, "history", history)
    return table
