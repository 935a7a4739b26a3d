"""A keyword network as a C array with packed zeros, and rows to check it by: ``make``.

    python examples/micro/model.py FOLDER

Writes `model.h`, the array of a DS-CNN in int8 that was pruned to density 0.2, and `rows.h`, rows
with LiteRT's answers to them. `main.cc` runs both in LiteRT Micro.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import quiet  # noqa: F401 - before Keras: no start-up messages of TensorFlow

# isort: split
import keras
import numpy as np

import keras_sparse_ortho as kso
from keras_sparse_ortho.export import c_array, load_litert

FRAMES, BANDS = 50, 10
CHECKED = 20  # rows of the header
RAM = 8192  # bytes of the largest filter that is packed


def sounds(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Spectrograms in which one of ten bands is louder than the noise, and the band."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((count, FRAMES, BANDS, 1)).astype("float32")
    bands = rng.integers(0, BANDS, count)
    rows[np.arange(count), :, bands] += 1.0
    return rows, bands


def spotter() -> keras.Model:
    """Depthwise and pointwise convolutions of 64 channels (Zhang et al., 2017)."""
    x = inputs = keras.Input((FRAMES, BANDS, 1), name="sound")
    x = keras.layers.Conv2D(64, (10, 4), 2, padding="same", use_bias=False)(x)
    x = keras.layers.ReLU()(keras.layers.BatchNormalization(momentum=0.9)(x))
    for _ in range(4):
        x = keras.layers.DepthwiseConv2D(3, padding="same", use_bias=False)(x)
        x = keras.layers.BatchNormalization(momentum=0.9)(x)
        x = keras.layers.Conv2D(64, 1, use_bias=False)(keras.layers.ReLU()(x))
        x = keras.layers.BatchNormalization(momentum=0.9)(x)
        x = keras.layers.ReLU()(x)
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, keras.layers.Dense(BANDS, name="head")(x))


def train(model: keras.Model, rows: np.ndarray, bands: np.ndarray) -> None:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(2e-3), loss)
    model.fit(rows, bands, batch_size=32, epochs=2, verbose=0)


def write_rows(header: Path, rows: np.ndarray, file: Path) -> None:
    """Writes rows, and LiteRT's answers to them, in the integers of the file's ends."""
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(str(file))
    answers = load_litert(file).predict(rows)
    lines = ["#pragma once"]
    for name, values, details in (
        ("rows", rows, interpreter.get_input_details()),
        ("answers", answers, interpreter.get_output_details()),
    ):
        scale, zero_point = details[0]["quantization"]
        steps = np.rint(values / scale) + zero_point
        integers = np.clip(steps, -128, 127).astype(int).reshape(len(rows), -1)
        lines.append(
            f"static const signed char {name}[{len(rows)}][{integers.shape[1]}] = {{"
        )
        for row in integers:
            lines.append("{" + ",".join(map(str, row)) + "},")
        lines.append("};")
    header.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="where the headers go")
    parser.add_argument("--rows", type=int, default=1000, help="to train on")
    given = parser.parse_args()
    keras.utils.set_random_seed(0)
    rows, bands = sounds(given.rows)
    dense = spotter()
    train(dense, rows, bands)
    pruned = kso.prune(dense, 0.2, exclude=keras.layers.DepthwiseConv2D)
    train(pruned, rows, bands)
    given.folder.mkdir(parents=True, exist_ok=True)
    file = given.folder / "model.tflite"
    kso.export_litert(
        kso.strip(pruned),
        file,
        mode="int8",
        representative_data=rows[:200],
        inference_input_type="int8",
        inference_output_type="int8",
    )
    operators = c_array(file, given.folder / "model.h", packed=True, ram=RAM)
    write_rows(given.folder / "rows.h", rows[-CHECKED:], file)
    print("operators:", *operators)


if __name__ == "__main__":
    main()
