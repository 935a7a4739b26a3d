"""Recurrent layers in LiteRT files: loops of two kinds, steps one by one, and one operator.

python benchmarks/recurrent.py [options]
"""

import os
import tempfile
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from record import groups, machine, markdown, matching, sentences
from runner import Measurement, Run, Setting, grid, main

from keras_sparse_ortho.export import export_litert, latencies

L = keras.layers
FEATURES = 16
OUTPUTS = 8
CALIBRATION = 256  # sequences
NETWORKS = {
    "LSTM(64)": (L.LSTM, [64]),
    "two LSTM(128)": (L.LSTM, [128, 128]),
    "GRU(64)": (L.GRU, [64]),
    "two GRU(128)": (L.GRU, [128, 128]),
    "two SimpleRNN(64)": (L.SimpleRNN, [64, 64]),
}
STORAGES = ["float32", "dynamic_int8", "int8"]
CONVERTER = "TensorFlow's converter"
LOOPS = "loops"
UNROLLED = "unrolled"
OPERATOR = "+lstm"
FORMS = [CONVERTER, LOOPS, UNROLLED, OPERATOR]


def network(name: str, steps: int, unroll: bool) -> keras.Model:
    """Recurrent layers with random weights, and a head."""
    keras.utils.set_random_seed(0)
    kind, widths = NETWORKS[name]
    layers = [
        kind(units, return_sequences=units_left > 0, unroll=unroll)
        for units_left, units in zip(
            reversed(range(len(widths))), widths, strict=True
        )
    ]
    # TensorFlow's converter refuses loops over batches of any size.
    inputs = keras.Input((steps, FEATURES), batch_size=1, name="x")
    return keras.Sequential([inputs, *layers, L.Dense(OUTPUTS, "softmax")])


def by_converter(model: keras.Model, storage: str) -> bytes:
    """The file of TensorFlow's converter alone, as its guide tells to make it."""
    import tensorflow as tf

    converter = tf.lite.TFLiteConverter.from_keras_model(model)
    if storage != "float32":
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
    return bytes(converter.convert())


class Recurrent(Measurement):
    """Bytes and time of recurrent layers in LiteRT files, in loops and without them.

        KERAS_BACKEND=tensorflow python benchmarks/recurrent.py

    Random weights: neither bytes nor time depend on them. All files of a network and its number of
    steps are timed in turn, each in a process of its own.
    """

    page = lines = "recurrent"
    settings = {
        "networks": Setting([*NETWORKS], choices=NETWORKS, quick=["GRU(64)"]),
        "steps": Setting([20, 100], quick=[4]),
        "seconds": Setting(30.0, "of timing in one part", quick=2.0),
    }

    def runs(self) -> list[Run]:
        return grid(network=self.given.networks, steps=self.given.steps)

    def run(self, which: Run) -> list[Run]:
        rng = np.random.default_rng(1)
        shape = (CALIBRATION, which["steps"], FEATURES)
        rows = rng.standard_normal(shape).astype("float32")
        lines = []
        with tempfile.TemporaryDirectory() as folder:
            files = []
            for form, storage in self._files(which["network"]):
                path = Path(folder) / f"{len(files)}.tflite"
                model = network(
                    which["network"], which["steps"], form == UNROLLED
                )
                line = which | {"form": form, "storage": storage}
                line["machine"] = machine()
                try:
                    line |= written(model, form, storage, rows, path)
                except (RuntimeError, ValueError) as error:
                    lines.append(line | {"reason": str(error)[:300]})
                    continue
                lines.append(line)
                files.append(path)
            times = iter(latencies(files, 1, self.given.seconds))
            for line in lines:
                if "bytes" in line:
                    line["ms"] = next(times)
        return lines

    @staticmethod
    def _files(name: str) -> list[tuple[str, str]]:
        """The form and the storage of every file of a network."""
        kind, _ = NETWORKS[name]
        files = []
        for storage in STORAGES:
            for form in FORMS:
                if form == OPERATOR and kind is not L.LSTM:
                    continue
                # Its calibration of loops crashes the process.
                if form == CONVERTER and storage == "int8":
                    continue
                files.append((form, storage))
        return files

    def report(self, lines: list[Run]) -> str:
        text = "# Recurrent layers in LiteRT files\n\n" + sentences(
            f"""
            {"; ".join(dict.fromkeys(line["machine"] for line in lines))}, Keras
            {keras.__version__}. Random weights, {FEATURES} features, a head of {OUTPUTS}. Medians
            of calls with one sequence on one thread, all files of a network and its steps in turn.
            "{CONVERTER}" is what it makes alone, with its own weights in int8 (it crashes where it
            calibrates a loop); the other files are those of `export_litert`.
            "{UNROLLED}": layers with `unroll=True`. "x" is the time of "{CONVERTER}" over that of
            the file, in the same storage.
            """
        )
        rows = []
        for of_storage in groups(lines, "network", "steps", "storage").values():
            bases = matching(of_storage, form=CONVERTER)
            for line in of_storage:
                row = [
                    line["network"],
                    str(line["steps"]),
                    f"`{line['storage']}`",
                    line["form"],
                ]
                if "ms" not in line:
                    rows.append([*row, "no file", "", ""])
                    continue
                factor = "-"
                if bases:
                    factor = f"{bases[0]['ms'] / line['ms']:.2f}"
                row += [f"{line['bytes']:,}", f"{line['ms']:.3g}", factor]
                rows.append(row)
        header = ["network", "steps", "storage", "form", "bytes", "ms", "x"]
        text += markdown(header, rows)
        for line in lines:
            if "reason" in line:
                text += (
                    f"\n- No file: {line['network']}, {line['steps']} steps, "
                    f"{line['form']}, `{line['storage']}`: {line['reason']}\n"
                )
        return text


def written(
    model: keras.Model, form: str, storage: str, rows: np.ndarray, path: Path
) -> Run:
    """Writes a file; its bytes, and for those of `export_litert` the error."""
    if form == CONVERTER:
        path.write_bytes(by_converter(model, storage))
        return {"bytes": path.stat().st_size}
    mode = storage
    if form == OPERATOR:
        mode += OPERATOR
    data = {"sample": rows[:32]}
    if storage == "int8":
        data["representative_data"] = rows
    report = export_litert(model, path, mode=mode, **data)
    return {"bytes": report.bytes, "error": report.error}


if __name__ == "__main__":
    main(Recurrent)
