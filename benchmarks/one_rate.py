"""Whether one learning rate holds over width and density: sparse maximal update parametrization.

    KERAS_BACKEND=jax python benchmarks/one_rate.py [--widths 128 384] [--densities 1 0.2]

An MLP with three hidden layers of ReLU on Fashion-MNIST, exactly orthogonal kernels, Adam, one
epoch of 30,000 images, cosine decay, over a grid of learning rates. Either as usual, or with the
rate of each kernel times `base fan-in / live fan-in` (Dey et al., 2024, arXiv 2405.15743); the base
is the dense network of the least width. Every run is a line of `results/one_rate.jsonl`, and is not
repeated. Writes `results/one_rate.md`.
"""

import argparse
import itertools
import os
import statistics
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from example_data import Dataset, load
from record import RESULTS, append, finished, markdown, parsed, write

import keras_sparse_ortho as kso

L = keras.layers
LINES = RESULTS / "one_rate.jsonl"
KEY = ("scaled", "width", "density", "exponent", "seed")
EXPONENTS = [-12, -11, -10, -9, -8, -7, -6, -5, -4]
IMAGES, BATCH = 30000, 128


class Scaled(kso.parametrizations.FixedMask):
    """`scale * w` on the mask: a step of Adam on `w` is `scale` times as large on the product."""

    scale = 1.0

    def effective(self, value: Any) -> Any:
        """The product."""
        return super().effective(value) * self.scale


def network(width: int, density: float, scaled: bool, base: int, seed: int) -> keras.Model:
    """The network; its head stays dense."""
    keras.utils.set_random_seed(seed)
    hidden = [L.Dense(width, "relu", name=f"hidden_{k}") for k in range(3)]
    model = keras.Sequential(
        [keras.Input((28, 28, 1)), L.Flatten(), *hidden, L.Dense(10, name="head")]
    )
    names = [layer.name for layer in hidden]
    pattern = kso.initializers.ExactOrthogonal(gain=2**0.5)
    drawn = kso.sparsify(model, density, "uniform", pattern, seed=seed, include=names)
    model = kso.parametrize(kso.strip(drawn), Scaled(), density, "uniform", include=names)
    model = kso.parametrize(model, Scaled(), 1.0, "uniform", include=["head"])
    for weight in kso.prunable_weights(model):
        inputs, outputs = weight.shape
        fan_in = min(inputs, base) if inputs == width else inputs
        scale = fan_in / (weight.live / outputs) if scaled else 1.0
        weight.parametrization.scale = scale
        weight.variable.assign(weight.variable.value / scale)
    return model


def train(run: dict, data: Dataset, base: int) -> dict:
    """One run: accuracy on the last tenth of the training set."""
    keras.utils.clear_session()
    model = network(run["width"], run["density"], run["scaled"], base, run["seed"])
    steps = IMAGES // BATCH
    rate = keras.optimizers.schedules.CosineDecay(2.0 ** run["exponent"], steps)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(rate), loss, metrics=["accuracy"], jit_compile=True)
    order = np.random.default_rng(run["seed"]).permutation(54000)[: steps * BATCH]
    x, y = data.x_train[order], data.y_train[order]
    model.fit(x, y, batch_size=BATCH, epochs=1, shuffle=False, verbose=0)
    last = data.x_train[54000:], data.y_train[54000:]
    return run | {"accuracy": float(model.evaluate(*last, batch_size=500, verbose=0)[1])}


def summarize() -> None:
    """For each width and density the best rate, and what the base's best rate loses to it."""
    groups: dict[tuple, list[float]] = {}
    for run in finished(LINES):
        groups.setdefault(tuple(run[name] for name in KEY[:4]), []).append(run["accuracy"])
    means = {key: 100 * statistics.mean(found) for key, found in groups.items()}
    cells = sorted({key[:3] for key in means}, key=lambda key: (key[0], key[1], -key[2]))
    rows = []
    for scaled, width, density in cells:
        mine = {key[3]: mean for key, mean in means.items() if key[:3] == (scaled, width, density)}
        first = min(cell[1] for cell in cells)
        base = {key[3]: mean for key, mean in means.items() if key[:3] == (scaled, first, 1.0)}
        best, shared = max(mine, key=mine.__getitem__), max(base, key=base.__getitem__)
        rows.append(
            [
                *("scaled" if scaled else "usual", f"{width}", f"{density:g}", f"{best}"),
                *(f"{mine[best]:.2f}", f"{mine[shared]:.2f}", f"{mine[best] - mine[shared]:.2f}"),
                "yes" if best in (min(mine), max(mine)) else "-",
            ]
        )
    text = "# One learning rate over width and density\n\nAn MLP of three hidden layers on "
    text += "Fashion-MNIST, exactly orthogonal kernels, Adam, one epoch of 30,000 images. Accuracy "
    text += (
        "on a validation split, mean over the seeds, at the best learning rate, a power of two, "
    )
    text += (
        "and at the one that is best for the dense network of the least width. `scaled`: sparse "
    )
    text += "maximal update parametrization, rates times base fan-in / live fan-in.\n\n"
    header = ["rates", "width", "density", "best exponent", "accuracy there [%]"]
    header += ["at the base's [%]", "lost", "edge"]
    write("one_rate", text + markdown(header, rows), {run["seed"] for run in finished(LINES)})


def main() -> None:
    """The runs that are missing, and the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", nargs="+", type=int, default=[128, 384, 1152])
    parser.add_argument("--densities", nargs="+", type=float, default=[1.0, 0.2, 0.05])
    parser.add_argument("--exponents", nargs="+", type=int, default=EXPONENTS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    quick = {"widths": [32], "densities": [1.0, 0.2], "exponents": [-9], "seeds": [0]}
    options = parsed(parser, quick)
    data = load("fashion_mnist")
    there = [tuple(run[name] for name in KEY) for run in finished(LINES)]
    grid = itertools.product(options.seeds, options.widths, options.densities, (False, True))
    for seed, width, density, scaled in grid:
        for exponent in options.exponents:
            row = (scaled, width, density, exponent, seed)
            if row not in there:
                run = dict(zip(KEY, row, strict=True))
                append(LINES, train(run, data, min(options.widths)))
    summarize()


if __name__ == "__main__":
    main()
