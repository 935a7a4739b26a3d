"""Cells of the tables in `results/`, the source of all figures of pages and pictures."""

import decimal
import hashlib
import pathlib
import re
from collections.abc import Iterable
from decimal import Decimal
from typing import Any


class FigureError(ValueError):
    """A figure is missing, or not where it should be."""


def tables(text: str) -> list[dict[str, Any]]:
    """The tables of a Markdown text: `section`, the heading above, and `rows` by column.

    A second and third column of one name are called "name 2" and "name 3".
    """
    found: list[dict[str, Any]] = []
    section, header, rows = "", None, []
    for line in [*text.splitlines(), ""]:
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.lstrip().startswith("|"):
            header = None
            if line.startswith("#"):
                section = line.lstrip("#").strip()
        elif header is None:
            header, rows = [], []
            for k, name in enumerate(cells):
                before = cells[:k].count(name)
                header.append(f"{name} {before + 1}" if before else name)
            found.append({"section": section, "rows": rows})
        elif not all(cell.strip(":-") == "" for cell in cells):
            rows.append(dict(zip(header, cells, strict=False)))
    return found


def cells(source: str, results: pathlib.Path) -> list[str]:
    """The cells that `"page#section | column=value; other column | column"` names.

    A section is named by the beginning of its title, unless another has exactly that title. A
    condition without a value selects tables that have this column.
    """
    place, where, column = (part.strip() for part in source.split("|"))
    page, _, section = place.partition("#")
    conditions = [one.partition("=") for one in re.split(r"; *", where) if one]
    file = results / f"{page.strip()}.md"
    if not file.exists():
        raise FigureError(f"There is no {file.name} in benchmarks/results. Received: {source!r}")
    there, title = tables(file.read_text(encoding="utf-8")), section.strip()
    meant = [table for table in there if table["section"] == title]
    meant = meant or [table for table in there if table["section"].startswith(title)]
    found = [
        row[column]
        for table in meant
        for row in table["rows"]
        if column in row
        and all(row.get(key) == value if sign else key in row for key, sign, value in conditions)
    ]
    if not found:
        raise FigureError(f"No cell of benchmarks/results is like this. Received: {source!r}")
    return found


def one_cell(source: str, results: pathlib.Path) -> str:
    """The only cell of that kind."""
    found = cells(source, results)
    if len(found) != 1:
        raise FigureError(f"One cell must be meant, not {len(found)}. Received: {source!r}")
    return found[0]


def number(text: str) -> Decimal:
    """The first number of a cell, with all its digits."""
    found = re.search(r"-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?", text)
    if found is None:
        raise FigureError(f"A cell must hold a number. Received: {text!r}")
    return Decimal(found.group().replace(",", ""))


def rounded(value: Decimal, form: str) -> str:
    """A number as text; halves are rounded up."""
    with decimal.localcontext(decimal.Context(rounding=decimal.ROUND_HALF_UP)):
        return format(value.normalize() if form == "g" else value, "f" if form == "g" else form)


def digest(names: Iterable[str], results: pathlib.Path) -> str:
    """The mark of a picture that is drawn from these files of results."""
    found = hashlib.sha256()
    for name in names:
        found.update((results / name).read_bytes())
    return found.hexdigest()[:16]
