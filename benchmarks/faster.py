"""Accuracy of networks on live blocks, and epochs and seconds to 88% of Fashion-MNIST's test set.

    KERAS_BACKEND=jax python benchmarks/faster.py                  # about two hours of two cores
    KERAS_BACKEND=jax python benchmarks/faster.py --net wide_mlp --densities 0.1
    python benchmarks/faster.py --summary                          # the table of finished runs

A wide MLP and a wide CNN (`faster.toml`): dense; with single live entries in masks (`eoi_auto`); on
live blocks of 16, 32 and 64; RigL on blocks of 32. Each method uses its best learning rate on a
validation split. Every run is a line of `results/faster.jsonl`; finished runs are not repeated. The
tables go to `results/faster.md`. Seconds are those of training alone: the median over the epochs
after the first, which compiles. They need an idle machine.
"""

import itertools
import json
import pathlib
import statistics
import tomllib
from typing import Any

from methods import command_line
from methods_runs import HERE, changed, identity
from methods_summary import mean_and_deviation
from methods_table import DENSE, METHODS
from record import finished, machine, markdown

GOAL = 0.88


def epochs_to_goal(run: dict[str, Any]) -> int | None:
    """The epoch after which the test accuracy reaches `GOAL`; `None` for never."""
    accuracies = [accuracy for _, accuracy in run["curve"]]
    return next((k + 1 for k, accuracy in enumerate(accuracies) if accuracy >= GOAL), None)


def seconds(run: dict[str, Any]) -> float:
    """Of an epoch."""
    return statistics.median(second for second, _ in run["curve"][1:])


def table(runs: list[dict[str, Any]]) -> str:
    """A row for each density and method."""
    rows = []
    densities = sorted({run["density"] for run in runs if run["method"] not in DENSE})
    for density, method in itertools.product([None, *reversed(densities)], METHODS):
        mine = [run for run in runs if identity(run)[2:4] == (method, density)]
        if not mine:
            continue
        reached = [epochs_to_goal(run) for run in mine]
        there = [epochs for epochs in reached if epochs is not None]
        needed = (
            statistics.mean(
                e * seconds(run) for e, run in zip(reached, mine, strict=True) if e is not None
            )
            if there
            else None
        )
        rows.append(
            [
                "1" if density is None else f"{density}",
                method,
                mean_and_deviation([run["accuracy"] for run in mine], 100),
                f"{len(mine)}",
                f"{len(there)} of {len(mine)}",
                f"{statistics.mean(there):.1f}" if there else "-",
                f"{statistics.mean(map(seconds, mine)):.2f}",
                "-" if needed is None else f"{needed:.1f}",
            ]
        )
    header = ["density", "method", "test accuracy [%]", "seeds", "reached 88%"]
    return markdown([*header, "epochs to 88%", "seconds an epoch", "seconds to 88%"], rows)


def summarize(lines: pathlib.Path) -> str:
    """The text of `results/faster.md`."""
    settings = tomllib.loads((HERE / "faster.toml").read_text())
    runs = [run for run in finished(lines) if "accuracy" in run]
    text = "# Training on live blocks: accuracy, and time to 88%\n\n"
    text += f"{machine()}, {', '.join(sorted({run['backend'] for run in runs}))}. Fashion-MNIST, "
    text += "Adam, cosine decay, each method at its best of three learning rates. Density is that "
    text += "of the hidden kernels; stem and head are dense.\n"
    for kind in sorted({(run["net"], run["epochs"], changed(run)) for run in runs}):
        mine = [run for run in runs if (run["net"], run["epochs"], changed(run)) == kind]
        used = settings[kind[0]] | (mine[0].get("settings") or {})
        about = json.dumps({k: used[k] for k in ("width", "depth", "samples")})
        text += f"\n## {kind[0]}, epochs: {kind[1]}{kind[2]}\n\n{about}\n\n{table(mine)}"
    return text


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    quick = {"net": ["wide_mlp"], "methods": ["dense", "blocks_32"], "epochs": 2}
    command_line(arguments, "faster", "Live blocks", None, summary=summarize, quick=quick)


if __name__ == "__main__":
    main()
