"""`SparsityReport`: the figures of a model, as a table, a dict and a CSV file."""

import csv
import dataclasses
import io
import pathlib
from collections.abc import Callable
from typing import Any

import rich.box
import rich.console
import rich.measure
import rich.table

from keras_sparse_ortho._files import written_aside


@dataclasses.dataclass(frozen=True)
class Row:
    """The figures of one kernel."""

    path: str
    shape: tuple[int, ...]
    size: int
    live: int
    flops: int | None
    sparse_flops: int | None
    orthogonality_error: float | None
    dead_outputs: int = 0
    gain: float | None = None
    taps: str | None = None

    @property
    def density(self) -> float:
        """Live fraction."""
        return self.live / self.size


@dataclasses.dataclass(frozen=True)
class SparsityReport:
    """What `keras_sparse_ortho.report` returns.

    Args:
        rows: One `Row` for each kernel.
        name: Name of the model.
    """

    rows: tuple[Row, ...]
    name: str = ""

    @property
    def size(self) -> int:
        """Entries of all kernels."""
        return sum(row.size for row in self.rows)

    @property
    def live(self) -> int:
        """Live entries of all kernels."""
        return sum(row.live for row in self.rows)

    @property
    def density(self) -> float:
        """Live fraction over all kernels."""
        return self.live / self.size if self.rows else 1.0

    @property
    def flops(self) -> int | None:
        """Multiply-adds of the dense kernels for one sample; `None` if not known for all."""
        return _sum([row.flops for row in self.rows])

    @property
    def sparse_flops(self) -> int | None:
        """Multiply-adds of the live entries for one sample; `None` if not known for all."""
        return _sum([row.sparse_flops for row in self.rows])

    def to_dict(self) -> dict[str, Any]:
        """All figures as JSON values."""
        return {
            "name": self.name,
            "size": self.size,
            "live": self.live,
            "density": self.density,
            "flops": self.flops,
            "sparse_flops": self.sparse_flops,
            "weights": [
                {**dataclasses.asdict(row), "shape": list(row.shape), "density": row.density}
                for row in self.rows
            ],
        }

    def to_csv(self, path: str | pathlib.Path) -> None:
        """Writes one line for each kernel."""
        rows = self.to_dict()["weights"]
        with written_aside(path) as stream:
            writer = csv.DictWriter(stream, [*(f.name for f in dataclasses.fields(Row)), "density"])
            writer.writeheader()
            writer.writerows({**row, "shape": "x".join(map(str, row["shape"]))} for row in rows)

    def __rich_console__(
        self, console: rich.console.Console, options: rich.console.ConsoleOptions
    ) -> rich.console.RenderResult:
        """The table; where it would not fit, with shorter numbers and less between them."""
        without_limit = options.update(max_width=1000)
        ways = ((_in_full, 24, 1), (_in_short, 24, 1), (_in_short, 11, 0))
        for number, name_width, space in ways:
            table = self._table(number, name_width, space)
            needed = rich.measure.Measurement.get(console, without_limit, table).minimum
            if needed <= options.max_width:
                break
        yield table

    def _table(
        self, number: Callable[[int | None], str], name_width: int, space: int
    ) -> rich.table.Table:
        table = rich.table.Table(
            padding=(0, space),
            title=f"Kernels of '{self.name}'",
            title_justify="left",
            box=rich.box.SIMPLE_HEAD,
            collapse_padding=True,
            pad_edge=False,
            show_edge=False,
        )
        # Without a least width, a terminal of 80 columns would leave no room for the names.
        longest = max([len(row.path) for row in self.rows], default=0)
        table.add_column("weight", overflow="fold", min_width=min(max(longest, 11), name_width))
        told = {title: cells for title, cells in self._columns().items() if any(cells)}
        titles = ["shape", "size", "live", "density", "FLOPs", "sparse\nFLOPs", *told]
        for title in titles:
            table.add_column(title, justify="right", no_wrap=True)
        for k, row in enumerate(self.rows):
            table.add_row(
                row.path,
                "x".join(map(str, row.shape)),
                number(row.size),
                number(row.live),
                f"{row.density:.4f}",
                number(row.flops),
                number(row.sparse_flops),
                *(cells[k] for cells in told.values()),
            )
        table.add_section()
        table.add_row(
            "all kernels",
            "",
            number(self.size),
            number(self.live),
            f"{self.density:.4f}",
            number(self.flops),
            number(self.sparse_flops),
        )
        return table

    def _columns(self) -> dict[str, list[str]]:
        """Columns by title that are shown only if they tell something: all empty, if not."""
        errors = [row.orthogonality_error for row in self.rows]
        gains = [row.gain for row in self.rows]
        taps = [row.taps or "" for row in self.rows]
        chosen = {gain for gain in gains if gain is not None} - {1.0}
        return {
            "|G - I|": ["" if error is None else f"{error:.1e}" for error in errors],
            "dead\noutputs": [str(row.dead_outputs or "") for row in self.rows],
            "gain": [f"{gain:.4g}" if chosen and gain is not None else "" for gain in gains],
            "taps": taps if set(taps) - {"", "center"} else ["" for _ in taps],
        }

    def __str__(self) -> str:
        stream = io.StringIO()
        rich.console.Console(file=stream, width=120).print(self)
        return stream.getvalue().rstrip()


def _sum(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _in_full(value: int | None) -> str:
    return "not known" if value is None else f"{value:,}"


def _in_short(value: int | None) -> str:
    """Three digits: `"235k"`."""
    if value is None:
        return "?"
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if value >= 0.9995 * size:
            return f"{float(f'{value / size:.3g}'):g}{unit}"
    return str(value)
