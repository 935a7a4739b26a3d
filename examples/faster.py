"""Train a wide network dense and on live blocks, side by side: accuracy, time and memory.

    python examples/faster.py                                  # digits: about a minute
    python examples/faster.py --dataset fashion_mnist --epochs 5
    KERAS_BACKEND=jax python examples/faster.py --block 64

The two networks have the same layers. In the second, the kernels between wide layers store,
multiply and update only live blocks, which start exactly orthogonal. The networks train in
alternating epochs, so that a busy machine slows both. For measurements see
`benchmarks/blocks.py step_times`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
import time
from pathlib import Path

import quiet  # noqa: F401 - before Keras: no start-up messages of TensorFlow

# isort: split
import keras
import numpy as np
from data import Dataset, DatasetError, load
from keras import layers
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
)

import keras_sparse_ortho as kso

EPOCHS = {"digits": 15, "fashion_mnist": 5}
MIB = 2**20

console = Console()


def mlp(data: Dataset, width: int, depth: int) -> keras.Model:
    """Layers between wide layers are called `hidden_1`, ..."""
    names = ["first", *(f"hidden_{k}" for k in range(1, depth))]
    return keras.Sequential(
        [
            keras.Input(data.x_train.shape[1:]),
            layers.Flatten(),
            *(
                layers.Dense(width, activation="relu", name=name)
                for name in names
            ),
            layers.Dense(data.classes, name="head"),
        ]
    )


class Stopwatch(keras.callbacks.Callback):
    """Wall-clock and CPU seconds of an epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        """Starts."""
        self.started = time.perf_counter(), time.process_time()

    def on_epoch_end(self, epoch, logs=None):
        """Stops; `logs` are numbers by now, so the device has finished."""
        wall, cpu = self.started
        self.seconds = time.perf_counter() - wall, time.process_time() - cpu


@dataclasses.dataclass
class Twin:
    """A network with its progress bar and measurements."""

    label: str
    model: keras.Model
    bar: TaskID
    seconds: list[float] = dataclasses.field(default_factory=list)
    cpu_seconds: list[float] = dataclasses.field(default_factory=list)
    accuracy: float = 0.0

    def epoch(self, data: Dataset, number: int, batch: int) -> None:
        """Trains and tests once."""
        watch = Stopwatch()
        span = {"initial_epoch": number, "epochs": number + 1}
        options = {
            "batch_size": batch,
            "verbose": 0,
            "callbacks": [watch],
            **span,
        }
        self.model.fit(data.x_train, data.y_train, **options)
        if number:  # the first one compiles
            self.seconds.append(watch.seconds[0])
            self.cpu_seconds.append(watch.seconds[1])
        _, self.accuracy = self.model.evaluate(
            data.x_test, data.y_test, verbose=0
        )

    def figures(self, folder: Path) -> dict[str, float]:
        """Medians over the epochs; MiB of the training state and of the file."""
        path = folder / f"{self.label}.keras"
        self.model.save(path)
        held = [*self.model.weights, *self.model.optimizer.variables]
        return {
            "accuracy": self.accuracy,
            "seconds": statistics.median(self.seconds),
            "cpu_seconds": statistics.median(self.cpu_seconds),
            "memory_mib": sum(
                math.prod(v.shape) * np.dtype(v.dtype).itemsize for v in held
            )
            / MIB,
            "file_mib": path.stat().st_size / MIB,
        }


