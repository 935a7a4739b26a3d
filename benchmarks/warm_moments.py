"""RigL and SET under Adam, by what the second moments of grown entries start from.

    python benchmarks/warm_moments.py [--epochs 20]

An MLP 784-300-300-10 at density 0.05 on scikit-learn's digits enlarged to 28 x 28 (`digits` of
moving_masks.py), Adam at one constant rate, an update every 50 steps. The loss on 1,000 training
images is taken before each update and after each of the ten steps that follow; the rise is the
largest of these less the one before. Writes `results/warm_moments.md`.
"""

import argparse
import itertools
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from methods_summary import mean_and_deviation
from moving_masks import digits, mlp
from record import markdown, parsed, write

import keras_sparse_ortho as kso

RATE, EVERY, AFTER, BATCH, DENSITY = 0.002, 50, 10, 128, 0.05


class Rises(keras.callbacks.Callback):
    """How far the loss on some images rises in the steps after each update."""

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        super().__init__()
        self.batch, self.rises = (x, y), []
        self.step, self.before = 0, 0.0

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Takes the loss."""
        self.step += 1
        since = self.step % EVERY
        if (self.step < EVERY or since > AFTER) and since:
            return
        if keras.backend.backend() == "jax":
            self.model.jax_state_sync()
        x, y = self.batch
        loss = keras.losses.sparse_categorical_crossentropy
        now = float(keras.ops.mean(loss(y, self.model(x), from_logits=True)))
        if since:
            self.rises[-1] = max(self.rises[-1], now - self.before)
        else:
            self.before = now
            self.rises.append(-np.inf)


def train(method: str, warm: bool, seed: int, epochs: int, data) -> dict:
    """The rises of a run, and its accuracy."""
    keras.utils.set_random_seed(seed)
    model = kso.sparsify(mlp((28, 28, 1), 10, {}), DENSITY, seed=seed)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(RATE), loss, metrics=["accuracy"])
    options = {"frequency": EVERY, "seed": seed, "warm_moments": warm}
    options["end_step"] = int(0.75 * epochs * (len(data.x_train) // BATCH))
    callbacks = kso.callbacks
    train_data = data.x_train, data.y_train
    moving = (
        callbacks.SET(**options)
        if method == "SET"
        else callbacks.RigL(train_data, BATCH, **options)
    )
    watch = Rises(data.x_train[:1000], data.y_train[:1000])
    model.fit(*train_data, BATCH, epochs, verbose=0, callbacks=[moving, watch])
    rises = watch.rises[: options["end_step"] // EVERY]
    accuracy = model.evaluate(data.x_test, data.y_test, batch_size=500, verbose=0)[1]
    return {"worst": max(rises), "mean": float(np.mean(rises)), "accuracy": float(accuracy)}


def main() -> None:
    """All runs, and the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--copies", type=int, default=12)
    options = parsed(parser, {"epochs": 3, "seeds": [0], "copies": 6})
    data, rows = digits(options.copies), []
    for method, warm in itertools.product(("SET", "RigL"), (False, True)):
        runs = [train(method, warm, seed, options.epochs, data) for seed in options.seeds]
        print(method, warm, runs, flush=True)
        found = [
            mean_and_deviation([run[name] for run in runs], 1000) for name in ("worst", "mean")
        ]
        accuracy = mean_and_deviation([run["accuracy"] for run in runs], 100)
        rows.append([method, "mean of the others" if warm else "0", *found, accuracy])
    text = "# What second moments of grown entries start from\n\nAn MLP 784-300-300-10 at density "
    text += f"{DENSITY}, {options.epochs} epochs of Adam({RATE}), an update every {EVERY} steps; "
    text += f"rises of the training loss in the {AFTER} steps after an update.\n\n"
    header = ["method", "start", "worst rise [0.001]", "mean rise [0.001]", "test accuracy [%]"]
    write("warm_moments", text + markdown(header, rows), options.seeds)


if __name__ == "__main__":
    main()
