"""Notebooks from the tutorials: ``notebooks.py FOLDER [--run] [--write] [NAME ...]``.

The Markdown of docs/tutorials is the source, and the notebooks are not committed. A ```python block
becomes a cell of code, the block ```text title="Output"`` behind it what the cell printed, all else
cells of text, with links that lead to the files of the checkout.

With --run each notebook's code is run, cell after cell, in a separate process, and the notebook
keeps what it printed and drew. With --write the pages get what was printed, too; then PAGES are
run as well.
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
PAGES = ("index.md", "all_on_one_page.md")  # of docs/, which show outputs, too
# Packages that .venv has not: `make test-compat` runs these.
NEEDS = {"keras_hub": "keras_hub"}
_BLOCK = re.compile(
    r'^```python\n(.*?)^```\n(?:\n```text title="Output"\n(.*?)^```\n)?',
    re.MULTILINE | re.DOTALL,
)
_LINK = re.compile(r"(\]\()(?!\w+://|#)([^)\s]+\))")
# Writes a list with the outputs of each cell, in the format of notebooks, to its second argument.
_RUNNER = """
import base64, contextlib, io, json, sys
found, space = [], {"__name__": "__main__"}
for cell in json.load(open(sys.argv[1], encoding="utf-8"))["cells"]:
    if cell["cell_type"] == "code":
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), cell["id"], "exec"), space)
        text = printed.getvalue().splitlines(keepends=True)
        outputs = [{"output_type": "stream", "name": "stdout", "text": text}] if text else []
        if pyplot := sys.modules.get("matplotlib.pyplot"):
            for number in pyplot.get_fignums():
                pyplot.figure(number).savefig(drawn := io.BytesIO(), format="png")
                png = {"image/png": base64.b64encode(drawn.getvalue()).decode()}
                outputs.append({"output_type": "display_data", "metadata": {}, "data": png})
            pyplot.close("all")
        found.append(outputs)
json.dump(found, open(sys.argv[2], "w", encoding="utf-8"))
"""


def notebook(markdown: str, to_tutorials: str) -> dict[str, Any]:
    """A tutorial as a notebook of format 4.5; `to_tutorials` leads from it to docs/tutorials."""
    cells: list[dict[str, Any]] = []

    def add(kind: str, text: str, **more: Any) -> None:
        if text.strip():
            source = text.strip("\n").splitlines(keepends=True)
            name = f"{kind}-{len(cells)}"
            cells.append(
                {
                    "cell_type": kind,
                    "id": name,
                    "metadata": {},
                    "source": source,
                    **more,
                }
            )

    def relink(found: re.Match[str]) -> str:
        return found[1] + posixpath.normpath(
            posixpath.join(to_tutorials, found[2])
        )

    end = 0
    for block in _BLOCK.finditer(markdown):
        add("markdown", _LINK.sub(relink, markdown[end : block.start()]))
        text = (block[2] or "").splitlines(keepends=True)
        printed = (
            [{"output_type": "stream", "name": "stdout", "text": text}]
            if text
            else []
        )
        add("code", block[1], outputs=printed, execution_count=None)
        end = block.end()
    add("markdown", _LINK.sub(relink, markdown[end:]))
    kernel = {
        "name": "python3",
        "display_name": "Python 3",
        "language": "python",
    }
    about = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {
        "nbformat": 4,
        "nbformat_minor": 5,
        "metadata": about,
        "cells": cells,
    }


def run(path: Path) -> bool:
    """Whether the code of a notebook runs; then the notebook has its outputs."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    environment.setdefault("MPLBACKEND", "Agg")
    with tempfile.TemporaryDirectory() as scratch:
        found = Path(scratch) / "outputs.json"
        command = [
            sys.executable,
            "-c",
            _RUNNER,
            str(path.resolve()),
            str(found),
        ]
        done = subprocess.run(
            command, cwd=scratch, env=environment, check=False
        )
        if done.returncode != 0:
            return False
        outputs = json.loads(found.read_text(encoding="utf-8"))
    made = json.loads(path.read_text(encoding="utf-8"))
    code = [cell for cell in made["cells"] if cell["cell_type"] == "code"]
    for number, (cell, printed) in enumerate(
        zip(code, outputs, strict=True), start=1
    ):
        cell |= {"outputs": printed, "execution_count": number}
    save(made, path)
    return True


def save(made: dict[str, Any], path: Path) -> None:
    """Writes a notebook."""
    path.write_text(
        json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def with_outputs(markdown: str, made: dict[str, Any]) -> str:
    """A page with the printed outputs of its notebook, behind each block of code."""
    code = iter([cell for cell in made["cells"] if cell["cell_type"] == "code"])

    def fill(block: re.Match[str]) -> str:
        streams = [
            out["text"]
            for out in next(code)["outputs"]
            if out["output_type"] == "stream"
        ]
        text = "".join(
            line.rstrip() + "\n" for lines in streams for line in lines
        )
        printed = f'\n```text title="Output"\n{text}```\n' if text else ""
        return f"```python\n{block[1]}```\n{printed}"

    return _BLOCK.sub(fill, markdown)


def main() -> int:
    """Write the notebooks, and run them if asked; 0 if all is well."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="tutorials; all without one"
    )
    parser.add_argument(
        "--run", action="store_true", help="run their code, keep its outputs"
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="run, and put outputs into the pages",
    )
    given = parser.parse_intermixed_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    pages = [
        page for page in sorted(TUTORIALS.glob("*.md")) if page.stem != "index"
    ]
    pages += [ROOT / "docs" / name for name in PAGES] if given.write else []
    failed = []
    for source in pages:
        if given.names and source.stem not in given.names:
            continue
        path = given.folder / f"{source.stem}.ipynb"
        to_page = Path(os.path.relpath(source.parent, given.folder)).as_posix()
        page = source.read_text(encoding="utf-8")
        save(notebook(page, to_page), path)
        there = source.stem not in NEEDS or find_spec(NEEDS[source.stem])
        runs = (given.run or given.write) and there
        good = not runs or run(path)
        print(
            f"{path}{': FAILS' if not good else ': runs' if runs else ''}",
            flush=True,
        )
        failed += [] if good else [source.stem]
        if given.write and runs and good:
            made = json.loads(path.read_text(encoding="utf-8"))
            source.write_text(with_outputs(page, made), encoding="utf-8")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
