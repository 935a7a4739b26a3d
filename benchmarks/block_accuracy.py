"""Accuracy of block-sparse against unstructured and dense training.

    KERAS_BACKEND=tensorflow python benchmarks/block_accuracy.py             # about 10 minutes
    KERAS_BACKEND=tensorflow python benchmarks/block_accuracy.py --seeds 1 --epochs 1

Fashion-MNIST, an MLP 784-1024-1024-512-10, Adam with cosine decay; the three hidden kernels are
dense orthogonal, unstructured EOI at density 0.1, or exactly orthogonal in blocks of 16 inputs at
density 0.1, with fixed masks; the head is dense. Finished runs are lines of
`results/block_accuracy.jsonl` and not repeated; the table, mean and deviation over the seeds, is
`results/block_accuracy.md`.
"""

import argparse
import dataclasses
import os
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from example_data import Dataset, load
from timing import RESULTS, append, finished, machine, markdown, parsed, write

import keras_sparse_ortho as kso
from keras_sparse_ortho.initializers import ExactOrthogonal
from keras_sparse_ortho.orthogonal import exact_orthogonal

L = keras.layers
SIZES = ((784, 1024), (1024, 1024), (1024, 512))
KINDS = ("dense", "unstructured", "blocks 16x1")
GAIN = 2**0.5
KEYS = ("kind", "seed", "epochs", "density", "rate")


def hidden(kind: str, k: int, density: float, seed: int) -> keras.Layer:
    inputs, outputs = SIZES[k]
    if kind == "blocks 16x1":
        start = ExactOrthogonal(density, gain=GAIN, seed=seed, structure=kso.Block(16, 1))
        layer = L.Dense(outputs, activation="relu", kernel_initializer=start, name=f"h{k}")
        return kso.PrunableLayer(layer)
    if kind == "dense":
        start = keras.initializers.Orthogonal(GAIN, seed=seed)
        return L.Dense(outputs, activation="relu", kernel_initializer=start, name=f"h{k}")
    kernel, mask = exact_orthogonal((inputs, outputs), density, gain=GAIN, seed=seed)
    layer = L.Dense(outputs, activation="relu", name=f"h{k}")
    wrapped = kso.PrunableLayer(layer, kso.parametrizations.FixedMask(mask=mask))
    wrapped.build((None, inputs))
    layer.kernel.assign(kernel)
    return wrapped


def run(kind: str, data: Dataset, options: argparse.Namespace, seed: int) -> dict:
    """One training; accuracy on the test set after the last epoch."""
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [
            keras.Input(data.x_train.shape[1:]),
            L.Flatten(),
            *(hidden(kind, k, options.density, 100 * seed + k) for k in range(len(SIZES))),
            L.Dense(data.classes),
        ]
    )
    steps = options.epochs * -(-len(data.x_train) // 256)
    model.compile(
        keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(options.rate, steps)),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=keras.backend.backend() != "torch",
    )
    start = time.perf_counter()
    model.fit(data.x_train, data.y_train, batch_size=256, epochs=options.epochs, verbose=0)
    seconds = time.perf_counter() - start
    _, accuracy = model.evaluate(data.x_test, data.y_test, batch_size=1000, verbose=0)
    plain = kso.strip(model) if kind != "dense" else model
    kernels = [np.asarray(layer.kernel) for layer in plain.layers if hasattr(layer, "kernel")]
    return {
        **_key(kind, options, seed),
        "accuracy": float(accuracy),
        "live": int(sum(np.count_nonzero(kernel) for kernel in kernels[:-1])),
        "size": int(sum(kernel.size for kernel in kernels[:-1])),
        "seconds": seconds,
    }


def _key(kind: str, options: argparse.Namespace, seed: int) -> dict:
    return {
        "kind": kind,
        "seed": seed,
        "epochs": options.epochs,
        "density": options.density,
        "rate": options.rate,
        **({"samples": options.samples} if options.samples else {}),
    }


def is_run_of(row: dict, key: dict) -> bool:
    """Whether a line is a run of these settings."""
    return {name: row[name] for name in (*KEYS, "samples") if name in row} == key


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--density", type=float, default=0.1)
    parser.add_argument("--rate", type=float, default=2e-3, help="of Adam, at the start")
    parser.add_argument("--samples", type=int, help="train on so many pictures only")
    options = parsed(parser, {"seeds": 1, "epochs": 1, "samples": 4096})
    file = RESULTS / "block_accuracy.jsonl"
    RESULTS.mkdir(exist_ok=True)
    there = finished(file)
    data = load("fashion_mnist")
    if options.samples:
        few = slice(options.samples)
        data = dataclasses.replace(data, x_train=data.x_train[few], y_train=data.y_train[few])
    mine = []
    for seed in range(
        options.seeds
    ):  # the kinds alternate, so that an interrupted run compares them
        for kind in KINDS:
            key = _key(kind, options, seed)
            row = next((r for r in there if is_run_of(r, key)), None)
            if row is None:
                row = run(kind, data, options, seed)
                append(file, row)
            mine.append(row)
            print(row, flush=True)
    text = (
        f"# The price of blocks: Fashion-MNIST, density {options.density:g}\n\n{machine()}, "
        f"Keras {keras.__version__} on {keras.backend.backend()}. MLP 784-1024-1024-512-10, "
        f"{len(data.x_train)} pictures, {options.epochs} epochs of Adam ({options.rate:g}, cosine "
        f"decay), batch 256, {options.seeds} seeds. Test accuracy after the last epoch, mean and "
        "standard deviation; `nonzero` is of the three hidden kernels.\n\n"
    )
    dense = statistics.mean(r["accuracy"] for r in mine if r["kind"] == "dense")
    rows = []
    for kind in KINDS:
        these = [r for r in mine if r["kind"] == kind]
        accuracies = [r["accuracy"] for r in these]
        spread = f" ± {statistics.stdev(accuracies):.2%}" if len(accuracies) > 1 else ""
        rows.append(
            [
                kind,
                f"{these[0]['live']:,} of {these[0]['size']:,}",
                f"{statistics.mean(accuracies):.2%}{spread}",
                f"{100 * (statistics.mean(accuracies) - dense):+.2f}",
                f"{statistics.mean(r['seconds'] for r in these):.0f}",
            ]
        )
    header = ["hidden kernels", "nonzero", "accuracy", "against dense, points", "training [s]"]
    write("block_accuracy", text + markdown(header, rows), seeds=range(options.seeds))


if __name__ == "__main__":
    main()
