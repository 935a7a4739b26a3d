"""Build the documentation site strictly, and check it: ``site_check.py [FOLDER]``.

Fails if a link or an anchor is broken, a page would load something from elsewhere, an equation is
not rendered, a public name is missing in the reference, or the search does not end on the page that
it should (tools/site_search.py). Without a FOLDER the site is not kept.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))

from tools import site_search  # noqa: E402
from tools.mkdocs_hooks import PACKAGE, documented, home, rooms  # noqa: E402

# Files that a browser fetches by itself, which excludes links.
_FETCHED = re.compile(
    r"<(?:script|img|iframe|source|video|audio)\b[^>]*?\bsrc=[\"']?((?:https?:)?//[^\"'\s>]+)"
    r"|<link\b(?![^>]*rel=[\"']?canonical)[^>]*?\bhref=[\"']?((?:https?:)?//[^\"'\s>]+)"
)


def build(folder: Path) -> bool:
    """Whether mkdocs builds the site without a warning."""
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
    ]
    # An advertisement, in colors.
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        [*command, str(folder)], cwd=ROOT, env=quiet, check=False
    )
    return done.returncode == 0


def fetched(folder: Path) -> list[str]:
    """Files that pages would load from other places."""
    return sorted(
        f"{path.relative_to(folder)} loads {next(filter(None, found))}"
        for path in folder.rglob("*.html")
        for found in _FETCHED.findall(path.read_text(encoding="utf-8"))
    )


def inventory(folder: Path) -> set[str]:
    """The names that the reference documents: Sphinx's format, written by mkdocstrings."""
    data = (folder / "objects.inv").read_bytes()
    text = zlib.decompress(data.split(b"\n", 4)[4]).decode("utf-8")
    return {line.split(" ", 1)[0] for line in text.splitlines()}


def lost_equations(folder: Path) -> list[str]:
    """Pages on which an equation is not rendered."""
    lost = []
    for path in sorted((ROOT / "docs").rglob("*.md")):
        wanted = path.read_text(encoding="utf-8").count("\n```math\n")
        page = folder / path.relative_to(ROOT / "docs").with_suffix(".html")
        if (
            page.read_text(encoding="utf-8").count('<div class="math"><math')
            != wanted
        ):
            lost.append(
                f"{path.relative_to(ROOT)}: not all of its {wanted} equations are drawn"
            )
    return lost


def undocumented(folder: Path) -> list[str]:
    """Public names without a place in the reference."""
    known = inventory(folder)
    wanted = [
        f"{PACKAGE}.{room}.{name}"
        for room, names in documented().items()
        for name in names
    ]
    wanted += [home(name) or f"{PACKAGE}.{name}" for name in rooms()[""]]
    return sorted(
        f"{name} is not in the reference"
        for name in set(wanted).difference(known)
    )


def main() -> int:
    """Build and check; 0 if all is well."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(sys.argv[1] if sys.argv[1:] else scratch).resolve()
        if not build(folder):
            print("mkdocs has not built the site without warnings")
            return 1
        problems = [
            *fetched(folder),
            *lost_equations(folder),
            *undocumented(folder),
        ]
        problems += site_search.lost(folder)
        pages = len([*folder.rglob("*.html")])
        print(
            "\n".join(problems)
            or f"{pages} pages, {len(inventory(folder))} names"
        )
        if sys.argv[1:] and not problems:
            print(f"open {folder / 'index.html'}")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
