"""Static int8 files and their remedies: error, agreement, bytes and time, by network."""

import functools
import math
import pathlib
import shutil
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import real as networks
from record import edge_of, last_of_each, machine, markdown, sentences
from runner import Measurement, Run, Setting, main
from training import load

import keras_sparse_ortho as kso
from keras_sparse_ortho.models import output_kinds
from keras_sparse_ortho.recovery import distill

layers = keras.layers
_CALIBRATION = 256  # rows
_TEST = 1000
_TRAINING = 12800  # of Fashion-MNIST
_ROUNDED_TRAINING = 6400  # of these
_DISTILLED = 2000  # rows of networks of packages, whose labels are not used
_RATES = (3e-4, 3e-5, 3e-6)  # of training with the rounding, without labels
_LABELLED_RATE = 5e-4
_TRAINED = "int8, trained with the rounding"
_OF_PACKAGES = (
    "rnet",
    "onet",
    "fer",
    "magika",
    "silero",
    "birdnet",
    "mhcnuggets",
)
_OF_APPLICATIONS: dict[str, Any] = {
    "input_shape": (96, 96, 1),
    "weights": None,
    "classes": 10,
    "classifier_activation": None,
}
_FILES: dict[str, dict[str, Any]] = {
    "float16": {"mode": "float16"},
    "dynamic int8": {"mode": "dynamic_int8"},
    "int8": {"mode": "int8"},
    "int8, fitted": {"mode": "int8", "ranges": "fitted"},
    "int8, equalized": {"mode": "int8", "equalize": True},
    "int8, fitted and equalized": {
        "mode": "int8",
        "ranges": "fitted",
        "equalize": True,
    },
    "int8, a stretch in floats": {"mode": "int8", "floats": "auto"},
    "int8, all three": {
        "mode": "int8",
        "ranges": "fitted",
        "equalize": True,
        "floats": "auto",
    },
}


class Subject(NamedTuple):
    """A trained network with rows to calibrate and to test, and what else there is of it."""

    model: keras.Model
    calibration: np.ndarray
    test: np.ndarray
    types: np.ndarray | None = None
    author: pathlib.Path | None = None
    training: tuple[np.ndarray, np.ndarray | None] | None = None


def real(name: str) -> Subject:
    """A network of `real.py`."""
    networks.fetch()
    training, _ = networks.cached(name, True)
    test, types = networks.cached(name, False)
    network = networks.network_of(name)
    assert network is not None
    return Subject(
        network.build(),
        training[:_CALIBRATION],
        test[:_TEST],
        types,
        networks.author_file(name),
        training=(training[_CALIBRATION : _CALIBRATION + _DISTILLED], None),
    )


def trained(
    build: Callable[[], keras.Model], epochs: int, scale: int = 1
) -> Subject:
    """A network that is trained on Fashion-MNIST, from its file if there is one.

    Args:
        build: callable. Makes the network.
        epochs: int. Passes over the images.
        scale: int. Each pixel becomes a square of so many; of 3, the image gets a margin, and 96.
    """
    data = load("fashion_mnist")
    x = scaled(data.x_train[-_TRAINING - _CALIBRATION :], scale)
    y = data.y_train[-_TRAINING - _CALIBRATION :]
    x_test = scaled(data.x_test[:_TEST], scale)
    file = networks.FETCHED / f"int8_{build.__name__}.keras"
    if not file.exists():
        keras.utils.set_random_seed(0)
        model = build()
        for layer in model.layers:  # applications have 0.999, for long training
            if isinstance(layer, layers.BatchNormalization):
                layer.momentum = min(layer.momentum, 0.95)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(2e-3), loss, metrics=["accuracy"])
        model.fit(x[:_TRAINING], y[:_TRAINING], 64, epochs, verbose=0)
        networks.FETCHED.mkdir(parents=True, exist_ok=True)
        model.save(file)
    return Subject(
        keras.models.load_model(file, compile=False),
        x[-_CALIBRATION:],
        x_test,
        data.y_test[:_TEST],
        training=(x[:_ROUNDED_TRAINING], y[:_ROUNDED_TRAINING]),
    )


def scaled(images: np.ndarray, scale: int) -> np.ndarray:
    """Images with each pixel as a square of pixels; of 84 ones, with a margin up to 96."""
    larger = images.repeat(scale, axis=1).repeat(scale, axis=2)
    margin = (96 - larger.shape[1]) // 2 if scale > 1 else 0
    return np.pad(larger, ((0, 0), (margin, margin), (margin, margin), (0, 0)))


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


def mobilenet_v2() -> keras.Model:
    """MobileNetV2 of half the width, for 96 pixels."""
    return keras.applications.MobileNetV2(alpha=0.5, **_OF_APPLICATIONS)


def mobilenet_v3() -> keras.Model:
    """MobileNetV3Small for 96 pixels: hard swish, squeeze and excite."""
    return keras.applications.MobileNetV3Small(
        include_preprocessing=False, dropout_rate=0.0, **_OF_APPLICATIONS
    )


