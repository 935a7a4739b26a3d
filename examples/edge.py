"""Train fast, ship fast: one set of blocks from the first step to the file for a small machine.

    python examples/edge.py                       # Fashion-MNIST, or digits where it is missing
    python examples/edge.py --epochs 2 --only speech

Two networks, each trained dense and on live blocks (`sparsify(..., storage="blocks")`, density
1/8, exactly orthogonal), and shipped as static int8, those blocks as `int8+blocks`:

- an MLP on Fashion-MNIST;
- a keyword spotter on synthetic spectrograms, see `spectrograms`.

For both it shows the time of an epoch, accuracy in Keras and of the file, bytes and the time of a
call on this machine. The export uses TensorFlow in another process, whatever the backend is, or
JAX where TensorFlow is not installed.
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
from data import DEBIAN_FOLDER, Dataset, DatasetError, load
from keras import layers
from rich.console import Console
from rich.table import Table

import keras_sparse_ortho as kso
from keras_sparse_ortho.export import latencies, load_litert

console = Console()

BANDS, FRAMES, KEYWORDS = 40, 48, 12
ROUTES = {"dense": "int8", "blocks": "int8+blocks"}


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
    tracks = (
        ends[:, :, :1] + (ends[:, :, 1:] - ends[:, :, :1]) * place[:, None, :]
    )
    # (rows, formants, frames, bands).
    distance = np.arange(BANDS) - tracks[..., None]
    energy = (
        np.exp(-0.5 * (distance / 1.5) ** 2).sum(axis=1) * inside[..., None]
    )
    noise = 0.6 * rng.standard_normal(energy.shape)
    return (energy + noise).astype("float32"), labels.astype("int32")


def mlp(shape: tuple[int, ...], classes: int) -> keras.Model:
    hidden = [
        layers.Dense(width, activation="relu", name=f"hidden_{k}")
        for k, width in enumerate((1024, 1024, 512))
    ]
    head = layers.Dense(classes, name="head")
    return keras.Sequential(
        [keras.Input(shape, name="x"), layers.Flatten(), *hidden, head],
        name="mlp",
    )


def speech(shape: tuple[int, ...], classes: int) -> keras.Model:
    """Windows of 8 frames; as large as a keyword spotter for microcontrollers."""
    windows, size = FRAMES // 8, 8 * BANDS
    return keras.Sequential(
        [
            keras.Input(shape, name="x"),
            layers.Reshape((windows, size)),
            layers.Dense(256, activation="relu", name="frame"),
            layers.Flatten(),
            layers.Dense(256, activation="relu", name="word"),
            layers.Dense(256, activation="relu", name="mix"),
            layers.Dense(classes, name="head"),
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
    return Dataset(
        "synthetic keywords", x[:10_000], y[:10_000], x[10_000:], y[10_000:]
    )


class Stopwatch(keras.callbacks.Callback):
    """Seconds of every epoch."""

    def on_train_begin(self, logs=None):
        """Starts with no epoch."""
        self.seconds: list[float] = []

    def on_epoch_begin(self, epoch, logs=None):
        """Starts an epoch."""
        self.started = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        """Ends it; `logs` are numbers by now, so the device has finished."""
        self.seconds.append(time.perf_counter() - self.started)


def train(model: keras.Model, data: Dataset, epochs: int) -> dict:
    """Accuracy on the test set after `epochs`, and seconds of the fastest epoch."""
    size = 32 if len(data.x_train) < 5_000 else 128
    steps = epochs * -(-len(data.x_train) // size)
    model.compile(
        keras.optimizers.Adam(
            keras.optimizers.schedules.CosineDecay(2e-3, steps)
        ),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=keras.backend.backend()
        != "torch",  # torch needs a C++ compiler
    )
    watch = Stopwatch()
    with console.status(
        f"Training {model.name} for {epochs} epochs on {data.name}"
    ):
        model.fit(
            data.x_train,
            data.y_train,
            batch_size=size,
            epochs=epochs,
            verbose=0,
            callbacks=[watch],
        )
    accuracy = float(model.evaluate(data.x_test, data.y_test, verbose=0)[1])
    return {"keras_accuracy": accuracy, "epoch_s": min(watch.seconds)}


def ship(model: keras.Model, route: str, data: Dataset, path: Path) -> dict:
    """Exports a verified file, and takes its accuracy on the test set."""
    with console.status(f"Exporting {path.name}"):
        report = kso.export_litert(
            model,
            path,
            mode=route,
            sample=data.x_test[:200],
            representative_data=data.x_train[:200],
        )
    path.with_suffix(".json").write_text(report.to_json())
    guesses = load_litert(path).predict(data.x_test).argmax(axis=1)
    accuracy = float(np.mean(guesses == data.y_test))
    return {
        "route": report.route,
        "bytes": report.bytes,
        "file_accuracy": accuracy,
    }


def run(
    name: str, data: Dataset, options: argparse.Namespace
) -> dict[str, dict]:
    """The network dense and on blocks, from training to the file."""
    lines: dict[str, dict] = {}
    for kind, route in ROUTES.items():
        keras.utils.set_random_seed(options.seed)
        model = NETWORKS[name][0](data.x_train.shape[1:], data.classes)
        if kind == "blocks":
            model = kso.sparsify(
                model,
                options.density,
                "uniform",
                storage="blocks",
                exclude=["head"],
                seed=options.seed,
            )
            console.print(kso.report(model))
        lines[kind] = train(model, data, options.epochs)
        lines[kind] |= ship(
            model, route, data, options.output / f"{name}_{kind}.tflite"
        )
    files = [options.output / f"{name}_{kind}.tflite" for kind in ROUTES]
    for kind, ms in zip(ROUTES, latencies(files), strict=True):
        lines[kind]["latency_ms"] = ms
    return lines


def compared(name: str, data: Dataset, lines: dict[str, dict]) -> Table:
    """The two networks side by side."""
    table = Table(title=f"{name} on {data.name}")
    for column in ("", *ROUTES, "dense / blocks"):
        table.add_column(column, justify="left" if not column else "right")
    for title, key, form in (
        ("an epoch [s]", "epoch_s", ".2f"),
        ("file [bytes]", "bytes", ",d"),
        ("a call [ms]", "latency_ms", ".4f"),
        ("accuracy in Keras", "keras_accuracy", ".2%"),
        ("accuracy of the file", "file_accuracy", ".2%"),
    ):
        dense, blocks = (lines[kind][key] for kind in ROUTES)
        ratio = "" if form == ".2%" else f"{dense / blocks:.1f}"
        table.add_row(title, format(dense, form), format(blocks, form), ratio)
    return table


NETWORKS = {"mlp": (mlp, fashion), "speech": (speech, keywords)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument(
        "--density",
        type=float,
        default=0.125,
        help="live fraction (default 1/8)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=[*NETWORKS])
    parser.add_argument("--output", type=Path, default=Path("edge_output"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    results, tables = {}, []
    for name, (_, source) in NETWORKS.items():
        if options.only in (None, name):
            data = source()
            console.rule(f"{name} on {data.name}")
            try:
                lines = run(name, data, options)
            except kso.errors.DensityError as error:
                parser.error(f"--density: {error}")
            results[name] = {"data": data.name, **lines}
            tables.append(compared(name, data, lines))
    (options.output / "edge.json").write_text(
        json.dumps(results, indent=1) + "\n"
    )
    for table in tables:
        console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
