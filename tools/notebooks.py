"""Notebooks from the tutorials: ``notebooks.py FOLDER [--run] [NAME ...]``.

The Markdown of docs/tutorials is the source, and the notebooks are not committed. A ```python block
becomes a cell of code, all else cells of text, with links that lead to the files of the checkout.
With --run each notebook's code is run, cell after cell, in a separate process.
"""

from __future__ import annotations

import argparse
import json
import os
import posixpath
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TUTORIALS = ROOT / "docs" / "tutorials"
NEEDS = {"keras_hub": "keras_hub"}  # packages that .venv has not: `make test-compat` runs these
_BLOCK = re.compile(r"^```python\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(\]\()(?!\w+://|#)([^)\s]+\))")
_RUNNER = """
import json, sys
for cell in json.load(open(sys.argv[1], encoding="utf-8"))["cells"]:
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), cell["id"], "exec"), globals())
"""


def notebook(markdown: str, to_tutorials: str) -> dict[str, Any]:
    """A tutorial as a notebook of format 4.5; `to_tutorials` leads from it to docs/tutorials."""
    cells: list[dict[str, Any]] = []

    def add(kind: str, text: str) -> None:
        if text.strip():
            own = {"outputs": [], "execution_count": None} if kind == "code" else {}
            source = text.strip("\n").splitlines(keepends=True)
            name = f"{kind}-{len(cells)}"
            cells.append({"cell_type": kind, "id": name, "metadata": {}, "source": source, **own})

    def relink(found: re.Match[str]) -> str:
        return found[1] + posixpath.normpath(posixpath.join(to_tutorials, found[2]))

    for place, text in enumerate(_BLOCK.split(markdown)):
        add("code", text) if place % 2 else add("markdown", _LINK.sub(relink, text))
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    about = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"nbformat": 4, "nbformat_minor": 5, "metadata": about, "cells": cells}


def run(path: Path) -> bool:
    """Whether the code of a notebook runs from its first cell to its last."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", _RUNNER, str(path.resolve())]
    with tempfile.TemporaryDirectory() as scratch:
        done = subprocess.run(
            command, cwd=scratch, env=environment, stdout=subprocess.DEVNULL, check=False
        )
    return done.returncode == 0


def main() -> int:
    """Write the notebooks, and run them if asked; 0 if all is well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help="tutorials; all without one")
    parser.add_argument("--run", action="store_true", help="run their code, too")
    given = parser.parse_intermixed_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    failed = []
    for source in sorted(TUTORIALS.glob("*.md")):
        if source.stem == "index" or (given.names and source.stem not in given.names):
            continue
        path = given.folder / f"{source.stem}.ipynb"
        to_tutorials = Path(os.path.relpath(TUTORIALS, given.folder)).as_posix()
        made = notebook(source.read_text(encoding="utf-8"), to_tutorials)
        path.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        runs = given.run and (source.stem not in NEEDS or find_spec(NEEDS[source.stem]))
        good = not runs or run(path)
        print(f"{path}{': FAILS' if not good else ': runs' if runs else ''}", flush=True)
        failed += [] if good else [source.stem]
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