def efficientnet() -> keras.Model:
    """EfficientNetV2B0 for 96 pixels: swish, squeeze and excite."""
    return keras.applications.EfficientNetV2B0(
        include_preprocessing=False, **_OF_APPLICATIONS
    )


SUBJECTS: dict[str, Callable[[], Subject]] = {
    **{name: functools.partial(real, name) for name in _OF_PACKAGES},
    "mobilenet": lambda: trained(mobilenet, 2),
    "transformer": lambda: trained(transformer, 2),
    "mobilenet_v2": lambda: trained(mobilenet_v2, 4, 3),
    "mobilenet_v3": lambda: trained(mobilenet_v3, 4, 3),
    "efficientnet": lambda: trained(efficientnet, 3, 3),
}


def as_list(outputs: Any) -> list[np.ndarray]:
    """Outputs in the order of the model, as float64."""
    if isinstance(outputs, dict):
        outputs = [*outputs.values()]
    if not isinstance(outputs, list):
        outputs = [outputs]
    return [np.asarray(output, np.float64) for output in outputs]


def classes(outputs: np.ndarray) -> np.ndarray:
    """The largest output; of a single one, the probability of a class, whether it is over 0.5."""
    if outputs.shape[-1] == 1:
        return outputs[..., 0] > 0.5
    return outputs.argmax(-1)


def accuracy(outputs: np.ndarray, types: np.ndarray) -> float:
    """The share of right answers, of rows whose type is known."""
    types = types[: len(outputs)]
    is_known = types >= 0
    return float(np.mean(classes(outputs)[is_known] == types[is_known]))


def relative_error(
    actual: list[np.ndarray], expected: list[np.ndarray]
) -> float:
    """The squared differences of all outputs over their squares."""
    pairs = zip(actual, expected, strict=True)
    squares = sum(float(np.sum((a - e) ** 2)) for a, e in pairs)
    return squares / sum(float(np.sum(e**2)) for e in expected)


def figures_of(
    path: pathlib.Path, subject: Subject, expected: list[np.ndarray]
) -> Run:
    """The figures of a file on the rows of the test; agreement is the least over its classes."""
    actual = as_list(kso.load_litert(path).predict(subject.test))
    pairs = list(zip(actual, expected, strict=True))
    kinds = output_kinds(subject.model, len(pairs))
    of_classes = [
        pair
        for pair, kind in zip(pairs, kinds, strict=True)
        if networks.is_class(kind) or len(pairs) == 1  # logits
    ]
    agreement = min(np.mean(classes(a) == classes(e)) for a, e in of_classes)
    line = {
        "bytes": path.stat().st_size,
        "error": relative_error(actual, expected),
        "agreement": float(agreement),
    }
    if subject.types is not None:
        line["accuracy"] = accuracy(actual[0], subject.types)
    return line


def exported(
    subject: Subject, settings: dict[str, Any], path: pathlib.Path
) -> Run:
    """Writes a file of a network, and says at which rate it was trained, if it was."""
    if not settings:
        model, rate = rounded(subject)
        sample = subject.calibration[:64]
        kso.export_litert(
            model, path, mode="int8", tolerance=2.0, sample=sample
        )
        return {"rate": rate}
    options = dict(settings)
    if options["mode"] == "int8":
        options["representative_data"] = subject.calibration
    else:
        options["sample"] = subject.calibration[:64]
    if "floats" not in options:  # which choose by it
        options["tolerance"] = 2.0
    kso.export_litert(subject.model, path, **options)
    return {}


def files_of(subject: Subject) -> dict[str, dict[str, Any]]:
    """The settings of the files of a network, by their labels."""
    if subject.training is None:
        return _FILES
    return _FILES | {_TRAINED: {}}


def rounded(subject: Subject) -> tuple[keras.Model, float]:
    """The network after training with the rounding, and its rate; without labels, towards itself.

    Without labels the rate is the one of three with the least error on the rows to calibrate.
    """
    assert subject.training is not None
    x, y = subject.training
    if y is not None:
        model = kso.quantize_aware(subject.model)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(_LABELLED_RATE), loss)
        model.fit(x, y, batch_size=128, epochs=1, verbose=0)
        return kso.quantization.round_biases(model), _LABELLED_RATE
    expected = as_list(subject.model.predict(subject.calibration, verbose=0))
    models = []
    errors = []
    for rate in _RATES:
        model = kso.quantize_aware(subject.model)
        distill(
            model, subject.model, x, epochs=2, learning_rate=rate, verbose=0
        )
        models.append(model)
        actual = as_list(model.predict(subject.calibration, verbose=0))
        errors.append(relative_error(actual, expected))
    best = int(np.argmin(errors))
    return kso.quantization.round_biases(models[best]), _RATES[best]


