"""Shared by all scripts: the command line, times taken in turns, and where results go.

`write` writes `results/<name>.md`, with machine, versions, commit, command and seeds;
`append` adds a long run as a line of `results/<name>.jsonl`, with machine and versions. With
`--quick`, or if the environment variable KSO_RESULTS names another folder, everything goes there:
results of small settings are never mixed with the real ones.
"""

import argparse
import datetime
import importlib.metadata
import inspect
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
COMMAND = tuple(sys.argv)
"""The words of this process, with the name of the measurement, which `chosen` removes."""
QUICK = "--quick" in COMMAND
RESULTS = pathlib.Path(
    os.environ.setdefault("KSO_RESULTS", str(HERE / ("out/quick" if QUICK else "results")))
)
"""The folder of this run; processes that it starts inherit it."""

LEFT = "left at least:"
"""How a line begins that says how much a long part still has to do; `suite.py` passes it on."""

_PACKAGES = (
    *("keras-sparse-ortho", "keras", "numpy", "scipy", "tensorflow", "jax", "torch", "tf_keras"),
    *("tensorflow-model-optimization", "ai-edge-litert", "ethos-u-vela"),
    *("onnxruntime", "openvino"),
)
_SETTINGS = ("KERAS_BACKEND", "XLA_FLAGS", "OPENBLAS_NUM_THREADS", "GLIBC_TUNABLES")


def chosen(*measurements: Callable[[], None]) -> None:
    """Runs the measurement that the first argument names; the others are its own."""
    names = {one.__name__: one for one in measurements}
    parser = argparse.ArgumentParser(usage="%(prog)s NAME [--help] ...")
    parser.add_argument("name", choices=names, metavar="NAME", help=", ".join(names))
    name = parser.parse_args(sys.argv[1:2]).name
    del sys.argv[1]
    names[name]()


