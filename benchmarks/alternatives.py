"""This package against what one would take instead: TFMOT, a mask by hand, torch's own pruning.

python benchmarks/alternatives.py NAME [options]
"""

import functools
import gzip
import inspect
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
from record import (
    column,
    groups,
    machine,
    markdown,
    mean_and_deviation,
    sentences,
)
from runner import Measurement, Run, Setting, grid, interleaved, main, peak
from training import Dataset, first_rows, load, shuffled

# --- user code ------------------------------------------------------------------------------------
#
# `start` makes a dense model sparse, and returns the callbacks; `end` makes it plain again. The
# table counts the lines of their bodies.


def nothing(model: Any, density: float, steps: int) -> tuple[Any, list]:
    return model, []


def as_it_is(model: Any) -> Any:
    return model


def tfmot_start(model: Any, density: float, steps: int) -> tuple[Any, list]:
    import tensorflow_model_optimization as tfmot

    # TFMOT prunes at begin + k frequency: the last of these must be the end, or it ends too dense.
    begin, frequency = steps // 10, max(1, steps // 100)
    schedule = tfmot.sparsity.keras.PolynomialDecay(
        0.0,
        1 - density,
        begin,
        begin + steps * 6 // 10 // frequency * frequency,
        3,
        frequency,
    )
    model = tfmot.sparsity.keras.prune_low_magnitude(
        model, pruning_schedule=schedule
    )
    return model, [tfmot.sparsity.keras.UpdatePruningStep()]


def tfmot_end(model: Any) -> Any:
    import tensorflow_model_optimization as tfmot

    return tfmot.sparsity.keras.strip_pruning(model)


def by_budget_start(model: Any, density: float, steps: int) -> tuple[Any, list]:
    import tensorflow_model_optimization as tfmot

    import keras_sparse_ortho as kso

    # TFMOT prunes at begin + k frequency: the last of these must be the end, or it ends too dense.
    begin, frequency = steps // 10, max(1, steps // 100)
    schedule = tfmot.sparsity.keras.PolynomialDecay(
        0.0,
        1 - density,
        begin,
        begin + steps * 6 // 10 // frequency * frequency,
        3,
        frequency,
    )
    model = kso.tfmot.prune_by_budget(model, density, "erk", schedule)
    return model, [tfmot.sparsity.keras.UpdatePruningStep()]


def by_hand_start(model: Any, density: float, steps: int) -> tuple[Any, list]:
    import keras

    class Masked(keras.constraints.Constraint):
        def __init__(self, mask):
            self.mask = keras.ops.convert_to_tensor(mask, "float32")

        def __call__(self, weight):
            return weight * self.mask

    rng = np.random.default_rng(0)
    for layer in model.layers:
        if isinstance(layer, keras.layers.Dense):
            mask = rng.random(layer.kernel.shape) < density
            layer.kernel.assign(layer.kernel * mask)
            layer.kernel.constraint = Masked(mask)
    return model, []


def random_start(model: Any, density: float, steps: int) -> tuple[Any, list]:
    import keras_sparse_ortho as kso

    return kso.sparsify(model, density, initializer="random_sparse", seed=0), []


def eoi_start(model: Any, density: float, steps: int) -> tuple[Any, list]:
    import keras_sparse_ortho as kso

    return kso.sparsify(model, density, seed=0), []


def gmp_start(model: Any, density: float, steps: int) -> tuple[Any, list]:
    import keras_sparse_ortho as kso

    schedule = kso.schedules.Cubic(begin_step=0.1, end_step=0.7)
    model = kso.parametrize(model, kso.MagnitudeMask(schedule), density, "erk")
    return model, [kso.callbacks.UpdateMasks()]


def str_start(model: Any, density: float, steps: int) -> tuple[Any, list]:
    import keras_sparse_ortho as kso

    model = kso.parametrize(model, kso.SoftThreshold)
    return model, [kso.callbacks.TargetDensity(density)]


def ours_end(model: Any) -> Any:
    import keras_sparse_ortho as kso

    return kso.strip(model)


