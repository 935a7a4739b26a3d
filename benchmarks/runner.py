"""One way to measure: settings, runs that are resumed, and a page.

A measurement is a class below `Measurement`. Its settings are data; `runs` says which runs a
command asks for, `run` makes one of them, and `report` writes the page from all lines there are. A
script ends in `main(Measurement, ...)`, and then has this command line:

    python SCRIPT.py NAME --help        # what is measured, and the settings
    python SCRIPT.py NAME --quick       # a small setting, into out/quick
    python SCRIPT.py NAME --summary     # only the page, from the lines there are

Every run is a line of `results/LINES.jsonl`. Runs that are there are not repeated, so a script may
be stopped at any time. With `resumes = False` times are measured again, and lines are added; the
page shows the last of each kind. A measurement without a file of lines keeps them in memory.

`python benchmarks/runner.py` runs the parts of `suite.toml`: see `SUITE`.
"""

import argparse
import dataclasses
import inspect
import itertools
import json
import math
import os
import pathlib
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import record

Run = dict[str, Any]
"""A run: its settings, or its settings and results, by name."""

LEFT = "left at least:"
"""How a line begins that says how much a long part still has to do; `suite` passes it on."""

_SAME = object()


@dataclasses.dataclass(frozen=True)
class Setting:
    """An option of a command line.

    Args:
        default: The value without the option. A list takes several values, and `False` or `True`
            makes a switch. A type, or a list of a type, has no value by default.
        help: Its meaning.
        choices: The values it can have.
        quick: The value with `--quick`, if that is another one.
    """

    default: Any
    help: str = ""
    choices: Iterable[Any] | None = None
    quick: Any = _SAME

    def add_to(self, parser: argparse.ArgumentParser, name: str) -> None:
        """Adds the option to a parser."""
        flag = f"--{name.replace('_', '-')}"
        if isinstance(self.default, bool):
            switch = (
                argparse.BooleanOptionalAction if self.default else "store_true"
            )
            parser.add_argument(
                flag, action=switch, default=self.default, help=self.help
            )
            return
        several = isinstance(self.default, list | tuple)
        sample = self.default[0] if several else self.default
        typed = isinstance(sample, type)
        parser.add_argument(
            flag,
            type=sample if typed else type(sample),
            nargs="+" if several else None,
            default=None if typed else self.default,
            choices=None if self.choices is None else [*self.choices],
            help=self.help,
        )