def described(measurement: Callable[..., None]) -> argparse.ArgumentParser:
    """A parser whose help is the docstring of a measurement."""
    return argparse.ArgumentParser(
        description=inspect.getdoc(measurement),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def parsed(
    parser: argparse.ArgumentParser, quick: dict[str, Any], arguments: list[str] | None = None
) -> argparse.Namespace:
    """The command line; `--quick` changes the defaults and the folder of the results."""
    parser.add_argument("--quick", action="store_true", help="a small setting, into out/quick")
    if "--quick" in (sys.argv[1:] if arguments is None else arguments):
        parser.set_defaults(**quick)
    return parser.parse_args(arguments)


def machine() -> str:
    """One line about where this ran."""
    model = platform.processor() or "unknown processor"
    info = pathlib.Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        if line.startswith("model name"):
            model = line.split(":")[1].strip()
            break
    cores = f"{os.cpu_count()} cores"
    if hasattr(os, "sched_getaffinity"):  # not on every system
        usable = len(os.sched_getaffinity(0))
        cores = cores if usable == os.cpu_count() else f"{usable} of {cores}"
    return f"{model}, {cores}, Python {platform.python_version()}"


def versions() -> dict[str, str]:
    """Versions of the packages that may be used here."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit of the repository, with a plus if the code has changed since; or "unknown"."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=HERE, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "../keras_sparse_ortho", "*.py", "*.toml")
        return git("rev-parse", "--short", "HEAD") + "+" * bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def about(seeds: Iterable[int] = (0,)) -> dict[str, Any]:
    """Everything recorded with a page."""
    return {
        "command": f"python benchmarks/{' '.join([pathlib.Path(COMMAND[0]).name, *COMMAND[1:]])}",
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
        "settings": {name: os.environ[name] for name in _SETTINGS if name in os.environ},
        "load": round(os.getloadavg()[0], 1),
        "seeds": sorted(set(seeds)),
    }


def append(lines: pathlib.Path, row: dict[str, Any]) -> None:
    """Writes one finished run as a line of JSON, with machine and versions."""
    known = versions()
    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    made = {"commit": commit(), "date": datetime.date.today().isoformat(), "machine": machine()}
    made |= {name: known[name] for name in ("keras", backend) if name in known}
    lines.parent.mkdir(parents=True, exist_ok=True)
    with lines.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(row | {"made": made}) + "\n")


def finished(lines: pathlib.Path) -> list[dict[str, Any]]:
    """The runs in a file of JSON lines, without lines that a kill cut off."""
    runs = []
    for line in lines.read_text().splitlines() if lines.exists() else []:
        try:
            runs.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return runs


def say_left(part: str, count: int, took: list[float]) -> None:
    """Prints how many runs are left at least, and for how long, as earlier ones took so many s."""
    if count:
        about = f", about {count * statistics.median(took) / 60:.0f} min" if took else ""
        print(f"{LEFT} {part}, {count} runs{about}", flush=True)


def announced(part: str, runs: Sequence[Any]) -> Iterator[Any]:
    """The runs one after the other, with how many are left before each."""
    took: list[float] = []
    for done, run in enumerate(runs):
        say_left(part, len(runs) - done, took)
        start = time.monotonic()
        yield run
        took.append(time.monotonic() - start)


def write(name: str, text: str, seeds: Iterable[int] = (0,)) -> None:
    """Prints a result and writes it to `<name>.md`."""
    write_page(RESULTS / f"{name}.md", text, seeds)


def write_page(page: pathlib.Path, text: str, seeds: Iterable[int] = (0,)) -> None:
    """Prints a result and writes it to a page, with machine, versions and command."""
    made = about(seeds)
    known = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    text = f"{text.rstrip()}\n\nMade by `{made['command']}`, commit {made['commit']}, "
    text += f"{made['date']}, seeds {', '.join(map(str, made['seeds']))}, load {made['load']}: "
    text += f"{known}.\n"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text, encoding="utf-8")
    print(text)


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


# --- times ----------------------------------------------------------------------------------------


def interleaved(
    cases: Mapping[str, Callable[[], object]], rounds: int, warm_up: int = 1
) -> dict[str, float]:
    """Median seconds of each case, run in turn, so that noise affects all of them."""
    return {name: wall for name, (wall, _) in wall_and_cpu(cases, rounds, warm_up).items()}


def wall_and_cpu(
    cases: Mapping[str, Callable[[], object]], rounds: int, warm_up: int = 1
) -> dict[str, tuple[float, float]]:
    """As `interleaved`, with wall-clock and CPU seconds."""
    for run in cases.values():
        for _ in range(warm_up):
            run()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, run in cases.items():
            start, worked = time.perf_counter(), time.process_time()
            run()
            times[name].append((time.perf_counter() - start, time.process_time() - worked))
    return {
        name: (statistics.median(w for w, _ in pairs), statistics.median(c for _, c in pairs))
        for name, pairs in times.items()
    }


def middle_of_processes(
    lines: Iterable[dict[str, Any]], key: Callable[[dict[str, Any]], Hashable], by: str
) -> dict[Hashable, dict[str, Any]]:
    """For each kind of result, the median line of all processes of the last day and commit.

    Memory placement in a process moves a ratio by a tenth. An even number of them
    has the larger of the middle two.
    """
    kinds: dict[Hashable, list[dict[str, Any]]] = {}
    for line in lines:
        kinds.setdefault(key(line), []).append(line)
    found = {}
    for name, mine in kinds.items():
        same = [line for line in mine if _occasion(line) == _occasion(mine[-1])]
        found[name] = sorted(same, key=lambda line: line[by])[len(same) // 2]
        found[name] = found[name] | {"processes": len(same)}
    return found


def _occasion(line: dict[str, Any]) -> Hashable:
    """Day and commit; a line without them is its own group."""
    made = line.get("made")
    return (made["date"], made["commit"].rstrip("+")) if made else id(line)
