"""Static int8 files and their remedies: error, agreement, bytes and time, by network.

python benchmarks/int8.py NAME [NAME ...]

Networks: rnet, onet, magika (of real.py, with the packages in KSO_REAL), mobilenet and transformer
(trained here on Fashion-MNIST, a minute each). Writes a table for each to standard output.
"""

import pathlib
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
from training import load

import keras_sparse_ortho as kso

layers = keras.layers
_CALIBRATION = 256  # rows
_TEST = 1000
_TRAINING = 12800  # of Fashion-MNIST
_FILES: dict[str, dict[str, Any]] = {
    "float32": {"mode": "float32"},
    "float16": {"mode": "float16"},
    "dynamic int8": {"mode": "dynamic_int8"},
    "int8": {"mode": "int8"},
    "int8, equalized": {"mode": "int8", "equalize": True},
    "int8, a stretch in floats": {"mode": "int8", "floats": "auto"},
    "both": {"mode": "int8", "equalize": True, "floats": "auto"},
}


class Subject(NamedTuple):
    """A trained network with rows to calibrate on, others, and their types if it has these."""

    model: keras.Model
    calibration: np.ndarray
    test: np.ndarray
    types: np.ndarray | None = None


def real(name: str) -> Subject:
    """A network of `real.py`."""
    import real as networks

    sys.path.append(str(networks.FETCHED))
    training, _ = networks.cached(name, True)
    test, types = networks.cached(name, False)
    return Subject(
        networks.NETWORKS[name].build(),
        training[:_CALIBRATION],
        test[:_TEST],
        types,
    )


def trained(build: Callable[[], keras.Model], epochs: int) -> Subject:
    """A network that is trained on Fashion-MNIST."""
    data = load("fashion_mnist")
    x, x_test = data.x_train, data.x_test
    keras.utils.set_random_seed(0)
    model = build()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(2e-3), loss, metrics=["accuracy"])
    model.fit(x[:_TRAINING], data.y_train[:_TRAINING], 128, epochs, verbose=0)
    return Subject(
        model, x[-_CALIBRATION:], x_test[:_TEST], data.y_test[:_TEST]
    )


def mobilenet() -> keras.Model:
    """Inverted residuals with depthwise convolutions and ReLU6, as in MobileNetV2."""

    def normalized(x: Any, relu: bool = True) -> Any:
        x = layers.BatchNormalization(momentum=0.9)(x)
        return layers.ReLU(6.0)(x) if relu else x

    inputs = keras.Input((28, 28, 1))
    x = normalized(layers.Conv2D(16, 3, 2, "same", use_bias=False)(inputs))
    for width, strides, count in ((16, 1, 1), (24, 2, 2), (32, 2, 2)):
        for number in range(count):
            y = layers.Conv2D(4 * x.shape[-1], 1, use_bias=False)(x)
            step = strides if number == 0 else 1
            y = layers.DepthwiseConv2D(3, step, "same", use_bias=False)(
                normalized(y)
            )
            y = layers.Conv2D(width, 1, use_bias=False)(normalized(y))
            y = normalized(y, relu=False)
            x = layers.Add()([x, y]) if x.shape == y.shape else y
    x = normalized(layers.Conv2D(128, 1, use_bias=False)(x))
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(10, name="head")(x))


def transformer() -> keras.Model:
    """Two encoders before normalization, on the rows of an image."""
    inputs = keras.Input((28, 28, 1))
    x = layers.Dense(64)(layers.Reshape((28, 28))(inputs))
    for _ in range(2):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(4, 16)(y, y)
        y = layers.LayerNormalization()(x)
        y = layers.Dense(128, activation="gelu")(y)
        x = x + layers.Dense(64)(y)
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return keras.Model(inputs, layers.Dense(10, name="head")(x))


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "rnet": lambda: real("rnet"),
    "onet": lambda: real("onet"),
    "magika": lambda: real("magika"),
    "mobilenet": lambda: trained(mobilenet, 2),
    "transformer": lambda: trained(transformer, 2),
}


def as_list(outputs: Any) -> list[np.ndarray]:
    """Outputs in the order of their names, as float64."""
    if isinstance(outputs, dict):
        outputs = [outputs[name] for name in sorted(outputs)]
    if not isinstance(outputs, list):
        outputs = [outputs]
    return [np.asarray(output, np.float64) for output in outputs]


def line_of(
    label: str,
    path: pathlib.Path,
    subject: Subject,
    expected: list[np.ndarray],
    seconds: float,
) -> list[str]:
    """The figures of a file on the rows of the test; agreement is the least over outputs."""
    actual = as_list(kso.load_litert(path).predict(subject.test))
    error = sum(
        np.sum((a - e) ** 2) for a, e in zip(actual, expected, strict=True)
    ) / sum(np.sum(e**2) for e in expected)
    agreement = [
        np.mean(a.argmax(-1) == e.argmax(-1))
        for a, e in zip(actual, expected, strict=True)
    ]
    cells = [label, f"{path.stat().st_size:,}", f"{error:.2g}"]
    cells.append(f"{100 * min(agreement):.1f}")
    if subject.types is not None:
        right = np.mean(actual[0].argmax(-1) == subject.types[: len(actual[0])])
        cells.append(f"{100 * right:.1f}")
    return [*cells, f"{seconds:.1f}"]


def measure(name: str, folder: pathlib.Path) -> list[str]:
    """The lines of the table of a network."""
    subject = SUBJECTS[name]()
    expected = as_list(
        subject.model.predict(subject.test, batch_size=256, verbose=0)
    )
    start = time.perf_counter()
    table = kso.int8_errors(subject.model, subject.calibration)
    print(table, flush=True)
    print(f"table in {time.perf_counter() - start:.1f} s\n")
    rows = []
    files = []
    for label, settings in _FILES.items():
        path = folder / f"{len(files)}.tflite"
        if settings["mode"] == "int8":
            settings = {**settings, "representative_data": subject.calibration}
        else:
            settings = {**settings, "sample": subject.calibration[:64]}
        if "floats" not in settings:  # which choose by it
            settings["tolerance"] = 2.0
        start = time.perf_counter()
        try:
            kso.export_litert(subject.model, path, **settings)
        except Exception as error:
            print(label, type(error).__name__, str(error)[:200])
            continue
        seconds = time.perf_counter() - start
        rows.append(line_of(label, path, subject, expected, seconds))
        files.append(path)
    times = kso.export.latencies(files, seconds=5.0)
    heads = ["file", "bytes", "error", "agreement, %"]
    if subject.types is not None:
        heads.append("accuracy, %")
    heads += ["made in, s", "ms"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row, milliseconds in zip(rows, times, strict=True):
        lines.append(f"| {' | '.join([*row, f'{milliseconds:.3f}'])} |")
    return lines


def main() -> None:
    warnings.simplefilter("ignore")
    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            lines = measure(name, pathlib.Path(folder))
        print(f"## {name}\n\n" + "\n".join(lines) + "\n", flush=True)


if __name__ == "__main__":
    main()