def torch_start(model: Any, density: float, steps: int) -> tuple[Any, list]:
    # Dense for half of the run, then all layers at once by magnitude, with fixed masks.
    import torch
    from torch.nn.utils import prune

    def cut(step):
        if step == steps // 2:
            kernels = [
                (m, "weight") for m in model if isinstance(m, torch.nn.Linear)
            ]
            prune.global_unstructured(
                kernels, prune.L1Unstructured, amount=1 - density
            )

    return model, [cut]


def torch_end(model: Any) -> Any:
    import torch
    from torch.nn.utils import prune

    for module in model:
        if isinstance(module, torch.nn.Linear):
            prune.remove(module, "weight")
    return model


USED: dict[str, tuple[str, Callable, Callable, str]] = {
    "dense_tf_keras": ("tf_keras", nothing, as_it_is, "the network itself"),
    "tfmot": (
        "tf_keras",
        tfmot_start,
        tfmot_end,
        "TFMOT, one sparsity for every layer",
    ),
    "tfmot_budget": (
        "tf_keras",
        by_budget_start,
        tfmot_end,
        "TFMOT under a budget of ours",
    ),
    "dense_keras": ("keras", nothing, as_it_is, "the network itself"),
    "by_hand": (
        "keras",
        by_hand_start,
        as_it_is,
        "random mask, a Keras constraint",
    ),
    "random": ("keras", random_start, ours_end, "ours: random mask"),
    "eoi": ("keras", eoi_start, ours_end, "ours: exactly orthogonal"),
    "gmp": ("keras", gmp_start, ours_end, "ours: gradual magnitude pruning"),
    "str": ("keras", str_start, ours_end, "ours: learnt thresholds"),
    "dense_torch": ("torch", nothing, as_it_is, "the network itself"),
    "torch_prune": (
        "torch",
        torch_start,
        torch_end,
        "torch.nn.utils.prune, at half the run",
    ),
}
"""Library, user code before and after training, and a description."""


def lines_of(*functions: Callable) -> int:
    """Lines of the bodies, without imports, comments, empty lines and returns."""
    count = 0
    for function in functions:
        if function in (nothing, as_it_is):
            continue
        for line in inspect.getsource(function).splitlines()[1:]:
            words = line.split()
            idle = (
                not words
                or words[0] in ("import", "from")
                or words[0].startswith("#")
            )
            count += not idle and line.strip() not in (
                "return model",
                "return model, []",
            )
    return count


# --- whole --------------------------------------------------------------------------------------

WIDTHS = (512, 256, 10)
BATCH = 128


