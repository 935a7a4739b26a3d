"""Networks for small machines: sparse in blocks from the first step, exported each way.

    python examples/edge.py                       # Fashion-MNIST, or digits where it is missing
    python examples/edge.py --epochs 2 --only speech

Two networks are trained at 90% sparsity (density 0.1) with exactly orthogonal kernels in blocks of
16 x 1 (in x out), the blocks of LiteRT's fast sparse kernel:

- an MLP on Fashion-MNIST;
- a keyword spotter on synthetic spectrograms, see `spectrograms`.

Each is exported by every route, verified and timed on this machine; the fastest file is kept. The
export uses TensorFlow in another process, whatever the backend is.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import quiet  # noqa: F401 - before Keras: no start-up messages of TensorFlow

# isort: split
import keras
import numpy as np
from blocks import block_dense
from data import DEBIAN_FOLDER, Dataset, DatasetError, load
from keras import layers
from rich.console import Console

import keras_sparse_ortho as kso
from keras_sparse_ortho.export import load_litert

console = Console()

BANDS, FRAMES, KEYWORDS = 40, 48, 12


def spectrograms(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Log spectrograms of made-up keywords, `(rows, FRAMES, BANDS)`, and their labels.

    Each keyword is three formants; formant k moves in a straight line from one band to another,
    both drawn once for the keyword (seed 0). A recording shifts the bands by up to 2, starts up to
    8 frames late, is 0.8 to 1.2 times as long and has a loudness of 0.7 to 1.3; a formant is a
    Gaussian of 1.5 bands; on top comes noise of deviation 0.6. None of it is recorded speech.
    """
    words = np.random.default_rng(0).uniform(3, BANDS - 3, (KEYWORDS, 3, 2))
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, KEYWORDS, rows)
    start = rng.uniform(0, 8, (rows, 1))
    length = 32 * rng.uniform(0.8, 1.2, (rows, 1))
    place = (np.arange(FRAMES) - start) / length  # 0 to 1 within the word
    inside = ((place >= 0) & (place <= 1)) * rng.uniform(0.7, 1.3, (rows, 1))
    ends = words[labels] + rng.uniform(-2, 2, (rows, 1, 1))
    tracks = ends[:, :, :1] + (ends[:, :, 1:] - ends[:, :, :1]) * place[:, None, :]
    distance = np.arange(BANDS) - tracks[..., None]  # (rows, formants, frames, bands)
    energy = np.exp(-0.5 * (distance / 1.5) ** 2).sum(axis=1) * inside[..., None]
    noise = 0.6 * rng.standard_normal(energy.shape)
    return (energy + noise).astype("float32"), labels.astype("int32")


def mlp(shape: tuple[int, ...], classes: int, density: float, seed: int) -> keras.Model:
    hidden = [
        block_dense(width, density, seed + k, activation="relu", name=f"hidden_{k}")
        for k, width in enumerate((1024, 1024, 512))
    ]
    return keras.Sequential(
        [keras.Input(shape, name="x"), layers.Flatten(), *hidden, layers.Dense(classes)], name="mlp"
    )


def speech(shape: tuple[int, ...], classes: int, density: float, seed: int) -> keras.Model:
    """Windows of 8 frames; as large as a keyword spotter for microcontrollers."""
    windows, size = FRAMES // 8, 8 * BANDS
    return keras.Sequential(
        [
            keras.Input(shape, name="x"),
            layers.Reshape((windows, size)),
            block_dense(256, density, seed, activation="relu", name="frame"),
            layers.Flatten(),
            block_dense(256, density, seed + 1, activation="relu", name="word"),
            block_dense(256, density, seed + 2, activation="relu", name="mix"),
            layers.Dense(classes),
        ],
        name="speech",
    )


def fashion() -> Dataset:
    if DEBIAN_FOLDER.is_dir():
        return load("fashion_mnist")
    try:
        return load("fashion_mnist")
    except DatasetError as error:
        console.print(f"{error}\nUsing digits instead.", style="yellow")
        return load("digits")


def keywords() -> Dataset:
    x, y = spectrograms(12_000, seed=1)
    mean, deviation = float(x[:10_000].mean()), float(x[:10_000].std())
    x = (x - mean) / deviation
    return Dataset("synthetic keywords", x[:10_000], y[:10_000], x[10_000:], y[10_000:])


def train(model: keras.Model, data: Dataset, epochs: int) -> float:
    """Accuracy on the test set after `epochs`."""
    size = 32 if len(data.x_train) < 5_000 else 128
    steps = epochs * -(-len(data.x_train) // size)
    model.compile(
        keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(2e-3, steps)),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=keras.backend.backend() != "torch",  # torch needs a C++ compiler
    )
    with console.status(f"Training {model.name} for {epochs} epochs on {data.name}"):
        model.fit(data.x_train, data.y_train, batch_size=size, epochs=epochs, verbose=0)
    return float(model.evaluate(data.x_test, data.y_test, verbose=0)[1])


def ship(model: keras.Model, data: Dataset, folder: Path) -> dict:
    """Export the fastest verified file, and report every route."""
    path = folder / f"{model.name}.tflite"
    with console.status(f"Exporting {model.name} by every route, and timing the files"):
        report = kso.export_litert(
            model,
            path,
            mode="fast",
            sample=data.x_test[:200],
            representative_data=data.x_train[:200],
        )
    console.print(report)
    (folder / f"{model.name}.json").write_text(report.to_json())
    opened = load_litert(path)
    rows = min(1000, len(data.x_test))
    guesses = opened.predict(data.x_test[:rows]).argmax(axis=1)
    keras_guesses = np.argmax(model.predict(data.x_test[:rows], verbose=0), axis=1)
    return {
        "route": report.route,
        "file_accuracy": float(np.mean(guesses == data.y_test[:rows])),
        "keras_accuracy": float(np.mean(keras_guesses == data.y_test[:rows])),
        "rows": rows,
        "bytes": report.bytes,
        "latency_ms": {one.route: one.latency_ms for one in report.routes if one.verified},
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--density", type=float, default=0.1, help="live fraction (default 0.1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=["mlp", "speech"])
    parser.add_argument("--output", type=Path, default=Path("edge_output"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    keras.utils.set_random_seed(options.seed)
    begun = time.monotonic()
    lines = {}
    for name, build, source in (("mlp", mlp, fashion), ("speech", speech, keywords)):
        if options.only not in (None, name):
            continue
        data = source()
        try:
            model = build(data.x_train.shape[1:], data.classes, options.density, options.seed)
        except kso.errors.DensityError as error:
            parser.error(f"--density: {error}")
        console.rule(f"{name} on {data.name}")
        accuracy = train(model, data, options.epochs)
        console.print(kso.report(model))
        lines[name] = ship(model, data, options.output) | {
            "data": data.name,
            "test_accuracy": accuracy,
        }
    (options.output / "edge.json").write_text(json.dumps(lines, indent=1) + "\n")
    print(f"\nResults, in {time.monotonic() - begun:.0f} s, in {options.output}:")
    for name, line in lines.items():
        times = line["latency_ms"]
        dense = min(times[route] for route in ("dynamic_int8", "int8") if route in times)
        print(
            f"{name} on {line['data']}: test accuracy {line['test_accuracy']:.2%}; fastest route "
            f"{line['route']}, {line['bytes']:,} bytes, {times[line['route']]:.3g} ms a call, "
            f"dense int8 {dense:.3g} ms, dense float32 {times['float32']:.3g} ms; on "
            f"{line['rows']} rows the file is right in {line['file_accuracy']:.2%}, Keras in "
            f"{line['keras_accuracy']:.2%}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
