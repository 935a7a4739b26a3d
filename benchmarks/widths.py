"""Trained networks made narrower: searched widths beside uniform ones, OBS beside norms.

python benchmarks/widths.py [options]
"""

import dataclasses
import functools
import os
import statistics
import time
from collections.abc import Iterable, Mapping
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from networks import mlp, resnet
from one_shot import fit_with_warm_up, halved
from record import (
    column,
    groups,
    markdown,
    matching,
    mean_and_deviation,
    sentences,
)
from runner import Measurement, Run, Setting, grid, main
from training import Dataset, accuracy, cached, compiled, first_rows, load

import keras_sparse_ortho as kso

CALIBRATION = 512
UNITS = {"mlp": 8, "resnet8": 4}  # multiples of searched widths
TITLES = {
    "mlp": "MLP of three layers of 1,024 on digits",
    "resnet8": "ResNet-8 of 16 to 64 channels on Fashion-MNIST",
}
METHODS = {
    "searched widths, OBS": {
        "widths": "searched",
        "order": "obs",
        "refit": True,
    },
    "uniform widths, OBS": {"widths": "uniform", "order": "obs", "refit": True},
    "searched widths, norms, refit": {
        "widths": "searched",
        "order": "norms",
        "refit": True,
    },
    "uniform widths, norms, refit": {
        "widths": "uniform",
        "order": "norms",
        "refit": True,
    },
    "uniform widths, norms": {
        "widths": "uniform",
        "order": "norms",
        "refit": False,
    },
}


def dataset(network: str, images: int | None) -> Dataset:
    """Digits, or images of clothes of half the size, and so many to train on."""
    if network == "mlp":
        return load("digits")
    data = first_rows(load("fashion_mnist"), images)
    return dataclasses.replace(
        data, x_train=halved(data.x_train), x_test=halved(data.x_test)
    )


def trained(which: Run, data: Dataset) -> keras.Model:
    """The trained network of a seed, from its file if there is one."""
    network, seed, epochs = which["network"], which["seed"], which["epochs"]
    keras.utils.set_random_seed(seed)
    if network == "mlp":
        model = mlp((8, 8, 1), [which["width"]] * 3)
        size = which["width"]
        fit = functools.partial(fit_with_warm_up, model, data, 5 * epochs, 1e-3)
    else:
        model = resnet((14, 14, 1), 10, {"filters": [16, 32, 64], "blocks": 1})
        size = len(data.x_train)
        fit = functools.partial(fit_with_warm_up, model, data, epochs, 4e-3)
    name = f"{network}-{seed}-{epochs}-{size}"
    return cached("widths", name, model, fit)


def uniform_widths(
    table: kso.calibration.WidthTable, share: float
) -> dict[str, int]:
    """The widths of the largest common share of all groups within a share of the parameters."""
    most = share * table.cost()
    narrow, wide = 0.0, 1.0
    for _ in range(20):
        middle = (narrow + wide) / 2
        widths = common_widths(table, middle)
        if table.cost(widths) <= most:
            narrow = middle
        else:
            wide = middle
    return common_widths(table, narrow)


def common_widths(
    table: kso.calibration.WidthTable, share: float
) -> dict[str, int]:
    """One share of the width of every group."""
    full = {name: table.groups[name].width for name in table.errors}
    return {name: max(round(share * width), 1) for name, width in full.items()}


def by_norms(
    model: keras.Model, channel_groups: Iterable[Any]
) -> dict[str, np.ndarray]:
    """The channels of each group, those of the smallest kernels that read them first."""
    kernels = kernels_of(model)
    order = {}
    for group in channel_groups:
        squares = np.zeros(group.width)
        for path, rows in group.rows.items():
            kernel = kernels[path].numpy()
            by_row = np.sum(kernel.reshape(-1, kernel.shape[-1]) ** 2, axis=1)
            squares += by_row[rows].sum(axis=1) / by_row.sum()
        order[group.name] = np.argsort(squares, kind="stable")
    return order


def kernels_of(model: keras.Model) -> dict[str, Any]:
    """The variables of kernels by path."""
    return {
        weight.path: weight.variable for weight in kso.prunable_weights(model)
    }


def without_refit(
    model: keras.Model,
    table: kso.calibration.WidthTable,
    widths: Mapping[str, int],
) -> keras.Model:
    """The network without the channels that go first; its other weights stay."""
    copy = keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    kernels = kernels_of(copy)
    for name, width in widths.items():
        group = table.groups[name]
        gone = table.order[name][: group.width - width]
        for path, rows in group.rows.items():
            kernel = kernels[path].numpy().copy()
            kernel.reshape(-1, kernel.shape[-1])[rows[gone].ravel()] = 0.0
            kernels[path].assign(kernel)
    return kso.remove_channels(copy)


def narrowed(
    model: keras.Model,
    table: kso.calibration.WidthTable,
    widths: Mapping[str, int],
    refit: bool,
    x: np.ndarray,
) -> keras.Model:
    """The network of these widths, in the order of the table."""
    if not refit:
        return without_refit(model, table, widths)
    return kso.narrow(model, widths, data=x, table=table)


