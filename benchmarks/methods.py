"""Accuracy, FLOPs and time of sparse training methods, network by network.

    python benchmarks/methods.py NAME [options]

- `methods`: on Fashion-MNIST, a small CNN and ResNet-20;
- `deep`: deep networks without normalization;
- `contemporary`: ResNet, VGG-16, MobileNetV1 and a vision transformer;
- `time_of_training`: of training under every method against the dense network, interleaved.

Settings are in `methods.toml`. Every run of a comparison is a line of `results/NAME.jsonl`;
finished runs are not repeated, so the script can be killed, restarted, and run in parts. The table
goes to `results/NAME.md`, with `--summary` only that.

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
import json
import os
import pathlib
import statistics
import time
import warnings
from collections.abc import Callable, Iterable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Two threads that wait for each other make AI's many small products 100 times slower.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import keras
import numpy as np
from methods_rivals import beside_kernels, narrowed
from methods_runs import CHANCE, CHOOSING, Run, identity, keep, latest, missing, tried
from methods_summary import TIMES, summarize
from methods_table import METHODS
from networks import NETWORKS, settings
from record import RESULTS, append, chosen, described, finished, parsed, say_left, write_page
from training import Dataset, Progress, load, shuffled, whole_batches

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import BudgetError, DensityWarning

OPTIMIZERS = {
    "adam": keras.optimizers.Adam,
    "sgd": functools.partial(keras.optimizers.SGD, momentum=0.9),
}
OVERRIDES = ("dataset", "samples", "depth")
"""Settings that the command line can change; a run records the changed ones."""
QUICK = {"samples": 2048, "epochs": 1, "densities": [0.1], "seeds": [0], "tune": False}
WIDENED = 4
"""How often a grid of learning rates goes on."""
BUDGETS = "budgets.jsonl"
"""The budgets that STR has learnt, for the methods that start with them."""
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
    made = functools.partial(network, data.x_train.shape[1:], data.classes)
    smaller = method in ("dense_narrow", "dense_shallow")
    shallow = method == "dense_shallow"
    dense = narrowed(made, options, density, shallow) if smaller else made(options)
    tenth = max(steps // 10, 1)
    frequency = options.get("frequency")
    plan = {"density": density, "seed": seed, "steps": steps, "others": beside_kernels(dense)}
    plan["frequency"] = frequency and min(frequency, tenth)
    plan["include"] = options.get("include")
    plan |= {"data": (data.x_train, data.y_train), "batch_size": options["batch_size"]}
    if "activation" in options:
        plan["gain"] = kso.analysis.critical_gain(options["activation"], options["bias_std"])
    plan["str"] = {"net": net, "epochs": options["epochs"], "density": density, "seed": seed}
    plan["budgets"] = options["budgets"]
    plan["learning_rate"] = learning_rate or options["learning_rate"]
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
        budget = kso.Budget.from_model(model)
        sizes = {name: int(size) for name, size in budget.sizes.items()}
        append(plan["budgets"], plan["str"] | {"densities": dict(budget), "sizes": sizes})
    weights = kso.prunable_weights(model, flops=True)
    return {
        "net": net,
        "method": method,
        "density": density,
        "seed": seed,
        "accuracy": float(accuracy),
        "live": sum(weight.live for weight in weights),
        "size": sum(weight.size for weight in weights),
        "others": plan["others"],
        "flops": sum(weight.sparse_flops or 0 for weight in weights),
        "live_channels": live_channels(model, data.x_test[:1000]),
        "epochs": options["epochs"],
        "learning_rate": learning_rate,
        "jit": options["jit"],
        "backend": keras.backend.backend(),
        "seconds": round(time.perf_counter() - start, 1),
        "settings": options.get("settings", {}),
        **({"curve": curve} if curve else {}),
        **({"progress": progress.points, "losses": progress.losses} if progress.points else {}),
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
        arguments: The words of the command line.
        name: The table of the settings in `methods.toml`, and the name of the results.
        title: The title of the page.
        nets: The networks by default; `None` for all.
        summary: The function that makes the table. Default: `summarize`.
        quick: Other defaults of the command line, with `--quick`.
    """
    known = settings(name)
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--net", nargs="+", choices=known, default=nets or list(known))
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
        options = dict(known[net])
        options |= {"jit": options.get("jit", True) and not given.no_jit}
        options |= {"budgets": out.with_name(BUDGETS), "tune": given.tune}
        other = {key: getattr(given, key) for key in OVERRIDES if getattr(given, key)}
        options |= other
        options |= {"epochs": given.epochs} if given.epochs else {}
        options["settings"] = {k: v for k, v in other.items() if known[net].get(k) != v}
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
    text = summarize(out, known, title) if summary is None else summary(out)
    seeds = {run["seed"] for run in finished(out)}
    write_page(out.with_suffix(".md"), text, seeds)


def methods(arguments: list[str] | None = None) -> None:
    """Methods on Fashion-MNIST and digits.

    python benchmarks/methods.py methods                             # the small CNN, the whole grid
    python benchmarks/methods.py methods --net resnet20 --methods dense eoi_erk rigl
    KERAS_BACKEND=jax python benchmarks/methods.py methods --net digits_cnn digits_resnet8
    python benchmarks/methods.py methods --no-tune --out other.jsonl    # all at one learning rate
    """
    command_line(arguments, "methods", "Methods on Fashion-MNIST and digits", ["cnn"], quick=SMALL)


