"""Accuracy lost because Keras on TensorFlow repeats the order of batches once a seed is set.

    python benchmarks/batch_order.py

An MLP 784-512-256-10 on Fashion-MNIST, Adam, batch 128, dense and with a random mask: `fit` on
arrays, and on a dataset that has another order in each epoch (shuffled.py). Counts the orders that
the first epochs see. Writes `results/batch_order.md`.
"""

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from example_data import Dataset, load
from methods_summary import mean_and_deviation
from record import machine, markdown, parsed, write
from shuffled import shuffled, whole_batches

import keras_sparse_ortho as kso

BATCH, DENSITY = 128, 0.1


def fed(data: Dataset, how: str, seed: int) -> dict:
    """What `fit` takes."""
    if how == "dataset":
        return shuffled(data.x_train, data.y_train, BATCH, seed)
    return whole_batches(data.x_train, data.y_train, BATCH)


def orders(how: str, epochs: int = 3) -> int:
    """Number of different first batches over some epochs, seen by a model that does not learn."""
    seen: list[float] = []

    class First(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
            if batch == 0:
                seen.append(float((logs or {})["loss"]))

    rows = np.arange(10 * BATCH, dtype="float32")[:, None]
    data = Dataset("rows", rows, rows[:, 0], rows, rows[:, 0])
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Activation("linear")])
    model.compile(loss=lambda y, found: found, jit_compile=False)
    model.fit(**fed(data, how, 0), epochs=epochs, verbose=0, callbacks=[First()])
    return len(set(seen))


def accuracy(kind: str, how: str, seed: int, data: Dataset, epochs: int) -> float:
    """On the test set, in percent."""
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input(data.x_train.shape[1:]),
            layers.Flatten(),
            layers.Dense(512, activation="relu"),
            layers.Dense(256, activation="relu"),
            layers.Dense(10),
        ]
    )
    if kind == "sparse":
        model = kso.sparsify(model, DENSITY, initializer="random_sparse", seed=seed)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"], jit_compile=False)
    model.fit(**fed(data, how, seed), epochs=epochs, verbose=0)
    return 100 * model.evaluate(data.x_test, data.y_test, batch_size=500, verbose=0)[1]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--samples", type=int, help="train on so many only")
    given = parsed(parser, {"epochs": 2, "seeds": [0], "samples": 2048})
    data, few = load("fashion_mnist"), slice(given.samples)
    data = Dataset(data.name, data.x_train[few], data.y_train[few], data.x_test, data.y_test)
    rows = []
    for how in ("arrays", "dataset"):
        cells = [how, f"{orders(how)} of 3"]
        for kind in ("dense", "sparse"):
            found = [accuracy(kind, how, seed, data, given.epochs) for seed in given.seeds]
            print(how, kind, found, flush=True)
            cells.append(mean_and_deviation(found))
        rows.append(cells)
    text = f"# The order of batches\n\n{machine()}, {keras.backend.backend()}. MLP 784-512-256-10, "
    text += f"Fashion-MNIST, {given.epochs} epochs of Adam, after `keras.utils.set_random_seed`; "
    text += f"the random mask has the density {DENSITY}. Test accuracy in percent, mean and "
    text += "standard deviation over seeds.\n\n"
    header = ["`fit` on", "orders of epochs", "dense", "random mask"]
    write("batch_order", text + markdown(header, rows), given.seeds)


if __name__ == "__main__":
    main()
