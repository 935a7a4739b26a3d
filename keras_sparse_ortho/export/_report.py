"""`ExportReport` and `RouteOutcome`: the figures of an export and of each of its routes."""

import dataclasses
import io
import json
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from keras_sparse_ortho.export._flatbuffer import WeightZeros
from keras_sparse_ortho.export._process import converter_backend


@dataclasses.dataclass(frozen=True)
class Figures:
    """Figures that are printed as a table, and given to programs as values or JSON."""

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain Python values."""
        return dataclasses.asdict(self)

    def to_json(self, indent: int | None = 2) -> str:
        """The same as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=100).print(self)
        return text.getvalue().rstrip()


@dataclasses.dataclass(frozen=True)
class RouteOutcome:
    """The figures of one route of an export, taken or not.

    Attributes:
        route: Its name, such as "dynamic_int8+1x16".
        batch_size: Rows of one call.
        reason: None if the file verified; otherwise why there is none.
        bytes: Size of the file.
        error: Difference from Keras in the route's measure.
        tolerance: The largest `error` that was allowed.
        max_abs_diff: Largest difference from Keras.
        mean_abs_diff: Mean difference.
        xnnpack: Whether the file verified with XNNPACK, the interpreter's default.
        without_xnnpack: Whether it verified without.
        uses_xnnpack: Whether `load_litert` runs the file with XNNPACK, as its record says: the
            faster of the two settings if both verified and were timed.
        load_bytes: By how much loading the file raised the peak of the process' memory.
        latency_ms: Median time of one call in that setting; None if it was not measured.
        default_ms: The same with XNNPACK, as a default interpreter runs it.
        threads: Threads of the interpreter in that measurement.
        ms_by_threads: Median time of one call in that setting by the number of threads: on
            `threads`, and on one or two for comparison.
        encoded: Tensors that this package encoded sparsely; for `+blocks` the kernels whose blocks
            are gathered.
        kept: Weights that it left dense, each with the reason.
        folded: Paths of kernels with zeros that no tensor of the file holds: the converter has
            combined them with other constants, such as a table of positions with a bias that is
            added to it.
    """

    route: str
    batch_size: int
    reason: str | None = None
    bytes: int | None = None
    error: float | None = None
    tolerance: float | None = None
    max_abs_diff: float | None = None
    mean_abs_diff: float | None = None
    xnnpack: bool = False
    without_xnnpack: bool = False
    uses_xnnpack: bool = True
    load_bytes: int | None = None
    latency_ms: float | None = None
    default_ms: float | None = None
    threads: int = 1
    ms_by_threads: dict[int, float] = dataclasses.field(default_factory=dict)
    encoded: tuple[str, ...] = ()
    kept: dict[str, str] = dataclasses.field(default_factory=dict)
    folded: tuple[str, ...] = ()

    @property
    def verified(self) -> bool:
        """Whether there is a file that runs and agrees with Keras."""
        return self.reason is None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportReport(Figures, RouteOutcome):
    """The figures of one verified LiteRT file: those of its route, and these.

    Print it for a table; `to_dict` and `to_json` give the same for programs.

    Attributes:
        path: Path of the file.
        quantization: As asked for: None, "float16", "dynamic_int8" or "int8".
        gzip_bytes: Its size under gzip, level 6.
        zstd_bytes: Its size under zstandard, level 12; None if `zstandard` is not installed.
        weights: Every weight tensor (rank 2 or more) in the file with its zeros.
        argmax_agreement: Fraction of sample rows whose largest output is the same as Keras', the
            least over the outputs of rank 2 with more than one column; None if there is none.
        measure: Of `error`: "max": max|d| / max(1, max|y|); "rms": sqrt(mean d^2) / sqrt(mean y^2).
        sample_rows: Rows that were compared.
        compared_on: Where these rows come from: `sample`, rows of `representative_data` that were
            held out from calibration, or random ones; it says if they calibrated the file, too.
        versions: Versions of Keras, of what converted and of ai-edge-litert, which ran the file.
        mode: As asked for.
        fallback_reason: Why the route asked for was not taken, or None.
        routes: Every route that was tried, with its figures or the reason it failed.
    """

    bytes: int
    error: float
    tolerance: float
    max_abs_diff: float
    mean_abs_diff: float
    path: str
    quantization: str | None
    gzip_bytes: int
    zstd_bytes: int | None
    weights: tuple[WeightZeros, ...]
    argmax_agreement: float | None
    measure: str
    sample_rows: int
    compared_on: str
    versions: dict[str, str]
    mode: str | None = None
    fallback_reason: str | None = None
    routes: tuple[RouteOutcome, ...] = ()

    @property
    def total_weights(self) -> int:
        """Number of entries of all weight tensors."""
        return sum(weight.size for weight in self.weights)

    @property
    def total_zeros(self) -> int:
        """Number of entries that are exactly zero."""
        return sum(weight.zeros for weight in self.weights)

    @property
    def density(self) -> float:
        """Live fraction of the weights in the file; 1.0 for a file without weights."""
        return 1.0 - self.total_zeros / self.total_weights if self.total_weights else 1.0

    def to_dict(self) -> dict[str, Any]:
        """All figures, totals included, as plain Python values."""
        names = ("total_weights", "total_zeros", "density")
        return super().to_dict() | {name: getattr(self, name) for name in names}

    def __rich__(self) -> Group:
        """Tables: the weights, the totals, and the routes if there were several."""
        title = f"Exported to {self.path}"
        weights = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        longest = max((len(weight.name) for weight in self.weights), default=0)
        # Names are wrapped, not cut: several begin alike.
        weights.add_column("weight", overflow="fold", min_width=min(longest, 16))
        for column in ("shape", "dtype", "encoding"):
            weights.add_column(column, overflow="fold")
        for column in ("entries", "zeros", "density"):
            weights.add_column(column, justify="right", no_wrap=True)
        for one in self.weights:
            shape = " x ".join(map(str, one.shape))
            counts = _counts(one.size, one.zeros, 1 - one.zeros / one.size)
            weights.add_row(one.name, shape, one.dtype, one.encoding, *counts)
        weights.add_section()
        total = _counts(self.total_weights, self.total_zeros, self.density)
        weights.add_row("all", "", "", "", *total)
        figures = Table.grid(padding=(0, 2))
        for label, value in self._figures().items():
            figures.add_row(label, value)
        routes = [_routes_table(self.routes)] if len(self.routes) > 1 else []
        return Group(weights, figures, *routes)

    def _figures(self) -> dict[str, str]:
        zstd = self.zstd_bytes
        figures = {
            "route": self.route + ("" if self.xnnpack else " (without XNNPACK only)"),
            "file": f"{self.bytes:,} bytes",
            "gzip": f"{self.gzip_bytes:,} bytes",
            "zstd": "zstandard is not installed" if zstd is None else f"{zstd:,} bytes",
            "largest difference": f"{self.max_abs_diff:.3g} (mean {self.mean_abs_diff:.3g})",
            "error": f"{self.error:.3g} ({self.measure}, allowed {self.tolerance:g})",
            "compared on": f"{self.sample_rows} rows ({self.compared_on})",
        }
        if self.load_bytes is not None:
            figures["memory at load"] = f"{self.load_bytes:,} bytes more at the peak"
        if self.latency_ms is not None:
            figures["latency"] = f"{_by_threads(self)} a call, batch {self.batch_size}"
        if self.fallback_reason is not None:
            figures["reason of the fallback"] = self.fallback_reason
        if self.folded:
            figures["folded into other constants"] = ", ".join(self.folded)
        if self.argmax_agreement is not None:
            figures["same argmax"] = f"{self.argmax_agreement:.1%} of {self.sample_rows} rows"
        if self.mode is None and self.quantization is None:
            figures["other modes"] = (
                f'"small" rounds to float16 or int8: about {self._rounded_bytes():,} bytes or '
                'fewer; "fast" takes the fastest file'
            )
        return figures

    def _rounded_bytes(self) -> int:
        """About the bytes of this float32 file with float16 values, or with dense int8 ones."""
        rest = self.bytes - sum(one.bytes for one in self.weights)
        float16 = int8 = rest
        for one in self.weights:
            stored = one.size - one.zeros * (one.encoding != "dense")
            # There are no 1x4 blocks of float16.
            float16 += one.bytes - (0 if one.encoding.endswith("1x4") else 2 * stored)
            int8 += one.size if one.size >= 1024 else 4 * one.size
        return min(float16, int8)


