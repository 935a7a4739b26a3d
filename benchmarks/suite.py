"""All benchmarks, one after the other: `make bench` and `make bench-quick`.

    python benchmarks/suite.py                            # all tables and pictures: days of 2 cores
    python benchmarks/suite.py --parts deep methods       # some of them
    python benchmarks/suite.py --tables                   # only tables and pictures, from the lines
    python benchmarks/suite.py --again --parts blocks     # set the lines aside, and measure again
    python benchmarks/suite.py --quick                    # a small setting of each: ten minutes

`suite.toml` lists the parts. Results go to `benchmarks/results`, those of `--quick` to
`benchmarks/out/quick`, with the output of every part in `logs/` there. Long parts are resumed:
finished runs are not repeated. They say how many runs are left, and how long these will take.
"""

import argparse
import math
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import time
import tomllib

from runner import LEFT

HERE = pathlib.Path(__file__).resolve().parent
PATIENCE = 300  # seconds for a part of the quick suite
EVERY = 60  # seconds between two looks at what a part has left


def parts() -> dict[str, dict]:
    """The parts by name."""
    found = tomllib.loads((HERE / "suite.toml").read_text(encoding="utf-8"))["part"]
    return {part["name"]: part for part in found}


def commands(part: dict, options: argparse.Namespace) -> list[tuple[str, list[str]]]:
    """The backend and the arguments of every run of a part; none if it has nothing to do."""
    backends = part.get("backends", ["tensorflow"])
    first = [part["measures"]] if "measures" in part else []
    if options.quick:
        some = backends if part.get("quick", True) else []
        return [(backend, [*first, "--quick"]) for backend in some]
    if options.tables:
        return [(backends[0], first + part["tables"])] if "tables" in part else []
    return [(backend, first + part.get("full", [])) for backend in backends]


def set_aside(part: dict, results: pathlib.Path) -> None:
    """Moves the finished runs of a part away, so that it starts over."""
    for name in part.get("lines", []):
        if (results / name).exists():
            aside = HERE / "out" / "aside" / time.strftime("%Y-%m-%d_%H-%M-%S")
            aside.mkdir(parents=True, exist_ok=True)
            shutil.move(results / name, aside / name)
            print(f"{name} is now in {aside.relative_to(HERE.parent)}", flush=True)


def cpu() -> float:
    """CPU seconds of ended processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def followed(script: subprocess.Popen, log: pathlib.Path, patience: float) -> int:
    """The exit code of a script; meanwhile prints what its log says of the time left.

    Raises:
        subprocess.TimeoutExpired: After so many seconds.
    """
    start, said = time.monotonic(), ""
    while True:
        left = patience - (time.monotonic() - start)
        try:
            return script.wait(min(left, EVERY))
        except subprocess.TimeoutExpired:
            if left <= EVERY:
                raise
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        last = next((line for line in reversed(lines) if line.startswith(LEFT)), "")
        if last != said:
            said = last
            print(f"      {said}", flush=True)


def run(part: dict, backend: str, arguments: list[str], results: pathlib.Path, quick: bool) -> bool:
    """One run of a script; its output goes to a file."""
    log = results / "logs" / f"{part['name']}_{backend}.txt"
    if not quick:
        log = HERE / "out" / "logs" / log.name
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"KERAS_BACKEND": backend, "KSO_RESULTS": str(results)}
    start, worked, note = time.monotonic(), cpu(), ""
    with log.open("w", encoding="utf-8") as stream:
        script = subprocess.Popen(
            [sys.executable, str(HERE / part["script"]), *arguments],
            env=environment,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            good = followed(script, log, PATIENCE if quick else math.inf) == 0
        except subprocess.TimeoutExpired:
            good, note = False, f"stopped after {PATIENCE} s"
        finally:  # an interruption, too, ends the processes that the script has started
            if script.poll() is None:
                os.killpg(script.pid, signal.SIGKILL)
                script.wait()
    seconds, worked = time.monotonic() - start, cpu() - worked
    word = "ok  " if good else "FAIL"
    title = f"{word}  {part['name']:<20}{backend:<12}"
    print(f"{title}{seconds:8.1f} s  {worked:8.1f} s of cores  {note}".rstrip(), flush=True)
    if not good:
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:]
        print("\n".join(f"      {line}" for line in [*tail, f"all of it: {log}"]), flush=True)
    return good


def main() -> int:
    """Runs the parts that the command line names; 0 if none failed."""
    known = parts()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=known, default=[*known], metavar="PART")
    parser.add_argument("--quick", action="store_true", help="a small setting of each")
    parser.add_argument("--tables", action="store_true", help="tables and pictures only")
    parser.add_argument("--again", action="store_true", help="set finished lines aside first")
    parser.add_argument("--out", type=pathlib.Path, help="a folder instead of the usual one")
    parser.add_argument("--list", action="store_true", help="name the parts and stop")
    options = parser.parse_args()
    if options.list:
        print("\n".join(known))
        return 0
    usual = HERE / "out" / "quick" if options.quick else HERE / "results"
    results = (options.out or usual).resolve()
    good, start = True, time.monotonic()
    for name in options.parts:
        if options.quick:  # earlier runs, perhaps with other code, are not resumed
            for lines in known[name].get("lines", []):
                (results / lines).unlink(missing_ok=True)
        elif options.again:
            set_aside(known[name], results)
        for backend, arguments in commands(known[name], options):
            good = run(known[name], backend, arguments, results, options.quick) and good
    print(f"{(time.monotonic() - start) / 60:.1f} minutes; results in {results}")
    return not good


if __name__ == "__main__":
    sys.exit(main())
