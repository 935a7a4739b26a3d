"""Put the figures of benchmarks/results into README.md and docs/: ``figures.py [--check]``.

``figures.toml`` says which number of which page is which cell of which table, so that the pages
stay plain Markdown. ``--check`` writes nothing, and fails where a page differs from the results.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
LIST = Path(__file__).with_name("figures.toml")
MARKS = {"wins": " ↑", "loses": " ↓"}
NUMBER = r"-?\d+(?:[.,]\d+)*(?:\s±\s\d+(?:\.\d+)?)?"
GAP = r"(?:(?!\n\s*\n|\n\|).)*?"  # within a paragraph, or a row of a table

sys.path.append(str(ROOT / "benchmarks"))

from cells import FigureError, cells, digest, number, one_cell, rounded  # noqa: E402


def figure(spec: str | Mapping[str, Any], results: Path = RESULTS) -> str:
    """A figure as a page has it.

    A string is ``"source | format"``; the mean and the deviation of a cell are both formatted. A
    table is ``{of, as}``, perhaps with ``over``, a second source to divide by; ``less``, one to
    take away; ``pick``, ``"min"`` or ``"max"`` of several cells, not dashes; ``times``, a factor;
    ``inverse``, for a ratio of times told as "times as fast".
    """
    if isinstance(spec, str):
        source, _, form = spec.rpartition("|")
        parts = [number(part) for part in re.split(r"\+-|±", one_cell(source, results))]
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


def texts(entries: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Each piece of text that holds figures: its page, its section, and the cells of its ``{}``."""
    for place, pieces in entries.items():
        page, _, section = place.partition("#")
        for text, specs in pieces.items():
            listed = specs if isinstance(specs, list) else [specs]
            yield {"page": page, "section": section, "text": text, "cells": listed}


def section_of(page: str, title: str) -> tuple[int, int]:
    """Where the section is whose heading begins with ``title``; without one, the whole page."""
    if not title:
        return 0, len(page)
    found = re.search(rf"^(#+) {re.escape(title)}.*$", page, re.MULTILINE)
    if found is None:
        raise FigureError(f"There is no such section. Received: {title!r}")
    end = re.compile(rf"^#{{1,{len(found[1])}}} ", re.MULTILINE).search(page, found.end())
    return found.start(), end.start() if end else len(page)


def find_text(page: str, entry: Mapping[str, Any]) -> re.Match[str]:
    """The only place where a piece of text stands; its groups are the numbers."""
    pieces = re.split(r"\s*\.\.\.\s*", entry["text"])
    pattern = GAP.join(
        f"({NUMBER})".join(
            r"\s+".join(map(re.escape, re.split(r"\s+", part))) for part in piece.split("{}")
        )
        for piece in pieces
    )
    span = section_of(page, entry.get("section", ""))
    found = list(re.compile(pattern, re.DOTALL).finditer(page, *span))
    if len(found) != 1 or found[0].re.groups != len(entry["cells"]):
        raise FigureError(
            f"The text must stand once in {entry['page']}, with as many {{}} as cells. Received: "
            f"{entry['text']!r}, which stands there {len(found)} times"
        )
    return found[0]


def fill_text(page: str, entry: Mapping[str, Any], results: Path = RESULTS) -> str:
    """The page with the numbers of one piece of text."""
    found = find_text(page, entry)
    for k in reversed(range(len(entry["cells"]))):
        begin, end = found.span(k + 1)
        new = figure(entry["cells"][k], results)
        if found[k + 1].split() != new.split():  # a line may end inside "1.0 ± 0.1"
            page = page[:begin] + new + page[end:]
    return page


def fill_table(page: str, entry: Mapping[str, Any], results: Path = RESULTS) -> str:
    """The page with the last columns of a table, which is found by a piece of its header.

    With `mark`, the source of a verdict, a figure that wins or loses gets an arrow. `gaps` are
    pairs of row and column that have no figure: a dash, as long as there is none.
    """
    lines = page.splitlines(keepends=True)
    starts = [
        k
        for k in range(len(lines) - 1)
        if entry["header"] in lines[k] and re.match(r"\|\s*:?--", lines[k + 1])
    ]
    if len(starts) != 1:
        raise FigureError(
            f"The header must stand once in {entry['page']}. Received: {entry['header']!r}, which "
            f"stands there {len(starts)} times"
        )
    body = starts[0] + 2
    for k, row in enumerate(entry["rows"]):
        old = [cell.strip() for cell in lines[body + k].strip().strip("|").split("|")]
        new = []
        for column in entry["columns"]:
            source = entry["cell"].format(row=row, column=column)
            if [row, column] in entry.get("gaps", []):
                new.append(gap(source, results))
                continue
            new.append(figure(source, results))
            if "mark" in entry:
                verdict = one_cell(entry["mark"].format(row=row, column=column), results)
                new[-1] += MARKS.get(verdict, "")
        lines[body + k] = "| " + " | ".join([*old[: len(old) - len(new)], *new]) + " |\n"
    if body + len(entry["rows"]) < len(lines) and lines[body + len(entry["rows"])].startswith("|"):
        raise FigureError(f"The table has more rows than the list. Received: {entry['header']!r}")
    return "".join(lines)


def gap(source: str, results: Path) -> str:
    """A dash, where there is no figure."""
    try:
        there = figure(source, results)
    except FigureError:
        return "-"
    raise FigureError(f"Not a gap any more: {source!r}. Received: {there}")


def stale_pictures(entries: Iterable[Mapping[str, Any]]) -> list[str]:
    """Pictures that were not drawn from the results that there are."""
    return [
        f"{entry['file']} is older than its results: run python benchmarks/{entry['script']}"
        for entry in entries
        if f"<dc:source>{digest(entry['sources'], RESULTS)}<" not in drawn(ROOT / entry["file"])
    ]


def drawn(picture: Path) -> str:
    """The text of an SVG without line breaks between its tags."""
    return re.sub(r"\s*\n\s*", "", picture.read_text(encoding="utf-8"))


def main() -> int:
    """Write the figures, or compare them; 0 if all is well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail if they differ")
    check = parser.parse_args().check
    listed = tomllib.loads(LIST.read_text(encoding="utf-8"))
    entries = listed | {"text": list(texts(listed["text"]))}
    before: dict[str, str] = {}
    after: dict[str, str] = {}
    problems = []
    for kind, fill in (("text", fill_text), ("table", fill_table)):
        for entry in entries[kind]:
            name = entry["page"]
            if name not in before:
                before[name] = after[name] = (ROOT / name).read_text(encoding="utf-8")
            try:
                after[name] = fill(after[name], entry)
            except FigureError as error:
                problems.append(str(error))
    changed = [name for name in before if before[name] != after[name]]
    for name in changed:
        if check:
            lines = difflib.unified_diff(
                before[name].splitlines(), after[name].splitlines(), "it says", "results", n=0
            )
            problems.append("\n".join([f"{name} differs from the results:", *lines]))
        else:
            (ROOT / name).write_text(after[name], encoding="utf-8")
            print(f"written: {name}")
    problems += stale_pictures(entries["picture"])
    print("\n".join(problems) or f"{sum(map(len, entries.values()))} figures, all as measured")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
