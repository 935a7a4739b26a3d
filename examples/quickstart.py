"""Train sparse networks and the same networks dense, and export them as LiteRT files.

    python examples/quickstart.py                          # digits: about 90 seconds
    python examples/quickstart.py --dataset fashion_mnist  # full size
    KERAS_BACKEND=jax python examples/quickstart.py

An MLP and a small CNN are made 90% sparse before training (density 0.1, exactly orthogonal
kernels), trained, saved and resumed half-way, stripped, and exported. `density` is the live
fraction of the kernels.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from pathlib import Path

import quiet  # noqa: F401 - before Keras: no start-up messages of TensorFlow

# isort: split
import keras
import numpy as np
from data import Dataset, DatasetError, load
from keras import layers
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import keras_sparse_ortho as kso

EPOCHS = {"digits": 20, "fashion_mnist": 6}
DENSE_COLOR, SPARSE_COLOR = "#8a8f98", "#d1495b"

console = Console()


# --- the two networks -----------------------------------------------------------------------------


def mlp(shape: tuple[int, ...], classes: int) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input(shape),
            layers.Flatten(),
            layers.Dense(512, activation="relu", name="dense_1"),
            layers.Dense(256, activation="relu", name="dense_2"),
            layers.Dense(128, activation="relu", name="dense_3"),
            layers.Dense(classes, name="head"),
        ],
        name="MLP",
    )


def convolution(filters: int, strides: int, name: str) -> list[keras.layers.Layer]:
    return [
        layers.Conv2D(filters, 3, strides, padding="same", use_bias=False, name=name),
        layers.BatchNormalization(momentum=0.9),
        layers.ReLU(),
    ]


def cnn(shape: tuple[int, ...], classes: int) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input(shape),
            *convolution(16, 1, "conv_1"),
            *convolution(32, 2, "conv_2"),
            *convolution(96, 2, "conv_3"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(classes, name="head"),
        ],
        name="CNN",
    )


# --- training -------------------------------------------------------------------------------------


def batch_size(data: Dataset) -> int:
    return 32 if len(data.x_train) < 10_000 else 128


def compile_model(model: keras.Model, data: Dataset, epochs: int) -> None:
    steps = epochs * math.ceil(len(data.x_train) / batch_size(data))
    model.compile(
        optimizer=keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(3e-3, steps)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=keras.backend.backend() != "torch",  # XLA; torch needs a C++ compiler
    )


class Bar(keras.callbacks.Callback):
    """Advances a progress bar after every epoch."""

    def __init__(self, progress: Progress, label: str, epochs: int) -> None:
        super().__init__()
        self.progress = progress
        self.task = progress.add_task(label, total=epochs, accuracy="")

    def on_epoch_end(self, epoch, logs=None):
        """Shows the epoch and its test accuracy."""
        accuracy = f"test accuracy {logs['val_accuracy']:.2%}"
        self.progress.update(self.task, completed=epoch + 1, accuracy=accuracy)


def train(model, data: Dataset, epochs: int, bar: Bar, start: int = 0) -> list[float]:
    """Test accuracy after every epoch from `start` on."""
    history = model.fit(
        data.x_train,
        data.y_train,
        batch_size=batch_size(data),
        initial_epoch=start,
        epochs=epochs,
        validation_data=(data.x_test, data.y_test),
        verbose=0,
        callbacks=[bar],
    )
    return history.history.get("val_accuracy", [])


# --- one network, all the way ---------------------------------------------------------------------


@dataclasses.dataclass
class Result:
    """The results of one network."""

    name: str
    dense_accuracy: list[float]
    sparse_accuracy: list[float]
    summary: kso.analysis.SparsityReport
    files: dict[str, kso.export.ExportReport]


def run(build, data: Dataset, options: argparse.Namespace) -> Result:
    dense = build(data.x_train.shape[1:], data.classes)
    name = dense.name
    console.rule(f"{name}: {dense.count_params():,} parameters")

    # The same network with new sparse, exactly orthogonal kernels.
    sparse = kso.sparsify(dense, options.density, budget=options.budget, seed=options.seed)
    console.print(kso.report(sparse))

    compile_model(dense, data, options.epochs)
    compile_model(sparse, data, options.epochs)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[accuracy]}"),
    )
    with Progress(*columns, console=console) as progress:
        bar = Bar(progress, f"{name}, dense ", options.epochs)
        dense_accuracy = train(dense, data, options.epochs, bar)

        # Train the first half, save, load, and resume: masks and optimizer are in the file.
        half = (options.epochs + 1) // 2
        bar = Bar(progress, f"{name}, sparse", options.epochs)
        sparse_accuracy = train(sparse, data, half, bar)
        checkpoint = options.output / f"{name.lower()}.keras"
        sparse.save(checkpoint)
        sparse = keras.saving.load_model(checkpoint)
        if half < options.epochs:
            sparse_accuracy += train(sparse, data, options.epochs, bar, start=half)
    sparse.save(checkpoint)

    # The plain model: no class of this package, masked weights exactly zero.
    plain = kso.strip(sparse)
    plain.save(options.output / f"{name.lower()}_plain.keras")
    summary = kso.report(sparse)
    nonzero = sum(int(np.count_nonzero(w.value)) for w in kso.prunable_weights(plain))
    assert nonzero <= summary.live, (nonzero, summary.live)

    files = {}
    with console.status(f"Exporting the {name}"):
        for label, model, mode in (
            ("dense float32", dense, None),
            ("sparse float32", plain, None),
            ("sparse int8", plain, "dynamic_int8"),
        ):
            path = options.output / f"{name.lower()}_{label.replace(' ', '_')}.tflite"
            files[label] = kso.export_litert(model, path, mode=mode, sample=data.x_test[:100])
    return Result(name, dense_accuracy, sparse_accuracy, summary, files)


# --- the picture ----------------------------------------------------------------------------------


def draw(results: list[Result], data: Dataset, options: argparse.Namespace) -> Path:
    """Layer densities on the left, accuracy over epochs on the right; one row per network."""
    figure = Figure(figsize=(11, 3.4 * len(results)), layout="constrained")
    axes = figure.subplots(len(results), 2, squeeze=False, width_ratios=[1, 1.15])
    for (left, right), result in zip(axes, results, strict=True):
        rows = result.summary.rows
        names = [row.path.removesuffix("/kernel") for row in rows]
        densities = [row.density for row in rows]
        left.barh(names, [1.0] * len(rows), color="#eceef1", height=0.62)
        left.barh(names, densities, color=SPARSE_COLOR, height=0.62)
        left.axvline(result.summary.density, color="#222222", lw=1, ls=":")
        for place, row in enumerate(rows):
            text = f"{row.density:.1%}   {row.live:,} of {row.size:,}"
            beside = row.density < 0.5
            start = max(row.density, result.summary.density)  # to the right of the dotted line
            left.text(
                start + 0.015 if beside else row.density - 0.015,
                place,
                text,
                va="center",
                ha="left" if beside else "right",
                color="#222222" if beside else "white",
                fontsize=9,
            )
        left.invert_yaxis()
        left.set(xlim=(0, 1), title=f"{result.name}: density of each kernel")
        left.set_xlabel(
            f"live fraction (dotted: all kernels together, {result.summary.density:.1%})"
        )
        left.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        left.tick_params(axis="y", length=0)

        epochs = np.arange(1, options.epochs + 1)
        for curve, label, color in (
            (result.dense_accuracy, "dense", DENSE_COLOR),
            (result.sparse_accuracy, f"density {options.density:g}", SPARSE_COLOR),
        ):
            right.plot(
                epochs,
                curve,
                color=color,
                lw=2,
                marker="o",
                markersize=3.5,
                label=f"{label}: {curve[-1]:.1%}",
            )
        both = result.dense_accuracy + result.sparse_accuracy
        margin = 0.1 * (max(both) - min(both)) + 0.005
        right.set(title=f"{result.name}: test accuracy", xlabel="epoch")
        right.set_ylim(min(both) - 3 * margin, max(both) + margin)  # room for the legend
        right.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        right.yaxis.set_major_formatter(PercentFormatter(1.0))
        right.grid(color="#e3e5e8", lw=0.8)
        right.set_axisbelow(True)
        right.legend(loc="lower right", title="after the last epoch", frameon=False)
        for axis in (left, right):
            axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"{data.name}: sparse from the first step, exactly orthogonal at initialization "
        f"({options.budget} budget, seed {options.seed})",
        fontsize=12,
    )
    path = options.output / f"{data.name}.png"
    figure.savefig(path, dpi=130)
    return path


# --- the last lines -------------------------------------------------------------------------------


def kib(size: int | None) -> str:
    return "not known" if size is None else f"{size / 1024:,.1f} KiB"


def say(results: list[Result], data: Dataset, picture: Path, seconds: float) -> None:
    backend = keras.backend.backend()
    rows = f"{len(data.x_train)} training and {len(data.x_test)} test images"
    print(f"\nResults: {data.name}, {rows}, backend {backend}, {seconds:.0f} s in total")
    for result in results:
        summary = result.summary
        print(
            f"{result.name}: test accuracy {result.sparse_accuracy[-1]:.2%} sparse, "
            f"{result.dense_accuracy[-1]:.2%} dense; "
            f"{summary.live:,} of {summary.size:,} kernel weights live "
            f"(density {summary.density:.4f})"
        )
        for label, file in result.files.items():
            print(
                f"{result.name}: {label:<14} file {kib(file.bytes)}, gzip {kib(file.gzip_bytes)}, "
                f"max difference to Keras {file.max_abs_diff:.2g}"
            )
    print(f"Picture: {picture}")


def save_figures(results: list[Result], path: Path) -> None:
    figures = {
        result.name: {
            "dense_accuracy": result.dense_accuracy,
            "sparse_accuracy": result.sparse_accuracy,
            "kernels": result.summary.to_dict(),
            "files": {label: file.to_dict() for label, file in result.files.items()},
        }
        for result in results
    }
    path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", choices=sorted(EPOCHS), default="digits")
    parser.add_argument("--epochs", type=int, help=f"default: {EPOCHS}")
    parser.add_argument("--density", type=float, default=0.1, help="live fraction (default 0.1)")
    parser.add_argument("--budget", choices=["erk", "er", "uniform"], default="erk")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("quickstart_output"))
    options = parser.parse_args()
    if options.epochs is None:
        options.epochs = EPOCHS[options.dataset]
    if options.epochs < 1:
        parser.error(f"--epochs must be 1 or more. Received: {options.epochs}")

    start = time.monotonic()
    try:
        data = load(options.dataset)
    except DatasetError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    options.output.mkdir(parents=True, exist_ok=True)
    keras.utils.set_random_seed(options.seed)
    try:
        results = [run(build, data, options) for build in (mlp, cnn)]
    except kso.errors.DensityError as error:
        parser.error(f"--density: {error}")
    except kso.errors.BudgetError as error:
        parser.error(f"--density, --budget: {error}")
    picture = draw(results, data, options)
    save_figures(results, options.output / f"{data.name}.json")
    say(results, data, picture, time.monotonic() - start)
    return 0


if __name__ == "__main__":
    sys.exit(main())
