"""Find English that readers stumble over: ``words.py [FILE ...]``, by default in all our texts.

It reads pages, and the docstrings, comments and messages of Python files. A hit is a sentence to
rewrite: subject, verb, object, and one thought a sentence.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEXTS = (
    *(
        "README.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "docs/**/*.md",
        "benchmarks/README.md",
    ),
    "paper/paper.md",
    *(
        "keras_sparse_ortho/**/*.py",
        "benchmarks/*.py",
        "tools/*.py",
        "examples/*.py",
    ),
)
# This file lists the words.
EXCEPT = ("tools/words.py",)

BEGIN = r"^\W*"
PREPOSITIONS = r"(?:about|as|by|for|from|in|of|on|than|to|with)"
PATTERNS = {
    "the object comes first": rf"{BEGIN}Of (?!course)\w+",
    "'what' as a noun": rf"{BEGIN}What (?!is new)[^?]*$|\b{PREPOSITIONS} what\b"
    r"|\bthat which\b|\bthose (?:that|which|who)\b",
    "a chain of clauses": r"\b(?:so that|(?:by|in|of|with) which)\b.*"
    r"\b(?:so that|(?:by|in|of|with) which)\b",
    "'is to be'": r"\b(?:is|are|was|were) (?:not )?to (?:be|have)\b|\bmay not do\b",
    "no term of the field": r"\b(?:is|are|be|was|were) (?:told|said)\b|\ban own\b",
    "the verb comes last, or is missing": rf"{BEGIN}Not (?!all\b|enough\b|every\b)\w+",
    "a paraphrase": r"\bc[ao]me(?:s|ing)? (?:about|near)\b|\bby the one word\b|\bnear to\b"
    r"|\btakes? (?:it|them|this) for\b",
    "a number without its zero": r"(?<=[\w,;:|(±] )\.\d+(?![\dfeg%])",
    "a phrase that readers stumbled over": r"\b(?:belongs? into|go(?:es)? behind|allows? to"
    r"|ended dense|(?:is|are) no (?:kernels|tools?) |rows apart|files travel|the whole way)\b"
    r"|\bin (?:two|three|four|both) ways\b",
    "an old word": r"\b(?:anew|as ever|ever|hereby|likewise|thereby|therein|thereof)\b",
}
NAMES = {"told", "said"}  # of functions and classes


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Line numbers and paragraphs of a file's prose."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield from _of_python(source)
        return
    for hidden in (r"^ *(```|~~~).*?^ *\1", r"<!--.*?-->", r"^#.*?$"):
        source = re.sub(hidden, _blank, source, flags=re.DOTALL | re.MULTILINE)
    yield from _paragraphs(1, source)


def _blank(match: re.Match[str]) -> str:
    return "\n" * match[0].count("\n")


def _of_python(source: str) -> Iterator[tuple[int, str]]:
    inside: set[int] = set()  # the parts of f-strings
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            inside |= {id(part) for part in node.values}
            parts = [
                part.value if isinstance(part, ast.Constant) else "x"
                for part in node.values
            ]
            yield from _paragraphs(node.lineno, "".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from _paragraphs(
                node.lineno, "" if id(node) in inside else node.value
            )
    block: list[str] = []
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            alone = token.line.lstrip().startswith("#")
            if token.start[0] > last + 1 or not alone:
                yield from _paragraphs(last + 1 - len(block), "\n".join(block))
                block = []
            block.append(token.string.lstrip("#: "))
            last = token.start[0]
    yield from _paragraphs(last + 1 - len(block), "\n".join(block))


def _paragraphs(line: int, text: str) -> Iterator[tuple[int, str]]:
    for part in re.split(
        r"\n(?=\s*(?:\n|[-*|]|\w[\w., *]*: |>>>|\.\.\.))", text
    ):
        if part.strip() and not part.lstrip().startswith((">>>", "...")):
            yield (
                line + len(part) - len(part.lstrip("\n")),
                " ".join(part.split()),
            )
        line += part.count("\n") + 1


def hits(path: Path) -> Iterator[str]:
    """The sentences of a file to rewrite, each with its line and the pattern it has."""
    for line, text in texts(path):
        for sentence in re.split(
            r"(?<=[.!?;:]) +|\| ", re.sub(r"`[^`]*`", "`x`", text)
        ):
            for name, pattern in PATTERNS.items():
                if (found := re.search(pattern, sentence)) is not None:
                    at = max(found.start() - 30, 0)
                    yield f"{line}: {name}: {sentence[at : at + 90]}"
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.FunctionDef | ast.ClassDef)
                and node.name in NAMES
            ):
                yield f"{node.lineno}: no term of the field: {node.name}"


def main(names: list[str]) -> int:
    """Print the hits in the files; 1 if there are any."""
    paths = [Path(name).resolve() for name in names]
    paths = paths or sorted(
        {path for pattern in TEXTS for path in ROOT.glob(pattern)}
    )
    excepted = (
        set()
        if names
        else {path for pattern in EXCEPT for path in ROOT.glob(pattern)}
    )
    found = [
        f"{path}:{hit}"
        for path in paths
        if path not in excepted
        for hit in hits(path)
    ]
    print("\n".join(found), end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