class Widths(Measurement):
    """Trained networks made narrower at once: searched widths beside uniform ones.

        python benchmarks/widths.py [--seeds 0 1 2]

    For each seed a network is trained (kept in `out/widths`) and narrowed to shares of its
    parameters, with 512 training rows for calibration; nothing is trained afterwards.
    """

    page = lines = "widths"

    def __init__(self, given: Any) -> None:
        super().__init__(given)
        self._tables: dict[Any, tuple[kso.calibration.WidthTable, float]] = {}

    settings = {
        "networks": Setting([*TITLES], choices=TITLES, quick=["mlp"]),
        "seeds": Setting([0, 1, 2], quick=[0]),
        "shares": Setting(
            [0.5, 0.25, 0.1, 0.03], "of the parameters", quick=[0.25]
        ),
        "epochs": Setting(
            4, "of images; five times as many of digits", quick=1
        ),
        "images": Setting(20000, quick=2000),
        "width": Setting(1024, "of the MLP", quick=64),
    }

    def runs(self) -> Iterable[Run]:
        given = self.given
        sizes = {
            "mlp": {"width": given.width},
            "resnet8": {"images": given.images},
        }
        for seed in given.seeds:
            for network in given.networks:
                setting = {
                    "network": network,
                    "seed": seed,
                    "epochs": given.epochs,
                }
                setting |= sizes[network]
                yield setting | {"method": "dense", "share": 1.0}
                for which in grid(share=given.shares, method=METHODS):
                    yield setting | which

    def run(self, which: Run) -> Run:
        data = dataset(which["network"], which.get("images"))
        model = trained(which, data)
        if which["method"] == "dense":
            return {
                "accuracy": percent(model, data),
                "parameters": model.count_params(),
            }
        method = METHODS[which["method"]]
        x = data.x_train[:CALIBRATION]
        table, seconds = self.table_of(which, model, x)
        if method["widths"] == "searched":
            widths = table.search(
                which["share"], multiple_of=UNITS[which["network"]]
            )
        else:
            widths = uniform_widths(table, which["share"])
        predicted = table.predicted(widths)
        if method["order"] == "norms":
            order = by_norms(
                model, [table.groups[name] for name in table.errors]
            )
            table = dataclasses.replace(table, order=order)
        start = time.perf_counter()
        small = narrowed(model, table, widths, bool(method["refit"]), x)
        return {
            "accuracy": percent(small, data),
            "error": relative_error(small, model, data.x_test),
            "predicted": predicted,
            "parameters": small.count_params(),
            "widths": [*widths.values()],
            "table_seconds": seconds,
            "seconds": time.perf_counter() - start,
        }

    def table_of(
        self, which: Run, model: keras.Model, x: np.ndarray
    ) -> tuple[kso.calibration.WidthTable, float]:
        """The table of a trained network, measured once, and the seconds that it took."""
        key = which["network"], which["seed"]
        if key not in self._tables:
            start = time.perf_counter()
            table = kso.widths(model, x, multiple_of=UNITS[which["network"]])
            self._tables = {key: (table, time.perf_counter() - start)}
        return self._tables[key]

    def report(self, lines: list[Run]) -> str:
        given = self.given
        runs = matching(
            lines, network="mlp", epochs=given.epochs, width=given.width
        )
        runs += matching(
            lines, network="resnet8", epochs=given.epochs, images=given.images
        )
        text = "# Trained networks made narrower, at once\n\n" + sentences(
            f"""
            Networks trained on digits ({5 * given.epochs} epochs) and Fashion-MNIST of half the
            size ({given.images} images, {given.epochs} epochs), narrowed to a share of their
            parameters with {CALIBRATION} training rows for calibration; nothing is trained
            afterwards. Searched widths are those of `kso.widths(model, x).search(share)`, uniform
            ones the largest common share of all groups that has no more parameters. The order of
            channels is that of structured OBS, or of the norms of the kernels that read them;
            `kso.narrow` refits these kernels, or (last row) they stay as they are. Test accuracy,
            mean and standard deviation over the seeds; error: the relative squared error of the
            outputs on test rows; predicted: by the table, for OBS; parameters of the result.
            """
        )
        for network, title in TITLES.items():
            members = matching(runs, network=network)
            if members:
                text += f"## {title}\n\n{table_of_methods(members)}\n"
        return text


def percent(model: keras.Model, data: Dataset) -> float:
    """Percent of the test images."""
    return accuracy(compiled(model, "sgd"), data)


def relative_error(
    model: keras.Model, reference: keras.Model, x: np.ndarray
) -> float:
    """The relative squared error of a network's outputs beside another's."""
    outputs, first = (
        one.predict(x, batch_size=500, verbose=0) for one in (model, reference)
    )
    return float(
        np.sum((outputs - first) ** 2)
        / np.sum((first - first.mean(axis=0)) ** 2)
    )


def table_of_methods(runs: list[Run]) -> str:
    """The table of a network."""
    rows = []
    for (share, method), members in groups(runs, "share", "method").items():
        row = [
            f"{share:g}",
            method,
            mean_and_deviation(column(members, "accuracy")),
        ]
        if method == "dense":
            row += ["", ""]
        else:
            row.append(f"{statistics.mean(column(members, 'error')):.2g}")
            predicted = statistics.mean(column(members, "predicted"))
            row.append(f"{predicted:.2g}" if method.endswith("OBS") else "")
        row.append(f"{statistics.mean(column(members, 'parameters')):.0f}")
        rows.append((-share, method, row))
    order = ["dense", *METHODS]
    rows.sort(key=lambda entry: (entry[0], order.index(entry[1])))
    header = [
        "share",
        "method",
        "accuracy [%]",
        "error",
        "predicted",
        "parameters",
    ]
    return markdown(header, [row for _, _, row in rows])


if __name__ == "__main__":
    main(Widths)
