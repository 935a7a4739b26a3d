"""Rows of budget files: of `Budget.save`, written by hand, and published for ResNet-50."""

import csv
import importlib.resources
import pathlib
import re
from typing import Any

from keras_sparse_ortho._files import Row, read_json, shown
from keras_sparse_ortho.errors import BudgetError

Column = str | float | None
"""The heading of a budget in a table of several."""

_Line = tuple[str, list[str]]  # its place in the file, and its cells
# First cells of the tables that STR's authors published.
_RESNET50_HEADS = (
    "Layer",
    "Metric",
)


def read_rows(
    path: pathlib.Path,
    column: Column = None,
) -> list[Row]:
    """The weights of a file, unchecked: `weight`, `density`, and what else it says of them."""
    if path.suffix not in (".json", ".csv"):
        raise BudgetError(
            f"A budget file ends in .json or .csv. Received: path={str(path)!r}"
        )
    lines = []
    if path.suffix == ".csv":
        lines = _csv_lines(path)
    if lines:
        _, head = lines[0]
        if head[0] in _RESNET50_HEADS and len(head) > 2:
            return _published_rows(path, lines, column)
    if column is not None:
        raise BudgetError(
            f"`column` is for the tables that STR's authors published. Received: column={column!r} "
            f"for {str(path)!r}, which is none of them"
        )
    if path.suffix == ".json":
        return _json_rows(path)
    return _csv_rows(lines)


def _csv_rows(lines: list[_Line]) -> list[Row]:
    """The rows `path,density`, without a heading."""
    rows: list[Row] = []
    for number, (place, cells) in enumerate(lines):
        density = ",".join(cells[1:]).strip()
        if number == 0 and density.lower() == "density":
            continue
        row = {"weight": cells[0].strip(), "density": _number(density)}
        rows.append((place, row))
    return rows


def sparsity_to_density(sparsity: str) -> Any:
    """The density for a printed sparsity in %, rounded: 100 - 90.23 is not 9.77 in binary."""
    value = _number(sparsity.removesuffix("%"))
    return sparsity if isinstance(value, str) else round(1 - value / 100, 6)


def resnet50() -> list[dict[str, str]]:
    """Published sparsities of ResNet-50: the row `overall`, then Keras' weights in their order."""
    resource = importlib.resources.files(__package__).joinpath(
        "data", "str_resnet50.csv"
    )
    return list(
        csv.DictReader(resource.read_text(encoding="utf-8").splitlines())
    )


def _number(text: str) -> float | str:
    """The number, or the text itself, which no check accepts."""
    try:
        return float(text)
    except ValueError:
        return text


def _json_rows(path: pathlib.Path) -> list[Row]:
    """The rows of a budget in a JSON file, of either form."""
    content = read_json(path, BudgetError)
    rows = None
    if isinstance(content, dict):
        rows = content.get("budget")
        if content and all(
            isinstance(value, int | float) for value in content.values()
        ):
            rows = [
                {"weight": name, "density": value}
                for name, value in content.items()
            ]
    if not isinstance(rows, list) or not all(
        isinstance(row, dict) for row in rows
    ):
        raise BudgetError(
            f'{path}, line 1: an object {{"budget": [{{...}}, ...]}} or {{"path": density, ...}} '
            "is needed. Received: other JSON"
        )
    return [(f"entry {number}", row) for number, row in enumerate(rows, 1)]


def _csv_lines(path: pathlib.Path) -> list[_Line]:
    """The lines of a CSV file that are not empty."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        reader = csv.reader(text.splitlines(), strict=True)
        return [
            (f"line {reader.line_num}", cells) for cells in reader if any(cells)
        ]
    except (UnicodeDecodeError, csv.Error) as problem:
        raise BudgetError(
            f"{path}: the file is not readable as CSV in UTF-8. "
            f"Received: {type(problem).__name__}: {shown(str(problem))}"
        ) from None


def _published_rows(
    path: pathlib.Path,
    lines: list[_Line],
    column: Column,
) -> list[Row]:
    """The rows of a table of RAIVNLab/STR, under Keras' names."""
    _, heads = lines[0]
    first_budget = 1
    if heads[0] == "Metric":
        if len(lines) > 1:
            _, heads = lines[1]  # the sparsities of the networks
        first_budget = 3
    budgets = heads[first_budget:]
    if str(column) not in budgets:
        raise BudgetError(
            f"{path} has several budgets: `column` must be one of {shown(budgets)}. "
            f"Received: column={column!r}"
        )
    at = heads.index(str(column), first_budget)
    _, *weights = resnet50()
    layers = [line for line in lines if re.match(r"(Layer )?\d", line[1][0])]
    numbers = [re.sub(r"Layer | - .*", "", cells[0]) for _, cells in layers]
    if numbers != [str(k) for k in range(1, len(weights) + 1)]:
        raise BudgetError(
            f"{path}: the {len(weights)} layers of ResNet-50 are needed, in order. "
            f"Received: {len(layers)} layers"
        )
    rows: list[Row] = []
    for (place, cells), weight in zip(layers, weights, strict=True):
        sparsity = cells[at] if at < len(cells) else ""
        row = {
            "weight": weight["layer"],
            "density": sparsity_to_density(sparsity),
            "size": int(weight["size"]),
        }
        rows.append((place, row))
    return rows
