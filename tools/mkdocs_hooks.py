"""Hooks of mkdocs for the documentation site; mkdocs.yml names this file.

- Files that pages link to become pages of the site: benchmark results, examples, CONTRIBUTING.md,
  CHANGELOG.md. In the sources links work as in a checkout.
- A reference page for each public room, with the names of its ``__all__``.
- API names in the text, such as `kso.sparsify`, link to the reference.
- Sources are left out of the search, and the reference and tables come after the pages.
- The version of the package stands beside the link to the repository.
- A mistake of lunr, with which the theme searches, is corrected: see `on_post_build`.
- Equations in ```math fences become MathML when the site is built: no script runs in the browser.
"""

from __future__ import annotations

import ast
import posixpath
import re
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "keras_sparse_ortho"
# How much a page counts in the search, by how its path begins: the first that fits, and 1 if none
# does. 0 leaves it out. Pages come before the reference, tables and the history.
SEARCHED = {
    "examples/": 0,
    "benchmarks/": 0.01,
    "CHANGELOG.md": 0.01,
    "CONTRIBUTING.md": 0.1,
    "CODE_OF_CONDUCT.md": 0.1,
    "architecture.md": 0.1,
    "core.md": 0.1,
    "releasing.md": 0.1,
    "reference/": 0.3,
    "all_on_one_page.md": 0.5,
    "landscape.md": 0.5,
    "quantization.md": 0.5,
    "tutorials/": 0.9,
}
ROOT_PAGES = (
    *("CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "SECURITY.md"),
    *("CHANGELOG.md", "LICENSE", "CITATION.cff", "benchmarks/README.md"),
)
# The names that a reference page begins with; the others follow in the order of `__all__`.
FIRST = {
    "pruning": ("sparsify", "prune", "narrow", "parametrize", "apply_masks"),
    "export": ("export_litert", "load_litert"),
    "shrinking": ("shrink",),
    "analysis": ("report", "sensitivity"),
    "callbacks": ("UpdateMasks", "TargetDensity", "SET", "RigL"),
    "parametrizations": ("FixedMask", "MagnitudeMask", "SoftThreshold"),
    "initializers": ("ExactOrthogonal", "RandomSparse"),
    "models": (
        "strip",
        "convert",
        "prunable_weights",
        "remove_channels",
        "channel_groups",
    ),
    "schedules": ("Cubic",),
    "budgets": ("Budget", "erk", "uniform"),
}
_FENCE = re.compile(r"^(```+|~~~+).*?^\1\s*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
_FIGURE = re.compile(r"<!--=.*?-->|<!--table: \S+-->\n*")  # of tools/figures.py
_NAME = re.compile(r"`kso\.([A-Za-z_.]+)((?:\([^`]*\))?)`(?!\])")


def math_fence(source: str, *_: Any, **__: Any) -> str:
    """An equation in LaTeX as MathML, which browsers draw by themselves."""
    import latex2mathml.converter

    found: str = latex2mathml.converter.convert(source.strip(), display="block")
    return f'<div class="math">{found}</div>'


@cache
def rooms() -> dict[str, list[str]]:
    """The public names of each public room, read from the source; "" is the package itself."""
    found = {}
    for path in [
        ROOT / PACKAGE / "__init__.py",
        *sorted((ROOT / PACKAGE).glob("*/__init__.py")),
    ]:
        found[path.parent.name if path.parent.name != PACKAGE else ""] = (
            exported(path)
        )
    found["errors"] = exported(ROOT / PACKAGE / "errors.py")
    return {
        room: names for room, names in found.items() if not room.startswith("_")
    }


def exported(path: Path) -> list[str]:
    """The names in ``__all__`` of a module."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and [
            ast.unparse(t) for t in node.targets
        ] == ["__all__"]:
            return list(ast.literal_eval(node.value))
    return []


def documented() -> dict[str, list[str]]:
    """The rooms that have a reference page."""
    return {
        room: rooms()[room]
        for room in sorted(rooms())
        if room not in ("", "cli")
    }


@cache
def home(name: str) -> str | None:
    """The full name under which the reference has a public name: `sparsify`, `callbacks.SET`."""
    room, _, short = name.rpartition(".")
    if room:
        return (
            f"{PACKAGE}.{name}" if short in documented().get(room, ()) else None
        )
    if name in documented():
        return f"{PACKAGE}.{name}"
    if name not in rooms()[""]:
        return None
    where = next(
        (room for room, names in documented().items() if name in names), None
    )
    return f"{PACKAGE}.{where}.{name}" if where else None


def on_config(config: Any) -> Any:
    """Notes the version of the package, read from its source."""
    text = (ROOT / PACKAGE / "__init__.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "(.+)"', text, re.MULTILINE)
    config.extra["version_of_package"] = version
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the reference pages, and the files of the repository that pages link to."""
    from mkdocs.structure.files import File

    for room, names in documented().items():
        first = FIRST.get(room, ())
        ordered = [*first, *(name for name in names if name not in first)]
        members = "".join(f"\n        - {name}" for name in ordered)
        text = (
            f"---\ntitle: {room}\n---\n\n::: {PACKAGE}.{room}\n    options:\n"
        )
        text += "      heading_level: 1\n      show_root_full_path: true\n"
        text += f"      members:{members}\n"
        files.append(
            File.generated(config, f"reference/{room}.md", content=text)
        )
    results = sorted((ROOT / "benchmarks" / "results").iterdir())
    for path in (one for one in results if one.suffix in (".md", ".svg")):
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    for path in sorted((ROOT / "examples").glob("*.py")):
        text = f"# {path.name}\n\n````python\n{path.read_text(encoding='utf-8')}````\n"
        files.append(
            File.generated(config, f"examples/{path.stem}.md", content=text)
        )
    for name in ROOT_PAGES:
        source = str(ROOT / name)
        files.append(File.generated(config, name, abs_src_path=source))
    return files


def in_site(repository_path: str) -> str:
    """Where the site has a file of the repository."""
    if repository_path.startswith("docs/"):
        return repository_path.removeprefix("docs/")
    if repository_path == "README.md":
        return "index.md"
    if repository_path.startswith("examples/") and repository_path.endswith(
        ".py"
    ):
        return repository_path.removesuffix(".py") + ".md"
    return repository_path


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turns links of the checkout into those of the site, and names of the API into links."""
    here = page.file.src_uri
    weight = next(
        (share for start, share in SEARCHED.items() if here.startswith(start)),
        1,
    )
    page.meta["search"] = {"boost": weight} if weight else {"exclude": True}
    generated = not (ROOT / "docs" / here).exists()
    folder = posixpath.dirname(here if generated else f"docs/{here}")

    def relink(found: re.Match[str]) -> str:
        picture, text, target, anchor = found.groups()
        if not target or "://" in target:
            return found[0]
        wanted = posixpath.normpath(posixpath.join(folder, target))
        there = in_site(wanted)
        if files.get_file_from_path(there) is None and (ROOT / wanted).exists():
            return text  # a file that the site has not
        link = posixpath.relpath(there, posixpath.dirname(here) or ".")
        return f"{picture}[{text}]({link}{anchor or ''})"

    def refer(found: re.Match[str]) -> str:
        name = home(found[1])
        return f"[{found[0]}][{name}]" if name else found[0]

    def outside_fences(text: str) -> str:
        lines = [_LINK.sub(relink, line) for line in text.split("\n")]
        return "\n".join(
            line if line.startswith("#") else _NAME.sub(refer, line)
            for line in lines
        )

    markdown = _FIGURE.sub("", markdown)
    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [outside_fences(markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, outside_fences(markdown[end:])])


def on_post_build(config: Any) -> None:
    """Corrects how lunr 2.3.9 tells nodes of its index apart when it merges equal ones.

    It joins labels and numbers of edges without a mark between them, so that "1" and 23 are "12"
    and 3: with some pages, nodes that differ are merged, and searches for some letters fail.
    """
    workers = Path(config.site_dir) / "assets" / "javascripts" / "workers"
    for path in workers.glob("search.*.min.js"):
        text = path.read_text(encoding="utf-8")
        text = re.sub(
            r"(\w+)=\1\+(\w+)\+(\w+)\.id\}", r'\1=\1+\2+\3.id+","}', text
        )
        path.write_text(text, encoding="utf-8")
