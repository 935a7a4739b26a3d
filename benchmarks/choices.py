"""Choices of a user: the start, the learning rate, the order of batches, RigL's updates.

python benchmarks/choices.py NAME [options]
"""

import itertools
import os
import statistics
from collections.abc import Callable, Iterable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from networks import NETWORKS, mlp, settings
from record import (
    ahead_and_p,
    column,
    edge_of,
    groups,
    machine,
    markdown,
    mean_and_deviation,
    sentences,
)
from runner import Measurement, Run, Setting, grid, main
from training import (
    BATCH,
    DEPTH,
    LENGTH,
    SYMBOLS,
    Dataset,
    accuracy,
    compiled,
    crossentropy,
    first_rows,
    load,
    python_text,
    shuffled,
    whole_batches,
    windows,
)

import keras_sparse_ortho as kso
from keras_sparse_ortho.initializers import ExactOrthogonal

# --- untuned --------------------------------------------------------------------------------------

STARTS = {
    "random": "random_sparse",
    "gain 1": ExactOrthogonal(gain=1.0),
    "auto": ExactOrthogonal(gain="auto"),
    "auto, all taps": ExactOrthogonal(gain="auto", taps="all"),
    "published": ExactOrthogonal(
        gain=1.0, start="published", taps="dense_center"
    ),
}
# The starts with even degrees were measured at 72dda44a, and are gone; their lines stay.
STARTS_SHOWN = [*STARTS]
STARTS_SHOWN[-1:-1] = ["even, auto", "even, auto, all taps"]
OPTIMIZERS = {"Adam 0.001": ("adam", 1e-3), "SGD 0.1": ("sgd", 0.1)}
UNTUNED_NETS = {
    "digits_cnn": {
        "of": "methods.cnn",
        "dataset": "digits",
        "epochs": 20,
        "batch_size": 32,
    },
    "cnn": {"of": "methods.cnn", "epochs": 4},
    "mlp": {"network": "mlp", "dataset": "fashion_mnist", "epochs": 4},
    "resnet20": {"of": "contemporary.resnet20", "epochs": 2},
    "mobilenet": {
        "of": "contemporary.mobilenet",
        "epochs": 4,
    },  # these two on TensorFlow
}
"""Settings of `methods.toml` and what differs; `mlp`: 784, 300, 100, 10 units, no normalization."""
UNTUNED_DENSITY = 0.05