class Measurement:
    """A measurement: its settings, its runs, and its page.

    The docstring of a subclass is the help of its command.

    Attributes:
        page: The page in `results`, without its ending; empty where it writes none.
        lines: The file of lines in `results`, without its ending; empty where there is none.
        resumes: Whether a run that stands in the file is not repeated.
        apart: Whether each run has a process of its own.
        seeds: The seeds of a page whose lines have none.
        settings: The options, by name.
    """

    page: ClassVar[str] = ""
    lines: ClassVar[str] = ""
    resumes: ClassVar[bool] = True
    apart: ClassVar[bool] = False
    seeds: ClassVar[Sequence[int]] = (0,)
    settings: ClassVar[Mapping[str, Setting]] = {}

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self._new: list[Run] = []

    # Overridden by subclasses.

    def runs(self) -> Iterable[Run]:
        """The settings of every run that the command asks for."""
        return [{}]

    def run(self, which: Run) -> Run | Iterable[Run]:
        """Makes one run; returns its results, or those of several rivals."""
        raise NotImplementedError

    def report(self, lines: list[Run]) -> str:
        """The text of the page, from all lines."""
        raise NotImplementedError

    # Done by the runner.

    @classmethod
    def title(cls) -> str:
        """The name of the measurement on the command line."""
        return snake(cls.__name__)

    @property
    def file(self) -> pathlib.Path:
        """The file of lines."""
        return record.RESULTS / f"{self.lines}.jsonl"

    def finished(self) -> list[Run]:
        """All lines there are."""
        return record.finished(self.file) if self.lines else self._new

    def add(self, line: Run) -> Run:
        """Writes and prints one finished run."""
        if self.lines:
            record.append(self.file, line)
        else:
            self._new.append(line)
        print(
            {name: value for name, value in line.items() if not _long(value)},
            flush=True,
        )
        return line

    def line_of(self, which: Run) -> Run | None:
        """The line of a run, if there is one."""
        lines = self.finished()
        return next(
            (line for line in lines if which.items() <= line.items()), None
        )

    def once(self, which: Run) -> Run:
        """The line of a run: the finished one, or else that of the run, which is made now."""
        return self.line_of(which) or self.make(which)[-1]

    def make(self, which: Run) -> list[Run]:
        """Makes one run, in a process of its own if they are apart, and writes its lines."""
        results = self.in_new_process(which) if self.apart else self.run(which)
        several = [results] if isinstance(results, dict) else results
        return [self.add(which | line) for line in several]

    def measure(self) -> None:
        """Makes all runs that are missing."""
        missing = list(self.runs())
        if self.resumes:
            missing = [
                which for which in missing if self.line_of(which) is None
            ]
        for which in announced(self.title(), missing):
            self.make(which)

    def in_new_process(self, which: Run) -> Run:
        """The results of a run in a process of its own."""
        command = [sys.executable, *record.COMMAND, "--one", json.dumps(which)]
        process = subprocess.run(
            command, capture_output=True, text=True, check=False
        )
        if process.returncode:
            raise SystemExit(f"{which} has failed:\n{process.stderr[-3000:]}")
        return json.loads(process.stdout.splitlines()[-1])

    def write(self) -> None:
        """Writes the page."""
        lines = self.finished()
        if self.lines and not lines:
            raise SystemExit("Nothing is measured yet.")
        seeds = {line["seed"] for line in lines if "seed" in line} or self.seeds
        record.write_page(
            self.file.with_name(f"{self.page}.md"), self.report(lines), seeds
        )

    @classmethod
    def command(cls, arguments: list[str] | None = None) -> None:
        """Does what the words of a command line say."""
        given = cls.parser(arguments).parse_args(arguments)
        measurement = cls(given)
        if given.one is not None:
            print(json.dumps(measurement.run(json.loads(given.one))))
            return
        if not given.summary:
            measurement.measure()
        if cls.page:
            measurement.write()

    @classmethod
    def parser(
        cls, arguments: list[str] | None = None
    ) -> argparse.ArgumentParser:
        """The parser of the settings; `--quick` among the words changes the defaults."""
        parser = argparse.ArgumentParser(
            description=inspect.getdoc(cls),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for name, setting in cls.settings.items():
            setting.add_to(parser, name)
        parser.add_argument(
            "--quick",
            action="store_true",
            help="a small setting, into out/quick",
        )
        # In a process of its own.
        parser.add_argument("--one", help=argparse.SUPPRESS)
        parser.set_defaults(summary=False)
        if cls.lines and cls.page:
            parser.add_argument(
                "--summary", action="store_true", help="only write the page"
            )
        if "--quick" in (sys.argv[1:] if arguments is None else arguments):
            small = {name: one.quick for name, one in cls.settings.items()}
            parser.set_defaults(
                **{k: v for k, v in small.items() if v is not _SAME}
            )
        return parser


def main(*measurements: type[Measurement]) -> None:
    """The command line of a script: the first word names one of its measurements."""
    names = {measurement.title(): measurement for measurement in measurements}
    if len(names) == 1:
        measurements[0].command()
        return
    parser = argparse.ArgumentParser(usage="%(prog)s NAME [--help] ...")
    parser.add_argument(
        "name", choices=names, metavar="NAME", help=", ".join(names)
    )
    name = parser.parse_args(sys.argv[1:2]).name
    del sys.argv[1]
    names[name].command()


def snake(name: str) -> str:
    """The name of a measurement for that of its class: `StepTimes` is `step_times`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _long(value: object) -> bool:
    """Whether a value is too long to be printed."""
    return len(str(value)) > 200


def grid(**axes: Iterable[Any]) -> list[Run]:
    """All combinations of values, those of the last axis next to each other."""
    return [
        dict(zip(axes, values, strict=True))
        for values in itertools.product(*axes.values())
    ]


# --- what is left ---------------------------------------------------------------------------------


def say_left(part: str, count: int, took: list[float]) -> None:
    """Prints how many runs are left at least, and for how long, as earlier ones took so many s."""
    if not count:
        return
    minutes = (
        f", about {count * statistics.median(took) / 60:.0f} min"
        if took
        else ""
    )
    print(f"{LEFT} {part}, {count} runs{minutes}", flush=True)


def announced(part: str, runs: Sequence[Any]) -> Iterator[Any]:
    """The runs one after the other, with how many are left before each."""
    took: list[float] = []
    for number, run in enumerate(runs):
        say_left(part, len(runs) - number, took)
        start = time.monotonic()
        yield run
        took.append(time.monotonic() - start)


# --- times and memory -----------------------------------------------------------------------------


def interleaved(
    cases: Mapping[Any, Callable[[], object]], rounds: int, warm_up: int = 1
) -> dict[Any, float]:
    """Median seconds of each case, run in turn, so that noise affects all of them."""
    times = wall_and_cpu(cases, rounds, warm_up)
    return {name: wall for name, (wall, _) in times.items()}


def wall_and_cpu(
    cases: Mapping[Any, Callable[[], object]], rounds: int, warm_up: int = 1
) -> dict[Any, tuple[float, float]]:
    """As `interleaved`, with wall-clock and CPU seconds."""
    for call in cases.values():
        for _ in range(warm_up):
            call()
    walls: dict[Any, list[float]] = {name: [] for name in cases}
    cpus: dict[Any, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, call in cases.items():
            start = time.perf_counter()
            worked = time.process_time()
            call()
            walls[name].append(time.perf_counter() - start)
            cpus[name].append(time.process_time() - worked)
    return {
        name: (statistics.median(walls[name]), statistics.median(cpus[name]))
        for name in cases
    }


def beside_first(times: Mapping[Any, tuple[float, float]]) -> dict[Any, Run]:
    """By name, the seconds of `wall_and_cpu` and their ratios to those of the first case."""
    first_wall, first_cpu = next(iter(times.values()))
    return {
        name: {
            "wall": wall,
            "cpu": cpu,
            "wall_ratio": wall / first_wall,
            "cpu_ratio": cpu / first_cpu,
        }
        for name, (wall, cpu) in times.items()
    }


def peak() -> float:
    """The largest resident set of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# --- all of them ----------------------------------------------------------------------------------

PATIENCE = 300  # seconds for a part of the quick suite
EVERY = 60  # seconds between two looks at what a part has left


def parts() -> dict[str, dict]:
    """The parts by name."""
    text = (record.HERE / "suite.toml").read_text(encoding="utf-8")
    return {part["name"]: part for part in tomllib.loads(text)["part"]}


def commands(
    part: dict, options: argparse.Namespace
) -> list[tuple[str, list[str]]]:
    """The backend and the arguments of every run of a part; none if it has nothing to do."""
    backends = part.get("backends", ["tensorflow"])
    name = [part["measures"]] if "measures" in part else []
    if options.quick:
        arguments = [*name, "--quick"]
        return [
            (backend, arguments)
            for backend in backends
            if part.get("quick", True)
        ]
    if options.tables:
        return (
            [(backends[0], name + part["tables"])] if "tables" in part else []
        )
    return [(backend, name + part.get("full", [])) for backend in backends]


def set_aside(part: dict, results: pathlib.Path) -> None:
    """Moves the finished runs of a part away, so that it starts over."""
    for name in part.get("lines", []):
        if (results / name).exists():
            aside = (
                record.HERE
                / "out"
                / "aside"
                / time.strftime("%Y-%m-%d_%H-%M-%S")
            )
            aside.mkdir(parents=True, exist_ok=True)
            shutil.move(results / name, aside / name)
            print(
                f"{name} is now in {aside.relative_to(record.HERE.parent)}",
                flush=True,
            )


def cpu() -> float:
    """CPU seconds of ended processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def followed(
    script: subprocess.Popen, log: pathlib.Path, patience: float
) -> int:
    """The exit code of a script; meanwhile prints what its log says of the time left.

    Raises:
        subprocess.TimeoutExpired: After so many seconds.
    """
    start = time.monotonic()
    printed = ""
    while True:
        remaining = patience - (time.monotonic() - start)
        try:
            return script.wait(min(remaining, EVERY))
        except subprocess.TimeoutExpired:
            if remaining <= EVERY:
                raise
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        message = next(
            (line for line in reversed(lines) if line.startswith(LEFT)), ""
        )
        if message != printed:
            printed = message
            print(f"      {message}", flush=True)


def run_part(
    part: dict,
    backend: str,
    arguments: list[str],
    results: pathlib.Path,
    quick: bool,
) -> bool:
    """One run of a script; its output goes to a file."""
    log = results / "logs" / f"{part['name']}_{backend}.txt"
    if not quick:
        log = record.HERE / "out" / "logs" / log.name
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {
        "KERAS_BACKEND": backend,
        "KSO_RESULTS": str(results),
    }
    start = time.monotonic()
    cpu_before = cpu()
    note = ""
    with log.open("w", encoding="utf-8") as stream:
        script = subprocess.Popen(
            [sys.executable, str(record.HERE / part["script"]), *arguments],
            env=environment,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            passed = followed(script, log, PATIENCE if quick else math.inf) == 0
        except subprocess.TimeoutExpired:
            passed = False
            note = f"stopped after {PATIENCE} s"
        finally:  # an interruption, too, ends the processes that the script has started
            if script.poll() is None:
                os.killpg(script.pid, signal.SIGKILL)
                script.wait()
    seconds = time.monotonic() - start
    title = f"{'ok  ' if passed else 'FAIL'}  {part['name']:<20}{backend:<12}"
    work = cpu() - cpu_before
    print(
        f"{title}{seconds:8.1f} s  {work:8.1f} s of cores  {note}".rstrip(),
        flush=True,
    )
    if not passed:
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[
            -5:
        ]
        print(
            "\n".join(f"      {line}" for line in [*tail, f"all of it: {log}"]),
            flush=True,
        )
    return passed


SUITE = """All benchmarks, one after the other: `make bench` and `make bench-quick`.

    python benchmarks/runner.py                           # all tables and pictures: days of 2 cores
    python benchmarks/runner.py --parts deep methods      # some of them
    python benchmarks/runner.py --tables                  # only tables and pictures, from the lines
    python benchmarks/runner.py --again --parts blocks    # set the lines aside, and measure again
    python benchmarks/runner.py --quick                   # a small setting of each: ten minutes

`suite.toml` lists the parts. Results go to `benchmarks/results`, those of `--quick` to
`benchmarks/out/quick`, with the output of every part in `logs/` there. Long parts are resumed:
finished runs are not repeated. They say how many runs are left, and how long these will take.
"""


def suite() -> int:
    """Runs the parts that the command line names; 0 if none failed."""
    known = parts()
    parser = argparse.ArgumentParser(
        description=SUITE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parts", nargs="+", choices=known, default=[*known], metavar="PART"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a small setting of each"
    )
    parser.add_argument(
        "--tables", action="store_true", help="tables and pictures only"
    )
    parser.add_argument(
        "--again", action="store_true", help="set finished lines aside first"
    )
    parser.add_argument(
        "--out", type=pathlib.Path, help="a folder instead of the usual one"
    )
    parser.add_argument(
        "--list", action="store_true", help="name the parts and stop"
    )
    options = parser.parse_args()
    if options.list:
        print("\n".join(known))
        return 0
    usual = (
        record.HERE / "out" / "quick"
        if options.quick
        else record.HERE / "results"
    )
    results = (options.out or usual).resolve()
    start = time.monotonic()
    failures = 0
    for name in options.parts:
        # Earlier runs, perhaps with other code, are not resumed.
        if options.quick:
            for lines in known[name].get("lines", []):
                (results / lines).unlink(missing_ok=True)
        elif options.again:
            set_aside(known[name], results)
        for backend, arguments in commands(known[name], options):
            passed = run_part(
                known[name], backend, arguments, results, options.quick
            )
            failures += not passed
    print(
        f"{(time.monotonic() - start) / 60:.1f} minutes; results in {results}"
    )
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(suite())
