"""Routes from a Keras model to a LiteRT file, which of them a mode tries, and their figures."""

import collections
import dataclasses
import json
from collections.abc import Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final

from keras_sparse_ortho._foreign_names import Answering, for_value
from keras_sparse_ortho._pictures import axes_or_new
from keras_sparse_ortho._text import printable, printable_lines
from keras_sparse_ortho.errors import ExportRouteError
from keras_sparse_ortho.export._process import converter_backend
from keras_sparse_ortho.export._weight_zeros import WeightZeros

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MODES = ("small", "gzip", "fast")

# Largest error that passes by default. Measured: up to 6e-4 for float16, 0.014 for dynamic int8,
# 0.12 for int8; for int4 0.013 if trained, else 0.13 to 0.16, which costs accuracy. Float32 differs
# by the order of summation only.
TOLERANCES = {
    "float32": 1e-5,
    "float16": 5e-3,
    "dynamic_int8": 0.1,
    "int8": 0.25,
    "dynamic_int4": 0.1,
    "int4": 0.1,
}
ENDS = ("float32", "int8", "uint8")  # types of inputs and outputs
RANGES = ("measured", "fitted")  # of activations
TARGETS = {
    "arm64": "times are those of this machine without AMX; arm64 has int8 dot products"
}


@dataclasses.dataclass(frozen=True)
class Route:
    """How a model is stored.

    The encoding is "dense", "sp" (TensorFlow's own), "blocks", or "lstm": LiteRT's fused operator.
    """

    storage: str
    encoding: str = "dense"

    @property
    def name(self) -> str:
        """Such as "dynamic_int8+blocks"."""
        return (
            self.storage
            if self.encoding == "dense"
            else f"{self.storage}+{self.encoding}"
        )

    @property
    def measure(self) -> str:
        """The measure of the error, see `export_litert`: "rms" is steady where int8 clips."""
        return "max" if self.storage == "float32" else "rms"

    @property
    def needs_data(self) -> bool:
        """Whether activations are calibrated."""
        return self.storage in ("int8", "int4")

    @property
    def of_blocks(self) -> bool:
        """Whether the model is converted with its block convolutions."""
        return self.encoding == "blocks"

    @property
    def of_lstms(self) -> bool:
        """Whether LSTMs become the fused operator."""
        return self.encoding == "lstm"

    @property
    def rows_apart(self) -> bool:
        """Whether each row of a batch is quantized by itself."""
        return self.of_blocks and self.storage == "dynamic_int8"


ROUTES: Final[tuple[Route, ...]] = (
    *map(Route, TOLERANCES),
    *(
        Route(storage, "sp") for storage in ("float32", "float16")
    ),  # XNNPACK crashes on others
    *(
        Route(storage, encoding)
        for encoding in ("blocks", "lstm")
        for storage in TOLERANCES
        if "int4" not in storage
    ),
)


def routes_of(mode: str | None, has_data: bool) -> list[Route]:
    """The routes that a mode tries; without data no static integers."""
    has_tensorflow = converter_backend() == "tensorflow"
    available = [
        route for route in ROUTES if has_tensorflow or route.encoding != "sp"
    ]
    by_mode = [
        route
        for route in available
        if not (route.of_lstms and fuses_lstms(Route(route.storage)))
    ]
    if mode in MODES:
        return [route for route in by_mode if has_data or not route.needs_data]
    if mode is None:
        return [
            route
            for route in available
            if route.storage == "float32" and not route.of_lstms
        ]
    by_name = {route.name: route for route in ROUTES}
    if mode not in by_name:
        raise ValueError(
            f"`mode` must be one of {list(MODES)} or the name of a route, one of "
            f"{list(by_name)}.{for_value('mode', mode)} Received: mode={mode!r}"
        )
    route = by_name[mode]
    if route not in available:
        raise ExportRouteError(
            f"Route {mode!r} is one of TensorFlow's converter; use another one, or install "
            'it: pip install "keras-sparse-ortho[litert]". '
            "Received: an environment without TensorFlow"
        )
    return [route]


def fuses_lstms(route: Route) -> bool:
    """Whether a route has the fused operator for LSTMs.

    Without TensorFlow files of dense floats do: the converter has no loops, and the steps one by
    one are slower and several times as large.
    """
    if route.of_lstms:
        return True
    return (
        route.encoding == "dense"
        and route.storage in ("float32", "float16")
        and converter_backend() == "jax"
    )