class Int8(Measurement):
    """Static int8 files and what makes them better, beside other files of the same network.

        python benchmarks/int8.py [--networks rnet onet]

    Networks of packages (of real.py), and others that are trained here on Fashion-MNIST. 256 rows
    calibrate, others are compared with Keras. The error is relative and squared, over all outputs.
    Training with the rounding is a pass over 6,400 images; networks of packages learn their own
    answers, in two passes over 2,000 other rows, at the best of three rates for the rows that
    calibrate.
    """

    page = lines = "int8"
    resumes = False
    settings = {
        "networks": Setting(
            [*SUBJECTS], choices=[*SUBJECTS], quick=["transformer"]
        ),
        "seconds": Setting(10.0, "to time the files", quick=1.0),
    }

    def runs(self) -> list[Run]:
        return [{"network": name} for name in self.given.networks]

    def run(self, which: Run) -> list[Run]:
        """Makes the files of a network, and judges and times all of them in turn."""
        subject = SUBJECTS[which["network"]]()
        expected = as_list(
            subject.model.predict(subject.test, batch_size=256, verbose=0)
        )
        start = time.perf_counter()
        table = kso.int8_errors(subject.model, subject.calibration)
        about = {
            "table_seconds": time.perf_counter() - start,
            "table_sum": table.total,
            "table_file": table.file_error,
        }
        lines: dict[pathlib.Path, Run] = {}
        failed: list[Run] = []
        with tempfile.TemporaryDirectory() as folder:
            for label, settings in files_of(subject).items():
                path = pathlib.Path(folder, f"{len(lines)}.tflite")
                start = time.perf_counter()
                try:
                    trained_at = exported(subject, settings, path)
                except (ValueError, RuntimeError) as error:
                    reason = str(error).partition(". ")[0]
                    failed.append({"file": label, "reason": reason} | about)
                    continue
                seconds = time.perf_counter() - start
                lines[path] = {"file": label, "seconds": seconds}
                lines[path] |= trained_at | about
            if subject.author is not None:
                path = pathlib.Path(folder, "author.tflite")
                shutil.copy(subject.author, path)
                lines[path] = {"file": "the author's file", "seconds": 0.0}
                lines[path] |= about
            times = kso.export.latencies([*lines], seconds=self.given.seconds)
            for (path, line), ms in zip(lines.items(), times, strict=True):
                line |= figures_of(path, subject, expected) | {"ms": ms}
        return [*lines.values(), *failed]

    def report(self, lines: list[Run]) -> str:
        text = "# Static int8, and what makes it better\n\n" + sentences(
            f"""
            {machine()}. {_CALIBRATION} rows calibrate; error, agreement (the least over outputs
            of classes) and accuracy are of up to {_TEST} others. Error: the relative squared
            error of the outputs. ms: one call with one row on one thread, the files of a network
            in turn.
            """
        )
        # A later run had a slower processor. Its times do not belong beside the others.
        shown = [line for line in lines if not line.get("rate_alone")]
        latest = last_of_each(shown, "network", "file")
        header = ["network", "file", "bytes", "error", "agreement", "accuracy"]
        header += ["ms", "made in s"]
        rows = []
        sums: dict[str, Run] = {}
        for line in latest.values():
            sums[line["network"]] = line
            row = [line["network"], line["file"]]
            if "reason" in line:
                rows.append([*row, f"no file: {line['reason']}", *5 * [""]])
                continue
            accuracy = line.get("accuracy", math.nan)
            rows.append(
                [
                    *row,
                    f"{line['bytes']:,}",
                    f"{line['error']:.2g}",
                    f"{100 * line['agreement']:.1f}",
                    "" if math.isnan(accuracy) else f"{100 * accuracy:.1f}",
                    f"{line['ms']:.3g}",
                    f"{line['seconds']:.0f}",
                ]
            )
        text += "\n\n" + markdown(header, rows)
        text += "\n\n## The table of `int8_errors`\n\n"
        header = ["network", "sum of all tensors", "the whole file"]
        header += ["sum / file", "seconds"]
        tables = [
            [
                name,
                f"{line['table_sum']:.2g}",
                f"{line['table_file']:.2g}",
                f"{line['table_sum'] / line['table_file']:.2f}",
                f"{line['table_seconds']:.0f}",
            ]
            for name, line in sums.items()
        ]
        return text + markdown(header, tables) + _table_of_rates(lines)


def _table_of_rates(lines: list[Run]) -> str:
    """The rates of the training with the rounding, where no labels were used."""
    trained = [
        line
        for line in lines
        if line["file"] == _TRAINED and line["network"] in _OF_PACKAGES
    ]
    chosen = last_of_each(
        [line for line in trained if "rate" in line], "network"
    )
    rows = []
    for name, line in chosen.items():
        edge = edge_of(line["rate"], _RATES)
        rows.append([name, f"{line['rate']:g}", edge, f"{line['error']:.2g}"])
    unknown = sorted({line["network"] for line in trained} - {*chosen})
    text = f"""
        Without labels the rate is chosen from {", ".join(f"{rate:g}" for rate in _RATES)}, by the
        error on the rows that calibrate; `low` and `high` are edges of these. Some rates are of a
        later run than the first table, with the error on test rows then.
    """
    if unknown:
        text += (
            f"Those of {', '.join(unknown)} are not recorded, and may be edges."
        )
    return (
        "\n## Rates of the training with the rounding\n\n"
        + sentences(text)
        + markdown(["network", "rate", "edge", "error"], rows)
        + "\n"
    )


if __name__ == "__main__":
    main(Int8)