class Whole(Measurement):
    """The whole way from a dense network to a plain sparse one, by each library.

        python benchmarks/alternatives.py whole                         # about an hour of 2 cores
        python benchmarks/alternatives.py whole --methods tfmot gmp --seeds 0

    One network (784-512-256-10), one data set (Fashion-MNIST), one optimizer (Adam, batch 128), one
    number of epochs, one global density. Every run has its own process. The table:

    - density reached: nonzero entries of the stripped model's kernels;
    - density while training: the mean over the ends of the epochs;
    - accuracy on the test set; seconds of an epoch, the median of all but the first, and their
      ratio to the dense network of the same library; no XLA, as is TFMOT's default;
    - memory: the largest resident set, less that after the imports and the data;
    - file: the stripped model as the library saves it, under gzip;
    - lines: user code that makes the network sparse and plain again (alternatives.py), without
      imports.
    """

    page = lines = "alternatives"
    apart = True
    settings = {
        "methods": Setting(
            [*USED],
            choices=USED,
            quick=["tfmot", "by_hand", "gmp", "torch_prune"],
        ),
        "dataset": Setting(
            "fashion_mnist", choices=["digits", "fashion_mnist"]
        ),
        "samples": Setting(int, "train on so many only", quick=2048),
        "epochs": Setting(10, quick=4),
        "density": Setting(0.1),
        "seeds": Setting([0, 1, 2], quick=[0]),
    }

    def runs(self) -> list[Run]:
        given = self.given
        names = ("dataset", "samples", "epochs", "density")
        setting = {name: getattr(given, name) for name in names}
        return [
            which | setting
            for which in grid(seed=given.seeds, method=given.methods)
        ]

    def run(self, which: Run) -> Run:
        """One run, in this process."""
        library, start, end, _ = USED[which["method"]]
        data = first_rows(load(which["dataset"]), which["samples"])
        train = train_torch if library == "torch" else train_keras
        package = prepared(library, which["seed"])
        before = peak()
        results = train(package, start, end, data, which)
        epochs = results["ends"]
        seconds = [seconds for seconds, _ in epochs]
        return {
            "density_reached": density_of(results["kernels"]),
            "density_in_training": statistics.mean(
                density for _, density in epochs
            ),
            "accuracy": results["accuracy"],
            "epoch_seconds": statistics.median(seconds[1:] or seconds),
            "memory_mib": results["peak"] - before,
            "file_kib": results["size"] / 1024,
        }

    def report(self, lines: list[Run]) -> str:
        """A table for each setting."""
        machines = ", ".join(
            sorted({line["made"]["machine"] for line in lines})
        )
        about = sentences(
            f"""
            {machines}. MLP 784-512-256-10 (64-512-256-10 for digits), Adam, batch 128, no XLA. Mean
            and standard deviation over seeds, of times the median. Densities are of all kernels
            together.
            """
        )
        text = (
            "# Beside what one would take instead\n\n"
            + about.rstrip("\n")
            + "\n"
        )
        by_setting = groups(lines, "dataset", "samples", "epochs", "density")
        for setting in sorted(
            by_setting, key=lambda key: (key[0], key[1] or 0, *key[2:])
        ):
            dataset, samples, epochs, density = setting
            some = f", {samples} samples" if samples else ""
            text += f"\n## {dataset}{some}, epochs: {epochs}, density asked for: {density}\n\n"
            text += whole_table(by_setting[setting])
        return text


def whole_table(lines: list[Run]) -> str:
    """The table of a setting."""
    by_method = groups(lines, "method")
    rows = []
    for method, (library, start, end, about) in USED.items():
        runs = by_method.get(method, [])
        if not runs:
            continue
        names = (
            "density_reached",
            "density_in_training",
            "memory_mib",
            "file_kib",
        )
        reached, training, memory, file = (
            statistics.mean(column(runs, name)) for name in names
        )
        seconds = statistics.median(column(runs, "epoch_seconds"))
        dense = column(by_method.get(f"dense_{library}", []), "epoch_seconds")
        row = [method, library, about, f"{reached:.4f}", f"{training:.3f}"]
        row += [
            mean_and_deviation(column(runs, "accuracy", 100)),
            f"{len(runs)}",
        ]
        row.append(f"{seconds:.2f}")
        row.append(
            f"{seconds / statistics.median(dense):.2f}" if dense else "-"
        )
        rows.append(
            [*row, f"{memory:.0f}", f"{file:.0f}", f"{lines_of(start, end)}"]
        )
    header = ["method", "library", "what", "density reached", "while training"]
    header += ["accuracy [%]", "seeds", "epoch [s]", "to dense", "memory [MiB]"]
    return markdown([*header, "file, gzip [KiB]", "lines"], rows)


def prepared(library: str, seed: int) -> Any:
    """A library, imported, with its random seed set."""
    if library == "torch":
        import torch

        torch.manual_seed(seed)
        return torch
    import keras

    import keras_sparse_ortho as kso

    package = (
        kso.tfmot.register_initializers() if library == "tf_keras" else keras
    )
    package.utils.set_random_seed(seed)
    return package


def density_of(kernels: list[np.ndarray]) -> float:
    """The nonzero fraction of all kernels."""
    return sum(np.count_nonzero(k) for k in kernels) / sum(
        k.size for k in kernels
    )


