"""`ExportReport` and `RouteOutcome`: the figures of an export and of each of its routes."""

import dataclasses
import json
from importlib import metadata
from typing import Any

from keras_sparse_ortho.export._flatbuffer import WeightZeros
from keras_sparse_ortho.export._process import converter_backend


@dataclasses.dataclass(frozen=True)
class RouteOutcome:
    """The figures of one route of an export, taken or not.

    Attributes:
        route: Its name, such as "dynamic_int8+blocks".
        reason: None if the file verified; otherwise why there is none.
        bytes: Size of the file.
        error: Difference from Keras in the measure of the route, see `export_litert`.
        tolerance: The largest `error` that was allowed.
        max_abs_diff: Largest difference from Keras.
        xnnpack: Whether the file runs with XNNPACK, the interpreter's default.
        latency_ms: Median time of one call; None if it was not measured.
        kept: For `+blocks` the kernels that stay dense, each with the reason.
        folded: Paths of kernels with zeros that no tensor of the file holds: the converter split
            them, or combined them with other constants, such as a table of positions with a bias.
    """

    route: str
    reason: str | None = None
    bytes: int | None = None
    error: float | None = None
    tolerance: float | None = None
    max_abs_diff: float | None = None
    xnnpack: bool = False
    latency_ms: float | None = None
    kept: dict[str, str] = dataclasses.field(default_factory=dict)
    folded: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class ExportReport:
    """The figures of one verified LiteRT file.

    The attributes of its `RouteOutcome` are attributes of the report, too: `report.bytes`. Print it
    for a table; `to_dict` and `to_json` give the same for programs.

    Attributes:
        outcome: The `RouteOutcome` of the file.
        path: Path of the file.
        mode: As asked for.
        gzip_bytes: Its size under gzip, level 6.
        weights: Every weight tensor (rank 2 or more) in the file with its zeros.
        argmax_agreement: Fraction of sample rows whose largest output is the same as Keras', the
            least over the outputs of rank 2 with more than one column; None if there is none.
        sample_rows: Rows that were compared.
        compared_on: Where these rows come from: `sample`, rows of `representative_data` that were
            held out from calibration, or random ones; it says if they calibrated the file, too.
        versions: Versions of Keras, of what converted and of ai-edge-litert, which ran the file.
        routes: Every route that was tried, with its figures or the reason it failed.
    """

    outcome: RouteOutcome
    path: str
    mode: str | None
    gzip_bytes: int
    weights: tuple[WeightZeros, ...]
    argmax_agreement: float | None
    sample_rows: int
    compared_on: str
    versions: dict[str, str]
    routes: tuple[RouteOutcome, ...]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "outcome":  # not there yet in a copy
            raise AttributeError(name)
        return getattr(self.outcome, name)

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
        totals = {name: getattr(self, name) for name in ("total_weights", "total_zeros", "density")}
        mine = dataclasses.asdict(self)
        return mine.pop("outcome") | mine | totals

    def to_json(self, indent: int | None = 2) -> str:
        """The same as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        width = max((len(weight.name) for weight in self.weights), default=0)
        lines = [f"Exported to {self.path}"]
        for one in self.weights:
            shape, kind = " x ".join(map(str, one.shape)), "sparse " * one.sparse + one.dtype
            live = f"{one.size - one.zeros:,} of {one.size:,} live"
            lines.append(f"  {one.name:{width}}  {shape:>16}  {kind:>14}  {live}")
        figures = {
            "route": self.route + ("" if self.xnnpack else " (without XNNPACK only)"),
            "file": f"{self.bytes:,} bytes, under gzip {self.gzip_bytes:,}",
            "density": f"{self.density:.4f}, {self.total_zeros:,} zeros",
            "error": f"{self.error:.3g} (allowed {self.tolerance:g}), at most "
            f"{self.max_abs_diff:.3g} apart",
            "compared on": f"{self.sample_rows} rows ({self.compared_on})",
        }
        if self.argmax_agreement is not None:
            figures["same argmax"] = f"{self.argmax_agreement:.1%} of the rows"
        if self.folded:
            figures["split or folded"] = ", ".join(self.folded)
        if len(self.routes) > 1 or self.latency_ms is not None:
            for each in self.routes:
                ms = "" if each.latency_ms is None else f", {each.latency_ms:.3g} ms a call"
                size = "no file: " if each.bytes is None else f"{each.bytes:,} bytes"
                figures[f"  {each.route}"] = f"{size}{ms}{each.reason or ''}"
        return "\n".join([*lines, *(f"{label:<22}{value}" for label, value in figures.items())])


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
