"""A picture of routes side by side."""

import os
from collections.abc import Sequence

from keras_sparse_ortho.export._outcome import RouteOutcome

_BAR, _TAKEN = "#8a8f98", "#d1495b"


def plot_routes(
    routes: Sequence[RouteOutcome], path: str | os.PathLike[str], taken: str | None = None
) -> None:
    """Draw the size, and the latency where it was measured, of every verified route.

    Args:
        routes: What was tried; failed routes are left out.
        path: Of the picture to write.
        taken: Name of the route to set off in colour, or None.

    Raises:
        ImportError: if matplotlib is missing.
        ValueError: if no route verified.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            'A picture needs matplotlib: pip install "keras-sparse-ortho[plot]". '
            "Received: no module named 'matplotlib'",
            name="matplotlib",
        ) from error
    good = [one for one in routes if one.verified]
    if not good:
        raise ValueError(f"At least one route must have verified. Received: {len(routes)} failed")
    names = [one.route for one in good]
    colors = [_TAKEN if name == taken else _BAR for name in names]
    panels = [("file [kB]", [(one.bytes or 0) / 1e3 for one in good])]
    if all(one.latency_ms is not None for one in good):
        label = f"latency [ms], batch {good[0].batch_size}, {good[0].threads} thread(s)"
        panels.append((label, [one.latency_ms or 0.0 for one in good]))
    figure = Figure(figsize=(5.2 * len(panels), 0.9 + 0.34 * len(good)), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (label, values) in zip(axes, panels, strict=True):
        bars = axis.barh(names, values, color=colors)
        axis.bar_label(bars, fmt="%.3g", padding=3, fontsize=8)
        axis.set_xlabel(label)
        axis.margins(x=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    figure.savefig(path, dpi=150)
