"""Tables in CSV and JSON files, which are checked when they are read."""

import csv
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from keras_sparse_ortho._files import written_aside

_COUNT = "of"
_LONGEST = 200  # characters of what is shown of a file in an error

Row = tuple[str, dict[str, Any]]
"""Where it stands (`"line 3"`), and its columns."""


def write_csv(
    path: str | pathlib.Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]
) -> None:
    """Writes rows, each with the number of all of them in a last column, by which a half is known.

    Floats read back as the same floats.
    """
    rows = list(rows)
    with written_aside(path) as stream:
        writer = csv.DictWriter(stream, [*columns, _COUNT])
        writer.writeheader()
        writer.writerows({**row, _COUNT: _all(rows)} for row in rows)


def read_csv(path: pathlib.Path, needed: Sequence[str], error: type[ValueError]) -> list[Row]:
    """The rows of a CSV file as text.

    Args:
        path: In UTF-8, with or without a byte order mark.
        needed: Columns that must be there.
        error: What to raise.

    Raises:
        error: A file that is no such table, or only a part of one, with the line.
    """
    rows: list[Row] = []
    line = 1
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            reader = csv.DictReader(stream)
            names = list(reader.fieldnames or [])
            if not set(needed) <= set(names) or len(set(names)) < len(names):
                columns = " and ".join(repr(name) for name in needed)
                raise error(
                    f"{path}, line 1: the columns {columns} are needed, each column once. "
                    f"Received: {shown(names)}"
                )
            for row in reader:
                line = reader.line_num
                if None in row or None in row.values():
                    raise error(
                        f"{path}, line {line}: {len(names)} columns are needed. "
                        f"Received: {shown(row)}"
                    )
                rows.append((f"line {line}", row))
    except (UnicodeDecodeError, csv.Error) as problem:
        raise error(
            f"{path}, line {line} or after it: the file is no CSV in UTF-8. Received: {problem}"
        ) from None
    said = {row.pop(_COUNT, _all(rows)) for _, row in rows}
    if said - {_all(rows)}:
        raise error(
            f"{path}, line {line}: the file is not whole; the column {_COUNT!r} says how many rows "
            f"there are (leave it out of a file that you edit). Received: {_all(rows)}, and "
            f"{_COUNT}={shown(sorted(said))}"
        )
    return rows


def _all(rows: Sequence[Any]) -> str:
    # With a word behind, so that no part of it is a count.
    return f"{len(rows)} rows"


def write_json(path: str | pathlib.Path, content: Any) -> None:
    """Writes JSON, of which no half is JSON."""
    with written_aside(path) as stream:
        stream.write(json.dumps(content, indent=1) + "\n")


def read_json_rows(path: pathlib.Path, key: str, error: type[ValueError]) -> list[Row]:
    """The objects in the list `key` of the object in a JSON file.

    Raises:
        error: A file that is not that, with the line or entry.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as problem:
        raise error(
            f"{path}, line {problem.lineno}: {problem.msg}. Received: a file that is not JSON"
        ) from None
    except (UnicodeDecodeError, RecursionError, ValueError) as problem:
        raise error(
            f"{path}: the file is no JSON in UTF-8 that can be read. "
            f"Received: {type(problem).__name__}: {shown(str(problem))}"
        ) from None
    rows = content.get(key) if isinstance(content, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise error(
            f'{path}, line 1: an object {{"{key}": [{{...}}, ...]}} is needed. Received: other JSON'
        )
    return [(f"entry {number}", row) for number, row in enumerate(rows, 1)]


def shown(value: Any) -> str:
    """What an error shows of something from a file: not all of what is long."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"
