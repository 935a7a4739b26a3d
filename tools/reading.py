"""How densely Python files are written: ``reading.py [FOLDER] [FILE ...]`` prints a table by file.

nodes      nodes of the syntax tree without docstrings: the size of the program, in any layout
code       lines with code: no blank line, no comment, no docstring
n/line     nodes a code line (equinox 6.7, optax 7.0, lineax 7.3, qwix 7.4)
vague      percent of assigned names that are a pronoun, a participle or an adjective alone
Any        annotations with Any, for each 1,000 code lines
if-expr    conditional expressions, for each 1,000 code lines
long       functions of more than 60 lines, docstring not counted
doc        percent of functions of more than 5 lines with a docstring
"""

from __future__ import annotations

import ast
import dataclasses
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "keras_sparse_ortho"

# Pronouns, participles and adjectives, which say nothing of a value without a noun.
VAGUE_WORDS = """
found own one ones given known made held left taken told kept asked wanted other others some all_
both it its them those these that this first last more most least few many much new old now then
once here there each every any_ got seen done tried chosen changed named same such whole rest back
off out way ways thing things part parts bare plain own_ again at to of by on in_ from_ only even
still yet far near small large big good bad best worst
"""
VAGUE = frozenset(VAGUE_WORDS.split())
LONGEST = 60  # lines of a function, without its docstring
SHORT = 5  # lines of a function that may do without a docstring

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclasses.dataclass(frozen=True)
class Figures:
    """Counts of one file, or of several together."""

    nodes: int = 0
    code: int = 0
    names: int = 0
    vague: int = 0
    any: int = 0
    if_expressions: int = 0
    long: int = 0
    to_document: int = 0
    documented: int = 0

    def __add__(self, other: Figures) -> Figures:
        pairs = zip(
            dataclasses.astuple(self), dataclasses.astuple(other), strict=True
        )
        return Figures(*(mine + theirs for mine, theirs in pairs))

    @property
    def nodes_a_line(self) -> float:
        return self.nodes / max(self.code, 1)

    @property
    def vague_percent(self) -> float:
        return 100 * self.vague / max(self.names, 1)

    @property
    def documented_percent(self) -> float:
        return 100 * self.documented / max(self.to_document, 1)

    def in_thousand_lines(self, count: int) -> float:
        """A count for each 1,000 code lines."""
        return 1000 * count / max(self.code, 1)

    def row(self, name: str) -> str:
        """The line of the table."""
        cells = (
            f"{self.nodes_a_line:6.1f}",
            f"{self.nodes:7d}",
            f"{self.code:6d}",
            f"{self.vague_percent:6.1f}",
            f"{self.in_thousand_lines(self.any):5.0f}",
            f"{self.in_thousand_lines(self.if_expressions):7.0f}",
            f"{self.long:4d}",
            f"{self.documented_percent:4.0f}",
        )
        return f"{' '.join(cells)}  {name}"


HEADER = "n/line   nodes   code vague%   Any if-expr long doc%  file"


def figures(source: str) -> Figures:
    """The figures of a file's source."""
    tree = ast.parse(source)
    docstrings = {id(node): node for node in _docstrings(tree)}
    hidden = {
        id(part) for node in docstrings.values() for part in ast.walk(node)
    }
    nodes = [node for node in ast.walk(tree) if id(node) not in hidden]
    names = [name for _, name in stored_names(tree)]
    sizes = [
        (function_size(node), ast.get_docstring(node) is not None)
        for node in nodes
        if isinstance(node, Function)
    ]
    return Figures(
        nodes=len(nodes),
        code=len(_code_lines(source, list(docstrings.values()))),
        names=len(names),
        vague=sum(is_vague(name) for name in names),
        any=sum(_has_any(annotation) for annotation in _annotations(nodes)),
        if_expressions=sum(isinstance(node, ast.IfExp) for node in nodes),
        long=sum(size > LONGEST for size, _ in sizes),
        to_document=sum(size > SHORT for size, _ in sizes),
        documented=sum(
            size > SHORT and has_docstring for size, has_docstring in sizes
        ),
    )


def is_vague(name: str) -> bool:
    """Whether a name is a pronoun, a participle or an adjective alone."""
    return name.strip("_").lower() in VAGUE


def stored_names(tree: ast.AST) -> list[tuple[int, str]]:
    """Lines and names of all variables that are assigned."""
    return [
        (node.lineno, node.id)
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]


def function_size(function: Function) -> int:
    """The lines of a function, without its docstring."""
    size = _lines_of(function)
    docstring = _docstring(function)
    if docstring is not None:
        size -= _lines_of(docstring)
    return size


def _lines_of(node: ast.stmt) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def _docstring(node: ast.AST) -> ast.Expr | None:
    """The statement of a docstring."""
    if (
        not isinstance(node, ast.Module | ast.ClassDef | Function)
        or not node.body
    ):
        return None
    statement = node.body[0]
    if not isinstance(statement, ast.Expr) or not isinstance(
        statement.value, ast.Constant
    ):
        return None
    if not isinstance(statement.value.value, str):
        return None
    return statement


def _docstrings(tree: ast.AST) -> Iterator[ast.Expr]:
    for node in ast.walk(tree):
        docstring = _docstring(node)
        if docstring is not None:
            yield docstring


def _code_lines(source: str, docstrings: list[ast.Expr]) -> set[int]:
    """The numbers of the lines with code."""
    no_code = (
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
        tokenize.ENCODING,
    )
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in no_code:
            lines.update(range(token.start[0], token.end[0] + 1))
    for docstring in docstrings:
        lines.difference_update(
            range(docstring.lineno, docstring.lineno + _lines_of(docstring))
        )
    return lines


def _annotations(nodes: list[ast.AST]) -> Iterator[ast.expr]:
    for node in nodes:
        annotation = None
        if isinstance(node, ast.arg | ast.AnnAssign):
            annotation = node.annotation
        elif isinstance(node, Function):
            annotation = node.returns
        if annotation is not None:
            yield annotation


def _has_any(annotation: ast.expr) -> bool:
    nodes = ast.walk(annotation)
    return any(
        isinstance(node, ast.Name) and node.id == "Any" for node in nodes
    )


def files_in(folder: Path) -> list[Path]:
    """The Python files of a package, without tests."""
    return [
        path
        for path in sorted(folder.rglob("*.py"))
        if "test" not in path.name and "tests" not in path.parts
    ]


def main(arguments: list[str]) -> int:
    """Print the table, densest files first."""
    folder = PACKAGE
    paths = [Path(argument) for argument in arguments]
    if paths and paths[0].is_dir():
        folder = paths.pop(0)
    by_path = {
        path: figures(path.read_text("utf-8"))
        for path in paths or files_in(folder)
    }
    print(HEADER)
    for path in sorted(by_path, key=lambda path: -by_path[path].nodes_a_line):
        name = path.relative_to(folder) if path.is_relative_to(folder) else path
        print(by_path[path].row(str(name)))
    print(sum(by_path.values(), Figures()).row("all"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
