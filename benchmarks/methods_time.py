"""Time of training under every method of methods.py against the dense network, interleaved.

    python benchmarks/methods_time.py --net cnn
    python benchmarks/methods_time.py --net resnet20 --rounds 3
    python benchmarks/methods_time.py --settings faster --net wide_cnn --methods dense blocks_32

The methods train in turn, for as many steps as between two mask updates, so that other load on the
machine affects all of them. Updates of masks, thresholds and extra gradients are as frequent as in
a run; compilation and the setup of an epoch are excluded. The ratios of the medians go to
`results/methods_time.json`, for the table of `methods.py --summary`; seconds of a step of the
networks of `faster.toml` to `results/faster_time.json`, for that of `faster.py`.
`eoi_str` needs the budget of a finished run of `str`.
"""

import argparse
import json
import os
import statistics
import time
import tomllib
import warnings
from collections.abc import Iterable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
from example_data import Dataset, load
from methods import build
from methods_runs import HERE
from methods_summary import TIMES
from methods_table import METHODS
from record import RESULTS, parsed

from keras_sparse_ortho.errors import BudgetError, DensityWarning

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


def measure(
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


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--settings", choices=["methods", "faster"], default="methods")
    parser.add_argument("--net", default="cnn")
    parser.add_argument("--density", type=float, default=0.05)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--no-jit", action="store_true", help="without XLA")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    given = parsed(parser, {"rounds": 2, "methods": ["dense", "base_erk", "gmp"]})
    options = tomllib.loads((HERE / f"{given.settings}.toml").read_text())[given.net]
    options |= {"jit": not given.no_jit, "budgets": RESULTS / "budgets"}
    data = load(options["dataset"])
    seconds = measure(given.net, given.density, data, options, given.rounds, given.methods)
    ratios = {name: value / seconds["dense"] for name, value in seconds.items()}
    for name, value in seconds.items():
        print(f"{name:12} {value:8.3f} s  {ratios[name]:.3f}")
    file = RESULTS / TIMES.replace("methods", given.settings)
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
    main()
