"""Put the figures of benchmarks/results into README.md, docs/, paper/: ``figures.py [--check]``.

In a page a comment behind a number names its figure, and one above a table names the table, so that
the words around them may change. ``figures.toml`` says which cell of which result each of them is.
``--check`` writes nothing, and fails where a page differs from the results.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
LIST = Path(__file__).with_name("figures.toml")
MARKS = {"wins": " ↑", "loses": " ↓"}
NUMBER = r"-?\d+(?:[.,]\d+)*(?:\s±\s\d+(?:\.\d+)?)?"
ANCHOR = re.compile(
    rf"(?P<number>(?:(?<![\d.,]){NUMBER})?)<!--=(?P<name>.*?)-->"
)
TABLE = re.compile(
    r"(?P<head><!--table: (?P<name>\S+)-->\n\s*(?:\|.*\n\|[ :|-]+\n)?)(?P<body>(?:\|.*\n)*)"
)

sys.path.append(str(ROOT / "benchmarks"))

from record import FigureError, cells, digest, number, one_cell, rounded  # noqa: E402


def figure(spec: str | Mapping[str, Any], results: Path = RESULTS) -> str:
    """A figure as a page has it.

    A string is ``"source | format"``; the mean and the deviation of a cell are both formatted. A
    table is ``{of, as}``, perhaps with ``over``, a second source to divide by; ``less``, one to
    take away; ``pick``, ``"min"`` or ``"max"`` of several cells, not dashes; ``times``, a factor;
    ``inverse``, for a ratio of times told as "times as fast".
    """
    if isinstance(spec, str):
        source, _, form = spec.rpartition("|")
        parts = [
            number(part)
            for part in re.split(r"\+-|±", one_cell(source, results))
        ]
        return " ± ".join(rounded(part, form.strip()) for part in parts)
    if "pick" in spec:
        value = {"min": min, "max": max}[spec["pick"]](
            number(cell) for cell in cells(spec["of"], results) if cell != "-"
        )
    else:
        value = number(one_cell(spec["of"], results))
    if "over" in spec:
        value /= number(one_cell(spec["over"], results))
    if "less" in spec:
        value -= number(one_cell(spec["less"], results))
    if spec.get("inverse"):
        value = 1 / value
    return rounded(value * Decimal(spec.get("times", 1)), spec["as"])


def named(name: str, listed: Mapping[str, Any]) -> str | dict[str, Any]:
    """A figure of the list; what follows its name between slashes replaces each ``{}``."""
    key, *arguments = name.split("/")
    if key not in listed:
        raise FigureError(f"The list has no such figure. Received: {name!r}")
    spec = listed[key]
    parts = {"": spec} if isinstance(spec, str) else spec
    try:
        filled = {
            part: one.format(*arguments) if isinstance(one, str) else one
            for part, one in parts.items()
        }
    except IndexError:
        raise FigureError(
            f"The figure {key!r} takes more than that. Received: {name!r}"
        ) from None
    return filled.get("", filled)


def fill_numbers(
    page: str, listed: Mapping[str, Any], results: Path = RESULTS
) -> str:
    """The page with the numbers that stand before the name of a figure."""

    def fill(found: re.Match[str]) -> str:
        if not found["number"]:
            raise FigureError(
                f"No number stands before the name. Received: {found[0]!r}"
            )
        new = figure(named(found["name"], listed), results)
        # A line may end inside "1.0 ± 0.1".
        same = found["number"].split() == new.split()
        return f"{found['number'] if same else new}<!--={found['name']}-->"

    return ANCHOR.sub(fill, page)


def fill_tables(
    page: str, listed: Mapping[str, Any], results: Path = RESULTS
) -> str:
    """The page with the last columns of the tables below the name of one.

    With `mark`, the source of a verdict, a figure that wins or loses gets an arrow. `gaps` are
    pairs of row and column that have no figure: a dash, as long as there is none.
    """

    def fill(found: re.Match[str]) -> str:
        if found["name"] not in listed or not found["body"]:
            raise FigureError(
                f"No table of the list is below this. Received: {found[0]!r}"
            )
        entry, lines = listed[found["name"]], found["body"].splitlines()
        if len(lines) != len(entry["rows"]):
            raise FigureError(
                f"The table must have as many rows as the list. Received: {found['name']!r}, with "
                f"{len(lines)} rows instead of {len(entry['rows'])}"
            )
        filled = [
            filled_row(line, row, entry, results)
            for line, row in zip(lines, entry["rows"], strict=True)
        ]
        return found["head"] + "".join(filled)

    return TABLE.sub(fill, page)


def filled_row(
    line: str, row: Any, entry: Mapping[str, Any], results: Path
) -> str:
    """A row of a table with its figures."""
    new = []
    for column in entry["columns"]:
        source = entry["cell"].format(row=row, column=column)
        if [row, column] in entry.get("gaps", []):
            new.append(gap(source, results))
            continue
        new.append(figure(source, results))
        if "mark" in entry:
            verdict = one_cell(
                entry["mark"].format(row=row, column=column), results
            )
            new[-1] += MARKS.get(verdict, "")
    old = [cell.strip() for cell in line.strip().strip("|").split("|")]
    return "| " + " | ".join([*old[: len(old) - len(new)], *new]) + " |\n"


def gap(source: str, results: Path) -> str:
    """A dash, where there is no figure."""
    try:
        there = figure(source, results)
    except FigureError:
        return "-"
    raise FigureError(f"This is no longer a gap: {source!r}. Received: {there}")


def stale_pictures(entries: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Pictures that were not drawn from the results that there are."""
    return [
        f"{file} is older than its results: run python benchmarks/pictures.py"
        for file, entry in entries.items()
        if f"<dc:source>{digest(entry['sources'], RESULTS)}<"
        not in drawn(ROOT / file)
    ]