class Untuned(Measurement):
    """Starts of sparse training at the rate that a user takes: nothing is tuned.

        KERAS_BACKEND=jax python benchmarks/choices.py untuned [--networks digits_cnn] [--seeds 5]

    Every network trains with fixed masks, ERK at a density of 0.05, with Adam at Keras' rate of
    0.001 and with SGD at 0.1, both constant and as they come. `random`: the layer's own initializer
    times a random mask, the rival; `p` is Welch's test against it, two-sided and not corrected.
    """

    page = lines = "untuned"
    settings = {
        "networks": Setting(
            [*UNTUNED_NETS], choices=UNTUNED_NETS, quick=["digits_cnn"]
        ),
        "starts": Setting([*STARTS], choices=STARTS, quick=["random", "auto"]),
        "seeds": Setting(5, quick=1),
        "samples": Setting(int, "how many images to train on", quick=256),
    }

    def runs(self) -> list[Run]:
        return grid(
            network=self.given.networks,
            seed=range(self.given.seeds),
            optimizer=OPTIMIZERS,
            start=self.given.starts,
        )

    def run(self, which: Run) -> Run:
        plan = untuned_plan(which["network"])
        data = first_rows(
            load(plan["dataset"]), self.given.samples or plan.get("samples")
        )
        shape = data.x_train.shape[1:]
        seed = which["seed"]
        keras.utils.clear_session()
        keras.utils.set_random_seed(seed)
        if plan["network"] == "mlp":
            dense = mlp(shape, (300, 100), prefix="h")
        else:
            dense = NETWORKS[plan["network"]](shape, 10, plan)
        start = STARTS[which["start"]]
        include = plan.get("include")
        model = kso.sparsify(
            dense,
            UNTUNED_DENSITY,
            initializer=start,
            seed=seed,
            include=include,
        )
        name, rate = OPTIMIZERS[which["optimizer"]]
        optimizer = keras.optimizers.get(name)
        optimizer.learning_rate = rate
        compiled(model, optimizer, jit_compile=plan.get("jit", "auto"))
        batches = whole_batches(
            data.x_train, data.y_train, plan.get("batch_size", 128)
        )
        model.fit(**batches, epochs=plan["epochs"], verbose=0)
        return {"accuracy": accuracy(model, data)}

    def report(self, lines: list[Run]) -> str:
        by_case = groups(lines, "network", "optimizer", "start")
        rows = []
        for network, optimizer, start in itertools.product(
            UNTUNED_NETS, OPTIMIZERS, STARTS_SHOWN
        ):
            accuracies = column(
                by_case.get((network, optimizer, start), []), "accuracy"
            )
            rival = column(
                by_case.get((network, optimizer, "random"), []), "accuracy"
            )
            if not accuracies or not rival:
                continue
            beside = (
                ["", ""]
                if start == "random"
                else ahead_and_p(accuracies, rival)
            )
            cells = [
                mean_and_deviation(accuracies, 1, always=True),
                str(len(accuracies)),
                *beside,
            ]
            rows.append([network, optimizer, start, *cells])
        header = [
            "network",
            "optimizer",
            "start",
            "accuracy",
            "seeds",
            "to random",
            "p",
        ]
        about = sentences(
            f"""
            Test accuracy in percent, mean and standard deviation; ERK at
            {UNTUNED_DENSITY}, fixed masks. Adam at 0.001 and SGD at 0.1, constant. `p`: Welch's
            test against `random`, the layer's own initializer under a random mask; not corrected
            for the number of rows.
            """
        )
        return (
            "# Starts at a rate that nobody tuned\n\n"
            + about
            + markdown(header, rows)
        )


def untuned_plan(name: str) -> dict[str, Any]:
    """The settings of a network."""
    plan = UNTUNED_NETS[name]
    section, _, network = plan.get("of", "").partition(".")
    base = settings(section)[network] if section else {}
    return {"network": network, **base, **plan}


# --- one_rate -------------------------------------------------------------------------------------

RATES = {
    "mlp": [2.0**-k for k in range(12, 6, -1)],
    "text": [2.0**-k for k in range(11, 6, -1)],
}
WIDTHS = {"mlp": [128, 512], "text": [64, 128]}
BASE_WIDTH = {"mlp": 128, "text": 64}
"""The widths whose rate at density 1 is the one for all."""
PARAMETRIZATIONS = ("plain", "S-muPar")
MORE_RATES = 4
"""How often a grid of rates goes on while its best is an edge."""
DIVERGED = 99.0
"""The loss of a run that is not finite."""