def _routes_table(routes: Sequence[RouteOutcome]) -> Group:
    """A table of routes: sizes, latency, memory, differences; under it why a route failed."""
    columns = {
        "kB": [_figure(one.bytes, 1e3) for one in routes],
        **{
            f"ms, {n} thread{'s' * (n > 1)}": [_figure(one.ms_by_threads.get(n)) for one in routes]
            for n in sorted({n for one in routes for n in one.ms_by_threads})
        },
        "load kB": [_figure(one.load_bytes, 1e3) for one in routes],
        "max diff": [f"{d:.1e}" if (d := one.max_abs_diff) is not None else "" for one in routes],
    }
    columns = {title: cells for title, cells in columns.items() if any(cells)}
    # Names are never shortened: those of several routes begin alike.
    table = Table(title="Routes", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("route", no_wrap=True)
    for title in columns:
        table.add_column(title, justify="right", no_wrap=True)
    notes = []
    for k, one in enumerate(routes):
        name = one.route if one.verified else f"{one.route}: no file"
        table.add_row(name, *(cells[k] for cells in columns.values()))
        note = one.reason
        if one.verified and not one.xnnpack:
            note = "runs without XNNPACK only"
        elif not one.uses_xnnpack and one.default_ms is not None:
            note = f"XNNPACK off; with it {one.default_ms:.3g} ms"
        if note is not None:
            notes.append(Text(f"{one.route}: {note}"))
    return Group(table, *notes)


def _by_threads(one: RouteOutcome) -> str:
    """Latencies on some numbers of threads, and which is faster if it is not the one chosen."""
    times = one.ms_by_threads or {one.threads: one.latency_ms or 0.0}
    words = [f"{times[n]:.3g} ms on {n} thread{'s' * (n > 1)}" for n in times]
    fastest = min(times, key=lambda n: times[n])
    faster = "" if fastest == one.threads else f" ({fastest} faster)"
    return " and ".join(words) + faster


def _counts(size: int, zeros: int, density: float) -> tuple[str, str, str]:
    return f"{size:,}", f"{zeros:,}", f"{density:.4f}"


def _figure(value: float | None, unit: float = 1) -> str:
    """At least three digits, never as a power of ten."""
    if value is None:
        return ""
    value /= unit
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def zstd_size(content: bytes) -> int | None:
    """Bytes under zstandard, level 12 (19 saves 7%, takes 13 times as long); None without it."""
    try:
        import zstandard
    except ImportError:
        return None
    return len(zstandard.ZstdCompressor(level=12).compress(content))


def installed_versions() -> dict[str, str]:
    """The versions of the packages that made and ran the file."""
    versions = {}
    makers: tuple[str, ...] = ("jax", "litert-converter", "ai-edge-quantizer")
    if converter_backend() == "tensorflow":
        makers = ("tensorflow",)
    for name in ("keras", *makers, "ai-edge-litert"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # e.g. tensorflow-cpu, a build of another name
            versions[name] = "unknown"
    return versions
