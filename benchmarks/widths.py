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
from networks import Positions, mlp, mobilenet, resnet
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
from scipy import stats
from training import (
    SYMBOLS,
    Dataset,
    accuracy,
    cached,
    compiled,
    first_rows,
    load,
    python_text,
    windows,
)

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import BudgetError

L = keras.layers

CALIBRATION = 512
READ = 24  # characters; the network predicts the next one
TESTED = 10_000  # windows of text
# Multiples of searched widths. The GRU's groups of 96 have too few multiples of 8 for its least
# shares, where only the multiple would count: uniform widths are any numbers.
UNITS = {"mlp": 8, "resnet8": 4, "mobilenet": 8, "gru": 1, "transformer": 8}
TITLES = {
    "mlp": "MLP of three layers of 1,024 on digits",
    "resnet8": "ResNet-8 of 16 to 64 channels on Fashion-MNIST",
    "mobilenet": "MobileNet of half the width on Fashion-MNIST",
    "gru": "GRU of two layers of 96 on text",
    "transformer": "Transformer of two blocks of 64 on text",
}
ON_IMAGES = ("resnet8", "mobilenet")
RATES = {"resnet8": 4e-3, "mobilenet": 2e-3, "gru": 4e-3, "transformer": 2e-3}
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
    # The order of Torch-Pruning's GroupMagnitudeImportance.
    "uniform widths, group norms, refit": {
        "widths": "uniform",
        "order": "group norms",
        "refit": True,
    },
    "uniform widths, group norms": {
        "widths": "uniform",
        "order": "group norms",
        "refit": False,
    },
}


def dataset(network: str, rows: int | None) -> Dataset:
    """Digits, images of clothes of half the size, or text, and so many rows to train on."""
    if network == "mlp":
        return load("digits")
    if network in ON_IMAGES:
        data = first_rows(load("fashion_mnist"), rows)
        return dataclasses.replace(
            data, x_train=halved(data.x_train), x_test=halved(data.x_test)
        )
    trained_on, others = python_text()
    x_train, y_train = windows(trained_on, rows or TESTED, 0, READ)
    x_test, y_test = windows(others, TESTED, 1, READ)
    return Dataset("text", x_train, y_train[:, -1], x_test, y_test[:, -1])


def gru() -> keras.Model:
    """The next character, by two recurrent layers."""
    x = inputs = keras.Input((READ,), dtype="int32")
    x = L.Embedding(SYMBOLS, 48, name="embedding")(x)
    x = L.GRU(96, return_sequences=True, name="first")(x)
    x = L.GRU(96, name="second")(x)
    return keras.Model(inputs, L.Dense(SYMBOLS, name="head")(x))


def transformer() -> keras.Model:
    """The next character, by two pre-norm blocks of four heads."""
    x = inputs = keras.Input((READ,), dtype="int32")
    x = L.Embedding(SYMBOLS, 64, name="embedding")(x)
    x = Positions(name="positions")(x)
    for k in range(2):
        y = L.LayerNormalization(name=f"attention_norm_{k}")(x)
        y = L.MultiHeadAttention(4, 16, name=f"attention_{k}")(y, y)
        x = L.Add()([x, y])
        y = L.LayerNormalization(name=f"mlp_norm_{k}")(x)
        y = L.Dense(256, "gelu", name=f"mlp_{k}_wide")(y)
        x = L.Add()([x, L.Dense(64, name=f"mlp_{k}_narrow")(y)])
    x = L.LayerNormalization(name="last_norm")(x)
    return keras.Model(inputs, L.Dense(SYMBOLS, name="head")(x[:, -1]))


def network_of(which: Run) -> keras.Model:
    """The network of a run, not trained."""
    if which["network"] == "mlp":
        return mlp((8, 8, 1), [which["width"]] * 3)
    makers = {
        "resnet8": functools.partial(
            resnet, (14, 14, 1), 10, {"filters": [16, 32, 64], "blocks": 1}
        ),
        "mobilenet": functools.partial(
            mobilenet, (14, 14, 1), 10, {"alpha": 0.5}
        ),
        "gru": gru,
        "transformer": transformer,
    }
    return makers[which["network"]]()


def trained(which: Run, data: Dataset) -> keras.Model:
    """The trained network of a seed, from its file if there is one."""
    network, seed, epochs = which["network"], which["seed"], which["epochs"]
    keras.utils.set_random_seed(seed)
    model = network_of(which)
    size = len(data.x_train)
    rate = RATES.get(network, 1e-3)
    if network == "mlp":
        size = which["width"]
        epochs = 5 * epochs
    fit = functools.partial(fit_with_warm_up, model, data, epochs, rate)
    name = f"{network}-{seed}-{which['epochs']}-{size}"
    return cached("widths", name, model, fit)


