"""`plot_history`: densities and thresholds of every layer over the epochs."""

import csv
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

_QUANTITIES = ("density", "threshold")


def plot_history(history: Any, prefix: str = "", target: float | None = None) -> Any:
    """Plots the densities, and the learnt thresholds, of all kernels over the epochs.

    Args:
        history: The logs of `callbacks.DensityLogger(per_layer=True)`: the `History` returned by
            `fit`, its dict, or the path of a file written by `keras.callbacks.CSVLogger`.
        prefix: The prefix of the logger.
        target: The requested density, drawn as a dashed line, or `None`.

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
        from matplotlib.ticker import LogLocator, MaxNLocator, StrMethodFormatter
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
    axes = figure.subplots(1, len(shown), sharex=True, squeeze=False)[0]
    for axis, name in zip(axes, shown, strict=True):
        start = f"{prefix}{name}/"
        for key, values in series.items():
            # 0 marks what has ended, such as the threshold of frozen weights: the line stops there.
            drawn = [value if value > 0 else math.nan for value in values]
            style: dict[str, Any] = {"marker": "o", "markersize": 3} if len(values) < 40 else {}
            if key == f"{prefix}{name}":
                style |= {"color": "black", "label": "all kernels", "zorder": 3}
            elif key.startswith(start):
                style |= {"label": key.removeprefix(start)}
            else:
                continue
            axis.plot(range(1, len(values) + 1), drawn, **style)
        if name == "density" and target is not None:
            axis.axhline(target, color="black", linestyle="--", linewidth=1, label="asked for")
        axis.set(xlabel="epoch", ylabel=name, yscale="log")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.minorticks_off()
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(fontsize="small", frameon=False)
    return figure


def _series(history: Any) -> Mapping[str, Sequence[float]]:
    if isinstance(history, str | os.PathLike):
        with pathlib.Path(history).open(newline="", encoding="utf-8") as stream:
            rows = list(csv.DictReader(stream))
        # CSVLogger writes NA where there is no value, e.g. for validation metrics.
        return {
            key: [math.nan if row[key] == "NA" else float(row[key]) for row in rows]
            for key in (rows[0] if rows else {})
        }
    table: Mapping[str, Sequence[float]] = getattr(history, "history", history)
    return table
