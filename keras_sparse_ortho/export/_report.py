"""What an export gave, in figures."""

import dataclasses
import io
import json
from typing import Any

from rich.console import Console, Group
from rich.table import Table

from keras_sparse_ortho.export._weights import WeightZeros


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

    def __rich__(self) -> Group:
        """Two tables: the weights, and the totals."""
        weights = Table("weight", "shape", "dtype", title=f"Exported to {self.path}")
        for column in ("entries", "zeros", "density"):
            weights.add_column(column, justify="right")
        for weight in self.weights:
            weights.add_row(
                weight.name,
                " x ".join(map(str, weight.shape)),
                weight.dtype,
                f"{weight.size:,}",
                f"{weight.zeros:,}",
                f"{1 - weight.zeros / weight.size:.4f}",
            )
        weights.add_section()
        weights.add_row(
            "all", "", "", f"{self.total_weights:,}", f"{self.total_zeros:,}", f"{self.density:.4f}"
        )
        facts = Table.grid(padding=(0, 2))
        for label, value in self._facts().items():
            facts.add_row(label, value)
        return Group(weights, facts)

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=100).print(self)
        return text.getvalue().rstrip()

    def _facts(self) -> dict[str, str]:
        zstd = "zstandard is not installed"
        if self.zstd_bytes is not None:
            zstd = f"{self.zstd_bytes:,} bytes"
        facts = {
            "quantization": str(self.quantization),
            "file": f"{self.bytes:,} bytes",
            "gzip": f"{self.gzip_bytes:,} bytes",
            "zstd": zstd,
            "largest difference": f"{self.max_abs_diff:.3g} (mean {self.mean_abs_diff:.3g})",
            "error": f"{self.error:.3g} ({self.measure}, allowed {self.tolerance:g})",
        }
        if self.argmax_agreement is not None:
            facts["same argmax"] = f"{self.argmax_agreement:.1%} of {self.sample_rows} rows"
        return facts