class OneRate(Measurement):
    """One learning rate for all widths and densities: sparse maximal update parametrization.

        KERAS_BACKEND=jax python benchmarks/choices.py one_rate [--networks mlp text]

    S-muPar (Dey et al., 2024, arXiv 2405.15743) scales what dense muP scales by width also by
    density: with Adam, a hidden kernel of width `w` and density `d` has variance `1 / (w d)`, which
    exactly orthogonal kernels have by themselves, and the learning rate `r (w0 / w) (d0 / d)`; the
    head's outputs are multiplied by `w0 / w`. "plain" has one rate for all variables, and no
    factor. Heads start at zero. Each rate of a grid trains once per width, density and seed; a grid
    goes on while its best rate is an edge.
    """

    page = lines = "one_rate"
    settings = {
        "networks": Setting([*RATES], choices=RATES, quick=["mlp"]),
        "widths": Setting([int], quick=[128]),
        "densities": Setting([1.0, 0.1]),
        "steps": Setting(300, quick=4),
        "seeds": Setting(1),
    }

    def measure(self) -> None:
        """Trains with all rates of each grid, and goes on beyond its edges."""
        given = self.given
        for network in given.networks:
            widths = given.widths or WIDTHS[network]
            for case in grid(
                density=given.densities, width=widths, kind=PARAMETRIZATIONS
            ):
                case |= {"network": network, "steps": given.steps}
                losses = {
                    rate: self.loss(case, rate) for rate in RATES[network]
                }
                for _ in range(MORE_RATES):
                    best = min(losses, key=losses.__getitem__)
                    if min(losses) < best < max(losses):
                        break
                    rate = best * 2 if best == max(losses) else best / 2
                    losses[rate] = self.loss(case, rate)

    def loss(self, case: Run, rate: float) -> float:
        """The mean test loss of a rate over the seeds."""
        seeds = range(self.given.seeds)
        lines = [
            self.once(case | {"rate": rate, "seed": seed}) for seed in seeds
        ]
        return statistics.mean(column(lines, "loss"))

    def run(self, which: Run) -> Run:
        x, y, x_test, y_test, size = rows_once(which["network"], which["steps"])
        keras.utils.clear_session()
        model = headed(which)
        model.fit(x, y, batch_size=size, verbose=0)
        loss = float(model.evaluate(x_test, y_test, batch_size=256, verbose=0))
        return {"loss": loss if np.isfinite(loss) else DIVERGED}

    def report(self, lines: list[Run]) -> str:
        """Best rates, and what the rate of the smallest dense network costs."""
        losses: dict[tuple, dict[float, float]] = {}
        same = [line for line in lines if line["steps"] == self.given.steps]
        names = ("network", "kind", "width", "density")
        for case, members in groups(same, *names).items():
            by_rate = groups(members, "rate")
            losses[case] = {
                rate: statistics.mean(column(runs, "loss"))
                for rate, runs in by_rate.items()
            }
        rows = [self.row(case, losses) for case in sorted(losses)]
        header = [
            "network",
            "parametrization",
            "width",
            "density",
            "best rate",
            "loss",
        ]
        header += ["with the base's rate", "tries", "edge"]
        about = sentences(
            f"""
            Adam, {self.given.steps} steps with warm-up and cosine decay, test loss; mlp:
            Fashion-MNIST, two sparse square layers; text: the blocks of the small language
            model. The base is the smallest width at density 1; `with the base's rate`: how much
            higher the loss is with its best rate than with the network's own.
            """
        )
        title = "# One learning rate for all widths and densities\n\n"
        return title + about + markdown(header, rows)

    def row(
        self, case: tuple, losses: dict[tuple, dict[float, float]]
    ) -> list[str]:
        """A row of the table."""
        network, kind, width, density = case
        by_rate = losses[case]
        best = min(by_rate, key=by_rate.__getitem__)
        base = losses[network, kind, BASE_WIDTH[network], 1.0]
        base_rate = min(base, key=base.__getitem__)
        cost = (
            f"{by_rate[base_rate] - by_rate[best]:+.3f}"
            if base_rate in by_rate
            else ""
        )
        cells = [
            f"2^{np.log2(best):.0f}",
            f"{by_rate[best]:.3f}",
            cost,
            str(len(by_rate)),
            edge_of(best, by_rate),
        ]
        return [network, kind, str(width), f"{density:g}", *cells]


class ScaledAdam(keras.optimizers.Adam):
    """Adam with a factor on the rate of some variables, by their paths."""

    def __init__(self, rate, scales: dict[str, float]) -> None:
        super().__init__(rate)
        self.scales = scales

    def update_step(self, gradient, variable, learning_rate):
        """A step at the variable's rate."""
        scale = self.scales.get(variable.path, 1.0)
        super().update_step(gradient, variable, scale * learning_rate)


def square_mlp(width: int) -> keras.Model:
    """Three hidden layers, of which two are square."""
    hidden = [
        keras.layers.Dense(
            width,
            activation="relu",
            name=f"h{k}",
            kernel_initializer=keras.initializers.Orthogonal(2**0.5, seed=k),
        )
        for k in range(3)
    ]
    return keras.Sequential([keras.Input((784,)), *hidden])


