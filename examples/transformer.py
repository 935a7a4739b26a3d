"""Train a small vision transformer, sparse from the first step and dense.

    python examples/transformer.py                          # digits: a minute or two
    python examples/transformer.py --dataset fashion_mnist
    KERAS_BACKEND=jax python examples/transformer.py --density 0.1

An image is a sequence of patches, and the blocks are those of keras.io. Attention projections,
feed-forward layers and position embeddings are sparse and start exactly orthogonal; the first and
the last layer stay dense. Prints accuracy, density and file sizes, also compressed.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import math
import os
import sys
from pathlib import Path

# TensorFlow's start-up messages.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from data import Dataset, DatasetError, load
from keras import layers, ops
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

import keras_sparse_ortho as kso

EPOCHS = {"digits": 20, "fashion_mnist": 2}
PATCH = {"digits": 2, "fashion_mnist": 7}
registered = keras.saving.register_keras_serializable(
    package="transformer_example"
)

console = Console()


@registered
class Patches(layers.Layer):
    """Cuts images `(rows, side, side, 1)` into a sequence of patches `(rows, count, size^2)`."""

    def __init__(self, size: int, **kwargs) -> None:
        super().__init__(**kwargs)
        self.size = size

    def call(self, images):
        """The patches, row by row."""
        side, size = images.shape[1] // self.size, self.size
        cut = ops.reshape(images, (-1, side, size, side, size))
        return ops.reshape(
            ops.transpose(cut, (0, 1, 3, 2, 4)), (-1, side**2, size**2)
        )

    def get_config(self) -> dict:
        """With the size."""
        return {**super().get_config(), "size": self.size}


@registered
class AddPositions(layers.Layer):
    """Adds a learnt vector for each position of a sequence."""

    def __init__(self, count: int, width: int, **kwargs) -> None:
        super().__init__(**kwargs)
        self.count, self.width = count, width
        self.positions = layers.Embedding(count, width, name="positions")

    def call(self, x):
        """The sum."""
        return x + self.positions(ops.arange(self.count))

    def get_config(self) -> dict:
        """With count and width."""
        return {
            **super().get_config(),
            "count": self.count,
            "width": self.width,
        }


@registered
class Block(layers.Layer):
    """Attention and a feed-forward network, each after a normalization and added to its input."""

    def __init__(self, width: int, heads: int, hidden: int, **kwargs) -> None:
        super().__init__(**kwargs)
        self.width, self.heads, self.hidden = width, heads, hidden
        self.norm_1 = layers.LayerNormalization(epsilon=1e-6, name="norm_1")
        self.attention = layers.MultiHeadAttention(
            heads, width // heads, name="attention"
        )
        self.norm_2 = layers.LayerNormalization(epsilon=1e-6, name="norm_2")
        self.wide = layers.Dense(hidden, activation="gelu", name="wide")
        self.narrow = layers.Dense(width, name="narrow")

    def call(self, x):
        """The sequence after attention and feed-forward network."""
        normal = self.norm_1(x)
        x = x + self.attention(normal, normal)
        return x + self.narrow(self.wide(self.norm_2(x)))

    def get_config(self) -> dict:
        """With the sizes."""
        sizes = {
            "width": self.width,
            "heads": self.heads,
            "hidden": self.hidden,
        }
        return {**super().get_config(), **sizes}


def transformer(data: Dataset, options: argparse.Namespace) -> keras.Model:
    """Patches, blocks, the mean over the sequence, and a head."""
    size = PATCH[data.name]
    count = (data.x_train.shape[1] // size) ** 2
    images = keras.Input(data.x_train.shape[1:])
    x = layers.Dense(options.width, name="patch")(Patches(size)(images))
    x = AddPositions(count, options.width, name="add_positions")(x)
    for k in range(options.depth):
        x = Block(
            options.width,
            options.heads,
            4 * options.width,
            name=f"block_{k + 1}",
        )(x)
    x = layers.GlobalAveragePooling1D()(
        layers.LayerNormalization(epsilon=1e-6)(x)
    )
    return keras.Model(
        images, layers.Dense(data.classes, name="head")(x), name="transformer"
    )


@dataclasses.dataclass
class Figures:
    """Results of one network; files in bytes, of the plain model without its optimizer."""

    accuracy: float
    density: float
    live: int
    weights: int
    keras_bytes: int
    gzip_bytes: int


def train(
    label: str, model: keras.Model, data: Dataset, options: argparse.Namespace
) -> float:
    """Trains a network, and returns its test accuracy."""
    steps = options.epochs * math.ceil(len(data.x_train) / options.batch)
    rate = keras.optimizers.schedules.CosineDecay(
        0.0, steps, 0.0, warmup_target=2e-3, warmup_steps=max(1, steps // 10)
    )
    model.compile(
        keras.optimizers.Adam(rate),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=keras.backend.backend()
        != "torch",  # XLA; torch needs a C++ compiler
    )
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(f"{label:<6}", total=options.epochs)
        move = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda *_: progress.advance(bar)
        )
        rows = {
            "batch_size": options.batch,
            "epochs": options.epochs,
            "verbose": 0,
        }
        model.fit(data.x_train, data.y_train, callbacks=[move], **rows)
    return float(model.evaluate(data.x_test, data.y_test, verbose=0)[1])


def figures(
    label: str, model: keras.Model, accuracy: float, folder: Path
) -> Figures:
    """Saves the plain model, and measures it."""
    plain = kso.strip(model)
    path = folder / f"{label}.keras"
    plain.save(path)
    values = [weight.value for weight in kso.prunable_weights(plain)]
    live, size = (
        sum(map(np.count_nonzero, values)),
        sum(value.size for value in values),
    )
    content = b"".join(
        np.asarray(value).tobytes() for value in plain.get_weights()
    )
    packed = len(gzip.compress(content, mtime=0))
    return Figures(
        accuracy, live / size, int(live), size, path.stat().st_size, packed
    )


def run(data: Dataset, options: argparse.Namespace) -> dict[str, Figures]:
    """Trains both networks."""
    dense = transformer(data, options)
    sparse = kso.sparsify(
        dense, options.density, exclude=["patch", "head"], seed=options.seed
    )
    console.print(kso.report(sparse))
    found = {}
    for label, model in (("dense", dense), ("sparse", sparse)):
        accuracy = train(label, model, data, options)
        found[label] = figures(label, model, accuracy, options.output)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dataset", choices=sorted(EPOCHS), default="digits")
    parser.add_argument("--epochs", type=int, help=f"default: {EPOCHS}")
    parser.add_argument(
        "--density", type=float, default=0.2, help="live fraction (default 0.2)"
    )
    parser.add_argument(
        "--width", type=int, default=64, help="of a vector in the sequence"
    )
    parser.add_argument("--depth", type=int, default=3, help="blocks")
    parser.add_argument("--heads", type=int, default=4, help="of the attention")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--output", type=Path, default=Path("transformer_output")
    )
    options = parser.parse_args()
    if options.epochs is None:
        options.epochs = EPOCHS[options.dataset]
    for name in ("epochs", "width", "depth", "heads", "batch"):
        if getattr(options, name) < 1:
            parser.error(
                f"--{name} must be 1 or more. Received: {getattr(options, name)}"
            )
    if options.width % options.heads:
        rule = f"--width must be divisible by --heads. Received: {options.width}, {options.heads}"
        parser.error(rule)

    try:
        data = load(options.dataset)
    except DatasetError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    options.output.mkdir(parents=True, exist_ok=True)
    keras.utils.set_random_seed(options.seed)
    try:
        found = run(data, options)
    except (kso.errors.DensityError, kso.errors.BudgetError) as error:
        parser.error(str(error))
    dense, sparse = found["dense"], found["sparse"]
    table = {label: dataclasses.asdict(each) for label, each in found.items()}
    path = options.output / "transformer.json"
    path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    print(
        f"\n{data.name}, {options.depth} blocks of width {options.width}, {options.epochs} epochs, "
        f"{keras.backend.backend()}"
    )
    print(
        f"test accuracy   {sparse.accuracy:.2%} sparse, {dense.accuracy:.2%} dense"
    )
    print(
        f"kernel weights  {sparse.live:,} of {sparse.weights:,} live: density {sparse.density:.4f}"
    )
    for text, name in (("file", "keras_bytes"), ("under gzip", "gzip_bytes")):
        mine, other = getattr(sparse, name), getattr(dense, name)
        kib = f"{mine / 1024:,.0f} KiB sparse, {other / 1024:,.0f} KiB dense"
        print(f"{text:<15} {kib}: {mine / other:.2f} of it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
