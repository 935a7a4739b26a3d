"""Keep code readable: ``names.py`` fails where a file of the package exceeds its limits.

The limits are those of the house (`HOUSE`), for each file by the figures of `reading.py`. A file
that was above them when this lint came has limits of its own in `tools/reading_limits.toml`; these
only go down:

    names.py            the files above their limits, and the vague names in them
    names.py --lower    lowers the limits of files that are below them now
    names.py --accept FILE ...   takes what these files have as their limits, after a merge
"""

from __future__ import annotations

import ast
import math
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools import reading

LIMITS = reading.ROOT / "tools" / "reading_limits.toml"
HOUSE = {
    "nodes a line": 9.5,
    "vague names": 0.03,  # of all names that are assigned
    "Any": 0.035,  # annotations a code line
    "if-expressions": 0.012,  # a code line
    "long functions": 0,
}
HEAD = """\
# Limits of files that are above those of the house; see names.py. They only go down:
# `python tools/names.py --lower`.

"""

Limits = Mapping[str, float]


def measured(figures: reading.Figures) -> dict[str, float]:
    """The limited figures of one file, as counts."""
    return {
        "nodes a line": math.ceil(10 * figures.nodes_a_line) / 10,
        "vague names": figures.vague,
        "Any": figures.any,
        "if-expressions": figures.if_expressions,
        "long functions": figures.long,
    }


def house_limits(figures: reading.Figures) -> dict[str, float]:
    """The limits of the house for a file of this length; one of each is always allowed."""
    return {
        "nodes a line": HOUSE["nodes a line"],
        "vague names": max(1, math.floor(HOUSE["vague names"] * figures.names)),
        "Any": max(1, math.floor(HOUSE["Any"] * figures.code)),
        "if-expressions": max(
            1, math.floor(HOUSE["if-expressions"] * figures.code)
        ),
        "long functions": HOUSE["long functions"],
    }


def exceeded(
    figures: reading.Figures, limits: Limits
) -> dict[str, tuple[float, float]]:
    """The figures above the limits of the house and of the file, each with the larger limit."""
    above = {}
    house = house_limits(figures)
    for name, value in measured(figures).items():
        limit = max(house[name], limits.get(name, 0))
        if value > limit:
            above[name] = (value, limit)
    return above


def needed_limits(figures: reading.Figures) -> dict[str, float]:
    """The limits that a file needs besides those of the house."""
    house = house_limits(figures)
    return {
        name: value
        for name, value in measured(figures).items()
        if value > house[name]
    }


def lowered(figures: reading.Figures, limits: Limits) -> dict[str, float]:
    """The limits of a file, brought down to its figures; none that the house has already."""
    needed = needed_limits(figures)
    return {
        name: min(limit, needed[name])
        for name, limit in limits.items()
        if name in needed
    }


def read_limits() -> dict[str, dict[str, float]]:
    """The limits of single files, by their paths below the package."""
    if not LIMITS.exists():
        return {}
    return tomllib.loads(LIMITS.read_text("utf-8"))


def write_limits(limits: Mapping[str, Limits]) -> None:
    """Write a line for each file that needs limits of its own."""
    lines = []
    for name in sorted(limits):
        values = ", ".join(
            f'"{key}" = {value}' for key, value in limits[name].items()
        )
        if values:
            lines.append(f'"{name}" = {{ {values} }}\n')
    LIMITS.write_text(HEAD + "".join(lines), "utf-8")


def vague_names(source: str) -> list[str]:
    """The vague names of a file, with their lines."""
    names = reading.stored_names(ast.parse(source))
    return [
        f"{line}: {name}"
        for line, name in sorted(names)
        if reading.is_vague(name)
    ]


def report(path: Path, limits: Limits) -> list[str]:
    """A line for each limit that a file exceeds, and its vague names if these are too many."""
    source = path.read_text("utf-8")
    above = exceeded(reading.figures(source), limits)
    lines = [
        f"{path}: {what}: {value:g}, limit {limit:g}"
        for what, (value, limit) in above.items()
    ]
    if "vague names" in above:
        lines += [f"{path}:{place}" for place in vague_names(source)]
    return lines


def main(arguments: list[str]) -> int:
    """Print what exceeds its limits; 1 if there is anything."""
    paths = {
        str(path.relative_to(reading.PACKAGE)): path
        for path in reading.files_in(reading.PACKAGE)
    }
    figures = {
        name: reading.figures(path.read_text("utf-8"))
        for name, path in paths.items()
    }
    limits = read_limits()
    if arguments and arguments[0] == "--accept":
        for argument in arguments[1:]:
            name = str(Path(argument).resolve().relative_to(reading.PACKAGE))
            limits[name] = needed_limits(figures[name])
        write_limits(limits)
        return 0
    if arguments == ["--lower"]:
        write_limits(
            {
                name: lowered(figures[name], file_limits)
                for name, file_limits in limits.items()
                if name in figures
            }
        )
        return 0
    lines = []
    for name, path in paths.items():
        lines += report(path, limits.get(name, {}))
    for line in lines:
        print(line)
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
