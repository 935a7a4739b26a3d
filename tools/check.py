"""Run the checks of this repository and sum up: ``check.py [PART ...] [--slow]``.

Without a PART all of `make test` runs. There half of the tests run, with a quarter of their
cases, each on one backend, and a quarter of the pages. The commit draws them, so that others run at
the next commit; --draw TEXT repeats a draw. The longest pages are left out. A part that is named,
and --slow, run all. A part that fails does not stop the others. A part that runs tests must have
run at least one. Parts that need one core run at the same time, and before the tests, which take
two.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "keras_sparse_ortho"
# Most of a test's time is tracing, on one core. Work stealing keeps neighbours, which share
# fixtures, on one worker until the other runs out of tests.
TWO_AT_A_TIME = ("-n", "2", "--dist", "worksteal")
# The blocks of a page share their names.
TWO_FILES_AT_A_TIME = ("-n", "2", "--dist", "loadfile")
# They train several networks each, with functions that other pages call, too: a quarter of all.
LONG_PAGES = (
    "docs/all_on_one_page.md",
    "docs/tutorials/cnn.md",
    "docs/tutorials/trained_network.md",
    "docs/tutorials/trained_to_blocks.md",
)
# Compiled test code runs for milliseconds: optimizing it takes longer than it saves. With --slow
# XLA compiles as it does for users.
COMPILE_QUICKLY = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
# JAX compiles thousands of small programs: in half the time with the emitters of before 2025 and
# one thread each.
COMPILE_QUICKLY_ON_JAX = (
    f"{COMPILE_QUICKLY['XLA_FLAGS']} --xla_cpu_use_fusion_emitters=false "
    "--xla_cpu_parallel_codegen_split_count=1"
)


# The rooms of `quick`: no export, no callback; on torch, which compiles nothing.
QUICK = (
    "analysis",
    "budgets",
    "initializers",
    "layers",
    "models",
    "parametrizations",
    "saliency",
)
QUICK_WITHOUT_KERAS = (
    "tests/test_rooms.py",
    "tests/orthogonal",
    "tests/schedules",
)


@dataclasses.dataclass
class Result:
    """Result of one part: whether it passed, and how many tests it ran."""

    ok: bool
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    note: str = ""


def commit() -> str:
    """The commit of this repository, or "none" in a copy without one."""
    command = ("git", "rev-parse", "--short", "HEAD")
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "none"


def as_typed(command: tuple[str, ...], env: dict[str, str]) -> str:
    """A command as one could type it."""
    return " ".join(["$", *(f"{k}={v}" for k, v in env.items()), *command])


def python(*arguments: str, **env: str) -> bool:
    """Run this interpreter in the root, with ``env`` in the environment; True if it exits with 0.

    Its output is printed at once in the end, as another part may run at the same time.
    """
    command = (sys.executable, *arguments)
    both = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
    }
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | env, check=False, **both
    )
    print(f"{as_typed(command, env)}\n{done.stdout}", end="", flush=True)
    return done.returncode == 0


def pytest(backend: str, *arguments: str, **env: str) -> Result:
    """Run pytest on a Keras backend, with `env` in the environment, and count what it ran."""
    if "--slow" not in arguments:
        env = COMPILE_QUICKLY | env
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        command = (
            sys.executable,
            "-m",
            "pytest",
            "-q",
            f"--junitxml={report}",
            "--durations=12",
            *arguments,
        )
        env = {"KERAS_BACKEND": backend} | env
        print(as_typed(command, env), flush=True)
        ok = (
            subprocess.run(
                command, cwd=ROOT, env=os.environ | env, check=False
            ).returncode
            == 0
        )
        if not report.exists():
            return Result(False, note="no report: pytest did not start")
        suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    total, skipped, *bad = (
        sum(int(suite.get(key, 0)) for suite in suites)
        for key in ("tests", "skipped", "failures", "errors")
    )
    passed, failed = total - skipped - sum(bad), sum(bad)
    note = "" if passed or failed else "no test ran"
    return Result(ok and not note, passed, failed, skipped, note)


def lint(_: list[str]) -> Result:
    """Ruff's rules and format; plain English; code that reads well."""
    found = {
        "ruff's rules": "-m ruff check .",
        "its format: make format": "-m ruff format --check .",
        "words": "tools/words.py",
        "names and density of code": "tools/names.py",
    }
    notes = [
        note for note, command in found.items() if not python(*command.split())
    ]
    return Result(not notes, note="; ".join(notes))


