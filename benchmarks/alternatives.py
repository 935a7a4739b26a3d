"""This package against the alternatives: TFMOT, a mask by hand, torch's own pruning.

    python benchmarks/alternatives.py                                   # about an hour of 2 cores
    python benchmarks/alternatives.py --methods tfmot gmp --seeds 0
    python benchmarks/alternatives.py --summary                         # the table of finished runs

One network (784-512-256-10), one data set (Fashion-MNIST), one optimizer (Adam, batch 128), one
number of epochs, one global density. Every run has its own process and is a line of
`results/alternatives.jsonl`; finished runs are not repeated. The table is
`results/alternatives.md`:

- density reached: nonzero entries of the stripped model's kernels;
- density while training: the mean over the ends of the epochs;
- accuracy on the test set; seconds of an epoch, the median of all but the first, and their ratio to
  the dense network of the same library; no XLA, as is TFMOT's default;
- memory: the largest resident set, less that after the imports and the data;
- file: the stripped model as the library saves it, under gzip;
- lines: user code that makes the network sparse and plain again (alternatives.py), without
  imports.
"""

import argparse
import gzip
import inspect
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
from record import COMMAND, RESULTS, announced, append, finished, markdown, parsed, write
from training import Dataset, load, shuffled

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
        0.0, 1 - density, begin, begin + steps * 6 // 10 // frequency * frequency, 3, frequency
    )
    model = tfmot.sparsity.keras.prune_low_magnitude(model, pruning_schedule=schedule)
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
        0.0, 1 - density, begin, begin + steps * 6 // 10 // frequency * frequency, 3, frequency
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
            kernels = [(m, "weight") for m in model if isinstance(m, torch.nn.Linear)]
            prune.global_unstructured(kernels, prune.L1Unstructured, amount=1 - density)

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
    "tfmot": ("tf_keras", tfmot_start, tfmot_end, "TFMOT, one sparsity for every layer"),
    "tfmot_budget": ("tf_keras", by_budget_start, tfmot_end, "TFMOT under a budget of ours"),
    "dense_keras": ("keras", nothing, as_it_is, "the network itself"),
    "by_hand": ("keras", by_hand_start, as_it_is, "random mask, a Keras constraint"),
    "random": ("keras", random_start, ours_end, "ours: random mask"),
    "eoi": ("keras", eoi_start, ours_end, "ours: exactly orthogonal"),
    "gmp": ("keras", gmp_start, ours_end, "ours: gradual magnitude pruning"),
    "str": ("keras", str_start, ours_end, "ours: learnt thresholds"),
    "dense_torch": ("torch", nothing, as_it_is, "the network itself"),
    "torch_prune": ("torch", torch_start, torch_end, "torch.nn.utils.prune, at half the run"),
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
            idle = not words or words[0] in ("import", "from") or words[0].startswith("#")
            count += not idle and line.strip() not in ("return model", "return model, []")
    return count


WIDTHS = (512, 256, 10)
BATCH = 128


# --- one run --------------------------------------------------------------------------------------


