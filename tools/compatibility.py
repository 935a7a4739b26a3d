"""Run the compatibility suite, and write its table: ``compatibility.py [BACKEND ...]``.

Without a BACKEND it runs on all three and, if every model passed, updates the table in
docs/compatibility.md; otherwise it prints the table. With `--reports FOLDER` backends can be run
one by one: each leaves its report there, and the table is written from all three.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "compatibility.md"
PAGES = "docs/tutorials/keras_hub.md"  # its code needs keras-hub
BEGIN, END = (
    "<!--- COMPATIBILITY: written by `make test-compat` -->",
    "<!--- END COMPATIBILITY -->",
)
NAMES = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "torch"}
STAGES = ("sparsify", "fit", "strip", "load", "load without the package")
EXPORT = "LiteRT"

NO_TESTS = 5  # exit status of pytest
_COUNTS = ("tests", "failures", "errors", "skipped")

Results = dict[str, dict[str, str]]
"""Outcomes by model and stage."""


def run(backend: str, report: Path) -> None:
    """Run the suite on a backend, and write a JUnit report; there is none if the pages fail."""
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q"]
    # Compiled code runs for milliseconds here; see tools/check.py.
    quick = {
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "KERAS_BACKEND": backend,
    }
    print("$", backend, *command, flush=True)
    environment = {**os.environ, **quick}
    # In one process, as the blocks of a page share their names; torch runs none of them.
    pages = subprocess.run(
        [*command, PAGES], cwd=ROOT, env=environment, check=False
    )
    if pages.returncode not in (0, NO_TESTS):
        return
    command += [
        "tests/compat",
        f"--junitxml={report}",
        "-n",
        "2",
        "--dist",
        "worksteal",
    ]
    subprocess.run(command, cwd=ROOT, env=environment, check=False)


def passed(report: ElementTree.ElementTree) -> bool:
    """Whether there are tests in a JUnit report, and all passed."""
    suites = list(report.iter("testsuite"))
    counts = {key: sum(int(s.get(key, "0")) for s in suites) for key in _COUNTS}
    return counts.pop("tests") > 0 and not any(counts.values())


def read(report: ElementTree.ElementTree) -> Results:
    """The stages of every model that a JUnit report has recorded."""
    results: Results = {}
    for case in report.iter("testcase"):
        name = case.get("name", "")
        if not name.startswith("test_the_whole_way["):
            continue
        noted = {
            p.get("name", ""): p.get("value", "") for p in case.iter("property")
        }
        results[name.partition("[")[2].removesuffix("]")] = {
            name.removeprefix("stage "): value
            for name, value in noted.items()
            if name.startswith("stage ")
        }
    return results


def cell(stages: dict[str, str] | None) -> str:
    """The table's entry for a model on a backend."""
    if stages is None:
        return ""
    missing = [stage for stage in STAGES if stages.get(stage) != "ok"]
    return f"fails: {missing[0]}" if missing else "ok"


def table(results: dict[str, Results]) -> str:
    """A row for each model, a column for each backend, and one for LiteRT."""
    titles = [NAMES[backend] for backend in results]
    exported = results.get("tensorflow", {})
    lines = [" | ".join(["| package", "model", *titles, f"{EXPORT} |"])]
    lines.append("|---" * (3 + len(titles)) + "|")
    for model in dict.fromkeys(
        name for found in results.values() for name in found
    ):
        package, _, short = model.partition(": ")
        cells = [cell(found.get(model)) for found in results.values()]
        cells.append(exported.get(model, {}).get(EXPORT, ""))
        lines.append(" | ".join([f"| {package}", short, *cells]) + " |")
    return "\n".join(lines)


def write(text: str) -> None:
    """Put the table between the markers of the page."""
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, marker, after = rest.partition(END)
    if not marker:
        raise SystemExit(f"{PAGE} must have the lines {BEGIN!r} and {END!r}")
    PAGE.write_text(
        f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8"
    )


def main() -> int:
    """Run on the backends that the command line names; 0 if every test passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "backends", nargs="*", metavar="BACKEND", help=", ".join(NAMES)
    )
    parser.add_argument(
        "--reports",
        metavar="FOLDER",
        help="where reports are kept, and taken from",
    )
    arguments = parser.parse_args()
    chosen = arguments.backends or list(NAMES)
    if unknown := set(chosen).difference(NAMES):
        parser.error(
            f"BACKEND must be one of {', '.join(NAMES)}. Received: {sorted(unknown)}"
        )
    results, good = {}, True
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments.reports or temporary).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        for backend in NAMES:
            report = folder / f"{backend}.xml"
            if backend in chosen:
                run(backend, report)
            if report.exists():
                found = ElementTree.parse(report)
                results[backend] = read(found)
                good = good and passed(found)
            elif backend in chosen:
                good = False
    text = table(results)
    print(text)
    if good and list(results) == list(NAMES):
        write(text)
        print(f"Written to {PAGE.relative_to(ROOT)}")
    return not good


if __name__ == "__main__":
    sys.exit(main())
