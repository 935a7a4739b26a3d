"""Starts of sparse training at the rate that a user takes: nothing is tuned.

    KERAS_BACKEND=jax python benchmarks/untuned.py [--networks digits_cnn] [--seeds 5]
    python benchmarks/untuned.py --summary

Every network trains with fixed masks, ERK at a density of .05, with Adam at Keras' rate of .001 and
with SGD at .1, both constant and as they come. `random`: the layer's own initializer times a random
mask, the rival; `p` is Welch's test against it, two-sided and not corrected. Each run is a line of
`results/untuned.jsonl`.
"""

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import scipy.stats
from networks import NETWORKS, settings
from record import RESULTS, append, finished, markdown, parsed, write
from training import load, whole_batches

import keras_sparse_ortho as kso
from keras_sparse_ortho.initializers import ExactOrthogonal

LINES = RESULTS / "untuned.jsonl"
STARTS = {
    "random": "random_sparse",
    "gain 1": ExactOrthogonal(gain=1.0),
    "auto": ExactOrthogonal(gain="auto"),
    "auto, all taps": ExactOrthogonal(gain="auto", taps="all"),
    "published": ExactOrthogonal(gain=1.0, start="published", taps="dense_center"),
}
OPTIMIZERS = {"Adam .001": ("adam", 1e-3), "SGD .1": ("sgd", 0.1)}
NETS = {
    "digits_cnn": {"of": "methods.cnn", "dataset": "digits", "epochs": 20, "batch_size": 32},
    "cnn": {"of": "methods.cnn", "epochs": 4},
    "mlp": {"network": "mlp", "dataset": "fashion_mnist", "epochs": 4},
    "resnet20": {"of": "contemporary.resnet20", "epochs": 2},
    "mobilenet": {"of": "contemporary.mobilenet", "epochs": 4},  # these two on TensorFlow
}
"""Settings of `methods.toml` and what differs; `mlp`: 784, 300, 100, 10 units, no normalization."""
DENSITY = 0.05


def mlp(shape: tuple[int, ...]) -> keras.Model:
    """LeNet-300-100."""
    dense = keras.layers.Dense
    layers = [dense(300, "relu", name="h0"), dense(100, "relu", name="h1"), dense(10, name="head")]
    return keras.Sequential([keras.Input(shape), keras.layers.Flatten(), *layers])


def options(name: str) -> dict:
    """The settings of a network."""
    own = NETS[name]
    section, _, network = own.get("of", "").partition(".")
    return {"network": network, **(settings(section)[network] if section else {}), **own}


def accuracy(name: str, start: str, optimizer: str, seed: int, samples: int | None) -> float:
    """Trains once; the test accuracy in percent."""
    plan = options(name)
    data = load(plan["dataset"])
    rows = samples or plan.get("samples")
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    if plan["network"] == "mlp":
        model = mlp(data.x_train.shape[1:])
    else:
        model = NETWORKS[plan["network"]](data.x_train.shape[1:], 10, plan)
    model = kso.sparsify(
        model, DENSITY, initializer=STARTS[start], seed=seed, include=plan.get("include")
    )
    made = keras.optimizers.get(OPTIMIZERS[optimizer][0])
    made.learning_rate = OPTIMIZERS[optimizer][1]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(made, loss, metrics=["accuracy"], jit_compile=plan.get("jit", "auto"))
    batches = whole_batches(data.x_train[:rows], data.y_train[:rows], plan.get("batch_size", 128))
    model.fit(**batches, epochs=plan["epochs"], verbose=0)
    found = model.evaluate(data.x_test, data.y_test, batch_size=500, verbose=0)[1]
    return 100 * float(found)


KEYS = ("network", "start", "optimizer", "seed")


def measure(given: argparse.Namespace) -> None:
    """Appends the runs that are missing, seed by seed."""
    done = {tuple(run[key] for key in KEYS) for run in finished(LINES)}
    for name in given.networks:
        for seed in range(given.seeds):
            for optimizer in OPTIMIZERS:
                for start in given.starts:
                    key = name, start, optimizer, seed
                    if key not in done:
                        run = dict(zip(KEYS, key, strict=True))
                        run["accuracy"] = accuracy(*key, given.samples)
                        append(LINES, run)
                        print(run, flush=True)


def summarize() -> None:
    """Writes the table."""
    found: dict[tuple, list[float]] = {}
    runs = finished(LINES)
    for run in runs:
        found.setdefault(tuple(run[key] for key in KEYS[:3]), []).append(run["accuracy"])
    starts = dict.fromkeys([*STARTS, *(run["start"] for run in runs)])  # removed ones, too
    rows = []
    for name in NETS:
        for optimizer in OPTIMIZERS:
            rival = found.get((name, "random", optimizer))
            for start in starts:
                own = found.get((name, start, optimizer))
                if own is None or rival is None:
                    continue
                spread = np.std(own, ddof=1) if len(own) > 1 else 0.0
                row = [name, optimizer, start, f"{np.mean(own):.1f} +- {spread:.1f}", str(len(own))]
                if start == "random" or min(len(own), len(rival)) < 2:
                    rows.append([*row, "", ""])
                    continue
                p = scipy.stats.ttest_ind(own, rival, equal_var=False).pvalue
                rows.append([*row, f"{np.mean(own) - np.mean(rival):+.1f}", f"{p:.3f}"])
    header = ["network", "optimizer", "start", "accuracy", "seeds", "to random", "p"]
    intro = (
        "# Starts at a rate that nobody tuned\n\n"
        f"Test accuracy in percent, mean and standard deviation; ERK at {DENSITY}, fixed "
        "masks. Adam at .001 and SGD at .1, constant. `p`: Welch's test against `random`, the "
        "layer's own initializer under a random mask; not corrected for the number of rows.\n\n"
    )
    write("untuned", intro + markdown(header, rows), sorted({run["seed"] for run in runs}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", default=list(NETS), choices=list(NETS))
    parser.add_argument("--starts", nargs="+", default=list(STARTS), choices=list(STARTS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--samples", type=int, help="how many images to train on")
    parser.add_argument("--summary", action="store_true", help="only write the table")
    quick = {"networks": ["digits_cnn"], "seeds": 1, "samples": 256, "starts": ["random", "auto"]}
    given = parsed(parser, quick=quick)
    if not given.summary:
        measure(given)
    summarize()


if __name__ == "__main__":
    main()