def peak() -> float:
    """The largest resident set of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def density_of(kernels: list[np.ndarray]) -> float:
    """The nonzero fraction of all kernels."""
    return sum(np.count_nonzero(k) for k in kernels) / sum(k.size for k in kernels)


def train_keras(
    library: Any, used: tuple, data: Dataset, given: argparse.Namespace, seed: int
) -> dict:
    """A run in Keras 3 or tf_keras."""
    _, start, end, _ = used
    L = library.layers
    steps = len(data.x_train) // BATCH * given.epochs
    hidden = [L.Dense(w, activation="relu", name=f"h{k}") for k, w in enumerate(WIDTHS[:-1])]
    inputs = library.Input(data.x_train.shape[1:])
    dense = library.Sequential([inputs, L.Flatten(), *hidden, L.Dense(WIDTHS[-1], name="head")])
    model, callbacks = start(dense, given.density, steps)
    ends: list[tuple[float, float]] = []

    class Watch(library.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.began = time.perf_counter()

        def on_epoch_end(self, epoch, logs=None):
            seconds = time.perf_counter() - self.began
            kernels = [np.asarray(w) for w in kernels_of(self.model)]
            ends.append((seconds, density_of(kernels)))

    def kernels_of(model: Any) -> list:
        # Wrapped layers: the effective weights, with masks and thresholds applied.
        if library.__name__ == "keras":
            import keras_sparse_ortho as kso

            return [weight.value for weight in kso.prunable_weights(model)]
        return [v for v in model.trainable_weights if v.shape.rank == 2]

    loss = library.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(library.optimizers.Adam(1e-3), loss, metrics=["accuracy"], jit_compile=False)
    rows = shuffled(data.x_train, data.y_train, BATCH, seed)
    model.fit(**rows, epochs=given.epochs, verbose=0, callbacks=[*callbacks, Watch()])
    used_memory = peak()
    _, accuracy = model.evaluate(data.x_test, data.y_test, verbose=0)
    plain = end(model)
    kernels = [np.asarray(w) for w in plain.get_weights() if np.ndim(w) == 2]
    weights = plain.get_weights()
    plain = library.models.clone_model(plain)  # without an optimizer
    plain.set_weights(weights)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "model.h5"
        plain.save_weights(path.with_suffix(".weights.h5"))
        size = len(gzip.compress(path.with_suffix(".weights.h5").read_bytes()))
    return {"ends": ends, "accuracy": float(accuracy), "size": size, "kernels": kernels} | {
        "peak": used_memory
    }


def train_torch(used: tuple, data: Dataset, given: argparse.Namespace) -> dict:
    """A run in torch alone."""
    import torch

    _, start, end, _ = used
    widths = (int(np.prod(data.x_train.shape[1:])), *WIDTHS)
    modules: list = [torch.nn.Flatten()]
    for k in range(len(WIDTHS)):
        modules += [torch.nn.Linear(widths[k], widths[k + 1]), torch.nn.ReLU()]
        torch.nn.init.xavier_uniform_(modules[-2].weight)
        torch.nn.init.zeros_(modules[-2].bias)
    model = torch.nn.Sequential(*modules[:-1])
    steps = len(data.x_train) // BATCH * given.epochs
    model, hooks = start(model, given.density, steps)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    x, y = torch.tensor(data.x_train), torch.tensor(data.y_train, dtype=torch.long)
    ends, step = [], 0
    for _ in range(given.epochs):
        began = time.perf_counter()
        order = torch.randperm(len(x))
        for first in range(0, len(x) - BATCH + 1, BATCH):
            for hook in hooks:
                hook(step)
            rows = order[first : first + BATCH]
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
            step += 1
        seconds = time.perf_counter() - began
        kernels = [m.weight.detach().numpy() for m in model if isinstance(m, torch.nn.Linear)]
        ends.append((seconds, density_of(kernels)))
    used_memory = peak()
    with torch.no_grad():
        found = model(torch.tensor(data.x_test)).argmax(1).numpy()
    plain = end(model)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "model.pt"
        torch.save(plain.state_dict(), path)
        size = len(gzip.compress(path.read_bytes()))
    kernels = [m.weight.detach().numpy() for m in plain if isinstance(m, torch.nn.Linear)]
    return {
        "ends": ends,
        "accuracy": float((found == data.y_test).mean()),
        "size": size,
        "kernels": kernels,
        "peak": used_memory,
    }


def one(method: str, seed: int, given: argparse.Namespace) -> dict:
    """One run, in this process."""
    used = USED[method]
    data = load(given.dataset)
    few = slice(given.samples)
    data = Dataset(data.name, data.x_train[few], data.y_train[few], data.x_test, data.y_test)
    library: Any = None
    if used[0] == "torch":
        import torch

        torch.manual_seed(seed)
    elif used[0] == "tf_keras":
        import keras_sparse_ortho as kso

        library = kso.tfmot.register_initializers()
    else:
        import keras as library

        import keras_sparse_ortho  # noqa: F401
    if library is not None:
        library.utils.set_random_seed(seed)
    before = peak()
    found = train_torch(used, data, given) if library is None else None
    found = found or train_keras(library, used, data, given, seed)
    ends = found["ends"]
    return {
        **key_of(method, seed, given),
        "density_reached": density_of(found["kernels"]),
        "density_in_training": statistics.mean(density for _, density in ends),
        "accuracy": found["accuracy"],
        "epoch_seconds": statistics.median([s for s, _ in ends[1:]] or [ends[0][0]]),
        "memory_mib": found["peak"] - before,
        "file_kib": found["size"] / 1024,
    }


def key_of(method: str, seed: int, given: argparse.Namespace) -> dict:
    """The key of a run."""
    names = ("dataset", "samples", "epochs", "density")
    return {"method": method, "seed": seed} | {name: getattr(given, name) for name in names}


# --- all of them ----------------------------------------------------------------------------------


def summarize(runs: list[dict]) -> str:
    """The page: a table for each setting."""
    text = "# Beside what one would take instead\n\n"
    made = ", ".join(sorted({run["made"]["machine"] for run in runs}))
    text += f"{made}. MLP 784-512-256-10 (64-512-256-10 for digits), Adam, batch 128, no XLA. "
    text += "Mean and standard deviation over seeds, of times the median. Densities are of all "
    text += "kernels together.\n"
    settings = sorted({(r["dataset"], r["samples"] or 0, r["epochs"], r["density"]) for r in runs})
    for dataset, samples, epochs, density in settings:
        mine = [
            r
            for r in runs
            if (r["dataset"], r["samples"] or 0, r["epochs"], r["density"])
            == (dataset, samples, epochs, density)
        ]
        rows = []
        for method, (library, start, end, about) in USED.items():
            these = [r for r in mine if r["method"] == method]
            if not these:
                continue
            mean = {
                name: statistics.mean(r[name] for r in these)
                for name in these[0]
                if isinstance(these[0][name], float)
            }
            dense = [r["epoch_seconds"] for r in mine if r["method"] == f"dense_{library}"]
            seconds = statistics.median(r["epoch_seconds"] for r in these)
            ratio = f"{seconds / statistics.median(dense):.2f}" if dense else "-"
            accuracies = [100 * r["accuracy"] for r in these]
            spread = f" +- {statistics.stdev(accuracies):.2f}" if len(these) > 1 else ""
            rows.append(
                [
                    method,
                    library,
                    about,
                    f"{mean['density_reached']:.4f}",
                    f"{mean['density_in_training']:.3f}",
                    f"{statistics.mean(accuracies):.2f}{spread}",
                    f"{len(these)}",
                    f"{seconds:.2f}",
                    ratio,
                    f"{mean['memory_mib']:.0f}",
                    f"{mean['file_kib']:.0f}",
                    f"{lines_of(start, end)}",
                ]
            )
        header = ["method", "library", "what", "density reached", "while training"]
        header += ["accuracy [%]", "seeds", "epoch [s]", "to dense", "memory [MiB]"]
        header += ["file, gzip [KiB]", "lines"]
        part = f", {samples} samples" if samples else ""
        text += f"\n## {dataset}{part}, epochs: {epochs}, density asked for: {density}\n\n"
        text += markdown(header, rows)
    return text


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", nargs="+", choices=USED, default=[*USED])
    parser.add_argument("--dataset", choices=["digits", "fashion_mnist"], default="fashion_mnist")
    parser.add_argument("--samples", type=int, help="train on so many only")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--density", type=float, default=0.1)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--summary", action="store_true", help="only write the table")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    quick = {"samples": 2048, "epochs": 4, "seeds": [0]}
    quick |= {"methods": ["tfmot", "by_hand", "gmp", "torch_prune"]}
    given = parsed(parser, quick)
    if given.one:
        (method,), (seed,) = given.methods, given.seeds
        print(json.dumps(one(method, seed, given)))
        return
    lines = RESULTS / "alternatives.jsonl"
    there = finished(lines)
    missing = [
        (method, seed)
        for seed in given.seeds
        for method in ([] if given.summary else given.methods)
        if not any(run | key_of(method, seed, given) == run for run in there)
    ]
    for method, seed in announced("alternatives", missing):
        command = [sys.executable, *COMMAND, "--one", "--methods", method]
        done = subprocess.run(
            [*command, "--seeds", str(seed)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"{method} has failed:\n{done.stderr[-3000:]}")
        run = json.loads(done.stdout.splitlines()[-1])
        print(run, flush=True)
        append(lines, run)
    if not (there := finished(lines)):
        parser.error("nothing is measured yet")
    write("alternatives", summarize(there), {run["seed"] for run in there})


if __name__ == "__main__":
    main()
