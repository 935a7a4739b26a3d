"""Accuracy and FLOPs of sparse training methods on Fashion-MNIST.

    python benchmarks/methods.py                                  # the small CNN, the whole grid
    python benchmarks/methods.py --net resnet20 --methods dense eoi_erk rigl
    python benchmarks/methods.py --no-tune --out other.jsonl      # all at one learning rate
    python benchmarks/methods.py --summary                        # the table of finished runs

Settings are in `methods.toml`. Every run is a line of `results/methods.jsonl`; finished runs are
not repeated, so the script can be killed, restarted, and run in parts. The table goes to
`results/methods.md`, with the time ratios of `methods_time.py`.

Each method first trains at each density with all `learning_rates`, with the first two seeds and
without the last tenth of the training set, the validation split; where the best is at an edge of
the grid, with more rates beyond it. The rate of the best mean there is used for its runs, which
train on the whole set (those with a curve without the split, on which that is read). Only these use
the test set. `shorter` trains the dense network with fewer epochs, too, tuned in the same way.
"""

import argparse
import dataclasses
import functools
import itertools
import os
import pathlib
import statistics
import time
import tomllib
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Two threads that wait for each other make AI's many small products 100 times slower.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import keras
import numpy as np
from curves import Progress
from example_data import Dataset, load
from methods_runs import CHANCE, CHOOSING, HERE, Run, identity, keep, latest, missing, tried
from methods_summary import summarize
from methods_table import METHODS
from networks import NETWORKS
from record import RESULTS, finished, parsed, say_left, write_page
from shuffled import shuffled, whole_batches

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import BudgetError

OPTIMIZERS = {
    "adam": keras.optimizers.Adam,
    "sgd": functools.partial(keras.optimizers.SGD, momentum=0.9),
}
OVERRIDES = ("dataset", "samples", "depth")
"""Settings that the command line can change; a run records those that it has changed."""
QUICK = {"samples": 2048, "epochs": 1, "densities": [0.1], "seeds": [0], "tune": False}
WIDENED = 4
"""How often a grid of learning rates goes on."""
SMALL = {"methods": ["dense", "base_erk", "eoi_auto", "str"]}


def build(
    net: str,
    method: str,
    density: float,
    seed: int,
    data: Dataset,
    options: dict,
    learning_rate: float | None = None,
) -> tuple:
    """A fresh network under a method, compiled; its callbacks; and the plan of the run."""
    keras.utils.set_random_seed(seed)
    steps = len(data.x_train) // options["batch_size"] * options["epochs"]
    network = NETWORKS[options.get("network", net)]
    dense = network(data.x_train.shape[1:], data.classes, options)
    tenth = max(steps // 10, 1)
    frequency = options.get("frequency")
    plan = {"density": density, "seed": seed, "steps": steps}
    plan["frequency"] = frequency and min(frequency, tenth)
    plan["include"] = options.get("include")
    plan |= {"data": (data.x_train, data.y_train), "batch_size": options["batch_size"]}
    if "activation" in options:
        plan["gain"] = kso.analysis.critical_gain(options["activation"], options["bias_std"])
    name = f"{net}_{options['epochs']}_epochs_str_{density}_{seed}.csv"
    plan["budget_file"] = options["budgets"] / name
    model, callbacks = METHODS[method](dense, plan)
    rate = learning_rate or options["learning_rate"]
    rate = keras.optimizers.schedules.CosineDecay(rate, steps)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = OPTIMIZERS[options.get("optimizer", "adam")](rate)
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=options["jit"])
    return model, callbacks, plan


def fit(
    model: keras.Model, callbacks: list, data: Dataset, options: dict, seed: int
) -> list[float]:
    """Trains on whole batches: one compilation; the accuracy after each epoch, with `curve`."""
    size = options["batch_size"]
    if options.get("reshuffle", True):
        rows = shuffled(data.x_train, data.y_train, size, seed)
    else:
        rows = whole_batches(data.x_train, data.y_train, size)
    history = model.fit(
        **rows,
        epochs=options["epochs"],
        verbose=0,
        callbacks=callbacks,
        validation_data=(data.x_test, data.y_test) if options.get("curve") else None,
        validation_batch_size=500,
    )
    return history.history.get("val_accuracy", [])


