"""`SparsityReport`: the figures of a model, as a table, a dict and a CSV file."""

import csv
import dataclasses
import io
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import rich.box
import rich.console
import rich.measure
import rich.table

from keras_sparse_ortho._files import atomic_write


@dataclasses.dataclass(frozen=True)
class Row:
    """The figures of one kernel.

    `state` is `"sparse"` for a kernel with a mask or with zeros, and says why another is dense:
    `"no mask"` (it was excluded, or never asked for), or `"not registered"`, where the
    meaning of the axes is unknown (`initializers.kernel_layouts`).
    """

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
    state: str = "sparse"

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
        unregistered: One `Row` for each matrix that is no kernel for all that is known.
    """

    rows: tuple[Row, ...]
    name: str = ""
    unregistered: tuple[Row, ...] = ()

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
        return _density(self.rows)

    @property
    def sparse_density(self) -> float:
        """Live fraction over the kernels that are not dense, 1 if all are."""
        return _density(self._sparse)

    @property
    def whole_density(self) -> float:
        """Live fraction over all matrices of the model, those that are not registered included."""
        return _density(self._everything)

    @property
    def dense(self) -> dict[str, str]:
        """Why matrices are dense, by path; see `Row`."""
        return {row.path: row.state for row in self._everything if row.state != "sparse"}

    @property
    def _everything(self) -> tuple[Row, ...]:
        return *self.rows, *self.unregistered

    @property
    def _sparse(self) -> list[Row]:
        return [row for row in self.rows if row.state == "sparse"]

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
            "sparse_density": self.sparse_density,
            "whole_density": self.whole_density,
            "flops": self.flops,
            "sparse_flops": self.sparse_flops,
            "weights": [_figures(row) for row in self.rows],
            "unregistered": [_figures(row) for row in self.unregistered],
        }

    def to_csv(self, path: str | pathlib.Path) -> None:
        """Writes one line for each kernel, and then for each matrix that is not registered."""
        figures = self.to_dict()
        rows = [*figures["weights"], *figures["unregistered"]]
        with atomic_write(path) as stream:
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
        longest = max([len(row.path) for row in self._everything], default=0)
        table.add_column("weight", overflow="fold", min_width=min(max(longest, 11), name_width))
        told = {title: cells for title, cells in self._columns().items() if any(cells)}
        titles = ["shape", "size", "live", "density", "FLOPs", "sparse\nFLOPs", *told]
        for title in titles:
            table.add_column(title, justify="right", no_wrap=True)
        for k, row in enumerate(self._everything):
            flops = (number(row.flops), number(row.sparse_flops))
            cells = [column[k] for column in told.values()]
            shape = "x".join(map(str, row.shape))
            table.add_row(row.path, shape, *_totals([row], number), *flops, *cells)
        table.add_section()
        if self.dense and self.sparse_density < 1:
            table.add_row("sparse kernels", "", *_totals(self._sparse, number))
        flops = (number(self.flops), number(self.sparse_flops))
        table.add_row("all kernels", "", *_totals(self.rows, number), *flops)
        if self.unregistered:
            table.add_row("whole model", "", *_totals(self._everything, number))
        return table

    def _columns(self) -> dict[str, list[str]]:
        """Columns by title that are shown only if they tell something: all empty, if not."""
        rows = self._everything
        errors = [row.orthogonality_error for row in rows]
        gains = [row.gain for row in rows]
        taps = [row.taps or "" for row in rows]
        some_are_sparse = bool(self._sparse)
        chosen = {gain for gain in gains if gain is not None} - {1.0}
        return {
            "|G - I|": ["" if error is None else f"{error:.1e}" for error in errors],
            "dead\noutputs": [str(row.dead_outputs or "") for row in rows],
            "gain": [f"{gain:.4g}" if chosen and gain is not None else "" for gain in gains],
            "taps": taps if set(taps) - {"", "center"} else ["" for _ in taps],
            "why\ndense": [
                row.state if row.state != "sparse" and some_are_sparse else "" for row in rows
            ],
        }

    def __str__(self) -> str:
        stream = io.StringIO()
        rich.console.Console(file=stream, width=120).print(self)
        return stream.getvalue().rstrip()


def _sum(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _density(rows: Sequence[Row]) -> float:
    return sum(row.live for row in rows) / sum(row.size for row in rows) if rows else 1.0


def _totals(rows: Sequence[Row], number: Callable[[int | None], str]) -> list[str]:
    """Size, live entries and density of rows together, as cells."""
    size, live = sum(row.size for row in rows), sum(row.live for row in rows)
    return [number(size), number(live), f"{_density(rows):.4f}"]


def _figures(row: Row) -> dict[str, Any]:
    return {**dataclasses.asdict(row), "shape": list(row.shape), "density": row.density}


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