def train_keras(
    library: Any, start: Callable, end: Callable, data: Dataset, which: Run
) -> Run:
    """A run in Keras 3 or tf_keras."""
    L = library.layers
    steps = len(data.x_train) // BATCH * which["epochs"]
    hidden = [
        L.Dense(w, activation="relu", name=f"h{k}")
        for k, w in enumerate(WIDTHS[:-1])
    ]
    inputs = library.Input(data.x_train.shape[1:])
    dense = library.Sequential(
        [inputs, L.Flatten(), *hidden, L.Dense(WIDTHS[-1], name="head")]
    )
    model, callbacks = start(dense, which["density"], steps)
    ends: list[tuple[float, float]] = []

    class Watch(library.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.began = time.perf_counter()

        def on_epoch_end(self, epoch, logs=None):
            seconds = time.perf_counter() - self.began
            kernels = [
                np.asarray(w) for w in effective_kernels(library, self.model)
            ]
            ends.append((seconds, density_of(kernels)))

    loss = library.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        library.optimizers.Adam(1e-3),
        loss,
        metrics=["accuracy"],
        jit_compile=False,
    )
    rows = shuffled(data.x_train, data.y_train, BATCH, which["seed"])
    model.fit(
        **rows,
        epochs=which["epochs"],
        verbose=0,
        callbacks=[*callbacks, Watch()],
    )
    memory = peak()
    _, accuracy = model.evaluate(data.x_test, data.y_test, verbose=0)
    stripped = end(model)
    weights = stripped.get_weights()
    plain = library.models.clone_model(stripped)  # without an optimizer
    plain.set_weights(weights)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "model.weights.h5"
        plain.save_weights(path)
        size = len(gzip.compress(path.read_bytes()))
    kernels = [np.asarray(weight) for weight in weights if np.ndim(weight) == 2]
    results = {"ends": ends, "accuracy": float(accuracy), "size": size}
    return results | {"kernels": kernels, "peak": memory}


def effective_kernels(library: Any, model: Any) -> list[Any]:
    """The kernels; those of wrapped layers with masks and thresholds applied."""
    if library.__name__ == "keras":
        import keras_sparse_ortho as kso

        return [weight.value for weight in kso.prunable_weights(model)]
    return [v for v in model.trainable_weights if v.shape.rank == 2]


def train_torch(
    torch: Any, start: Callable, end: Callable, data: Dataset, which: Run
) -> Run:
    """A run in torch alone."""
    widths = (int(np.prod(data.x_train.shape[1:])), *WIDTHS)
    modules: list = [torch.nn.Flatten()]
    for k in range(len(WIDTHS)):
        modules += [torch.nn.Linear(widths[k], widths[k + 1]), torch.nn.ReLU()]
        torch.nn.init.xavier_uniform_(modules[-2].weight)
        torch.nn.init.zeros_(modules[-2].bias)
    model = torch.nn.Sequential(*modules[:-1])
    steps = len(data.x_train) // BATCH * which["epochs"]
    model, hooks = start(model, which["density"], steps)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    x, y = (
        torch.tensor(data.x_train),
        torch.tensor(data.y_train, dtype=torch.long),
    )
    ends = []
    step = 0
    for _ in range(which["epochs"]):
        began = time.perf_counter()
        order = torch.randperm(len(x))
        for first in range(0, len(x) - BATCH + 1, BATCH):
            for hook in hooks:
                hook(step)
            rows = order[first : first + BATCH]
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(
                model(x[rows]), y[rows]
            ).backward()
            optimizer.step()
            step += 1
        seconds = time.perf_counter() - began
        ends.append((seconds, density_of(torch_kernels(torch, model))))
    memory = peak()
    with torch.no_grad():
        classes = model(torch.tensor(data.x_test)).argmax(1).numpy()
    plain = end(model)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "model.pt"
        torch.save(plain.state_dict(), path)
        size = len(gzip.compress(path.read_bytes()))
    results = {
        "ends": ends,
        "accuracy": float((classes == data.y_test).mean()),
        "size": size,
    }
    return results | {"kernels": torch_kernels(torch, plain), "peak": memory}