def drawn(picture: Path) -> str:
    """The text of an SVG without line breaks between its tags."""
    return re.sub(r"\s*\n\s*", "", picture.read_text(encoding="utf-8"))


def unused(
    pages: Iterable[str], listed: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Names of the list that no page has, or more than one table."""
    text = "".join(pages)
    there = {found["name"].partition("/")[0] for found in ANCHOR.finditer(text)}
    problems = [
        f"No page has the figure {name!r}"
        for name in listed["figures"].keys() - there
    ]
    tables = [found["name"] for found in TABLE.finditer(text)]
    problems += [
        f"The table {name!r} must stand on a page, once. Received: {tables.count(name)} times"
        for name in listed["table"]
        if tables.count(name) != 1
    ]
    return problems


def main() -> int:
    """Write the figures, or compare them; 0 if all is well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing, fail if they differ",
    )
    check = parser.parse_args().check
    listed = tomllib.loads(LIST.read_text(encoding="utf-8"))
    files = [
        ROOT / "README.md",
        ROOT / "paper/paper.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    ]
    pages = {file: file.read_text(encoding="utf-8") for file in files}
    problems = unused(pages.values(), listed)
    for file, before in pages.items():
        name = file.relative_to(ROOT)
        try:
            after = fill_tables(
                fill_numbers(before, listed["figures"]), listed["table"]
            )
        except FigureError as error:
            problems.append(f"{name}: {error}")
            continue
        if check and after != before:
            lines = difflib.unified_diff(
                before.splitlines(),
                after.splitlines(),
                "it says",
                "results",
                n=0,
            )
            problems.append(
                "\n".join([f"{name} differs from the results:", *lines])
            )
        elif after != before:
            file.write_text(after, encoding="utf-8")
            print(f"written: {name}")
    problems += stale_pictures(listed["picture"])
    count = sum(len(ANCHOR.findall(page)) for page in pages.values())
    print(
        "\n".join(problems)
        or f"{count} figures and {len(listed['table'])} tables, as measured"
    )
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