def text_blocks(width: int) -> keras.Model:
    """The blocks of the small language model, without its head."""
    from slice_transformer import decoder

    whole = decoder(
        LENGTH, SYMBOLS, width, DEPTH, max(width // 32, 2), 4 * width
    )
    return keras.Model(whole.inputs, whole.get_layer("head").input)


NOT_SCALED = ("h0", "classes", "embedding", "positions")
"""Layers whose rate does not depend on width and density."""


def headed(which: Run) -> keras.Model:
    """A compiled network under a parametrization."""
    width, density, rate, steps = (
        which[k] for k in ("width", "density", "rate", "steps")
    )
    keras.utils.set_random_seed(which["seed"])
    images = which["network"] == "mlp"
    body = square_mlp(width) if images else text_blocks(width)
    if density < 1:
        hidden = ["h1", "h2"] if images else [".*kernel"]
        body = kso.sparsify(
            body, density, "uniform", seed=which["seed"], include=hidden
        )
    wide = width / BASE_WIDTH[which["network"]]
    scaled = which["kind"] == "S-muPar"
    outputs = body.outputs[0]
    if scaled:
        outputs = keras.layers.Rescaling(1 / wide)(outputs)
    classes = 10 if images else SYMBOLS
    head = keras.layers.Dense(
        classes, kernel_initializer="zeros", name="classes"
    )
    model = keras.Model(body.inputs, head(outputs))
    scales = {
        weight.variable.path: 1 / (wide * density)
        for weight in kso.prunable_weights(model, unregistered=True)
        if scaled and weight.path.split("/")[0] not in NOT_SCALED
    }
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0, steps, warmup_target=rate, warmup_steps=max(steps // 20, 1)
    )
    model.compile(ScaledAdam(schedule, scales), crossentropy())
    return model


def rows_once(name: str, steps: int) -> tuple:
    """Inputs and targets to train on, once, and to test; and the size of a batch."""
    if name == "text":
        symbols, others = python_text()
        return (
            *windows(symbols, BATCH * steps, 0),
            *windows(others, 256, 1),
            BATCH,
        )
    images = load("fashion_mnist")
    rows = np.random.default_rng(0).permutation(55000)[: 128 * steps]
    x = images.x_train.reshape(-1, 784)
    y = images.y_train
    return x[rows], y[rows], x[55000:], y[55000:], 128


# --- rigl -----------------------------------------------------------------------------------------

RIGL_NETS = {
    "mlp": {"density": 0.02, "rate": 0.002, "epochs": [10, 40]},
    "cnn": {"density": 0.05, "rate": 0.008, "epochs": [20]},
}
RIGL_OPTIONS = {"filters": [24, 48, 48], "batch_size": 128, "jit": True}
PUBLISHED = 100
"""Steps between two updates in the paper."""


class Rigl(Measurement):
    """RigL against the random mask it starts from, by the steps between its updates.

        python benchmarks/choices.py rigl [--nets mlp cnn] [--epochs 10 40]

    An MLP 784-300-300-10 at density 0.02 and the small CNN of methods.py at 0.05, Adam, cosine
    decay, on scikit-learn's digits enlarged to 28 x 28: each is drawn several times, turned,
    moved and scaled, with noise; no digit is in both sets.
    """

    page = lines = "moving_masks"
    settings = {
        "nets": Setting([*RIGL_NETS], choices=RIGL_NETS, quick=["mlp"]),
        "epochs": Setting([int], quick=[2]),
        "seeds": Setting([0, 1, 2], quick=[0]),
        "copies": Setting(12, quick=2),
    }

    def measure(self) -> None:
        """Draws the digits first."""
        self.data = enlarged_digits(self.given.copies)
        super().measure()

    def runs(self) -> Iterable[Run]:
        """All runs; an update every 100 steps, as in the paper, and by default."""
        steps = len(self.data.x_train) // RIGL_OPTIONS["batch_size"]
        for net, seed in itertools.product(self.given.nets, self.given.seeds):
            plan = RIGL_NETS[net]
            for epochs in self.given.epochs or plan["epochs"]:
                default = min(max(3 * steps * epochs // 400, 1), PUBLISHED)
                case = {
                    "net": net,
                    "density": plan["density"],
                    "rate": plan["rate"],
                }
                for frequency in dict.fromkeys(
                    [None, PUBLISHED, 2 * default, default]
                ):
                    yield case | {
                        "epochs": epochs,
                        "frequency": frequency,
                        "seed": seed,
                    }

    def run(self, which: Run) -> Run:
        import methods

        methods.NETWORKS["mlp"] = lambda shape, classes, options: mlp(
            shape, (300, 300), classes
        )
        keras.utils.clear_session()
        frequency = which["frequency"]
        method = "base_erk" if frequency is None else "rigl_random"
        options = RIGL_OPTIONS | {
            "epochs": which["epochs"],
            "frequency": frequency or PUBLISHED,
        }
        model = methods.trained(
            which["net"],
            method,
            which["density"],
            which["seed"],
            self.data,
            options,
            which["rate"],
        )
        return {"accuracy": accuracy(model, self.data) / 100}

    def report(self, lines: list[Run]) -> str:
        by_case = groups(lines, "net", "density", "rate", "epochs", "frequency")
        ordered = sorted(
            by_case, key=lambda case: [value or 0 for value in case[1:]]
        )
        rows = [rigl_row(case, by_case) for case in ordered]
        about = sentences(
            """
            RigL and the random mask that it starts from, ERK, on scikit-learn's digits enlarged
            to 28 x 28, all at one learning rate of Adam. Ahead are points; the verdict is that
            of Student's test over the seeds at 5%.
            """
        )
        header = [
            "net",
            "density",
            "epochs",
            "rate",
            "method",
            "every",
            "test accuracy [%]",
        ]
        header += ["ahead", "verdict", "seeds", "tries", "edge"]
        return "# Moving masks\n\n" + about + markdown(header, rows)


def rigl_row(case: tuple, by_case: dict[tuple, list[Run]]) -> list[str]:
    """A row of the table."""
    from methods_summary import beside

    net, density, rate, epochs, frequency = case
    percent = column(by_case[case], "accuracy", 100)
    name = "random mask"
    compared = ["-", "-"]
    if frequency:
        frequencies = [
            other[4] for other in by_case if other[4] and other[:4] == case[:4]
        ]
        often = {PUBLISHED: "published", min(frequencies): "by default"}
        name = f"RigL, {often.get(frequency, 'rarer')}"
        static = by_case.get((*case[:-1], None))
        if static:
            ahead, _, verdict = beside(
                column(by_case[case], "accuracy"), column(static, "accuracy")
            )
            compared = [ahead, verdict]
    cells = [
        net,
        f"{density:g}",
        f"{epochs}",
        f"{rate:g}",
        name,
        f"{frequency or '-'}",
    ]
    cells += [mean_and_deviation(percent), *compared, f"{len(percent)}"]
    return [*cells, "1", "not tuned"]


def turned(
    images: np.ndarray, copies: int, rng: np.random.Generator
) -> np.ndarray:
    """Images of 8 x 8 on 28 x 28, each `copies` times, turned, moved and scaled a little."""
    from scipy import ndimage

    enlarged = np.empty((copies * len(images), 28, 28, 1), np.float32)
    for place, image in zip(enlarged, itertools.cycle(images), strict=False):
        angle, scale = rng.uniform(-0.35, 0.35), rng.uniform(0.75, 1.2)
        turn = np.array(
            [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
        )
        turn *= 7 / 27 / scale
        center = np.array([13.5, 13.5]) + rng.uniform(-3, 3, 2)
        shift = np.array([3.5, 3.5]) - turn @ center
        place[..., 0] = ndimage.affine_transform(
            image, turn, shift, (28, 28), order=1
        )
    return enlarged + rng.normal(0, 0.15, enlarged.shape).astype(np.float32)


def enlarged_digits(copies: int = 12, test_copies: int = 10) -> Dataset:
    """The training and the test set."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    x, y = load_digits(return_X_y=True)
    x, x_test, y, y_test = train_test_split(
        x.reshape(-1, 8, 8) / 16, y, test_size=0.25, stratify=y, random_state=0
    )
    rng = np.random.default_rng(0)
    train = turned(x, copies, rng)
    test = turned(x_test, test_copies, rng)
    mean, std = train.mean(), train.std()
    labels = np.tile(y, copies)
    test_labels = np.tile(y_test, test_copies)
    return Dataset(
        "digits", (train - mean) / std, labels, (test - mean) / std, test_labels
    )


# --- order ----------------------------------------------------------------------------------------

ORDER_BATCH = 128
ORDER_DENSITY = 0.1
FEEDS: dict[str, Callable[..., dict[str, Any]]] = {
    "arrays": lambda data, seed: whole_batches(
        data.x_train, data.y_train, ORDER_BATCH
    ),
    "dataset": lambda data, seed: shuffled(
        data.x_train, data.y_train, ORDER_BATCH, seed
    ),
}
"""By name, what makes the arguments of `fit`."""


class Order(Measurement):
    """Accuracy lost because Keras on TensorFlow repeats the order of batches once a seed is set.

        python benchmarks/choices.py order

    An MLP 784-512-256-10 on Fashion-MNIST, Adam, batch 128, dense and with a random mask: `fit`
    on arrays, and on a dataset that has another order in each epoch (training.py). Counts the
    orders that the first epochs see.
    """

    page = "batch_order"
    settings = {
        "epochs": Setting(10, quick=2),
        "seeds": Setting([0, 1, 2], quick=[0]),
        "samples": Setting(int, "train on so many only", quick=2048),
    }

    def runs(self) -> list[Run]:
        return grid(
            how=FEEDS, kind=("dense", "random mask"), seed=self.given.seeds
        )

    def run(self, which: Run) -> Run:
        data = first_rows(load("fashion_mnist"), self.given.samples)
        seed = which["seed"]
        keras.utils.set_random_seed(seed)
        model = mlp(data.x_train.shape[1:], (512, 256))
        if which["kind"] != "dense":
            model = kso.sparsify(
                model, ORDER_DENSITY, initializer="random_sparse", seed=seed
            )
        compiled(model, keras.optimizers.Adam(1e-3), jit_compile=False)
        model.fit(
            **FEEDS[which["how"]](data, seed),
            epochs=self.given.epochs,
            verbose=0,
        )
        return {"accuracy": accuracy(model, data)}

    def report(self, lines: list[Run]) -> str:
        rows = []
        for how, of_feed in groups(lines, "how").items():
            by_kind = groups(of_feed, "kind").values()
            accuracies = [
                mean_and_deviation(column(runs, "accuracy")) for runs in by_kind
            ]
            rows.append([how, f"{orders(how)} of 3", *accuracies])
        about = sentences(
            f"""
            {machine()}, {keras.backend.backend()}. MLP 784-512-256-10, Fashion-MNIST,
            {self.given.epochs} epochs of Adam, after `keras.utils.set_random_seed`; the random
            mask has the density {ORDER_DENSITY}. Test accuracy in percent, mean and standard
            deviation over seeds.
            """
        )
        header = ["`fit` on", "orders of epochs", "dense", "random mask"]
        return "# The order of batches\n\n" + about + markdown(header, rows)


def orders(how: str, epochs: int = 3) -> int:
    """Number of different first batches over some epochs, seen by a model that does not learn."""
    seen: list[float] = []

    class First(keras.callbacks.Callback):
        def on_train_batch_end(
            self, batch: int, logs: dict | None = None
        ) -> None:
            if batch == 0:
                seen.append(float((logs or {})["loss"]))

    rows = np.arange(10 * ORDER_BATCH, dtype="float32")[:, None]
    data = Dataset("rows", rows, rows[:, 0], rows, rows[:, 0])
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((1,)), keras.layers.Activation("linear")]
    )
    model.compile(loss=lambda y, outputs: outputs, jit_compile=False)
    model.fit(
        **FEEDS[how](data, 0), epochs=epochs, verbose=0, callbacks=[First()]
    )
    return len(set(seen))


if __name__ == "__main__":
    main(Untuned, OneRate, Rigl, Order)