def run(
    data: Dataset, options: argparse.Namespace
) -> tuple[dict[str, dict[str, float]], float]:
    """Trains both; returns the figures of each and the density of the sparse kernels."""
    dense = mlp(data, options.width, options.depth)
    size = (
        None
        if options.block is None
        else kso.Block(options.block, options.block)
    )
    sparse = kso.sparsify(
        dense,
        options.density,
        storage="blocks",
        structure=size,
        include="hidden_.*",
        seed=options.seed,
    )
    console.print(kso.report(sparse))
    weights = [
        w for w in kso.prunable_weights(sparse) if w.path.startswith("hidden")
    ]
    density = sum(w.live for w in weights) / sum(w.size for w in weights)

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
    )
    texts = (
        TextColumn(f"{{task.fields[{name}]}}")
        for name in ("accuracy", "seconds")
    )
    steps = options.epochs * math.ceil(len(data.x_train) / options.batch)
    with Progress(*columns, *texts, console=console) as progress:
        twins = []
        for label, model in (("dense", dense), ("blocks", sparse)):
            model.compile(
                keras.optimizers.Adam(
                    keras.optimizers.schedules.CosineDecay(1e-3, steps)
                ),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=["accuracy"],
                jit_compile=keras.backend.backend()
                != "torch",  # XLA; torch needs a C++ compiler
            )
            bar = progress.add_task(
                f"{label:<6}", total=options.epochs, accuracy="", seconds=""
            )
            twins.append(Twin(label, model, bar))
        for number in range(options.epochs):
            for twin in twins:
                twin.epoch(data, number, options.batch)
                seconds = (
                    f"{twin.seconds[-1]:.2f} s an epoch"
                    if twin.seconds
                    else "compiled"
                )
                shown = {
                    "accuracy": f"test accuracy {twin.accuracy:.2%}",
                    "seconds": seconds,
                }
                progress.update(twin.bar, completed=number + 1, **shown)
    return {twin.label: twin.figures(options.output) for twin in twins}, density


def say(
    figures: dict[str, dict[str, float]], density: float, title: str
) -> None:
    """The last lines."""
    dense, blocks = figures["dense"], figures["blocks"]
    ratios = {name: blocks[name] / dense[name] for name in dense}
    print(f"\n{title}; density of the hidden kernels {density:.4f}")
    print(
        f"test accuracy      {blocks['accuracy']:.2%} on blocks, {dense['accuracy']:.2%} dense"
    )
    for name, text, unit in (
        ("seconds", "epoch, wall clock", "s"),
        ("cpu_seconds", "epoch, CPU time", "s"),
        ("memory_mib", "weights, optimizer", "MiB"),
        ("file_mib", "file", "MiB"),
    ):
        each = f"{blocks[name]:.2f} {unit} on blocks, {dense[name]:.2f} {unit} dense"
        print(f"{text:<18} {each}: ratio {ratios[name]:.2f}")
    if ratios["seconds"] < 1:
        print(
            f"An epoch on blocks is {1 / ratios['seconds']:.1f} times faster than the dense one."
        )
    else:
        print(
            "It is no faster here: blocks pay in wide layers (try --width 2048), with larger "
            "blocks (--block 64), and on JAX or TensorFlow with XLA; see docs/faster.md."
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dataset", choices=sorted(EPOCHS), default="digits")
    parser.add_argument("--epochs", type=int, help=f"default: {EPOCHS}")
    parser.add_argument(
        "--width", type=int, default=2048, help="units of a hidden layer"
    )
    parser.add_argument("--depth", type=int, default=4, help="hidden layers")
    parser.add_argument(
        "--block", type=int, help="side of a block (default: chosen)"
    )
    parser.add_argument(
        "--density", type=float, default=0.1, help="live fraction (default 0.1)"
    )
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("faster_output"))
    options = parser.parse_args()
    if options.epochs is None:
        options.epochs = EPOCHS[options.dataset]
    for name, least in (
        ("epochs", 2),
        ("depth", 2),
        ("width", 1),
        ("batch", 1),
        ("block", 1),
    ):
        value = getattr(options, name)
        if value is not None and value < least:
            received = f"--{name} must be {least} or more. Received: {getattr(options, name)}"
            parser.error(received)

    try:
        data = load(options.dataset)
    except DatasetError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    options.output.mkdir(parents=True, exist_ok=True)
    keras.utils.set_random_seed(options.seed)
    try:
        figures, density = run(data, options)
    except (kso.errors.DensityError, kso.errors.LayoutError) as error:
        parser.error(str(error))
    size = "a chosen size" if options.block is None else options.block
    title = (
        f"{data.name}, {options.depth} x {options.width}, blocks of {size}, "
    )
    title += f"batch {options.batch}, {options.epochs} epochs, {keras.backend.backend()}"
    path = options.output / "faster.json"
    path.write_text(
        json.dumps({"density": density, **figures}, indent=1) + "\n",
        encoding="utf-8",
    )
    say(figures, density, title)
    return 0


if __name__ == "__main__":
    sys.exit(main())