def torch_kernels(torch: Any, model: Any) -> list[np.ndarray]:
    """The weights of the linear layers."""
    return [
        m.weight.detach().numpy()
        for m in model
        if isinstance(m, torch.nn.Linear)
    ]


# --- tfmot ----------------------------------------------------------------------------------------

STEPS = 2  # training steps in one sample: rivals take turns often, as the load may change
PERIOD = 100  # TFMOT's own default between two updates
NEVER = 10**9
SORTS = {"TopKV2", "TopK", "Sort", "ApproxTopK"}
UPDATING = "TFMOT, a step that updates"
BETWEEN = "TFMOT, between updates"


class Tfmot(Measurement):
    """Time of a training step of our TFMOT wrappers against TFMOT's own, interleaved, in tf_keras.

        python benchmarks/alternatives.py tfmot

    Rivals are the dense model, the same model in TFMOT's wrapper (between updates of its masks, and
    in a step that updates them), in `PruneWithMask` and in `PruneWithSoftThreshold`, and a second
    dense model, whose ratio to the first is the noise of the measurement. Also lists the operations
    of the graph: TFMOT finds its thresholds by sorting, in a branch of every step.
    """

    page = "tfmot"
    settings = {
        "rounds": Setting(41, quick=3),
        "width": Setting(1024, "of the MLP", quick=128),
        "cnn": Setting(True, quick=False),
    }

    def runs(self) -> list[Run]:
        networks = [{"network": "MLP", "batch": 128}]
        if self.given.cnn:
            networks.append({"network": "CNN", "batch": 64})
        jits = (False,) if self.given.quick else (False, True)
        return [network | {"xla": jit} for network in networks for jit in jits]

    def run(self, which: Run) -> Iterator[Run]:
        import keras_sparse_ortho as kso

        tf_keras = kso.tfmot.register_initializers()
        from tensorflow_model_optimization.sparsity.keras import (
            ConstantSparsity,
        )

        cnn = which["network"] == "CNN"
        dense = (
            tfmot_cnn(tf_keras)
            if cnn
            else tfmot_mlp(tf_keras, self.given.width)
        )
        prune = functools.partial(
            kso.tfmot.prune_by_budget, dense, 0.1, "uniform"
        )
        models = {
            "dense": dense,
            BETWEEN: prune(ConstantSparsity(0.9, begin_step=NEVER)),
            "PruneWithMask": kso.tfmot.prune_exact_orthogonal(
                dense, 0.1, seed=0
            ),
            "PruneWithSoftThreshold": kso.tfmot.prune_with_soft_threshold(
                dense, s_init=-5.0
            ),
            "dense again": tf_keras.models.clone_model(dense),
        }
        jit, batch = which["xla"], which["batch"]
        rivals = {
            name: Stepper(tf_keras, model, jit, batch)
            for name, model in models.items()
        }
        times = interleaved(rivals, self.given.rounds, warm_up=3)
        updating = Stepper(
            tf_keras, prune(ConstantSparsity(0.9, 0, frequency=1)), jit, batch
        )
        updating.steps(2)
        times[UPDATING] = (
            STEPS
            * interleaved({"": functools.partial(updating.steps, 1)}, 5)[""]
        )
        models[UPDATING] = updating.model
        update = (times[UPDATING] - times[BETWEEN]) / PERIOD
        times[f"TFMOT, updates every {PERIOD} steps"] = times[BETWEEN] + update
        for name, seconds in times.items():
            line = {"rival": name, "ms": 1e3 * seconds / STEPS}
            line |= {
                "to_dense": seconds / times["dense"],
                "to_tfmot": seconds / times[BETWEEN],
            }
            if name in models:
                line["sorts"] = bool(operations(models[name]) & SORTS)
            yield line

    def report(self, lines: list[Run]) -> str:
        import tensorflow as tf
        import tf_keras

        rows = []
        for line in lines:
            size = (
                f" 4 x {self.given.width}" if line["network"] == "MLP" else ""
            )
            xla = "XLA" if line["xla"] else "no XLA"
            row = [
                f"{line['network']}{size}, batch {line['batch']}, {xla}",
                line["rival"],
            ]
            row += [
                f"{line['ms']:.2f}",
                f"{line['to_dense']:.3f}",
                f"{line['to_tfmot']:.3f}",
            ]
            rows.append(
                [*row, {True: "yes", False: "no", None: ""}[line.get("sorts")]]
            )
        about = sentences(
            f"""
            {machine()}, tf_keras {tf_keras.__version__}, TensorFlow {tf.__version__}. Adam,
            float32, density 0.1. Medians of {self.given.rounds} interleaved samples of {STEPS}
            steps, of 5 single steps for the step that updates. "dense again" is the dense model
            against itself: the noise. "Updates every {PERIOD} steps" is computed from the two
            above.
            """
        )
        header = [
            "model",
            "rival",
            "step [ms]",
            "to dense",
            "to TFMOT between updates",
        ]
        title = (
            "# Training step in tf_keras: our wrappers against TFMOT's own\n\n"
        )
        return title + about + markdown([*header, "sort in graph"], rows)