@dataclasses.dataclass(frozen=True)
class RouteOutcome(Answering):
    """The figures of one route of an export, taken or not.

    Attributes:
        route: str. Its name, such as "dynamic_int8+blocks".
        reason: None if the file verified; otherwise why there is none.
        bytes: int. Size of the file.
        error: float. Difference from Keras in the measure of the route, see `export_litert`.
        tolerance: float. The largest `error` that was allowed.
        max_abs_diff: float. Largest difference from Keras.
        argmax_agreement: float. Fraction of sample rows whose largest output is Keras', the least
            over outputs of rank 2 with more than one column; None if there is none.
        cosine: float. That of Keras' outputs and the file's on all sample rows; of several outputs
            the least.
        latency_ms: float. Median time of one call; None if it was not measured.
        seconds: float. Spent on converting, and comparing.
        kept: dict. For `+blocks` the kernels that stay dense, with the reason; in files with fused
            LSTMs the other ones, which stay loops.
        left_out: int. For `+blocks` the entries of zero blocks, which are not in the file.
        folded: Paths of kernels with zeros that no tensor of the file holds: the converter split
            them, or combined them with other constants.
        in_floats: For `"int8"` and `"int4"`, dense or not: the operations that the file computes in
            floats all the same, such as "MEAN of model/norm/moments", by the converter's names. A
            device without floats cannot run them.
        remedy: str. How a file of static integers was made better with `max_loss`, `ranges`,
            `equalize` or `floats`, such as "fitted ranges, equalized channels".
    """

    route: str
    reason: str | None = None
    bytes: int | None = None
    error: float | None = None
    tolerance: float | None = None
    max_abs_diff: float | None = None
    argmax_agreement: float | None = None
    cosine: float | None = None
    latency_ms: float | None = None
    seconds: float = 0.0
    kept: dict[str, str] = dataclasses.field(default_factory=dict, repr=False)
    left_out: int = 0
    folded: tuple[str, ...] = ()
    in_floats: tuple[str, ...] = ()
    remedy: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class ExportReport(RouteOutcome):
    """The figures of one verified LiteRT file, besides those of its route; print it.

    Attributes:
        path: Path of the file.
        mode: As requested.
        gzip_bytes: int. Its size under gzip, level 6.
        weights: Every weight tensor (rank 2 or more) in the file with its zeros.
        sample_rows: int. Rows that were compared.
        compared_on: str. Their source: `sample`, rows of `representative_data` held out from
            calibration, or random ones; it says if they calibrated the file, too.
        ends: Types of the inputs and outputs.
        assumed: str. How the times of a `target` were estimated; else None.
        versions: dict. Versions of Keras, of the converters and of ai-edge-litert, which ran it.
        routes: Every route that was tried, with its figures or the reason it failed.
    """

    path: str
    mode: str | None
    gzip_bytes: int
    weights: tuple[WeightZeros, ...]
    sample_rows: int
    compared_on: str
    ends: tuple[str, str]
    assumed: str | None
    versions: dict[str, str]
    routes: tuple[RouteOutcome, ...]

    @property
    def total_weights(self) -> int:
        """Entries of all weight tensors, with those of blocks that are left out."""
        return sum(weight.size for weight in self.weights) + self.left_out

    @property
    def total_zeros(self) -> int:
        """Number of these that are exactly zero."""
        return sum(weight.zeros for weight in self.weights) + self.left_out

    @property
    def density(self) -> float:
        """Live fraction of the weights in the file; 1.0 for a file without weights."""
        if not self.total_weights:
            return 1.0
        return 1.0 - self.total_zeros / self.total_weights

    def to_dict(self) -> dict[str, Any]:
        """All figures, totals included, as plain Python values."""
        totals = {
            name: getattr(self, name)
            for name in ("total_weights", "total_zeros", "density")
        }
        return dataclasses.asdict(self) | totals

    def to_json(self, indent: int | None = 2) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Plots bytes and milliseconds of every file of `mode="fast"`.

        Args:
            ax: Matplotlib axes to draw on. Default: those of a new figure.

        Returns:
            The axes.

        Raises ValueError for another mode.
        """
        timed = []
        for outcome in self.routes:
            size = outcome.bytes
            milliseconds = outcome.latency_ms
            if size is not None and milliseconds is not None:
                timed.append((outcome.route, size, milliseconds))
        if not timed:
            raise ValueError(
                f"Only mode='fast' measures time. Received: mode={self.mode!r}"
            )
        axes = axes_or_new(ax)
        for route, size, milliseconds in timed:
            marker = "o" if route == self.route else "."
            axes.plot(size, milliseconds, marker, color="C0")
            axes.annotate(f" {route}", (size, milliseconds), fontsize=7)
        axes.set(
            xscale="log",
            yscale="log",
            xlabel="bytes",
            ylabel="ms a call",
        )
        return axes

    def __repr__(self) -> str:
        return (
            f"ExportReport(path={self.path!r}, route={self.route!r}, bytes={self.bytes}, "
            f"density={self.density:.4g}, error={self.error:.3g}); print it for all figures"
        )

    def __str__(self) -> str:
        lines = [
            f"Exported to {printable(self.path)}",
            *self._lines_of_weights(),
        ]
        for label, value in {
            **self._figures(),
            **self._figures_of_routes(),
        }.items():
            lines.append(f"{label:<21} {value}")
        return "\n".join(lines)

    def _lines_of_weights(self) -> list[str]:
        width = max((len(weight.name) for weight in self.weights), default=0)
        lines = []
        for weight in self.weights:
            shape = " x ".join(map(str, weight.shape))
            kind = f"sparse {weight.dtype}" if weight.sparse else weight.dtype
            live = f"{weight.size - weight.zeros:,} of {weight.size:,} live"
            lines.append(
                f"  {weight.name:{width}}  {shape:>16}  {kind:>14}  {live}"
            )
        return lines

    def _figures(self) -> dict[str, str]:
        """The figures of the file by label."""
        figures = {
            "route": self.route,
            "file": f"{self.bytes:,} bytes, under gzip {self.gzip_bytes:,}",
            "density": f"{self.density:.4f}, {self.total_zeros:,} zeros",
            "error": f"{self.error:.3g} (allowed {self.tolerance:g}), at most "
            f"{self.max_abs_diff:.3g} apart",
            "compared on": f"{self.sample_rows} rows ({self.compared_on})",
        }
        if self.remedy:
            figures["remedies"] = self.remedy
        if self.ends != ("float32", "float32"):
            figures["inputs, outputs"] = ", ".join(self.ends)
        if self.assumed is not None:
            figures["assumed"] = self.assumed
        if self.argmax_agreement is not None:
            figures["same argmax"] = f"{self.argmax_agreement:.1%} of the rows"
        if self.folded:
            figures["split or folded"] = printable(", ".join(self.folded))
        if fuses_lstms(Route(*self.route.split("+"))) and self.kept:
            reasons = [
                f"{path}: {reason}" for path, reason in self.kept.items()
            ]
            figures["not fused"] = printable("; ".join(reasons))
        if self.in_floats:
            figures["in floats"] = counts_by_kind(self.in_floats)
        return figures

    def _figures_of_routes(self) -> dict[str, str]:
        """Bytes and time of each route by label, if there were several or time was measured."""
        if len(self.routes) == 1 and self.latency_ms is None:
            return {}
        figures = {}
        for outcome in self.routes:
            if outcome.bytes is None:
                reason = outcome.reason or ""
                _, _, cause = reason.partition("Received: ValueError: ")
                text = f"no file: {printable_lines(cause or reason)}"
            else:
                text = f"{outcome.bytes:,} bytes"
                if outcome.latency_ms is not None:
                    text += f", {outcome.latency_ms:.3g} ms a call"
                text += f", made in {outcome.seconds:.1f} s"
            label = f"  {outcome.route}"
            if outcome.remedy:
                label += f", {outcome.remedy}:"
            figures[label] = text
        return figures


def counts_by_kind(in_floats: Sequence[str]) -> str:
    """Operations counted by their kind, such as "2 MEAN, 1 SUB"."""
    kinds = collections.Counter(
        operation.partition(" ")[0] for operation in in_floats
    )
    return ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())


def installed_versions() -> dict[str, str]:
    """Versions of the packages that made and ran a file."""
    converters = ["tensorflow"]
    if converter_backend() == "jax":
        converters = ["jax", "litert-converter"]
    versions = {}
    for name in (
        "keras",
        *converters,
        "ai-edge-quantizer",
        "ai-edge-litert",
    ):
        try:
            versions[name] = metadata.version(name)
        # E.g. tensorflow-cpu, a build of another name.
        except metadata.PackageNotFoundError:
            versions[name] = "unknown"
    return versions