def live_channels(model: keras.Model, images: np.ndarray) -> list[list[int]]:
    """For each ReLU layer, how many channels differ between images or places, and the total."""
    layers = [layer for layer in model.layers if isinstance(layer, keras.layers.ReLU)]
    if not layers:
        return []
    ends = []
    for layer in layers:
        places = tuple(range(1, len(layer.output.shape) - 1))
        ends += [keras.ops.min(layer.output, places), keras.ops.max(layer.output, places)]
    found = keras.Model(model.inputs, ends).predict(images, batch_size=100, verbose=0)
    pairs = zip(found[::2], found[1::2], strict=True)
    varies = [high.max(axis=0) > low.min(axis=0) for low, high in pairs]
    return [[int(channels.sum()), channels.size] for channels in varies]


def train(
    net: str,
    method: str,
    density: float,
    seed: int,
    data: Dataset,
    options: dict,
    learning_rate: float | None = None,
) -> Run:
    """One run: a fresh network, the method, training, the test set."""
    start = time.perf_counter()
    keras.utils.clear_session()
    learnt = without_tenth(data) if options.get("curve") else data
    model, callbacks, plan = build(net, method, density, seed, learnt, options, learning_rate)
    progress = Progress(options.get("progress", 1))
    callbacks += [progress] if options.get("progress") else []
    curve = fit(model, callbacks, learnt, options, seed)
    accuracy = model.evaluate(data.x_test, data.y_test, batch_size=500, verbose=0)[1]
    if method == "str" and options.get("final", True):
        plan["budget_file"].parent.mkdir(parents=True, exist_ok=True)
        kso.Budget.from_model(model).save(plan["budget_file"])
    weights = kso.prunable_weights(model, flops=True)
    return {
        "net": net,
        "method": method,
        "density": density,
        "seed": seed,
        "accuracy": float(accuracy),
        "live": sum(weight.live for weight in weights),
        "size": sum(weight.size for weight in weights),
        "flops": sum(weight.sparse_flops or 0 for weight in weights),
        "live_channels": live_channels(model, data.x_test[:1000]),
        "epochs": options["epochs"],
        "learning_rate": learning_rate,
        "jit": options["jit"],
        "backend": keras.backend.backend(),
        "seconds": round(time.perf_counter() - start, 1),
        "settings": options.get("settings", {}),
        **({"curve": curve} if curve else {}),
        **({"progress": progress.points} if progress.points else {}),
    }


def without_tenth(data: Dataset) -> Dataset:
    """The training set without its last tenth, which replaces the test set."""
    kept = len(data.x_train) * 9 // 10
    return dataclasses.replace(
        data,
        x_train=data.x_train[:kept],
        y_train=data.y_train[:kept],
        x_test=data.x_train[kept:],
        y_test=data.y_train[kept:],
    )


def chosen_rate(
    lines: pathlib.Path, net: str, method: str, density: float, data: Dataset, options: dict
) -> float:
    """The learning rate of the highest mean validation accuracy; trains what is missing.

    While that is the lowest or the highest rate the grid goes on there, by its own ratio, so many
    times as `WIDENED`, unless all are at chance. A rate at which a layer loses all of its live
    entries counts as tried.
    """
    wanted = {"net": net, "method": method, "density": density, "epochs": options["epochs"]}
    wanted |= {"settings": options.get("settings", {})}
    seeds, options = options["seeds"][:CHOOSING], options | {"curve": False, "final": False}
    there = tried(finished(lines), wanted | {"seed": seeds[0]})
    lost = ""

    def validation(rate: float) -> float:
        nonlocal lost
        found = there.setdefault(rate, {})
        for seed in seeds:
            if seed in found:
                continue
            try:
                run = train(net, method, density, seed, without_tenth(data), options, rate)
                run["validation"] = run.pop("accuracy")
            except BudgetError as error:
                lost = str(error)
                run = {**wanted, "seed": seed, "learning_rate": rate}
                run |= {"validation": 0.0, "lost": lost}
            keep(lines, run)
            found[seed] = run["validation"]
        return statistics.mean(found[seed] for seed in seeds)

    rates = sorted(options["learning_rates"])
    ratio = rates[-1] / rates[-2] if len(rates) > 1 else 2.0
    found = {rate: validation(rate) for rate in rates}
    for _ in range(WIDENED):
        best = max(found, key=found.__getitem__)
        if min(found) < best < max(found) or found[best] <= CHANCE:
            break
        rate = float(f"{best * ratio if best == max(found) else best / ratio:.4g}")
        found[rate] = validation(rate)
    if not any(found.values()):
        raise BudgetError(lost or f"{method} lost a layer at every rate. Received: {rates}")
    return max(found, key=found.__getitem__)


