"""`RouteOutcome`: what became of one route, and routes side by side in a table and a picture."""

import dataclasses
import os
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

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
        folded: Paths of kernels with zeros that no tensor of the file holds: the converter has
            computed them together with other constants, such as a table of positions with a bias
            that is added to it.
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
    folded: tuple[str, ...] = ()

    @property
    def verified(self) -> bool:
        """Whether there is a file that runs and agrees with Keras."""
        return self.reason is None


def routes_table(routes: Sequence[RouteOutcome]) -> Group:
    """A table of routes: sizes, latency, memory, differences; under it why a route failed."""
    columns = {
        "kB": [_cell(one.bytes, 1e3) for one in routes],
        "zstd kB": [_cell(one.zstd_bytes, 1e3) for one in routes],
        "ms": [_cell(one.latency_ms) for one in routes],
        "load kB": [_cell(one.load_bytes, 1e3) for one in routes],
        "max diff": [f"{d:.1e}" if (d := one.max_abs_diff) is not None else "" for one in routes],
    }
    columns = {title: cells for title, cells in columns.items() if any(cells)}
    # Names are never shortened: those of several routes begin alike.
    table = Table(title="Routes", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("route", no_wrap=True)
    for title in columns:
        table.add_column(title, justify="right", no_wrap=True)
    for k, one in enumerate(routes):
        name = one.route if one.verified else f"{one.route}: no file"
        table.add_row(name, *(cells[k] for cells in columns.values()))
    notes = [Text(f"{one.route}: {note}") for one in routes if (note := _note(one))]
    return Group(table, *notes)


def _cell(value: float | None, unit: float = 1) -> str:
    return "" if value is None else _figure(value / unit)


def _note(one: RouteOutcome) -> str:
    if one.reason is not None:
        return one.reason
    if not one.xnnpack:
        return "runs without XNNPACK only"
    if not one.uses_xnnpack and one.default_ms is not None:
        return f"XNNPACK off; with it {one.default_ms:.3g} ms"
    return ""


def plot_routes(
    routes: Sequence[RouteOutcome], path: str | os.PathLike[str], taken: str | None = None
) -> None:
    """Draw the size, and the latency where it was measured, of every verified route.

    Args:
        routes: What was tried; the smallest file comes first, failed routes last.
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
    good.sort(key=lambda one: one.bytes or 0)
    shown = [*good, *(one for one in routes if not one.verified)]
    names = [one.route for one in shown]
    colors = [_TAKEN if name == taken else _BAR for name in names]
    panels = [("file [kB]", [(one.bytes or 0) / 1e3 for one in shown])]
    if all(one.latency_ms is not None for one in good):
        threads = f"{good[0].threads} thread{'s' if good[0].threads > 1 else ''}"
        label = f"latency [ms], batch {good[0].batch_size}, {threads}"
        panels.append((label, [one.latency_ms or 0.0 for one in shown]))
    figure = Figure(figsize=(5.2 * len(panels), 0.9 + 0.34 * len(shown)), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (label, values) in zip(axes, panels, strict=True):
        bars = axis.barh(names, values, color=colors)
        texts = [
            _figure(value) if one.verified else "no file"
            for one, value in zip(shown, values, strict=True)
        ]
        axis.bar_label(bars, texts, padding=3, fontsize=8)
        axis.set_xlabel(label)
        axis.margins(x=0.18)
        axis.xaxis.set_major_formatter("{x:,g}")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    figure.savefig(path, dpi=150)


def _figure(value: float) -> str:
    """Three digits and more, never as a power of ten."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
