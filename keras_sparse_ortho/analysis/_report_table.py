"""A `SparsityReport` as tables that fit the terminal, each column whole."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import rich.box
import rich.console
import rich.measure
import rich.table
import rich.text

from keras_sparse_ortho._text import printable, printable_lines

_WIDE = 100  # columns of a terminal; more have room for all digits
# Columns that a long name gets at least.
_NAME_IN_WIDE, _NAME_IN_NARROW = (
    24,
    11,
)

# A `SparsityReport` draws itself by this file, which therefore cannot import its class.
Number = Callable[[int | None], str]
"""How a count is written."""


@dataclasses.dataclass(frozen=True)
class _Column:
    """One column: its title, a cell for each kernel, and one for each line of totals."""

    title: str
    kernels: Sequence[str]
    totals: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class _Names:
    """The first column, which each table repeats."""

    kernels: Sequence[str]
    totals: Sequence[str]
    least_width: int


def tables_of(
    report: Any,
    console: rich.console.Console,
    options: rich.console.ConsoleOptions,
) -> Iterator[rich.console.RenderableType]:
    """Yields title, tables and notes: one table if all columns fit, otherwise several.

    Args:
        report: SparsityReport. The figures.
        console: Console that measures the tables.
        options: ConsoleOptions. They say how wide the terminal is.
    """
    wide = options.max_width > _WIDE
    names = _names(report, _NAME_IN_WIDE if wide else _NAME_IN_NARROW)

    def fits(columns: Sequence[_Column]) -> bool:
        table = _table(names, columns, wide)
        width = rich.measure.Measurement.get(
            console, _unlimited(options), table
        ).minimum
        return width <= options.max_width

    columns = _columns(report, in_full if wide else in_short)
    if wide and not fits(columns):
        columns = _columns(report, in_short)
    yield rich.text.Text(_title(report), style="table.title")
    while columns:
        count = len(columns)
        while count > 1 and not fits(columns[:count]):
            count -= 1
        yield _table(names, columns[:count], wide)
        columns = columns[count:]
    notes = _notes(report)
    if notes:
        yield rich.text.Text(
            printable_lines("\n".join(notes)), style="table.caption"
        )


def in_full(value: int | None) -> str:
    """A count with all its digits: `"235,146"`."""
    return "not known" if value is None else f"{value:,}"


def in_short(value: int | None) -> str:
    """A count of three digits: `"235k"`."""
    if value is None:
        return "?"
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if value >= 0.9995 * size:
            return f"{float(f'{value / size:.3g}'):g}{unit}"
    return str(value)


def _unlimited(
    options: rich.console.ConsoleOptions,
) -> rich.console.ConsoleOptions:
    """Options under which a table is measured as if the terminal had no edge."""
    return options.update(width=1 << 16)


def _title(report: Any) -> str:
    title = f"Kernels of '{printable(report.name)}'"
    if report.mask_params:  # what is counted and stored besides live values
        title += (
            f"\n{report.params:,} parameters in summary(), {report.mask_params:,} of them masks or "
            f"indices; kernels take {in_short(report.bytes)}B, their live values "
            f"{in_short(report.live_bytes)}B"
        )
    return title


def _notes(report: Any) -> list[str]:
    notes = []
    reasons = [
        f"{row.path}: {row.not_on_blocks}"
        for row in report.rows
        if row.not_on_blocks
    ]
    if reasons:
        notes += ["No live blocks:", *reasons]
    if report.unadopted:
        notes += [
            "No masks: a sparse initializer alone lets every entry train. Before training, "
            "call apply_masks(model).",
            ", ".join(report.unadopted),
        ]
    return notes


def _everything(report: Any) -> tuple[Any, ...]:
    return *report.rows, *report.unregistered


def _sparse(report: Any) -> tuple[Any, ...]:
    return tuple(row for row in report.rows if row.state == "sparse")


def _names(report: Any, width: int) -> _Names:
    kernels = [printable(row.path) for row in _everything(report)]
    totals = [label for label, _, _ in _totals(report)]
    longest = max((len(name) for name in [*kernels, *totals]), default=0)
    return _Names(kernels, totals, min(longest, width))


def _totals(report: Any) -> list[tuple[str, tuple[Any, ...], bool]]:
    """The lines below the kernels: a label, the rows that count, and whether FLOPs are shown."""
    totals = []
    if report.dense and report.sparse_density < 1:
        totals.append(("sparse kernels", _sparse(report), False))
    totals.append(("all kernels", report.rows, True))
    if report.unregistered:
        totals.append(("whole model", _everything(report), False))
    return totals


def _columns(report: Any, number: Number) -> list[_Column]:
    """All columns but the names; optional ones only if a cell is not empty."""
    rows = _everything(report)
    sums = [
        (dataclasses.replace(report, rows=counted, unregistered=()), with_flops)
        for _, counted, with_flops in _totals(report)
    ]
    columns = [
        _Column(
            "shape",
            ["x".join(map(str, row.shape)) for row in rows],
            [""] * len(sums),
        ),
        _Column(
            "size",
            [number(row.size) for row in rows],
            [number(total.size) for total, _ in sums],
        ),
        _Column(
            "live",
            [number(row.live) for row in rows],
            [number(total.live) for total, _ in sums],
        ),
        _Column(
            "density",
            [f"{row.density:.4f}" for row in rows],
            [f"{total.density:.4f}" for total, _ in sums],
        ),
        _Column(
            "FLOPs",
            [number(row.flops) for row in rows],
            [
                number(total.flops) if with_flops else ""
                for total, with_flops in sums
            ],
        ),
        _Column(
            "sparse\nFLOPs",
            [number(row.sparse_flops) for row in rows],
            [
                number(total.sparse_flops) if with_flops else ""
                for total, with_flops in sums
            ],
        ),
    ]
    return columns + [
        column for column in _optional_columns(report) if any(column.kernels)
    ]


def _optional_columns(report: Any) -> list[_Column]:
    """The columns that not every model needs; all cells of a needless one are empty."""
    rows = _everything(report)
    dense = report.dense
    tells_why = bool(_sparse(report)) or {"not updated", "not adopted"} & {
        *dense.values()
    }
    gains = {row.gain for row in rows if row.gain is not None} - {1.0}
    errors = [
        ""
        if row.orthogonality_error is None
        else f"{row.orthogonality_error:.1e}"
        for row in rows
    ]
    least = [
        "" if row.least_density is None else f"{row.least_density:.4f}"
        for row in rows
    ]
    return [
        _Column("|G - I|", errors),
        _Column("dead\noutputs", [str(row.dead_outputs or "") for row in rows]),
        _Column(
            "gain",
            [
                f"{row.gain:.4g}" if gains and row.gain is not None else ""
                for row in rows
            ],
        ),
        _Column(
            "why\ndense",
            [dense.get(row.path, "") if tells_why else "" for row in rows],
        ),
        _Column(
            "blocks", ["x".join(map(str, row.block or ())) for row in rows]
        ),
        _Column("least\ndensity", least),
    ]


def _table(
    names: _Names, columns: Sequence[_Column], wide: bool
) -> rich.table.Table:
    """A table of some columns; without totals if none of these columns has one."""
    table = rich.table.Table(
        padding=(0, int(wide)),
        box=rich.box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
        show_edge=False,
    )
    # Without a minimum width, a terminal of 80 columns would leave no room for the names.
    table.add_column("weight", overflow="fold", min_width=names.least_width)
    for column in columns:
        table.add_column(column.title, justify="right", no_wrap=True)
    for k, name in enumerate(names.kernels):
        cells = [name, *(column.kernels[k] for column in columns)]
        table.add_row(*map(rich.text.Text, cells))
    if any(any(column.totals) for column in columns):
        table.add_section()
        for k, label in enumerate(names.totals):
            cells = [
                label,
                *(
                    column.totals[k] if column.totals else ""
                    for column in columns
                ),
            ]
            table.add_row(*map(rich.text.Text, cells))
    return table
