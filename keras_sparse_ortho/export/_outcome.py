"""`RouteOutcome`: what became of one route, and routes side by side in a table and a picture."""

import dataclasses
import os
from collections.abc import Sequence

from rich.table import Table

_BAR, _TAKEN = "#8a8f98", "#d1495b"


@dataclasses.dataclass(frozen=True)
class RouteOutcome:
    """The figures of one route of an export, taken or not.

    Attributes:
        route: Its name, such as "dynamic_int8+1x16".
        reason: None if the file verified; otherwise why there is none.
        bytes: Size of the file.
        gzip_bytes: Its size under gzip, level 6; None where it was not asked for.
        zstd_bytes: Its size under zstandard, level 12; likewise.
        error: Difference from Keras in the route's measure.
        max_abs_diff: Largest difference from Keras.
        mean_abs_diff: Mean difference.
        xnnpack: Whether the file verified with XNNPACK, the interpreter's default.
        without_xnnpack: Whether it verified without.
        load_bytes: By how much loading the file raised the peak of the process' memory.
        uses_xnnpack: Whether `load_litert` runs the file with XNNPACK, as its record says: the
            faster of the two where both verified and were timed.
        latency_ms: Median time of one call so; None where it was not measured.
        default_ms: The same with XNNPACK, as a default interpreter runs it.
        threads: Threads of the interpreter in that measurement.
        batch_size: Rows of one call.
        encoded: Tensors that this package encoded sparsely.
        kept: Weights of Dense layers that it left dense, each with the reason.
    """

    route: str
    batch_size: int
    reason: str | None = None
    bytes: int | None = None
    gzip_bytes: int | None = None
    zstd_bytes: int | None = None
    error: float | None = None
    max_abs_diff: float | None = None
    mean_abs_diff: float | None = None
    xnnpack: bool = False
    without_xnnpack: bool = False
    uses_xnnpack: bool = True
    load_bytes: int | None = None
    latency_ms: float | None = None
    default_ms: float | None = None
    threads: int = 1
    encoded: tuple[str, ...] = ()
    kept: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def verified(self) -> bool:
        """Whether there is a file that runs and agrees with Keras."""
        return self.reason is None


def routes_table(routes: Sequence[RouteOutcome]) -> Table:
    """A table of routes: sizes, latency, memory, differences, or the reason of a failure."""
    table = Table("route", title="Routes")
    for column in ("bytes", "zstd", "ms", "load bytes", "max diff"):
        table.add_column(column, justify="right")
    table.add_column("note")
    for one in routes:
        note = one.reason or ("" if one.xnnpack else "runs without XNNPACK only")
        if one.verified and one.xnnpack and not one.uses_xnnpack and one.default_ms is not None:
            note = f"XNNPACK off; with it {one.default_ms:.3g} ms"
        table.add_row(
            one.route,
            "" if one.bytes is None else f"{one.bytes:,}",
            "" if one.zstd_bytes is None else f"{one.zstd_bytes:,}",
            "" if one.latency_ms is None else f"{one.latency_ms:.3g}",
            "" if one.load_bytes is None else f"{one.load_bytes:,}",
            "" if one.max_abs_diff is None else f"{one.max_abs_diff:.2g}",
            note,
        )
    return table


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
