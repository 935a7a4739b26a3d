"""What an export gave, in figures."""

import dataclasses
import gzip
import io
import json
import os
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table

from keras_sparse_ortho.export._arguments import Task
from keras_sparse_ortho.export._candidates import Candidate
from keras_sparse_ortho.export._litert_file import WeightZeros, read_weights
from keras_sparse_ortho.export._outcome import RouteOutcome, plot_routes, routes_table
from keras_sparse_ortho.export._sidecar import sidecar_path


@dataclasses.dataclass(frozen=True)
class ExportReport:
    """The figures of one verified LiteRT file.

    Print it for a table; `to_dict` and `to_json` give the same for programs.

    Attributes:
        path: Where the file stands.
        quantization: As asked for: None, "float16", "dynamic_int8" or "int8".
        batch_size: Rows that one call of the file takes.
        bytes: Size of the file.
        gzip_bytes: Its size under gzip, level 6.
        zstd_bytes: Its size under zstandard, level 12; None if `zstandard` is not installed.
        weights: Every weight tensor (rank 2 or more) in the file with its zeros.
        max_abs_diff: Largest difference of an output from Keras', in units of the output.
        mean_abs_diff: Mean difference.
        argmax_agreement: Fraction of sample rows whose largest output is the same as Keras', the
            least over the outputs of rank 2 with more than one column; None if there is none.
        error: The difference in the measure that was checked, see `measure`.
        tolerance: The largest `error` that was allowed.
        measure: "max": max|d| / max(1, max|y|); "rms": sqrt(mean d^2) / sqrt(mean y^2).
        sample_rows: Rows that were compared.
        versions: Versions of Keras, TensorFlow and ai-edge-litert.
        route: Name of the route that was taken, such as "dynamic_int8+1x16".
        mode: As asked for.
        xnnpack: Whether the file runs with XNNPACK, as a default interpreter would run it.
        uses_xnnpack: Whether `load_litert` runs it with XNNPACK, as its record says: the faster
            of the two where both verified and were timed.
        load_bytes: By how much loading the file raised the peak of the process' memory.
        sidecar: Path of the compressed file beside it, or None.
        fallback_reason: Why the route asked for was not taken, or None.
        folded: Paths of kernels whose zeros are not in the file, as no tensor holds the kernel:
            the converter has computed it together with other constants.
        routes: Every route that was tried, with its figures or the reason it failed.
    """

    path: str
    quantization: str | None
    batch_size: int
    bytes: int
    gzip_bytes: int
    zstd_bytes: int | None
    weights: tuple[WeightZeros, ...]
    max_abs_diff: float
    mean_abs_diff: float
    argmax_agreement: float | None
    error: float
    tolerance: float
    measure: str
    sample_rows: int
    versions: dict[str, str]
    route: str = "float32"
    mode: str | None = None
    xnnpack: bool = True
    uses_xnnpack: bool = True
    load_bytes: int | None = None
    sidecar: str | None = None
    fallback_reason: str | None = None
    folded: tuple[str, ...] = ()
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
        totals = {
            "total_weights": self.total_weights,
            "total_zeros": self.total_zeros,
            "density": self.density,
        }
        return dataclasses.asdict(self) | totals

    def to_json(self, indent: int | None = 2) -> str:
        """The same as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the size, and the latency where measured, of every verified route.

        Args:
            path: Of the picture to write, `.png`, `.svg` or `.pdf`. Needs matplotlib.
        """
        plot_routes(self.routes, path, taken=self.route)

    def __rich__(self) -> Group:
        """Tables: the weights, the totals, and the routes if there were several."""
        title = f"Exported to {self.path}"
        weights = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        longest = max((len(weight.name) for weight in self.weights), default=0)
        # Names are broken, not cut: several begin alike.
        weights.add_column("weight", overflow="fold", min_width=min(longest, 16))
        for column in ("shape", "dtype", "encoding"):
            weights.add_column(column, overflow="fold")
        for column in ("entries", "zeros", "density"):
            weights.add_column(column, justify="right", no_wrap=True)
        for weight in self.weights:
            weights.add_row(
                weight.name,
                " x ".join(map(str, weight.shape)),
                weight.dtype,
                weight.encoding,
                f"{weight.size:,}",
                f"{weight.zeros:,}",
                f"{1 - weight.zeros / weight.size:.4f}",
            )
        weights.add_section()
        weights.add_row(
            "all",
            "",
            "",
            "",
            f"{self.total_weights:,}",
            f"{self.total_zeros:,}",
            f"{self.density:.4f}",
        )
        facts = Table.grid(padding=(0, 2))
        for label, value in self._facts().items():
            facts.add_row(label, value)
        return Group(weights, facts, *([routes_table(self.routes)] if len(self.routes) > 1 else []))

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=100).print(self)
        return text.getvalue().rstrip()

    def _facts(self) -> dict[str, str]:
        zstd = "zstandard is not installed"
        if self.zstd_bytes is not None:
            zstd = f"{self.zstd_bytes:,} bytes"
        facts = {
            "route": self.route + ("" if self.xnnpack else " (without XNNPACK only)"),
            "file": f"{self.bytes:,} bytes",
            "gzip": f"{self.gzip_bytes:,} bytes",
            "zstd": zstd,
            "largest difference": f"{self.max_abs_diff:.3g} (mean {self.mean_abs_diff:.3g})",
            "error": f"{self.error:.3g} ({self.measure}, allowed {self.tolerance:g})",
        }
        if self.load_bytes is not None:
            facts["memory at load"] = f"{self.load_bytes:,} bytes more at the peak"
        for outcome in self.routes:
            if outcome.route == self.route and outcome.latency_ms is not None:
                facts["latency"] = (
                    f"{outcome.latency_ms:.3g} ms a call, batch {outcome.batch_size}, "
                    f"{outcome.threads} thread{'s' if outcome.threads > 1 else ''}"
                )
        if self.fallback_reason is not None:
            facts["fell back, because"] = self.fallback_reason
        if self.folded:
            facts["folded into other constants"] = ", ".join(self.folded)
        if self.argmax_agreement is not None:
            facts["same argmax"] = f"{self.argmax_agreement:.1%} of {self.sample_rows} rows"
        return facts