def deep(arguments: list[str] | None = None) -> None:
    """Deep networks without normalization on Fashion-MNIST.

    python benchmarks/methods.py deep                                # all networks and methods
    python benchmarks/methods.py deep --net deep_mlp --methods base_scaled eoi_auto
    """
    title = "Deep networks without normalization on Fashion-MNIST"
    quick = {"net": ["deep_mlp"], "depth": 5, "methods": ["dense", "base_erk", "eoi_auto"]}
    command_line(arguments, "deep", title, None, quick=quick)


CONTEMPORARY = ["resnet20", "resnet32", "vgg16", "mobilenet", "vit"]
"""Those on CIFAR-10 are not trained by default: 200 epochs each."""


def contemporary(arguments: list[str] | None = None) -> None:
    """Contemporary networks.

    python benchmarks/methods.py contemporary                        # ten hours of two cores
    KERAS_BACKEND=jax python benchmarks/methods.py contemporary --net cifar10_resnet32    # on a GPU
    python benchmarks/methods.py contemporary --net vit --methods blocks_8 --densities 0.0625
    """
    quick = {"net": ["vit"], "methods": ["dense", "base_erk", "eoi_auto"]}
    command_line(arguments, "contemporary", "Contemporary networks", CONTEMPORARY, quick=quick)


# --- time -----------------------------------------------------------------------------------------


TURN = (
    14  # steps, unless the settings have a frequency: the default for four epochs of the small CNN
)
WARM_UP = 2  # turns: the second compiles what only comes once masks have moved


class Turn(keras.callbacks.Callback):
    """Ends training after one epoch, and records its seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        """Starts the clock: the setup of an epoch sometimes waits for half a second."""
        if batch == 0:
            self._start = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Stops."""
        self.seconds.append(time.perf_counter() - self._start)
        self.model.stop_training = True


class Case:
    """A training run that continues one turn at a time."""

    def __init__(self, net: str, method: str, density: float, data: Dataset, options: dict) -> None:
        seed = options["seeds"][0]
        self.model, self.callbacks, self.plan = build(net, method, density, seed, data, options)
        self.steps = self.plan["frequency"] or TURN
        count = self.steps * options["batch_size"]
        self.data = data.x_train[:count], data.y_train[:count]
        self.turn = Turn()

    def __call__(self) -> None:
        """One turn. Schedules are those of the whole run: `epochs` says how long that is."""
        with warnings.catch_warnings():  # a turn ends before its schedule does
            warnings.simplefilter("ignore", DensityWarning)
            self.model.fit(
                *self.data,
                batch_size=self.plan["batch_size"],
                initial_epoch=len(self.turn.seconds),
                epochs=self.plan["steps"] // self.steps,
                verbose=0,
                callbacks=[*self.callbacks, self.turn],
            )


def turns(
    net: str,
    density: float,
    data: Dataset,
    options: dict,
    rounds: int,
    methods: Iterable[str] | None = None,
) -> dict:
    """Median seconds of a turn of each method, and of the dense network once more."""
    cases = {}
    for name in (*(METHODS if methods is None else methods), "dense again"):
        try:
            cases[name] = Case(net, name.removesuffix(" again"), density, data, options)
        except BudgetError as error:  # a mask that empties a layer
            print(f"{name}: {error}")
    for _ in range(WARM_UP + rounds):
        for case in cases.values():
            case()
    return {name: statistics.median(r.turn.seconds[WARM_UP:]) for name, r in cases.items()}


def time_of_training() -> None:
    """Time of training under every method against the dense network, interleaved.

        python benchmarks/methods.py time_of_training --net resnet20 --rounds 3
        python benchmarks/methods.py time_of_training --settings faster --net wide_cnn

    The methods train in turn, for as many steps as between two mask updates, so that other load on
    the machine affects all of them. Updates of masks, thresholds and extra gradients are as
    frequent as in a run; compilation and the setup of an epoch are excluded. The ratios of the
    medians, and seconds of a step of the networks of `faster.py`, go to
    `results/methods_time.json`, for the tables of `methods` and `faster`. `eoi_str` needs the
    budget of a finished run of `str`.
    """
    parser = described(time_of_training)
    parser.add_argument("--settings", choices=["methods", "faster"], default="methods")
    parser.add_argument("--net", default="cnn")
    parser.add_argument("--density", type=float, default=0.05)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--no-jit", action="store_true", help="without XLA")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    given = parsed(parser, {"rounds": 2, "methods": ["dense", "base_erk", "gmp"]})
    options = dict(settings(given.settings)[given.net])
    options |= {"jit": not given.no_jit, "budgets": RESULTS / BUDGETS}
    data = load(options["dataset"])
    seconds = turns(given.net, given.density, data, options, given.rounds, given.methods)
    ratios = {name: value / seconds["dense"] for name, value in seconds.items()}
    for name, value in seconds.items():
        print(f"{name:12} {value:8.3f} s  {ratios[name]:.3f}")
    file = RESULTS / TIMES
    measured = json.loads(file.read_text()) if file.exists() else {}
    if given.settings == "methods":
        measured[given.net] = ratios
    else:
        turn = options.get("frequency", TURN)
        steps = {name: value / turn for name, value in seconds.items()}
        measured.setdefault(given.net, {})[f"{given.density:g}"] = steps
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    chosen(methods, deep, contemporary, time_of_training)
