"""A trained network to a folder that a Raspberry Pi runs: a file, rows to check it by, a script.

    python examples/raspberry_pi.py                              # a small CNN, trained first
    python examples/raspberry_pi.py --model my.keras --data rows.npy

`kso.shrink` makes the file, with nothing but rows. The folder needs NumPy and ai-edge-litert
there, not this package and no Keras. Its script runs the file on the rows, compares the answers
with those of the Keras model, and times a call; here it is run, too.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import quiet  # noqa: F401 - before Keras: no start-up messages of TensorFlow

# isort: split
import keras
import numpy as np
from data import DEBIAN_FOLDER, load

import keras_sparse_ortho as kso

RUN = '''"""Checks and times the file beside this script. Needs NumPy and ai-edge-litert."""

import gzip
import pathlib
import statistics
import time

import numpy as np
from ai_edge_litert.interpreter import Interpreter

folder = pathlib.Path(__file__).parent
content = gzip.decompress((folder / "model.tflite.gz").read_bytes())
interpreter = Interpreter(model_content=content, num_threads=1)
interpreter.allocate_tensors()
given, answer = interpreter.get_input_details()[0], interpreter.get_output_details()[0]
checked, same, times = np.load(folder / "rows.npz"), [], []
for row, wanted in zip(checked["rows"], checked["wanted"]):
    interpreter.set_tensor(given["index"], row[None].astype(given["dtype"]))
    start = time.perf_counter()
    interpreter.invoke()
    times.append(1e3 * (time.perf_counter() - start))
    same.append(interpreter.get_tensor(answer["index"])[0].argmax() == wanted.argmax())
print(f"{sum(same)} of {len(same)} rows have the class that Keras gives them")
print(f"{statistics.median(times):.3f} ms a call, on one thread")
'''


def trained(epochs: int) -> tuple[keras.Model, np.ndarray, np.ndarray]:
    """A CNN as somebody may have it, training images as its unlabelled rows, and others."""
    data = load("fashion_mnist" if DEBIAN_FOLDER.exists() else "digits")
    layers: list[keras.layers.Layer] = [keras.Input(data.x_train.shape[1:])]
    for filters in (32, 64):
        layers += [
            keras.layers.Conv2D(filters, 3, padding="same", activation="relu")
        ]
        layers += [keras.layers.MaxPooling2D()]
    layers += [
        keras.layers.Flatten(),
        keras.layers.Dense(128, activation="relu"),
    ]
    model = keras.Sequential(
        [*layers, keras.layers.Dense(data.classes, activation="softmax")]
    )
    model.compile(
        "adam", "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    model.fit(
        data.x_train, data.y_train, batch_size=128, epochs=epochs, verbose=2
    )
    return model, data.x_train[:6000], data.x_test[:200]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", help="a .keras file of one input and one output, of classes"
    )
    parser.add_argument(
        "--data", help="its rows, .npy; the last 200 only check the file"
    )
    parser.add_argument(
        "--epochs", type=int, default=3, help="of the CNN, without --model"
    )
    parser.add_argument(
        "--minutes", type=float, default=3.0, help="for `kso.shrink`"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("raspberry_pi_output")
    )
    options = parser.parse_args()
    if (options.model is None) != (options.data is None):
        parser.error(
            f"--model and --data go together. Received: {options.model}, {options.data}"
        )
    if options.model:
        model = keras.saving.load_model(options.model, compile=False)
        rows, checked = np.split(np.load(options.data), [-200])
    else:
        keras.utils.set_random_seed(0)
        model, rows, checked = trained(options.epochs)

    options.output.mkdir(parents=True, exist_ok=True)
    report = kso.shrink(
        model,
        rows,
        options.output / "model.tflite.gz",
        minutes=options.minutes,
        verbose=True,
    )
    print(report)
    wanted = model.predict(checked, verbose=0)
    np.savez_compressed(
        options.output / "rows.npz", rows=checked, wanted=wanted
    )
    script = options.output / "run.py"
    script.write_text(RUN)

    print(f"\nOn this machine, {script} says:", flush=True)
    subprocess.run([sys.executable, str(script)], check=True)
    print("\nOn the Raspberry Pi (64 bits):")
    print(f"    scp -r {options.output} pi@raspberrypi.local:")
    print(
        "    ssh pi@raspberrypi.local python3 -m pip install numpy ai-edge-litert"
    )
    print(f"    ssh pi@raspberrypi.local python3 {options.output.name}/run.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
