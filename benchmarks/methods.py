"""Accuracy, FLOPs and time of sparse training methods, network by network.

    python benchmarks/methods.py NAME [options]

- `methods`: on Fashion-MNIST and digits, a small CNN and ResNet-20;
- `deep`: deep networks without normalization;
- `contemporary`: ResNet, VGG-16, MobileNetV1 and a vision transformer;
- `faster`: networks on live blocks, and how soon they reach 88%;
- `time_of_training`: of training under every method against the dense network, interleaved.

Settings are in `methods.toml`. Every run is a line of `results/NAME.jsonl`; finished runs are not
repeated, so the script can be killed, restarted, and run in parts.

Each method first trains at each density with all `learning_rates`, with the first two seeds and
without the last tenth of the training set, the validation split; where the best is at an edge of
the grid, with more rates beyond it. The rate of the best mean there is used for its runs, which
train on the whole set (those with a curve without the split, on which that is read). Only these use
the test set. `shorter` trains the dense network with fewer epochs, too, tuned in the same way.
"""

import dataclasses
import functools
import json
import os
import pathlib
import statistics
import time
import warnings
from collections.abc import Iterable
from typing import Any, ClassVar

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Two threads that wait for each other make AI's many small products 100 times slower.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import keras
import methods_summary
import numpy as np
from methods_summary import (
    BUSY,
    CHANCE,
    CHOOSING,
    TIMES,
    identity,
    latest,
    missing,
    tried,
)
from methods_table import METHODS, beside_kernels, narrowed
from networks import NETWORKS, settings
from record import RESULTS, append, finished
from runner import Measurement, Run, Setting, grid, main, say_left
from training import (
    Dataset,
    Progress,
    compiled,
    first_rows,
    load,
    shuffled,
    whole_batches,
)

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import BudgetError, DensityWarning

OPTIMIZERS = {
    "adam": keras.optimizers.Adam,
    "sgd": functools.partial(keras.optimizers.SGD, momentum=0.9),
}
OVERRIDES = ("dataset", "samples", "depth")
"""Settings that the command line can change; a run records the changed ones."""
WIDENED = 4
"""How often a grid of learning rates goes on."""
BUDGETS = "budgets.jsonl"
"""The budgets that STR has learnt, for the methods that start with them."""

# --- one run --------------------------------------------------------------------------------------