def by_norms(
    model: keras.Model, channel_groups: Iterable[Any]
) -> dict[str, np.ndarray]:
    """The channels of each group, those of the smallest kernels that read them first."""
    kernels = kernels_of(model)
    order = {}
    for group in channel_groups:
        squares = np.zeros(group.steps)
        for path, rows in group.rows.items():
            by_row = squares_of_rows(kernels[path])
            squares += by_row[rows].sum(axis=1) / by_row.sum()
        order[group.name] = np.argsort(squares, kind="stable")
    return order


def by_group_norms(
    model: keras.Model, channel_groups: Iterable[Any]
) -> dict[str, np.ndarray]:
    """The channels of each group, those of the smallest weights in all layers that have them first.

    Torch-Pruning 1.6 (GroupMagnitudeImportance) sums the squares of the kernels that make a
    channel, of the kernels that read it, and of the scales between them.
    """
    kernels = kernels_of(model)
    order = {}
    for group in channel_groups:
        squares = np.zeros(group.steps)
        for path, rows in group.rows.items():
            squares += squares_of_rows(kernels[path])[rows].sum(axis=1)
        # Channels that go together, as of an STFT, are judged by their readers.
        operations = []
        if group.unit == 1:
            operations = operations_with_channels(model, group)
        for operation in operations:
            for weight in getattr(operation, "trainable_weights", []):
                squares += squares_of_channels(weight, group.width)
        order[group.name] = np.argsort(squares, kind="stable")
    return order


def squares_of_rows(variable: Any) -> np.ndarray:
    """The sum of squares of each row of a kernel as a matrix `(rows, outputs)`."""
    kernel = variable.numpy()
    squares: np.ndarray = np.sum(kernel.reshape(-1, kernel.shape[-1]) ** 2, 1)
    return squares


def operations_with_channels(model: keras.Model, group: Any) -> list[Any]:
    """The operations that make the channels of a group or pass them on, without their readers.

    Heads of attention do not leave their layer: nothing, then, as its other kernels are no makers.
    """
    if "/" in group.name:
        return []
    followers: dict[str, list[Any]] = {}
    for operation in getattr(model, "operations", model.layers):
        if isinstance(operation, L.InputLayer):
            continue
        for tensor in keras.tree.flatten(operation.input):
            maker = tensor._keras_history.operation.name
            followers.setdefault(maker, []).append(operation)
    readers = {path.split("/")[0] for path in group.rows}
    reached = {name: model.get_layer(name) for name in group.makers}
    waiting = [*reached.values()]
    while waiting:
        operation = waiting.pop()
        for follower in followers.get(operation.name, []):
            if follower.name not in {*reached, *readers}:
                reached[follower.name] = follower
                waiting.append(follower)
    return [*reached.values()]


def squares_of_channels(weight: Any, width: int) -> np.ndarray:
    """The sum of squares of each channel in a kernel or a scale; 0 in biases."""
    value = weight.numpy()
    is_depthwise = value.shape[-2:] == (width, 1)
    has_channels_last = value.shape[-1] % width == 0  # gates side by side
    is_shift = weight.name in ("bias", "beta")
    if is_shift or not (is_depthwise or has_channels_last):
        return np.zeros(width)
    return np.sum(value.reshape(-1, width) ** 2, axis=0)


def kernels_of(model: keras.Model) -> dict[str, Any]:
    """The variables of kernels by path."""
    return {
        weight.path: weight.variable for weight in kso.prunable_weights(model)
    }


