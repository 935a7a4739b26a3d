"""Put small faults into the package, one at a time, and see whether its tests notice.

``mutants.py [NAME ...]``. mutants.toml lists the faults. Each is put into a copy of this
repository, where the tests that it names are run. It counts as killed only if a test fails, not if
the tests cannot run. A fault that survives shows a gap in the tests.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_name("mutants.toml")
PACKAGE = "keras_sparse_ortho"
BACKENDS = ("tensorflow", "jax", "torch")
SECONDS = 900  # for the tests of one fault
# Exit status of pytest.
PASSED, FAILED = 0, 1
MEANING = {
    2: "interrupted, or not collected",
    3: "internal error",
    4: "usage",
    5: "no test ran",
}
# It finds every fault by its text, and so fails for each.
OWN_TEST = "tests/tools/test_mutants.py"


class BrokenMutantError(ValueError):
    """The fault cannot be put into the package, or its tests cannot be run."""


@dataclass(frozen=True)
class Place:
    """Where a fault goes: a file, relative to the package, and a span of its text."""

    file: Path
    start: int
    end: int

    @property
    def room(self) -> str:
        """The sub-package that the file belongs to, or its own name if it stands outside."""
        return self.file.parts[0].removesuffix(".py")


@dataclass(frozen=True)
class Mutant:
    """A fault: a function, text that stands once in it, what replaces it, who should notice."""

    name: str
    fault: str
    find: str
    replace: str
    tests: tuple[str, ...]
    k: str = ""
    backend: str = "tensorflow"
    within: str = ""

    def located(self, root: Path) -> Place:
        """The only place of the text in the function, or room, that the fault is in."""
        package = root / PACKAGE
        room, _, name = self.within.partition(".")
        places = [
            Place(path.relative_to(package), 0, len(text))
            for path in sorted(package.rglob("*.py"))
            for text in [path.read_text(encoding="utf-8")]
        ]
        inside = [place for place in places if place.room == room]
        if name:
            inside = named(package, inside, name) or named(
                package, places, name
            )
        pattern = r"\s*".join(
            map(_pattern_of, re.findall(r"\w+|[^\w\s]", self.find))
        )
        found = [
            Place(place.file, *match.span())
            for place in inside or places
            for match in re.compile(pattern).finditer(
                code_of(package / place.file), place.start, place.end
            )
        ]
        if len(found) != 1:
            where = ", ".join(str(place.file) for place in found) or "nowhere"
            raise BrokenMutantError(
                f"its text must stand once in {self.within if inside else 'the package'}. "
                f"Received: {self.find!r} in {where}"
            )
        return found[0]

    def apply(self, root: Path) -> None:
        """Put the fault into the package under ``root``."""
        place = self.located(root)
        path = root / PACKAGE / place.file
        before = path.read_text(encoding="utf-8")
        after = before[: place.start] + self.replace + before[place.end :]
        try:
            same = ast.dump(ast.parse(after)) == ast.dump(ast.parse(before))
        except SyntaxError as error:
            raise BrokenMutantError(f"it does not compile: {error}") from None
        if same:
            raise BrokenMutantError("it changes nothing")
        path.write_text(after, encoding="utf-8")


def _pattern_of(token: str) -> str:
    """A regular expression for a token; the formatter may have put a comma before a bracket."""
    if token.isidentifier():
        return rf"\b{token}\b"
    if token in ")]}":
        return rf"(?:,\s*)?{re.escape(token)}"
    return re.escape(token)


def code_of(file: Path) -> str:
    """The text of a file with its docstrings blanked: words about code are not code."""
    text = file.read_text(encoding="utf-8")
    docstring = re.compile(r'^ *r?""".*?"""$', re.DOTALL | re.MULTILINE)
    return docstring.sub(lambda match: " " * len(match[0]), text)


def named(package: Path, files: Iterable[Place], name: str) -> list[Place]:
    """The functions and classes of that qualified name in ``files``."""
    found = []
    for place in files:
        text = (package / place.file).read_text(encoding="utf-8")
        found += [
            Place(place.file, *span)
            for known, span in definitions(text)
            if known == name
        ]
    return found


@cache
def definitions(text: str) -> list[tuple[str, tuple[int, int]]]:
    """Qualified names and spans of all functions and classes of a file."""
    begins = [0]
    for line in text.splitlines(keepends=True):
        begins.append(begins[-1] + len(line))

    def walk(
        node: ast.AST, prefix: str
    ) -> Iterator[tuple[str, tuple[int, int]]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                name = f"{prefix}{child.name}"
                yield (
                    name,
                    (begins[child.lineno - 1], begins[child.end_lineno or 0]),
                )
                yield from walk(child, f"{name}.")
            else:
                yield from walk(child, prefix)

    return list(walk(ast.parse(text), ""))


@dataclass(frozen=True)
class Verdict:
    """``killed``, ``SURVIVED`` or ``broken``, and the test that says so or the reason."""

    mutant: Mutant
    word: str
    note: str
    seconds: float = 0.0


def read_list(path: Path = LIST) -> list[Mutant]:
    """The faults of a file, in its order."""
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    return [
        Mutant(
            name, tests=tuple(row.pop("tests")), within=row.pop("in", ""), **row
        )
        for name, row in table.items()
    ]


def copy_tree(source: Path, target: Path) -> None:
    """Copy a repository without environments, caches and outputs."""
    ignored = shutil.ignore_patterns(
        ".*", "build", "dist", "*.egg-info", "__pycache__"
    )
    shutil.copytree(source, target, ignore=ignored)


def run_pytest(
    tree: Path, backend: str, tests: Iterable[str], k: str = ""
) -> tuple[int, str]:
    """Run tests of ``tree`` on its own package; the exit status and the output."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        *tests,
    ]
    # First in the path, also of the processes that tests start: before any installed package.
    paths = [str(tree), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "KERAS_BACKEND": backend,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONDONTWRITEBYTECODE": "1",  # files of equal length and time look unchanged to it
        "COLUMNS": "200",  # for reasons in pytest's summary
    }
    try:
        done = subprocess.run(
            [*command, *(["-k", k] if k else [])],
            cwd=tree,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return -1, f"not done in {SECONDS} s"
    return done.returncode, done.stdout


def first_failure(output: str) -> str:
    """The line of pytest's summary that names the failed test, and why."""
    found = re.search(r"^(?:FAILED|ERROR) (.*)$", output, re.MULTILINE)
    return found.group(1) if found else output.strip().rpartition("\n")[2]


def check_clean(
    tree: Path, mutants: Sequence[Mutant], jobs: int = 1
) -> str | None:
    """Run all named tests without a fault; the first failure, or `None`."""
    code = f"import importlib.util as u; print(u.find_spec({PACKAGE!r}).origin)"
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    origin = subprocess.check_output(
        [sys.executable, "-c", code], cwd=tree, env=environment
    )
    if not Path(origin.decode().strip()).is_relative_to(tree.resolve()):
        return f"the tests would not see the copy. Received: {origin.decode().strip()}"
    groups: dict[tuple[str, bool], list[Mutant]] = {}
    for mutant in mutants:
        groups.setdefault((mutant.backend, bool(mutant.k)), []).append(mutant)

    def failure(group: tuple[str, bool]) -> str | None:
        backend, with_k = group
        some = groups[group]
        tests = dict.fromkeys(test for mutant in some for test in mutant.tests)
        k = (
            " or ".join(dict.fromkeys(f"({mutant.k})" for mutant in some))
            if with_k
            else ""
        )
        status, output = run_pytest(tree, backend, tests, k)
        reason = f"{backend}: {first_failure(output)} ({MEANING.get(status, 'failed')})"
        return None if status == PASSED else reason

    with ThreadPoolExecutor(jobs) as pool:
        return next(filter(None, pool.map(failure, groups)), None)


def judge(source: Path, mutant: Mutant, whole: bool = False) -> Verdict:
    """Try one fault in a copy of ``source``."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree = Path(folder).resolve() / "tree"
        copy_tree(source, tree)
        try:
            mutant.apply(tree)
        except BrokenMutantError as error:
            return Verdict(mutant, "broken", str(error))
        status, output = run_pytest(
            tree, mutant.backend, mutant.tests, mutant.k
        )
        if status == PASSED and whole:
            for backend in BACKENDS:
                everything = ["tests", f"--ignore={OWN_TEST}"]
                status, output = run_pytest(tree, backend, everything)
                if status != PASSED:
                    break
    seconds = time.monotonic() - start
    if status == PASSED:
        return Verdict(
            mutant, "SURVIVED", " ".join([*mutant.tests, mutant.k]), seconds
        )
    if status == FAILED:
        return Verdict(mutant, "killed", first_failure(output), seconds)
    reason = f"{MEANING.get(status, f'exit status {status}')}: {first_failure(output)}"
    return Verdict(mutant, "broken", reason, seconds)


def show(verdict: Verdict) -> None:
    """Print one line of the table, and the fault where no test found it."""
    mutant = verdict.mutant
    note = (
        verdict.note if len(verdict.note) <= 140 else f"{verdict.note[:137]}..."
    )
    print(
        f"{verdict.word:<9}{mutant.name:<36}{verdict.seconds:6.1f} s  {note}",
        flush=True,
    )
    if verdict.word != "killed":
        print(
            f"{'':9}{mutant.fault}\n{'':9}- {mutant.find}\n{'':9}+ {mutant.replace}",
            flush=True,
        )


def chosen(mutants: Sequence[Mutant], names: Sequence[str]) -> list[Mutant]:
    """The faults of a name, or of a room."""
    if not names:
        return list(mutants)
    selected: set[str] = set()
    rooms = None
    for name in names:
        matches = [m.name for m in mutants if fnmatch(m.name, name)]
        if not matches:
            # To find the room of every fault takes a second or two.
            rooms = rooms or {m.name: room_of(m) for m in mutants}
            matches = [fault for fault, room in rooms.items() if room == name]
        if not matches:
            raise SystemExit(
                f"NAME must be a fault or a room with one. Received: {name}"
            )
        selected.update(matches)
    return [mutant for mutant in mutants if mutant.name in selected]


def room_of(mutant: Mutant) -> str | None:
    """The room that a fault goes into, or `None` if its text is not there."""
    try:
        return mutant.located(ROOT).room
    except BrokenMutantError:
        return None


def main() -> int:
    """Try the faults that the command line names; 0 if tests notice all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="faults (or a glob), or rooms"
    )
    parser.add_argument(
        "--list", action="store_true", help="show the faults, try none"
    )
    parser.add_argument(
        "--jobs", type=int, default=2, help="faults at a time (default 2)"
    )
    parser.add_argument(
        "--whole",
        action="store_true",
        help="run the whole suite before one counts as survived",
    )
    options = parser.parse_args()
    mutants = chosen(read_list(), options.names)
    if options.list:
        for mutant in mutants:
            print(f"{mutant.name:<36}{mutant.fault}")
        return 0

    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        # So that later edits do not matter.
        clean = Path(folder).resolve() / "tree"
        copy_tree(ROOT, clean)
        print(
            f"{len(mutants)} faults; their tests without a fault ...",
            flush=True,
        )
        if failure := check_clean(clean, mutants, options.jobs):
            print(
                f"broken: the tests must pass without a fault. Received: {failure}"
            )
            return 1
        print(f"green after {time.monotonic() - start:.0f} s", flush=True)
        with ThreadPoolExecutor(options.jobs) as pool:
            tried = [
                pool.submit(judge, clean, mutant, options.whole)
                for mutant in mutants
            ]
            verdicts = []
            for future in as_completed(tried):
                verdicts.append(future.result())
                show(verdicts[-1])

    killed = [v for v in verdicts if v.word == "killed"]
    print(
        f"\n{len(killed)} of {len(mutants)} killed, in {time.monotonic() - start:.0f} s"
    )
    for verdict in verdicts:
        if verdict.word != "killed":
            print(
                f"{verdict.word:<9}{verdict.mutant.name}: {verdict.mutant.fault}"
            )
    return int(len(killed) < len(mutants))


if __name__ == "__main__":
    sys.exit(main())