def types(_: list[str]) -> Result:
    """The type annotations of the package."""
    return Result(python("-m", "mypy"))


def pages_left_out(draw: str) -> list[str]:
    """The long pages of docs/, and three quarters of the others."""
    pages = [
        page.relative_to(ROOT).as_posix()
        for page in sorted((ROOT / "docs").rglob("*.md"))
    ]
    short = [page for page in pages if page not in LONG_PAGES]
    short.sort(key=lambda page: zlib.crc32(f"{draw} {page}".encode()))
    return [*LONG_PAGES, *short[: 3 * len(short) // 4]]


def docs(options: list[str]) -> Result:
    """The examples in docstrings, README.md and docs/."""
    texts = [name for name in ("README.md", "docs") if (ROOT / name).exists()]
    left = []
    if "--spread" in options:
        draw = options[options.index("--spread") + 1]
        left = [f"--ignore={page}" for page in pages_left_out(draw)]
    return pytest(
        "tensorflow",
        "--doctest-modules",
        PACKAGE,
        *texts,
        *left,
        *TWO_FILES_AT_A_TIME,
    )


def site(_: list[str]) -> Result:
    """Figures as measured; the site, strictly."""
    found = {
        "figures differ from benchmarks/results: make figures": "tools/figures.py --check",
        "the site": "tools/site_check.py",
    }
    notes = [
        note for note, command in found.items() if not python(*command.split())
    ]
    return Result(not notes, note="; ".join(notes))


def quick(_: list[str]) -> Result:
    """The rules of the house, and short tests of the core, on torch."""
    found = pytest(
        "tensorflow", *QUICK_WITHOUT_KERAS, "-m", "numpy_only", *TWO_AT_A_TIME
    )
    core = torch([], *(f"tests/{room}" for room in QUICK))
    both = zip(
        dataclasses.astuple(found)[:4],
        dataclasses.astuple(core)[:4],
        strict=True,
    )
    ok, *counts = (one + other for one, other in both)
    return Result(
        ok == 2, *counts, "; ".join(filter(None, [found.note, core.note]))
    )


def tensorflow(options: list[str]) -> Result:
    """The tests on TensorFlow, and those without a backend."""
    return pytest("tensorflow", "tests", *TWO_AT_A_TIME, *options)


def jax(options: list[str]) -> Result:
    """The tests on JAX."""
    flags = COMPILE_QUICKLY_ON_JAX
    with tempfile.TemporaryDirectory() as cache:
        # The oldest versions of JAX do not know the flags, and end a process that names them.
        if "--slow" in options or not python(
            "-c", "import jax; jax.devices()", XLA_FLAGS=flags
        ):
            flags = (
                COMPILE_QUICKLY["XLA_FLAGS"] if "--slow" not in options else ""
            )
        # Compile runs that are compared with each other, or resumed, only once.
        return pytest(
            "jax",
            "tests",
            *TWO_AT_A_TIME,
            *options,
            **({"XLA_FLAGS": flags} if flags else {}),
            JAX_COMPILATION_CACHE_DIR=cache,
            JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
            JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
        )


def torch(options: list[str], *folders: str) -> Result:
    """The tests on torch."""
    # Two processes of one thread each: the tensors are too small for more threads.
    where = folders or ("tests",)
    return pytest(
        "torch", *where, *TWO_AT_A_TIME, *options, OMP_NUM_THREADS="1"
    )


def wheel(_: list[str]) -> Result:
    """A wheel built from a clean copy holds the package, nothing else, and can be imported."""
    ignored = shutil.ignore_patterns(
        ".*", "build", "dist", "*.egg-info", "__pycache__"
    )
    with tempfile.TemporaryDirectory() as folder:
        source, site = Path(folder, "source"), Path(folder, "site")
        shutil.copytree(ROOT, source, ignore=ignored)
        pip = ["-m", "pip", "--disable-pip-version-check"]
        build = [
            "wheel",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            folder,
            str(source),
        ]
        if not python(*pip, *build):
            return Result(False, note="the wheel was not built")
        (file,) = Path(folder).glob("*.whl")
        names = zipfile.ZipFile(file).namelist()
        ours = (f"{PACKAGE}/", f"{PACKAGE}-", f"{PACKAGE}_command.py")
        strays = [n for n in names if not n.startswith(ours)]
        if strays or f"{PACKAGE}/py.typed" not in names:
            return Result(
                False, note=f"py.typed is missing, or strays: {strays}"
            )
        ours = {
            p.relative_to(ROOT).as_posix()
            for p in (ROOT / PACKAGE).rglob("*.py")
        }
        if left_out := sorted(ours.difference(names)):
            return Result(False, note=f"left out of the wheel: {left_out}")
        installed = python(
            *pip, "install", "-q", "--no-deps", "--target", str(site), str(file)
        )
        code = f"import {PACKAGE} as p; assert p.__file__.startswith({str(site)!r}), p.__file__"
        imported = installed and python(
            "-P", "-c", code, PYTHONPATH=str(site), KERAS_BACKEND="jax"
        )
        return Result(imported, note=f"{file.name}, {len(names)} files")


ALONE = (lint, types, site, wheel)
TESTED = (docs, tensorflow, jax, torch)
PARTS: dict[str, Callable[[list[str]], Result]] = {
    part.__name__: part for part in (*ALONE, *TESTED, quick)
}


def timed(name: str, options: list[str]) -> tuple[str, Result, float]:
    """A part, its result and its seconds."""
    print(f"\n=== {name}: {PARTS[name].__doc__}", flush=True)
    start = time.monotonic()
    return name, PARTS[name](options), time.monotonic() - start


def main() -> int:
    """Run the parts that the command line names; 0 if all pass."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=", ".join(PARTS)
    )
    parser.add_argument(
        "--slow", action="store_true", help="with the tests marked slow"
    )
    parser.add_argument(
        "--draw", metavar="TEXT", help="draws the cases in place of the commit"
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.parts).difference(PARTS):
        parser.error(
            f"PART must be one of {', '.join(PARTS)}. Received: {', '.join(unknown)}"
        )

    names = arguments.parts or [part.__name__ for part in (*ALONE, *TESTED)]
    options = []
    if arguments.slow:
        options = ["--slow"]
    elif arguments.draw or not arguments.parts:
        options = ["--spread", arguments.draw or commit()]
    alone = [name for name in names if PARTS[name] in ALONE]
    with ThreadPoolExecutor(2) as pool:
        rows = [*pool.map(lambda name: timed(name, options), alone)]
    rows += [timed(name, options) for name in names if name not in alone]

    print("\n=== summary")
    for name, result, seconds in rows:
        ran = result.passed or result.failed
        tests = f"{result.passed} passed, {result.failed} failed" if ran else ""
        about = ", ".join(filter(None, [tests, result.note]))
        print(
            f"{'ok  ' if result.ok else 'FAIL'}  {name:<12}{seconds:7.1f} s  {about}".rstrip()
        )
    passed, failed, skipped = (
        sum(getattr(result, key) for _, result, _ in rows)
        for key in ("passed", "failed", "skipped")
    )
    if passed or failed:
        print(f"tests: {passed} passed, {failed} failed, {skipped} skipped")
    bad = [name for name, result, _ in rows if not result.ok]
    print("FAILED: " + ", ".join(bad) if bad else "all good", flush=True)
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
