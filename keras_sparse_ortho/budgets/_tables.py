"""Rows of budget files: of `Budget.save`, or written by hand."""

import csv
import pathlib

from keras_sparse_ortho._files import Row, read_json, shown
from keras_sparse_ortho.errors import BudgetError

_Line = tuple[str, list[str]]  # where it is, and its cells


def read_rows(path: pathlib.Path) -> list[Row]:
    """The weights of a file, unchecked: `weight`, `density`, and what else it says of them."""
    if path.suffix == ".json":
        return _json_rows(path)
    if path.suffix != ".csv":
        raise BudgetError(f"A budget file ends in .json or .csv. Received: path={str(path)!r}")
    lines = _lines(path)
    pairs = [(place, cells[0].strip(), ",".join(cells[1:]).strip()) for place, cells in lines]
    named = pairs and pairs[0][2].lower() == "density"
    return [(place, {"weight": n, "density": _number(d)}) for place, n, d in pairs[bool(named) :]]


def _number(text: str) -> float | str:
    """The number, or the text itself, which no check accepts."""
    try:
        return float(text)
    except ValueError:
        return text


def _json_rows(path: pathlib.Path) -> list[Row]:
    content, rows = read_json(path, BudgetError), None
    if isinstance(content, dict):
        rows = content.get("budget")
        if content and all(isinstance(value, int | float) for value in content.values()):
            rows = [{"weight": name, "density": value} for name, value in content.items()]
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise BudgetError(
            f'{path}, line 1: an object {{"budget": [{{...}}, ...]}} or {{"path": density, ...}} '
            "is needed. Received: other JSON"
        )
    return [(f"entry {number}", row) for number, row in enumerate(rows, 1)]


def _lines(path: pathlib.Path) -> list[_Line]:
    try:
        reader = csv.reader(path.read_text(encoding="utf-8-sig").splitlines(), strict=True)
        return [(f"line {reader.line_num}", cells) for cells in reader if any(cells)]
    except (UnicodeDecodeError, csv.Error) as problem:
        raise BudgetError(
            f"{path}: the file is not readable as CSV in UTF-8. "
            f"Received: {type(problem).__name__}: {shown(str(problem))}"
        ) from None
