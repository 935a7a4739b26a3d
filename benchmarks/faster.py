"""Accuracy of networks on live blocks, and epochs and seconds to 88% on Fashion-MNIST.

    KERAS_BACKEND=jax python benchmarks/faster.py --net wide_mlp   # half an hour
    python benchmarks/faster.py --net wide_cnn                     # an hour; on TensorFlow
    python benchmarks/faster.py --summary                          # the table of finished runs

A wide MLP and a wide CNN: dense; with single live entries in masks (`eoi_auto`); on live
blocks of 16, 32 and 64; RigL on blocks of 32; dense with shorter schedules, too. Each row has its
own learning rate, the best on a validation split, and 88% are read on that split, not on the test
set. Every run is a line of `results/faster.jsonl`; finished runs are not repeated. The
tables go to `results/faster.md`. Seconds are those of the steps alone, measured apart and
interleaved, on an idle machine, by `methods.py time_of_training --settings faster`.
"""

import itertools
import json
import pathlib
import statistics
from typing import Any

from methods import command_line
from methods_runs import changed, identity, latest
from methods_summary import TIMES, mean_and_deviation, tries_and_edge
from methods_table import DENSE, METHODS
from networks import settings
from record import finished, machine, markdown

GOAL = 0.88


def epochs_to_goal(run: dict[str, Any]) -> int | None:
    """The epoch after which the validation accuracy reaches `GOAL`; `None` for never."""
    return next((k + 1 for k, accuracy in enumerate(run["curve"]) if accuracy >= GOAL), None)


def steps_of(used: dict[str, Any]) -> int:
    """Batches of an epoch, without the validation split."""
    return used["samples"] * 9 // 10 // used["batch_size"]


def table(
    runs: list[dict[str, Any]], all_runs: list[dict[str, Any]], seconds: dict[tuple, float]
) -> str:
    """A row for each density, method and number of epochs.

    Args:
        runs: The runs of the network in the table.
        all_runs: These, and the runs that chose their learning rates.
        seconds: The time of an epoch, by method and density.
    """
    rows = []
    densities = sorted({run["density"] for run in runs if run["method"] not in DENSE})
    lengths = sorted({run["epochs"] for run in runs}, reverse=True)
    for density, method, epochs in itertools.product(
        [None, *reversed(densities)], METHODS, lengths
    ):
        mine = [run for run in runs if identity(run)[1:4] == (epochs, method, density)]
        if not mine:
            continue
        reached = [epochs_to_goal(run) for run in mine]
        there = [epochs for epochs in reached if epochs is not None]
        epoch = seconds.get((method, density))
        needed = epoch * statistics.mean(there) if epoch and there else None
        rows.append(
            [
                "1" if density is None else f"{density}",
                method if epochs == lengths[0] else f"{method}, {epochs} epochs",
                mean_and_deviation([run["accuracy"] for run in mine], 100),
                f"{len(mine)}",
                f"{len(there)} of {len(mine)}",
                f"{statistics.mean(there):.1f}" if there else "-",
                "-" if epoch is None else f"{epoch:.2f}",
                "-" if needed is None else f"{needed:.1f}",
                ", ".join(sorted({f"{run['learning_rate']}" for run in mine})),
                *tries_and_edge(all_runs, mine),
            ]
        )
    header = ["density", "method", "test accuracy [%]", "seeds", "reached 88%"]
    header += ["epochs to 88%", "seconds an epoch", "seconds to 88%"]
    return markdown([*header, "learning rate", "tries", "edge"], rows)


def summarize(lines: pathlib.Path) -> str:
    """The text of `results/faster.md`."""
    known = settings("faster")
    all_runs = finished(lines)
    runs = list(latest(all_runs).values())
    text = "# Training on live blocks: accuracy, and time to 88%\n\n"
    text += f"{machine()}, {', '.join(sorted({run['backend'] for run in runs}))}. Fashion-MNIST, "
    text += "Adam, cosine decay over all epochs of a row. 88% are read after each epoch on the "
    text += "last tenth of the training set, without which all are trained; the learning rate is "
    text += "the best one there of those tried, each with so many seeds. At an edge the chosen one "
    text += "is the least or the largest. Density is that of the hidden kernels; stem and head are "
    text += "dense. Seconds are those of a step of training times the steps of an epoch, medians "
    text += (
        "of interleaved turns of one process (`methods.py time_of_training --settings faster`).\n"
    )
    file = lines.with_name(TIMES)
    times = json.loads(file.read_text()) if file.exists() else {}
    for kind in sorted({(run["net"], changed(run)) for run in runs}):
        mine = [run for run in runs if (run["net"], changed(run)) == kind]
        used = known[kind[0]] | (mine[0].get("settings") or {})
        about = json.dumps({k: used[k] for k in ("width", "depth", "samples")})
        epochs = max(run["epochs"] for run in mine)
        text += f"\n## {kind[0]}, epochs: {epochs}{kind[1]}\n\n{about}\n\n"
        seconds = {
            (method, None if method in DENSE else float(density)): step * steps_of(used)
            for density, steps in times.get(kind[0], {}).items()
            for method, step in steps.items()
        }
        text += table(mine, all_runs, seconds)
    return text


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    quick = {"net": ["wide_mlp"], "methods": ["dense", "blocks_32"], "epochs": 2}
    command_line(arguments, "faster", "Live blocks", None, summary=summarize, quick=quick)


if __name__ == "__main__":
    main()
