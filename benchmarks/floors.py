"""STR under `TargetDensity` with and without its floor, and its rank of entries out of reach.

    python benchmarks/floors.py [--nets cnn14 cnn] [--rates 0.016 0.032]

The small CNN of methods.py on Fashion-MNIST at density 0.05, Adam, cosine decay, four epochs;
`cnn14` has the same weights on images pooled to 14 x 14, a third of the work. Entries of magnitude
1 and more are out of a sigmoid's reach: they are ranked by magnitude, or, as before, by place.
Every run is a line of `results/floors.jsonl`, and is not repeated. Writes `results/floors.md`.
"""

import argparse
import dataclasses
import itertools
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import methods
import numpy as np
from example_data import Dataset, load
from methods_summary import mean_and_deviation
from record import RESULTS, append, finished, markdown, parsed, told, write

import keras_sparse_ortho as kso
from keras_sparse_ortho.callbacks import _threshold_cut

LINES = RESULTS / "floors.jsonl"
DENSITY = 0.05
OPTIONS = {"filters": [24, 48, 48], "batch_size": 128, "frequency": 50, "jit": True}
VARIANTS = {
    "floor, by magnitude": (0.3, True),
    "floor, by place": (0.3, False),
    "no floor, by magnitude": (0.0, True),
    "no floor, by place": (0.0, False),
}
KEY = ("net", "variant", "rate", "seed", "epochs")
by_magnitude = _threshold_cut.entries_of


def by_place(threshold) -> _threshold_cut.Entries:
    """Entries out of reach, all equal, so that the first of them are kept."""
    found = by_magnitude(threshold)
    return found._replace(scales=np.where(found.critical > -np.inf, 0.0, -np.inf))


def pooled(data: Dataset) -> Dataset:
    """Images of half the height and width."""

    def halved(x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(x.reshape(-1, 14, 2, 14, 2, 1).mean((2, 4)))

    return dataclasses.replace(data, x_train=halved(data.x_train), x_test=halved(data.x_test))


def train(run: dict, data: Dataset) -> dict:
    """One run."""
    keras.utils.clear_session()
    floor, ranked = VARIANTS[run["variant"]]
    _threshold_cut.entries_of = by_magnitude if ranked else by_place

    def method(model: keras.Model, plan: dict) -> tuple:
        model = kso.parametrize(model, kso.SoftThreshold())
        return model, [kso.callbacks.TargetDensity(plan["density"], floor=floor)]

    methods.METHODS["floors"] = method
    options = OPTIONS | {"epochs": run["epochs"], "budgets": RESULTS}
    seed, rate = run["seed"], run["rate"]
    model, callbacks, _ = methods.build("cnn", "floors", DENSITY, seed, data, options, rate)
    methods.fit(model, callbacks, data, options, seed)
    accuracy = model.evaluate(data.x_test, data.y_test, batch_size=500, verbose=0)[1]
    weights = kso.prunable_weights(model)
    shares = [weight.density for weight in weights]
    live, size = sum(w.live for w in weights), sum(w.size for w in weights)
    return run | {"accuracy": float(accuracy), "live": live, "size": size, "shares": shares}


def summarize() -> None:
    """The table."""
    runs = finished(LINES)
    rows = []
    keys = sorted({tuple(run[name] for name in KEY[:3]) for run in runs})
    for net, variant, rate in sorted(keys, key=lambda k: (k[0], list(VARIANTS).index(k[1]), k[2])):
        mine = [run for run in runs if tuple(run[name] for name in KEY[:3]) == (net, variant, rate)]
        found = [run["accuracy"] for run in mine]
        shares = np.mean([run["shares"] for run in mine], axis=0)
        counts = {run["live"] for run in mine}
        rows.append(
            [
                *(net, variant, f"{rate:g}", mean_and_deviation(found, 100)),
                f"{100 * min(found):.2f}",
                "/".join(f"{share:.3f}" for share in shares),
                ", ".join(f"{count}" for count in sorted(counts)),
                f"{len(mine)}",
            ]
        )
    text = "# Floors of TargetDensity\n\nSTR on Fashion-MNIST at density 0.05: 1590 of 31800 "
    text += "entries. Shares are the densities of the layers in order, the head last.\n\n"
    header = ["net", "variant", "rate", "test accuracy [%]", "worst", "shares", "live", "seeds"]
    write("floors", text + markdown(header, rows), {run["seed"] for run in runs})


def main() -> None:
    """The runs that are missing, and the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nets", nargs="+", choices=["cnn14", "cnn"], default=["cnn14", "cnn"])
    parser.add_argument("--rates", nargs="+", type=float, default=[0.008, 0.016, 0.032, 0.064])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=4)
    quick = {"nets": ["cnn14"], "rates": [0.032], "seeds": [0], "epochs": 1}
    options = parsed(parser, quick)
    data = load("fashion_mnist")
    sets = {"cnn": data, "cnn14": pooled(data)}
    there = [tuple(run[name] for name in KEY) for run in finished(LINES)]
    grid = itertools.product(options.nets, VARIANTS, options.rates, options.seeds)
    missing = []
    for net, variant, rate, seed in grid:
        ablated = net == "cnn14" and rate in (0.016, 0.032) and seed == 0
        row = (net, variant, rate, seed, options.epochs)
        if row not in there and (ablated or variant == "floor, by magnitude"):
            missing.append(dict(zip(KEY, row, strict=True)))
    for run in told("floors", missing):
        append(LINES, train(run, sets[run["net"]]))
    summarize()


if __name__ == "__main__":
    main()
