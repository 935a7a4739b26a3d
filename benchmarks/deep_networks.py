"""Deep networks pruned on calibration data: seconds, memory, and what drawn positions cost.

python benchmarks/deep_networks.py NAME [options]
"""

import contextlib
import os
import time
from collections.abc import Iterator
from unittest import mock

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Seconds of the processor on one core, whatever else the machine does.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import keras
import networks
import numpy as np
from record import machine, markdown, matching, mean_and_deviation, sentences
from runner import Measurement, Run, Setting, grid, main, peak

import keras_sparse_ortho as kso
from keras_sparse_ortho.calibration import _moments, _sweep

DENSITY = 0.3
SIDE = 96
OF_CIFAR = "ResNet "  # and the depth, for 32 pixels
AS_PRUNE = -1  # rows an input of a kernel: as many as `prune` draws
ALL = 0  # every position
NAMES = {AS_PRUNE: "32, and at least 2048 rows", ALL: "all positions"}
WAYS = {
    "one pass": contextlib.nullcontext,
    "a pass for each layer": lambda: mock.patch.object(
        _sweep, "computes_its_graph", return_value=False
    ),
}


def network(name: str) -> keras.Model:
    """A network of Keras with random weights, or a chain of convolutions."""
    keras.utils.set_random_seed(0)
    if name == "chain":
        layers = [keras.layers.Conv2D(8, 3, padding="same") for _ in range(8)]
        return keras.Sequential([keras.Input((SIDE, SIDE, 3)), *layers])
    if name.startswith(OF_CIFAR):
        depth = int(name.removeprefix(OF_CIFAR))
        options = {"filters": (16, 32, 64), "blocks": (depth - 2) // 6}
        return networks.resnet((32, 32, 3), 10, options)
    make = getattr(keras.applications, name)
    return make(weights=None, input_shape=(SIDE, SIDE, 3))


class Sweeps(Measurement):
    """Seconds of the processor that OBS takes for networks of Keras at 96 pixels, and other ones.

        KERAS_BACKEND=tensorflow taskset -c 0 python benchmarks/deep_networks.py sweeps
        KERAS_BACKEND=tensorflow python benchmarks/deep_networks.py sweeps --networks "ResNet 56"

    Random weights and rows: they cost as much as trained ones. Each run has a process and one
    thread of its own.
    """

    page = lines = "deep_networks"
    apart = True
    settings = {
        "networks": Setting(["MobileNetV2"], quick=["chain"]),
        "rows": Setting([128, 256], quick=[32]),
        "budgets": Setting(["uniform", "error"], quick=["uniform"]),
        "ways": Setting([*WAYS], choices=WAYS),
    }

    def runs(self) -> list[Run]:
        given = self.given
        return grid(
            network=given.networks,
            rows=given.rows,
            budget=given.budgets,
            way=given.ways,
        )

    def run(self, which: Run) -> Run:
        """Prunes one network in this process."""
        model = network(which["network"])
        shape = (which["rows"], *model.input_shape[1:])
        x = np.random.default_rng(0).normal(size=shape).astype("float32")
        model(x[:2])
        before = peak()
        worked = time.process_time()
        with WAYS[which["way"]]():
            kso.prune(
                model, DENSITY, score="obs", budget=which["budget"], data=x
            )
        return {
            "backend": keras.backend.backend(),
            "kernels": len(kso.prunable_weights(model)),
            "weights": model.count_params(),
            "cpu": time.process_time() - worked,
            "peak": peak() - before,
        }

    def report(self, lines: list[Run]) -> str:
        rows = []
        for line in lines:
            row = [
                line["network"],
                str(line["kernels"]),
                f"{line['weights'] / 1e6:.1f}",
            ]
            row += [str(line["rows"]), line["budget"], line["way"]]
            rows.append(
                [*row, f"{line['cpu']:.0f}", f"{line['peak'] / 1024:.1f}"]
            )
        header = [
            "network",
            "kernels",
            "million weights",
            "rows",
            "budget",
            "sweep",
        ]
        text = (
            f"# Deep networks, pruned on calibration data (density {DENSITY})\n\n"
            + sentences(
                f"""
            {machine()}, Keras {keras.__version__} on {keras.backend.backend()}. Seconds of the
            processor on one core, for `prune` with `score="obs"` at {SIDE} pixels ("ResNet" and a
            depth: 32). "A pass for each
            layer" is the sweep of models that are no graphs, and was that of all models before.
            Memory is the peak above the process with the model.
            """
            )
        )
        return text + markdown([*header, "CPU [s]", "memory [GiB]"], rows)


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Digits at random places in images of 32 pixels, with noise, and their classes."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    large = np.kron(images.reshape(-1, 8, 8) / 16, np.ones((1, 3, 3)))
    rng = np.random.default_rng(0)
    x = 0.1 * rng.normal(size=(len(large), 32, 32, 1))
    for image, (down, right) in enumerate(rng.integers(0, 9, (len(large), 2))):
        x[image, down : down + 24, right : right + 24, 0] += large[image]
    return x.astype("float32"), labels


@contextlib.contextmanager
def rows_drawn(rows_an_input: int) -> Iterator[None]:
    """Makes `prune` draw so many rows for each input of a kernel, without a least number."""
    if rows_an_input == AS_PRUNE:
        yield
        return
    rows = rows_an_input or 10**9
    with (
        mock.patch.object(_moments, "_ROWS_AN_INPUT", rows),
        mock.patch.object(_moments, "_FEWEST_ROWS", 0),
    ):
        yield


class Positions(Measurement):
    """The error of a CNN pruned by OBS over how many positions of its images are drawn.

        KERAS_BACKEND=tensorflow python benchmarks/deep_networks.py positions

    The relative squared error of the logits on rows that nothing was fitted to, for several draws
    of the calibration rows: drawn positions cost nothing while their part is below that of the
    rows.
    """

    page = lines = "positions"
    settings = {
        "rows_an_input": Setting(
            [ALL, AS_PRUNE, 32, 8, 2], quick=[ALL, AS_PRUNE, 8]
        ),
        "rows": Setting([128], quick=[32]),
        "draws": Setting(4, quick=2),
        "epochs": Setting(10, quick=1),
    }

    def measure(self) -> None:
        """Trains the network once."""
        keras.utils.set_random_seed(0)
        layers = keras.layers
        same = {"padding": "same", "activation": "relu"}
        self.x, labels = digits()
        self.model = keras.Sequential(
            [
                keras.Input((32, 32, 1)),
                layers.Conv2D(16, 3, **same),
                layers.Conv2D(24, 3, **same),
                layers.MaxPooling2D(),
                layers.BatchNormalization(),
                layers.SeparableConv2D(48, 3, **same),
                layers.Conv2D(48, 3, **same),
                layers.MaxPooling2D(),
                layers.Conv2D(64, 3, **same),
                layers.GlobalAveragePooling2D(),
                layers.Dense(10),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.model.compile(keras.optimizers.Adam(1e-3), loss)
        epochs = self.given.epochs
        self.model.fit(
            self.x[:1000],
            labels[:1000],
            batch_size=50,
            epochs=epochs,
            verbose=0,
        )
        super().measure()

    def runs(self) -> list[Run]:
        given = self.given
        draws = range(given.draws)
        return grid(
            rows_an_input=given.rows_an_input, rows=given.rows, draw=draws
        )

    def run(self, which: Run) -> Run:
        known, fresh = self.x[:1400], self.x[1400:]
        rng = np.random.default_rng(which["draw"])
        x = known[rng.choice(len(known), which["rows"], replace=False)]
        with rows_drawn(which["rows_an_input"]):
            pruned = kso.prune(
                self.model, 0.15, score="obs", budget="uniform", data=x
            )
        dense = self.model.predict(fresh, verbose=0)
        sparse = pruned.predict(fresh, verbose=0)
        return {
            "error": float(np.sum((sparse - dense) ** 2) / np.sum(dense**2))
        }

    def report(self, lines: list[Run]) -> str:
        rows = []
        for rows_an_input in dict.fromkeys(
            line["rows_an_input"] for line in lines
        ):
            errors = [
                line["error"]
                for line in matching(lines, rows_an_input=rows_an_input)
            ]
            name = NAMES.get(rows_an_input, str(rows_an_input))
            rows.append(
                [name, mean_and_deviation(errors, 4, "±"), str(len(errors))]
            )
        text = "# Drawn positions of convolutions\n\n" + sentences(
            f"""
            {machine()}, Keras {keras.__version__} on {keras.backend.backend()}. A CNN of six
            kernels for digits in images of 32 pixels, pruned by OBS to density 0.15 on 128 rows.
            Relative squared error of the logits on other rows: mean and standard deviation over
            draws of the 128 rows. `prune` draws 32 rows an input, and at least
            2048: the second line.
            """
        )
        return text + markdown(
            ["rows an input of a kernel", "error", "draws"], rows
        )


if __name__ == "__main__":
    main(Sweeps, Positions)
