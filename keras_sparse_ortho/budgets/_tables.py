"""Rows of budget files: of `Budget.save`, written by hand, and published for ResNet-50."""

import csv
import importlib.resources
import pathlib
import re
from typing import Any

from keras_sparse_ortho._files import Row, read_json, shown
from keras_sparse_ortho.errors import BudgetError

_Line = tuple[str, list[str]]  # where it is, and its cells


def read_rows(path: pathlib.Path, column: Any = None) -> list[Row]:
    """The weights of a file, unchecked: `weight`, `density`, and what else it says of them."""
    if path.suffix not in (".json", ".csv"):
        raise BudgetError(f"A budget file ends in .json or .csv. Received: path={str(path)!r}")
    lines = _lines(path) if path.suffix == ".csv" else []
    if lines and lines[0][1][0] in ("Layer", "Metric") and len(lines[0][1]) > 2:
        return _published(path, lines, column)
    if column is not None:
        raise BudgetError(
            f"`column` is for the tables that STR's authors published. Received: column={column!r} "
            f"for {str(path)!r}, which is none of them"
        )
    if path.suffix == ".json":
        return _json_rows(path)
    pairs = [(place, cells[0].strip(), ",".join(cells[1:]).strip()) for place, cells in lines]
    named = pairs and pairs[0][2].lower() == "density"
    return [(place, {"weight": n, "density": _number(d)}) for place, n, d in pairs[bool(named) :]]


def sparsity_to_density(sparsity: str) -> Any:
    """The density for a printed sparsity in %, rounded: 100 - 90.23 is not 9.77 in binary."""
    value = _number(sparsity.removesuffix("%"))
    return sparsity if isinstance(value, str) else round(1 - value / 100, 6)


def resnet50() -> list[dict[str, str]]:
    """Published sparsities of ResNet-50: the row `overall`, then Keras' weights in their order."""
    resource = importlib.resources.files(__package__).joinpath("data", "str_resnet50.csv")
    return list(csv.DictReader(resource.read_text(encoding="utf-8").splitlines()))


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


def _published(path: pathlib.Path, lines: list[_Line], column: Any) -> list[Row]:
    """The rows of a table of RAIVNLab/STR, under Keras' names."""
    heads, first = lines[0][1], 1
    if heads[0] == "Metric":  # its next line has the sparsities of the networks
        heads, first = (lines[1:2] or lines)[0][1], 3
    if str(column) not in heads[first:]:
        raise BudgetError(
            f"{path} has several budgets: `column` must be one of {shown(heads[first:])}. "
            f"Received: column={column!r}"
        )
    at, known = heads.index(str(column), first), resnet50()[1:]
    layers = [line for line in lines if re.match(r"(Layer )?\d", line[1][0])]
    numbers = [re.sub(r"Layer | - .*", "", cells[0]) for _, cells in layers]
    if numbers != [str(k) for k in range(1, len(known) + 1)]:
        raise BudgetError(
            f"{path}: the {len(known)} layers of ResNet-50 are needed, in order. "
            f"Received: {len(layers)} layers"
        )
    densities = [sparsity_to_density("".join(cells[at : at + 1])) for _, cells in layers]
    return [
        (place, {"weight": row["layer"], "density": density, "size": int(row["size"])})
        for (place, _), density, row in zip(layers, densities, known, strict=True)
    ]
