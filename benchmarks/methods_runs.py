"""The finished runs of methods.py, each a line of JSON, and how many are missing."""

import pathlib
from collections.abc import Iterable

from methods_table import DENSE
from record import append

Run = dict
CHOOSING = 2
"""How many seeds choose a learning rate."""
CHANCE = 0.12
"""Up to this validation accuracy a network of ten classes has learnt nothing, at any rate."""


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


def missing(
    runs: list[Run],
    rows: Iterable[Run],
    seeds: list[int],
    rates: list[float],
    choosing: list[int],
) -> int:
    """How many runs these rows of a table need at least: a grid may go on, and its best move.

    Args:
        runs: The finished ones.
        rows: Runs without a seed.
        seeds: The seeds of the runs on the whole training set.
        rates: The grid of learning rates.
        choosing: Seeds of the runs that choose among them.
    """
    there, count = latest(runs), 0
    for row in {identity(row | {"seed": None}): row | {"seed": None} for row in rows}.values():
        found = tried(runs, row)
        if found and not any(any(by_seed.values()) for by_seed in found.values()):
            continue  # lost a layer at every rate
        count += sum(len(set(choosing) - found.get(rate, {}).keys()) for rate in rates)
        count += sum(identity(row | {"seed": seed}) not in there for seed in seeds)
    return count


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
