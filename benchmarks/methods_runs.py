"""The finished runs of methods.py, each a line of JSON."""

import pathlib

from methods_table import DENSE
from record import append

HERE = pathlib.Path(__file__).parent
Run = dict


def identity(run: Run) -> tuple:
    """The key of a run; a dense network has no density."""
    density = None if run["method"] in DENSE else run["density"]
    return run["net"], run["epochs"], run["method"], density, run["seed"], changed(run)


def changed(run: Run) -> str:
    """The settings in which a run differs from those of the file, as a part of a title."""
    return "".join(f", {name}: {value}" for name, value in (run.get("settings") or {}).items())


def latest(runs: list[Run]) -> dict[tuple, Run]:
    """The runs with a test accuracy; of those with equal keys, the last one."""
    return {identity(run): run for run in runs if "accuracy" in run}


def tried(runs: list[Run], like: Run) -> dict[float, dict[int, float]]:
    """Validation accuracies of runs like this one: for each learning rate, by seed."""
    key = identity(like)[:4], changed(like)
    found: dict[float, dict[int, float]] = {}
    for run in runs:
        if "validation" in run and (identity(run)[:4], changed(run)) == key:
            found.setdefault(run["learning_rate"], {})[run["seed"]] = run["validation"]
    return found


def keep(lines: pathlib.Path, run: Run) -> None:
    """Writes and prints a finished run."""
    append(lines, run)
    kind = "validation" if "validation" in run else "accuracy"
    rate = "" if run["learning_rate"] is None else f" learning rate {run['learning_rate']}"
    print(
        f"{run['net']} {run['method']} density {run['density']} seed {run['seed']}{rate}: "
        f"{kind} {run[kind]:.4f}",
        flush=True,
    )