def report_on(
    taken: Candidate,
    outcomes: Sequence[RouteOutcome],
    task: Task,
    target: Path,
    sidecar: str | None = None,
    mode: str | None = None,
    fallback_reason: str | None = None,
) -> ExportReport:
    """Measure the sizes of a verified file and put all figures together.

    Args:
        taken: A candidate with a file.
        outcomes: Of every route that was tried.
        task: What the routes share.
        target: Where the file will stand.
        sidecar: Compression of the file beside it, or None.
        mode: As asked for.
        fallback_reason: Why another route was taken than asked for, or None.
    """
    if taken.file is None or taken.comparison is None:
        raise ValueError(f"Only a verified file has a report. Received: {taken.outcome.reason}")
    content = taken.file.read_bytes()
    result = taken.comparison
    return ExportReport(
        path=str(target),
        quantization=taken.route.quantization,
        batch_size=task.signature.batch_size,
        bytes=len(content),
        gzip_bytes=gzip_size(content),
        zstd_bytes=zstd_size(content),
        weights=read_weights(content),
        max_abs_diff=result.max_abs_diff,
        mean_abs_diff=result.mean_abs_diff,
        argmax_agreement=result.argmax_agreement,
        error=result.error,
        tolerance=task.allowed(taken.route),
        measure=taken.route.measure,
        sample_rows=len(task.sample[0]),
        versions=_versions(),
        route=taken.route.name,
        mode=mode,
        xnnpack=taken.outcome.xnnpack,
        uses_xnnpack=taken.outcome.uses_xnnpack,
        load_bytes=taken.outcome.load_bytes,
        sidecar=None if sidecar is None else str(sidecar_path(target, sidecar)),
        fallback_reason=fallback_reason,
        folded=taken.outcome.folded,
        routes=tuple(outcomes),
    )


def gzip_size(content: bytes) -> int:
    """Bytes under gzip, level 6.

    On 38 MB at density 0.1, level 9 saves 2% and takes 9 times as long.
    """
    return len(gzip.compress(content, compresslevel=6))


def zstd_size(content: bytes) -> int | None:
    """Bytes under zstandard, level 12; None if the package `zstandard` is missing.

    On 38 MB at density 0.1, level 19 saves 7% and takes 13 times as long.
    """
    try:
        import zstandard
    except ImportError:
        return None
    return len(zstandard.ZstdCompressor(level=12).compress(content))


def _versions() -> dict[str, str]:
    """The versions of the packages that made and ran the file."""
    versions = {}
    for name in ("keras", "tensorflow", "ai-edge-litert"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # e.g. tensorflow-cpu, a build of another name
            versions[name] = "unknown"
    return versions
