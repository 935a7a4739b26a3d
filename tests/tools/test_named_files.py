"""Files that pages, docstrings and comments name are there."""

import re

import pytest

from tools.mutants import PACKAGE, ROOT

pytestmark = pytest.mark.numpy_only

TOP = ("benchmarks", "docs", "examples", "tests", "tools", PACKAGE)
ROOMS = tuple(path.parent.name for path in (ROOT / PACKAGE).glob("*/__init__.py"))
NAMED = re.compile(
    rf"(?<![\w/.-])(?:\.\./)*((?:{'|'.join(TOP)})/[\w./*-]+|(?:{'|'.join(ROOMS)})/\w+\.py)"
)
WRITTEN = ("benchmarks/out", f"{PACKAGE}/1")  # results; the name in a LiteRT file
INVENTED = ("test_release.py", "test_site.py")  # they make folders of their own


def texts():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile"]
    pages += [*(ROOT / "docs").rglob("*.md"), *(ROOT / "tools").glob("*.toml")]
    code = [file for folder in TOP for file in (ROOT / folder).rglob("*.py")]
    return [file for file in (*pages, *code) if file.name not in INVENTED]


def test_files_that_are_named_exist():
    lost = []
    for file in texts():
        for name in NAMED.findall(file.read_text(encoding="utf-8")):
            path = name.rstrip(".")
            if path.startswith(WRITTEN):
                continue
            if not any(any(base.glob(path)) for base in (ROOT, ROOT / PACKAGE, file.parent)):
                lost.append(f"{file.relative_to(ROOT)}: {path}")
    assert not lost