ORDERS = {"norms": by_norms, "group norms": by_group_norms}


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
        gone = table.order[name][: (group.width - width) // group.unit]
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


def narrowed_by(
    method: Run,
    model: keras.Model,
    table: kso.calibration.WidthTable,
    share: float,
    unit: int,
    x: np.ndarray,
) -> tuple[keras.Model, dict[str, int]]:
    """The network of a method at a share of the parameters, and its widths.

    Args:
        method: One of `METHODS`.
        model: The trained network.
        table: Its table of widths.
        share: float. A share of the parameters.
        unit: int. Searched widths are multiples of it.
        x: Rows for calibration.
    """
    if method["widths"] == "searched":
        widths = table.search(share, multiple_of=unit)
    else:
        widths = table.uniform(share, multiple_of=1)
    if method["order"] in ORDERS:
        order = ORDERS[method["order"]](
            model, [table.groups[name] for name in table.errors]
        )
        table = dataclasses.replace(table, order=order)
    return narrowed(model, table, widths, bool(method["refit"]), x), widths


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
        "windows": Setting(40000, "of text", quick=2000),
        "width": Setting(1024, "of the MLP", quick=64),
    }

    def runs(self) -> Iterable[Run]:
        given = self.given
        sizes = sizes_of(given)
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
        rows = which.get("images", which.get("windows"))
        data = dataset(which["network"], rows)
        model = trained(which, data)
        if which["method"] == "dense":
            return {
                "accuracy": percent(model, data),
                "parameters": model.count_params(),
            }
        x = data.x_train[:CALIBRATION]
        table, seconds = self.table_of(which, model, x)
        start = time.perf_counter()
        try:
            small, widths = narrowed_by(
                METHODS[which["method"]],
                model,
                table,
                which["share"],
                UNITS[which["network"]],
                x,
            )
        except BudgetError as error:  # a share that is out of reach
            return {"reason": str(error)[:200]}
        return {
            "accuracy": percent(small, data),
            "error": relative_error(small, model, data.x_test),
            "predicted": table.predicted(widths),
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
        runs = []
        for network, size in sizes_of(given).items():
            runs += matching(
                lines, network=network, epochs=given.epochs, **size
            )
        text = "# Trained networks made narrower, at once\n\n" + sentences(
            f"""
            Networks trained on digits ({5 * given.epochs} epochs), Fashion-MNIST of half the size
            ({given.images} images, {given.epochs} epochs) and Python's standard library
            ({given.windows} windows of {READ} characters, {given.epochs} epochs; the next
            character), narrowed to a share of their parameters with {CALIBRATION} training rows for
            calibration; nothing is trained afterwards. Searched widths are those of
            `kso.widths(model, x).search(share)`, multiples of 8, of the ResNet of 4, of the GRU any
            numbers; uniform ones are the largest common share of all groups that has no more
            parameters, in any numbers of channels. The order of channels is that of structured OBS,
            or of the norms of the kernels that read them; `kso.narrow` refits these kernels, or
            (last row) they stay as they are. Test accuracy, mean and standard deviation over the
            seeds, and half the 95% interval of the mean (Student's t); error: the relative squared
            error of the outputs on test rows; predicted: by the table, for OBS; parameters of the
            result.
            """
        )
        for network, title in TITLES.items():
            members = matching(runs, network=network)
            if members:
                text += f"## {title}\n\n{table_of_methods(members)}\n"
        return text


def sizes_of(given: Any) -> dict[str, Run]:
    """The setting of each network besides seed and epochs."""
    sizes: dict[str, Run] = {"mlp": {"width": given.width}}
    for network in TITLES:
        if network in ON_IMAGES:
            sizes[network] = {"images": given.images}
        elif network != "mlp":
            sizes[network] = {"windows": given.windows}
    return sizes


def interval(values: list[float]) -> str:
    """Half the 95% interval of a mean; nothing for a single value."""
    if len(values) < 2:
        return ""
    quantile = stats.t.ppf(0.975, len(values) - 1)
    error = statistics.stdev(values) / len(values) ** 0.5
    return f"{quantile * error:.2f}"


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
    return relative_distance(outputs, first)


def relative_distance(outputs: np.ndarray, reference: np.ndarray) -> float:
    """The squared distance of outputs, as a share of the reference's from its mean."""
    distance = np.sum((outputs - reference) ** 2)
    return float(distance / np.sum((reference - reference.mean(axis=0)) ** 2))


def errors_of(runs: list[Run], method: str) -> list[str]:
    """The mean error of a method, and the predicted one of its widths for the order of OBS."""
    if method == "dense":
        return ["", ""]
    error = f"{statistics.mean(column(runs, 'error')):.2g}"
    if not method.endswith("OBS"):
        return [error, ""]
    return [error, f"{statistics.mean(column(runs, 'predicted')):.2g}"]


def table_of_methods(runs: list[Run]) -> str:
    """The table of a network."""
    rows = []
    for (share, method), members in groups(runs, "share", "method").items():
        row = [f"{share:g}", method]
        if any("reason" in line for line in members):
            row += ["out of reach", "", "", "", ""]
            rows.append((-share, method, row))
            continue
        row.append(mean_and_deviation(column(members, "accuracy")))
        row.append(interval(column(members, "accuracy")))
        row += errors_of(members, method)
        row.append(f"{statistics.mean(column(members, 'parameters')):.0f}")
        rows.append((-share, method, row))
    order = ["dense", *METHODS]
    rows.sort(key=lambda entry: (entry[0], order.index(entry[1])))
    header = [
        "share",
        "method",
        "accuracy [%]",
        "95%",
        "error",
        "predicted",
        "parameters",
    ]
    return markdown(header, [row for _, _, row in rows])


if __name__ == "__main__":
    main(Widths)
