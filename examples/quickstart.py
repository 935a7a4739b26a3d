"""A trained network as a small file, beside its dense rivals: ``make demo``.

    python examples/quickstart.py                 # about five minutes on two cores
    KERAS_BACKEND=jax python examples/quickstart.py

A network of three layers of 1024 units is trained on scikit-learn's handwritten digits and written
as LiteRT files: dense in float32, int8 and int4, pruned by `kso.shrink`, and trained from
scratch on live blocks. Every file answers the same test images and is timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import importlib.util
import sys
import time
from pathlib import Path

import quiet  # noqa: F401 - before Keras: no start-up messages of TensorFlow

# isort: split
import keras
import numpy as np
from data import Dataset, load

import keras_sparse_ortho as kso

DENSITY = 0.125  # of the live blocks: one weight in eight


def network() -> keras.Model:
    layers = [
        keras.layers.Dense(1024, activation="relu", name=f"hidden_{k}")
        for k in range(3)
    ]
    return keras.Sequential(
        [keras.Input((64,)), *layers, keras.layers.Dense(10, name="head")]
    )


def train(model: keras.Model, data: Dataset, epochs: int) -> float:
    """Trains a model; the seconds that the steps took, without compiling."""
    steps = epochs * -(-len(data.x_train) // 64)
    model.compile(
        keras.optimizers.Adam(
            keras.optimizers.schedules.CosineDecay(1e-3, steps)
        ),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=keras.backend.backend()
        != "torch",  # XLA; torch needs a C++ compiler
    )
    model.fit(data.x_train, data.y_train, batch_size=64, epochs=1, verbose=0)
    start = time.perf_counter()
    model.fit(
        data.x_train,
        data.y_train,
        batch_size=64,
        initial_epoch=1,
        epochs=epochs,
        verbose=0,
    )
    return time.perf_counter() - start


def say(text: str, start: float) -> None:
    print(f"[{time.monotonic() - start:4.0f} s] {text}", flush=True)


def table(files: dict[str, Path], data: Dataset) -> str:
    """Accuracy, bytes and time of each file; all are timed in turn."""
    lines = [
        f"{'file':34}{'test accuracy':>14}{'bytes':>12}{'gzip':>12}{'ms a call':>11}"
    ]
    for (name, path), ms in zip(
        files.items(),
        kso.export.latencies([*files.values()], seconds=5),
        strict=True,
    ):
        answers = kso.load_litert(path).predict(data.x_test).argmax(axis=1)
        accuracy = np.mean(answers == data.y_test)
        size, packed = (
            path.stat().st_size,
            len(gzip.compress(path.read_bytes())),
        )
        lines.append(
            f"{name:34}{accuracy:14.1%}{size:12,}{packed:12,}{ms:11.3f}"
        )
    return "\n".join(lines)


def draw(report: kso.shrinking.ShrinkReport, path: Path) -> bool:
    """Draws the score of all files over their bytes, if Matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    axes = report.plot()
    axes.figure.set_size_inches(10, 6)
    axes.figure.savefig(path, dpi=120)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument(
        "--minutes", type=float, default=2.0, help="for `kso.shrink`"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--output", type=Path, default=Path("quickstart_output")
    )
    options = parser.parse_args()
    if options.epochs < 2:
        parser.error(f"--epochs must be 2 or more. Received: {options.epochs}")
    start = time.monotonic()
    keras.utils.set_random_seed(options.seed)
    data = load("digits")
    flat = {
        name: getattr(data, name).reshape(-1, 64)
        for name in ("x_train", "x_test")
    }
    data = dataclasses.replace(data, **flat)
    rows = f"{len(data.x_train)} training and {len(data.x_test)} test images"
    say(f"digits: {rows}; backend {keras.backend.backend()}", start)

    dense = network()
    dense_seconds = train(dense, data, options.epochs)
    say(
        f"trained a dense network of {dense.count_params():,} parameters", start
    )

    options.output.mkdir(parents=True, exist_ok=True)
    files = {}
    for name, mode in (
        ("float32", "float32"),
        ("int8", "int8"),
        ("int4", "dynamic_int4"),
    ):
        files[f"dense {name}"] = path = options.output / f"dense_{name}.tflite"
        calibration = (
            {"representative_data": data.x_train} if mode == "int8" else {}
        )
        kso.export_litert(dense, path, mode=mode, tolerance=1.0, **calibration)
    say("wrote it dense: float32, int8, int4", start)

    # A trained model to a file, in one call.
    files["kso.shrink"] = path = options.output / "small.tflite"
    report = kso.shrink(
        dense, (data.x_train, data.y_train), path, minutes=options.minutes
    )
    say(f"kso.shrink took {report.taken.name}, as {report.taken.route}", start)
    widths = " ".join(str(width) for width in report.taken.widths.values())
    say(f"of 1024 units each, its hidden layers have {widths or 'all'}", start)
    picture = options.output / "frontier.png"
    if draw(report, picture):
        say(f"all files that it tried, by score and bytes: {picture}", start)

    # Or trained on one weight in eight from the first step, and shipped on the same blocks.
    blocks = kso.sparsify(
        network(), DENSITY, storage="blocks", exclude="head", seed=options.seed
    )
    block_seconds = train(blocks, data, options.epochs)
    files["live blocks from the first step"] = path = (
        options.output / "blocks.tflite"
    )
    kso.export_litert(
        blocks, path, mode="int8+blocks", representative_data=data.x_train
    )
    faster = dense_seconds / block_seconds
    say(
        f"trained it on live blocks: steps {faster:.1f} times as fast as dense",
        start,
    )

    print(f"\n{table(files, data)}\n")
    say(f"the files are in {options.output}", start)
    return 0


if __name__ == "__main__":
    sys.exit(main())