def run_missing(lines: pathlib.Path, net: str, grid: dict, data: Dataset, options: dict) -> None:
    """Trains what is missing, `str` before the methods that use its budget."""
    order = sorted(grid["methods"], key=list(METHODS).index)
    like = {"net": net, "epochs": options["epochs"], "settings": options.get("settings")}
    rows = [
        like | {"method": method, "density": density}
        for density, method in itertools.product(grid["densities"], order)
    ]
    rates = options["learning_rates"] if options["tune"] else []
    for row, seed in itertools.product(rows, grid["seeds"]):
        wanted = row | {"seed": seed}
        density, method = row["density"], row["method"]
        runs = finished(lines)
        took = [run["seconds"] for run in runs if run["net"] == net and "seconds" in run]
        choosing = options["seeds"][:CHOOSING]
        say_left(net, missing(runs, rows, grid["seeds"], rates, choosing), took)
        try:
            rate = None
            if options["tune"]:
                rate = chosen_rate(lines, net, method, density, data, options)
            there = latest(runs).get(identity(wanted))
            if there is not None and there["learning_rate"] == rate:
                continue
            run = train(net, method, density, seed, data, options, rate)
        except BudgetError as error:  # a mask that empties a layer: no run, and no line
            print(f"{net} {method} density {density} seed {seed}: {error}", flush=True)
            continue
        keep(lines, run)


def command_line(
    arguments: list[str] | None,
    name: str,
    title: str,
    nets: list[str] | None,
    summary: Callable[[pathlib.Path], str] | None = None,
    quick: dict | None = None,
) -> None:
    """Runs what the command line asks for, and writes the table.

    Args:
        arguments: Of the command line.
        name: Of the settings in this folder, and of the results.
        title: Of the table.
        nets: The networks by default; `None` for all.
        summary: What makes the table, if not `summarize`.
        quick: Other defaults of the command line, with `--quick`.
    """
    settings = tomllib.loads((HERE / f"{name}.toml").read_text())
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--net", nargs="+", choices=settings, default=nets or list(settings))
    parser.add_argument("--methods", nargs="+", choices=METHODS)
    parser.add_argument("--densities", nargs="+", type=float)
    parser.add_argument("--seeds", nargs="+", type=int)
    parser.add_argument("--dataset", choices=["digits", "fashion_mnist", "cifar10"])
    parser.add_argument("--samples", type=int, help="train on so many samples only")
    parser.add_argument("--epochs", type=int, help="instead of those of the settings")
    parser.add_argument("--depth", type=int, help="instead of that of the settings")
    parser.add_argument("--no-jit", action="store_true", help="without XLA")
    parser.add_argument("--tune", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--summary", action="store_true", help="only write the table")
    given = parsed(parser, QUICK | (quick or {}), arguments)
    out = given.out or RESULTS / f"{name}.jsonl"
    for net in [] if given.summary else given.net:
        options = dict(settings[net])
        options |= {"jit": options.get("jit", True) and not given.no_jit}
        options |= {"budgets": out.parent / "budgets", "tune": given.tune}
        other = {key: getattr(given, key) for key in OVERRIDES if getattr(given, key)}
        options |= other
        options |= {"epochs": given.epochs} if given.epochs else {}
        options["settings"] = {k: v for k, v in other.items() if settings[net].get(k) != v}
        data = load(options["dataset"])
        if samples := options.get("samples"):
            cut = slice(samples)
            parts = (data.x_train[cut], data.y_train[cut], data.x_test[cut], data.y_test[cut])
            data = Dataset(data.name, *parts)
        grid = {
            "methods": given.methods or options.get("methods") or list(METHODS),
            "densities": given.densities or options["densities"],
            "seeds": given.seeds or options["seeds"],
        }
        run_missing(out, net, grid, data, options)
        if "dense" in grid["methods"] and not given.epochs:
            for epochs in options.get("shorter", []):
                shorter = options | {"epochs": epochs}
                run_missing(out, net, grid | {"methods": ["dense"]}, data, shorter)
    text = summarize(out, settings, title) if summary is None else summary(out)
    seeds = {run["seed"] for run in finished(out)}
    write_page(out.with_suffix(".md"), text, seeds)


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    command_line(arguments, "methods", "Methods on Fashion-MNIST", ["cnn"], quick=SMALL)


if __name__ == "__main__":
    main()