def build(
    net: str,
    method: str,
    density: float,
    seed: int,
    data: Dataset,
    options: Run,
    learning_rate: float | None = None,
) -> tuple[keras.Model, list[Any], Run]:
    """A fresh network under a method, compiled; its callbacks; and the plan of the run."""
    keras.utils.set_random_seed(seed)
    steps = len(data.x_train) // options["batch_size"] * options["epochs"]
    network = NETWORKS[options.get("network", net)]
    make = functools.partial(network, data.x_train.shape[1:], data.classes)
    if method in ("dense_narrow", "dense_shallow"):
        dense = narrowed(
            make, options, density, shallow=method == "dense_shallow"
        )
    else:
        dense = make(options)
    frequency = options.get("frequency")
    rate = learning_rate or options["learning_rate"]
    plan = {
        "density": density,
        "seed": seed,
        "steps": steps,
        "others": beside_kernels(dense),
        "frequency": frequency and min(frequency, max(steps // 10, 1)),
        "include": options.get("include"),
        "data": (data.x_train, data.y_train),
        "batch_size": options["batch_size"],
        "str": {
            "net": net,
            "epochs": options["epochs"],
            "density": density,
            "seed": seed,
        },
        "budgets": options["budgets"],
        "learning_rate": rate,
    }
    if "activation" in options:
        plan["gain"] = kso.analysis.critical_gain(
            options["activation"], options["bias_std"]
        )
    model, callbacks = METHODS[method](dense, plan)
    schedule = keras.optimizers.schedules.CosineDecay(rate, steps)
    optimizer = OPTIMIZERS[options.get("optimizer", "adam")](schedule)
    compiled(model, optimizer, jit_compile=options["jit"])
    return model, callbacks, plan


def fit(
    model: keras.Model,
    callbacks: list[Any],
    data: Dataset,
    options: Run,
    seed: int,
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
        validation_data=(data.x_test, data.y_test)
        if options.get("curve")
        else None,
        validation_batch_size=500,
    )
    return history.history.get("val_accuracy", [])


def trained(
    net: str,
    method: str,
    density: float,
    seed: int,
    data: Dataset,
    options: Run,
    learning_rate: float,
) -> keras.Model:
    """A network, trained under a method."""
    model, callbacks, _ = build(
        net, method, density, seed, data, options, learning_rate
    )
    fit(model, callbacks, data, options, seed)
    return model


def live_channels(model: keras.Model, images: np.ndarray) -> list[list[int]]:
    """For each ReLU layer, how many channels differ between images or places, and the total."""
    layers = [
        layer for layer in model.layers if isinstance(layer, keras.layers.ReLU)
    ]
    if not layers:
        return []
    ends = []
    for layer in layers:
        places = tuple(range(1, len(layer.output.shape) - 1))
        ends += [
            keras.ops.min(layer.output, places),
            keras.ops.max(layer.output, places),
        ]
    values = keras.Model(model.inputs, ends).predict(
        images, batch_size=100, verbose=0
    )
    counts = []
    for low, high in zip(values[::2], values[1::2], strict=True):
        varies = high.max(axis=0) > low.min(axis=0)
        counts.append([int(varies.sum()), varies.size])
    return counts


def train(
    net: str,
    method: str,
    density: float,
    seed: int,
    data: Dataset,
    options: Run,
    learning_rate: float | None = None,
) -> Run:
    """One run: a fresh network, the method, training, the test set."""
    start = time.perf_counter()
    keras.utils.clear_session()
    rows = without_tenth(data) if options.get("curve") else data
    model, callbacks, plan = build(
        net, method, density, seed, rows, options, learning_rate
    )
    progress = Progress(options.get("progress", 1))
    if options.get("progress"):
        callbacks = [*callbacks, progress]
    curve = fit(model, callbacks, rows, options, seed)
    accuracy = model.evaluate(
        data.x_test, data.y_test, batch_size=500, verbose=0
    )[1]
    if method == "str" and options.get("final", True):
        budget = kso.Budget.from_model(model)
        sizes = {name: int(size) for name, size in budget.sizes.items()}
        append(
            plan["budgets"],
            plan["str"] | {"densities": dict(budget), "sizes": sizes},
        )
    weights = kso.prunable_weights(model, flops=True)
    run = {
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
    }
    if curve:
        run["curve"] = curve
    if progress.points:
        run |= {"progress": progress.points, "losses": progress.losses}
    return run


def without_tenth(data: Dataset) -> Dataset:
    """The training set without its last tenth, which replaces the test set."""
    count = len(data.x_train) * 9 // 10
    return dataclasses.replace(
        data,
        x_train=data.x_train[:count],
        y_train=data.y_train[:count],
        x_test=data.x_train[count:],
        y_test=data.y_train[count:],
    )


# --- comparisons ----------------------------------------------------------------------------------


class Comparison(Measurement):
    """Methods by accuracy on the networks of a section of `methods.toml`."""

    heading: ClassVar[str] = ""

    @property
    def file(self) -> pathlib.Path:
        """The file of lines, which the command line can name."""
        return self.given.out or super().file

    def write(self) -> None:
        """Writes the page beside the file of lines."""
        self.page = self.file.stem
        super().write()

    def report(self, lines: list[Run]) -> str:
        times = self.file.with_name(TIMES)
        ratios = json.loads(times.read_text()) if times.exists() else {}
        return methods_summary.summarize(
            lines, settings(self.lines), ratios, self.heading
        )

    def measure(self) -> None:
        """Trains what is missing, network by network."""
        for net in self.given.net:
            options = self.options_of(net)
            data = load(options["dataset"])
            if count := options.get("samples"):
                few = first_rows(data, count)
                data = Dataset(
                    data.name,
                    few.x_train,
                    few.y_train,
                    data.x_test[:count],
                    data.y_test[:count],
                )
            methods = (
                self.given.methods or options.get("methods") or list(METHODS)
            )
            self.train_missing(net, methods, data, options)
            if "dense" in methods and not self.given.epochs:
                for epochs in options.get("shorter", []):
                    self.train_missing(
                        net, ["dense"], data, options | {"epochs": epochs}
                    )

    def options_of(self, net: str) -> Run:
        """The settings of a network, as the command line changes them."""
        given = self.given
        options = dict(settings(self.lines)[net])
        changes = {
            name: getattr(given, name)
            for name in OVERRIDES
            if getattr(given, name)
        }
        differing = {
            name: value
            for name, value in changes.items()
            if options.get(name) != value
        }
        options |= changes
        options |= {
            "jit": options.get("jit", True) and given.jit,
            "epochs": given.epochs or options["epochs"],
            "densities": given.densities or options["densities"],
            "budgets": self.file.with_name(BUDGETS),
            "settings": differing,
            "final_seeds": given.seeds or options["seeds"],
        }
        return options

    def train_missing(
        self, net: str, methods: list[str], data: Dataset, options: Run
    ) -> None:
        """Trains what is missing, `str` before the methods that use its budget."""
        tune = self.given.tune
        seeds = options["final_seeds"]
        rates = options["learning_rates"] if tune else []
        rows = grid(
            net=[net],
            epochs=[options["epochs"]],
            settings=[options["settings"]],
            density=options["densities"],
            method=sorted(methods, key=list(METHODS).index),
        )
        for row in rows:
            for seed in seeds:
                runs = self.finished()
                took = [
                    run["seconds"]
                    for run in runs
                    if run["net"] == net and "seconds" in run
                ]
                choosing = options["seeds"][:CHOOSING]
                say_left(net, missing(runs, rows, seeds, rates, choosing), took)
                try:
                    self.train_row(row | {"seed": seed}, data, options)
                # A mask that empties a layer: no run, and no line.
                except BudgetError as error:
                    print(
                        f"{net} {row['method']} {row['density']} seed {seed}: {error}"
                    )

    def train_row(self, which: Run, data: Dataset, options: Run) -> None:
        """Trains a run at the rate that is best for its method, unless it is there."""
        rate = (
            self.chosen_rate(which, data, options) if self.given.tune else None
        )
        line = latest(self.finished()).get(identity(which))
        if line is None or line["learning_rate"] != rate:
            self.add(train(*_case(which), data, options, rate))
        if self.given.untuned:
            untuned_rate = options["learning_rate"]
            seeds = [which["seed"]]
            self.validation(which, untuned_rate, data, options, seeds)

    def chosen_rate(self, which: Run, data: Dataset, options: Run) -> float:
        """The learning rate of the highest mean validation accuracy; trains what is missing.

        While that is the lowest or the highest rate the grid goes on there, by its own ratio, so
        many times as `WIDENED`, unless all are at chance. A rate at which a layer loses all of its
        live entries counts as tried.
        """
        rates = sorted(options["learning_rates"])
        ratio = rates[-1] / rates[-2] if len(rates) > 1 else 2.0
        seeds = options["seeds"][:CHOOSING]
        accuracies = {
            rate: self.validation(which, rate, data, options, seeds)
            for rate in rates
        }
        for _ in range(WIDENED):
            best = max(accuracies, key=accuracies.__getitem__)
            inside = min(accuracies) < best < max(accuracies)
            if inside or accuracies[best] <= CHANCE:
                break
            beyond = best * ratio if best == max(accuracies) else best / ratio
            rate = float(f"{beyond:.4g}")
            accuracies[rate] = self.validation(
                which, rate, data, options, seeds
            )
        if not any(accuracies.values()):
            raise BudgetError(
                f"{which['method']} lost a layer at every rate. Received: {[*accuracies]}"
            )
        return max(accuracies, key=accuracies.__getitem__)

    def validation(
        self,
        which: Run,
        rate: float,
        data: Dataset,
        options: Run,
        seeds: list[int],
    ) -> float:
        """The mean validation accuracy of a rate over some seeds."""
        options = options | {"curve": False, "final": False}
        accuracies = []
        for seed in seeds:
            case = which | {"seed": seed}
            known = tried(self.finished(), case).get(rate, {})
            if seed not in known:
                try:
                    run = train(
                        *_case(case), without_tenth(data), options, rate
                    )
                    run["validation"] = run.pop("accuracy")
                except BudgetError as error:
                    run = case | {
                        "learning_rate": rate,
                        "validation": 0.0,
                        "lost": str(error),
                    }
                known = {seed: self.add(run)["validation"]}
            accuracies.append(known[seed])
        return statistics.mean(accuracies)


def _case(which: Run) -> tuple[str, str, float, int]:
    """The first arguments of `train`."""
    return which["net"], which["method"], which["density"], which["seed"]


def comparison_settings(
    section: str, nets: list[str] | None = None, **quick: Any
) -> dict[str, Setting]:
    """The settings of a comparison.

    Args:
        section: That of `methods.toml`.
        nets: The networks by default; `None` for all.
        **quick: Values with `--quick`.
    """
    known = settings(section)
    small = {
        "net": nets or list(known),
        "epochs": 1,
        "depth": None,
        "methods": None,
    } | quick
    return {
        "net": Setting(nets or list(known), choices=known, quick=small["net"]),
        "methods": Setting([str], choices=METHODS, quick=small["methods"]),
        "densities": Setting([float], quick=[0.1]),
        "seeds": Setting([int], quick=[0]),
        "dataset": Setting(str, choices=["digits", "fashion_mnist", "cifar10"]),
        "samples": Setting(int, "train on so many samples only", quick=2048),
        "epochs": Setting(
            int, "instead of those of the settings", quick=small["epochs"]
        ),
        "depth": Setting(
            int, "instead of that of the settings", quick=small["depth"]
        ),
        "jit": Setting(True, "compile with XLA"),
        "tune": Setting(
            True, "choose a learning rate for each method", quick=False
        ),
        "untuned": Setting(
            False, "and train all seeds at the rate that nobody tuned"
        ),
        "out": Setting(
            pathlib.Path, "a file of lines instead of the usual one"
        ),
    }


class Methods(Comparison):
    """Methods on Fashion-MNIST and digits.

    python benchmarks/methods.py methods                             # the small CNN, the whole grid
    python benchmarks/methods.py methods --net resnet20 --methods dense eoi_erk rigl
    KERAS_BACKEND=jax python benchmarks/methods.py methods --net digits_cnn digits_resnet8
    python benchmarks/methods.py methods --no-tune --out other.jsonl    # all at one learning rate
    """

    page = lines = "methods"
    heading = "Methods on Fashion-MNIST and digits"
    settings = comparison_settings(
        "methods", ["cnn"], methods=["dense", "base_erk", "eoi_auto", "str"]
    )


class Deep(Comparison):
    """Deep networks without normalization on Fashion-MNIST.

    python benchmarks/methods.py deep                                # all networks and methods
    python benchmarks/methods.py deep --net deep_mlp --methods base_scaled eoi_auto
    """

    page = lines = "deep"
    heading = "Deep networks without normalization on Fashion-MNIST"
    settings = comparison_settings(
        "deep",
        net=["deep_mlp"],
        depth=5,
        methods=["dense", "base_erk", "eoi_auto"],
    )


CONTEMPORARY = ["resnet20", "resnet32", "vgg16", "mobilenet", "vit"]
"""Those on CIFAR-10 are not trained by default: 200 epochs each."""


class Contemporary(Comparison):
    """Contemporary networks.

    python benchmarks/methods.py contemporary                        # ten hours of two cores
    KERAS_BACKEND=jax python benchmarks/methods.py contemporary --net cifar10_resnet32    # on a GPU
    python benchmarks/methods.py contemporary --net vit --methods blocks_8 --densities 0.0625
    """

    page = lines = "contemporary"
    heading = "Contemporary networks"
    settings = comparison_settings(
        "contemporary",
        CONTEMPORARY,
        net=["vit"],
        methods=["dense", "base_erk", "eoi_auto"],
    )


class Faster(Comparison):
    """Accuracy of networks on live blocks, and epochs and seconds to 88% on Fashion-MNIST.

        KERAS_BACKEND=jax python benchmarks/methods.py faster --net wide_mlp   # half an hour
        python benchmarks/methods.py faster --net wide_cnn                # an hour; on TensorFlow

    A wide MLP and a wide CNN: dense; with single live entries in masks (`eoi_auto`); on live
    blocks of 16, 32 and 64; RigL on blocks of 32; dense with shorter schedules, too. Each row has
    its own learning rate, the best on a validation split, and 88% are read on that split, not on
    the test set. Seconds are those of the steps alone, measured apart and interleaved, on an idle
    machine, by `time_of_training --settings faster`.
    """

    page = lines = "faster"
    settings = comparison_settings(
        "faster", net=["wide_mlp"], methods=["dense", "blocks_32"], epochs=2
    )

    def report(self, lines: list[Run]) -> str:
        file = self.file.with_name(TIMES)
        times = json.loads(file.read_text()) if file.exists() else {}
        ratios = finished(self.file.with_name(BUSY))
        return methods_summary.summarize_faster(
            lines, settings("faster"), times, ratios
        )


# --- time_of_training -----------------------------------------------------------------------------

TURN_STEPS = 14
"""Steps of a turn, unless the settings have a frequency: the default of the small CNN's run."""
WARM_UP = 2  # turns: the second compiles what only comes once masks have moved


class Turn(keras.callbacks.Callback):
    """Ends training after one epoch, and records its seconds, and those of the processor."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self.cpu: list[float] = []

    def on_train_batch_begin(
        self, batch: int, logs: dict | None = None
    ) -> None:
        """Starts the clock: the setup of an epoch sometimes waits for half a second."""
        if batch == 0:
            self._start = time.perf_counter()
            self._worked = time.process_time()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Stops."""
        self.seconds.append(time.perf_counter() - self._start)
        self.cpu.append(time.process_time() - self._worked)
        self.model.stop_training = True


class Case:
    """A training run that continues one turn at a time."""

    def __init__(
        self,
        net: str,
        method: str,
        density: float,
        data: Dataset,
        options: dict,
    ) -> None:
        seed = options["seeds"][0]
        self.model, self.callbacks, self.plan = build(
            net, method, density, seed, data, options
        )
        self.steps = self.plan["frequency"] or TURN_STEPS
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
    options: Run,
    rounds: int,
    methods: Iterable[str],
) -> dict[str, tuple[float, float]]:
    """Median wall-clock and CPU seconds of a turn of each method, and of dense once more."""
    cases: dict[str, Case] = {}
    for name in (*methods, "dense again"):
        try:
            cases[name] = Case(
                net, name.removesuffix(" again"), density, data, options
            )
        except BudgetError as error:  # a mask that empties a layer
            print(f"{name}: {error}")
    for _ in range(WARM_UP + rounds):
        for case in cases.values():
            case()
    medians = {}
    for name, case in cases.items():
        wall = statistics.median(case.turn.seconds[WARM_UP:])
        cpu = statistics.median(case.turn.cpu[WARM_UP:])
        medians[name] = wall, cpu
    return medians


class TimeOfTraining(Measurement):
    """Time of training under every method against the dense network, interleaved.

        python benchmarks/methods.py time_of_training --net resnet20 --rounds 3
        python benchmarks/methods.py time_of_training --settings faster --net wide_cnn

    The methods train in turn, for as many steps as between two mask updates, so that other load on
    the machine affects all of them. Updates of masks, thresholds and extra gradients are as
    frequent as in a run; compilation and the setup of an epoch are excluded. The ratios of the
    medians, and seconds of a step of the networks of `faster`, go to
    `results/methods_time.json`, for the tables of `methods` and `faster`. `eoi_str` needs the
    budget of a finished run of `str`. With `--busy`, on a machine with other work, only ratios of
    CPU times are written, to a table of their own on the page of `faster`.
    """

    settings = {
        "settings": Setting(
            "methods", "of methods.toml", choices=["methods", "faster"]
        ),
        "net": Setting("cnn"),
        "density": Setting(0.05),
        "rounds": Setting(11, quick=2),
        "jit": Setting(True, "compile with XLA"),
        "busy": Setting(False, "write ratios of CPU times only"),
        "methods": Setting(
            [*METHODS], choices=METHODS, quick=["dense", "base_erk", "gmp"]
        ),
    }

    def measure(self) -> None:
        """Times the methods, and writes the file."""
        given = self.given
        options = dict(settings(given.settings)[given.net])
        options |= {"jit": given.jit, "budgets": RESULTS / BUDGETS}
        data = load(options["dataset"])
        medians = turns(
            given.net, given.density, data, options, given.rounds, given.methods
        )
        if given.busy:
            self.add_ratios(medians)
            return
        seconds = {name: wall for name, (wall, _) in medians.items()}
        ratios = {
            name: value / seconds["dense"] for name, value in seconds.items()
        }
        for name, value in seconds.items():
            print(f"{name:12} {value:8.3f} s  {ratios[name]:.3f}")
        file = RESULTS / TIMES
        times = json.loads(file.read_text()) if file.exists() else {}
        if given.settings == "methods":
            times[given.net] = ratios
        else:
            steps = options.get("frequency", TURN_STEPS)
            of_step = {name: value / steps for name, value in seconds.items()}
            times.setdefault(given.net, {})[f"{given.density:g}"] = of_step
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(times, indent=1) + "\n")

    def add_ratios(self, medians: dict[str, tuple[float, float]]) -> None:
        """Writes the CPU time of each method, relative to the dense network's."""
        _, base = medians["dense"]
        for name, (_, cpu) in medians.items():
            line = {
                "net": self.given.net,
                "density": self.given.density,
                "method": name,
                "cpu_ratio": cpu / base,
                "backend": keras.backend.backend(),
                "load": os.getloadavg()[0],
            }
            append(RESULTS / BUSY, line)
            print(line, flush=True)


if __name__ == "__main__":
    main(Methods, Deep, Contemporary, Faster, TimeOfTraining)
