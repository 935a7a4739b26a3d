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


def tried(runs: list[Run], like: Run) -> list[Run]:
    """The validation runs at all learning rates, for a run like this one."""
    key = identity(like)[:4], changed(like)
    validations = (run for run in runs if "validation" in run)
    return [run for run in validations if (identity(run)[:4], changed(run)) == key]


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