def tfmot_mlp(tf_keras: Any, width: int) -> Any:
    """Four layers of one width, and a head."""
    L = tf_keras.layers
    layers = [
        L.Dense(width, activation="relu", name=f"hidden_{k}") for k in range(4)
    ]
    return tf_keras.Sequential(
        [tf_keras.Input((width,)), *layers, L.Dense(10, name="head")]
    )


def tfmot_cnn(tf_keras: Any) -> Any:
    """Four convolutions with batch normalization."""
    L = tf_keras.layers
    layers = [tf_keras.Input((32, 32, 3))]
    for k, filters in enumerate((32, 64, 64, 128)):
        layers += [
            L.Conv2D(
                filters,
                3,
                strides=1 + k % 2,
                padding="same",
                use_bias=False,
                name=f"c{k}",
            ),
            L.BatchNormalization(name=f"n{k}"),
            L.ReLU(name=f"r{k}"),
        ]
    layers += [L.GlobalAveragePooling2D(name="pool"), L.Dense(10, name="head")]
    return tf_keras.Sequential(layers)


class Stepper:
    """Trains `STEPS` steps on data that is in memory already."""

    def __init__(
        self, tf_keras: Any, model: Any, jit: bool, batch: int
    ) -> None:
        import tensorflow as tf
        from tensorflow_model_optimization.sparsity import keras as sparsity

        self.model = model
        loss = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(tf_keras.optimizers.Adam(1e-4), loss, jit_compile=jit)
        rng = np.random.default_rng(0)
        x = rng.normal(size=(4 * batch, *model.input_shape[1:])).astype(
            "float32"
        )
        y = rng.integers(0, 10, 4 * batch).astype("int32")
        data = (
            tf.data.Dataset.from_tensor_slices((x, y))
            .batch(batch, drop_remainder=True)
            .cache()
        )
        self._batches = iter(data.repeat())
        self._train = model.make_train_function()
        update = sparsity.UpdatePruningStep()
        update.set_model(model)
        update.on_train_begin()  # without it TFMOT's wrapper refuses to train

    def steps(self, count: int) -> None:
        """Trains some steps, and waits for them."""
        for _ in range(count):
            logs = self._train(self._batches)
        float(logs["loss"])

    def __call__(self) -> None:
        """One sample."""
        self.steps(STEPS)


def operations(model: Any) -> set[str]:
    """The kinds of operations in the graph of a call in training, branches included."""
    import tensorflow as tf

    spec = tf.TensorSpec((1, *model.input_shape[1:]), "float32")
    graph = (
        tf.function(lambda x: model(x, training=True))
        .get_concrete_function(spec)
        .graph
    )
    definition = graph.as_graph_def()
    kinds = {node.op for node in definition.node}
    for function in definition.library.function:
        kinds |= {node.op for node in function.node_def}
    return kinds


if __name__ == "__main__":
    main(Whole, Tfmot)
