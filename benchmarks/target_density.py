"""Whether training ends at the density asked for.

    python benchmarks/target_density.py NAME [options]

The measurements:

- `target`: target and final densities of soft thresholds under `TargetDensity`.
- `early_stopping`: final density with early stopping, for every method.
"""

import argparse
import itertools
import os
import pathlib
import subprocess
import sys
import warnings

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from record import (
    COMMAND,
    RESULTS,
    announced,
    append,
    chosen,
    described,
    finished,
    markdown,
    parsed,
    write,
)

# --- target ---------------------------------------------------------------------------------------

LINES = RESULTS / "target_density.jsonl"
DENSITIES = (0.5, 0.1, 0.05, 0.02, 0.01)
NETS = ("MLP", "CNN")
OPTIMIZERS = ("SGD", "Adam")
SEEDS = (0, 1, 2)
EPOCHS = 20


def key(run: dict) -> tuple:
    """The key of a run."""
    names = ("backend", "net", "optimizer", "density", "seed")
    return (*(run[name] for name in names), run.get("epochs", EPOCHS))


def train(net: str, optimizer: str, density: float, seed: int, epochs: int) -> dict:
    """One run, on the backend of this process."""
    import keras
    from sklearn.datasets import load_digits

    import keras_sparse_ortho as kso

    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    x, y = load_digits(return_X_y=True)
    x = x.astype("float32") / 16
    if net == "MLP":
        body = [keras.Input((64,))]
        body += [layers.Dense(256, activation="relu", name=f"hidden_{k}") for k in range(2)]
    else:
        x = x.reshape(-1, 8, 8, 1)
        body = [keras.Input((8, 8, 1))]
        for k, (filters, strides) in enumerate(((32, 1), (64, 2), (64, 1))):
            body += [
                layers.Conv2D(filters, 3, strides, "same", use_bias=False, name=f"conv_{k}"),
                layers.BatchNormalization(),
                layers.ReLU(),
            ]
        body.append(layers.GlobalAveragePooling2D())
    model = keras.Sequential([*body, layers.Dense(10, name="head")])
    model = kso.parametrize(model, kso.parametrizations.SoftThreshold())
    algorithm = {
        "SGD": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        "Adam": lambda: keras.optimizers.Adam(2e-3),
    }[optimizer]()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(algorithm, loss, metrics=["accuracy"], jit_compile=True)
    steering = kso.callbacks.TargetDensity(density, frequency=20)
    model.fit(x[:1440], y[:1440], batch_size=32, epochs=epochs, verbose=0, callbacks=[steering])
    budget = kso.Budget.from_model(model)
    accuracy = model.evaluate(x[1440:], y[1440:], verbose=0)[1]
    return {
        "backend": keras.backend.backend(),
        "net": net,
        "optimizer": optimizer,
        "density": density,
        "seed": seed,
        "epochs": epochs,
        "size": budget.size,
        "live": budget.live,
        "accuracy": float(accuracy),
    }


def run_missing(backend: str, options: argparse.Namespace) -> None:
    """All missing runs of this process' backend."""
    there = {key(run) for run in finished(LINES)}
    grid = options.nets, options.optimizers, options.densities, options.seeds
    missing = [
        settings
        for settings in itertools.product(*grid)
        if (backend, *settings, options.epochs) not in there
    ]
    for settings in announced(backend, missing):
        run = train(*settings, options.epochs)
        append(LINES, run)
        print(run, flush=True)


def miss(run: dict) -> float:
    """Relative distance of the final density from the target."""
    return abs(run["live"] / run["size"] - run["density"]) / run["density"]


def summarize() -> None:
    """The table."""
    runs = finished(LINES)
    rows = []
    for net, optimizer, density, backend in itertools.product(
        NETS, OPTIMIZERS, DENSITIES, sorted({run["backend"] for run in runs})
    ):
        mine = [run for run in runs if key(run)[:4] == (backend, net, optimizer, density)]
        if not mine:
            continue
        reached = [run["live"] / run["size"] for run in mine]
        rows.append(
            [
                net,
                optimizer,
                backend,
                f"{density}",
                f"{min(reached):.5f} to {max(reached):.5f}",
                f"{100 * max(map(miss, mine)):.3f}%",
                f"{100 * sum(run['accuracy'] for run in mine) / len(mine):.1f}%",
                f"{len(mine)}",
            ]
        )
    epochs = " and ".join(sorted({str(key(run)[-1]) for run in runs}))
    text = "# Soft thresholds under TargetDensity: asked and reached densities\n\n"
    text += f"{len(runs)} runs of {epochs} epochs on scikit-learn's digits, XLA. "
    text += (
        "MLP 64-256-256-10, CNN of three convolutions. The largest relative miss of all runs is "
    )
    text += f"{100 * max(map(miss, runs)):.3f}%.\n\n"
    header = ["net", "optimizer", "backend", "asked", "reached", "largest miss", "accuracy", "runs"]
    write("target_density", text + markdown(header, rows), {run["seed"] for run in runs})


def target() -> None:
    """Target and final densities of soft thresholds under `TargetDensity`.

        python benchmarks/target_density.py target [--backends tensorflow jax]

    Sparsities of 50, 90, 95, 98 and 99% x MLP and CNN x SGD and Adam x 3 seeds x backends, under
    XLA, on scikit-learn's digits: 120 runs, one process for each backend. Every run is a line of
    `results/target_density.jsonl`; finished runs are not repeated. Writes
    `results/target_density.md`.
    """
    parser = described(target)
    parser.add_argument("--backends", nargs="+", default=["tensorflow", "jax"])
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--nets", nargs="+", choices=NETS, default=NETS)
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=OPTIMIZERS)
    parser.add_argument("--densities", nargs="+", type=float, default=DENSITIES)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    quick = {"backends": ["tensorflow"], "nets": ["MLP"], "optimizers": ["Adam"]}
    quick |= {"densities": [0.1, 0.02], "seeds": [0], "epochs": 4}
    options = parsed(parser, quick)
    if options.worker:
        run_missing(os.environ["KERAS_BACKEND"], options)
        return
    for backend in options.backends:
        command = [sys.executable, *COMMAND, "--worker"]
        subprocess.run(command, env=os.environ | {"KERAS_BACKEND": backend}, check=True)
    summarize()


# --- early_stopping -------------------------------------------------------------------------------

ROOT = pathlib.Path(__file__).parents[1]
METHODS = ("FixedMask", "SET", "RigL", "STR", "channel STR", "GMP", "DNW")


def network(method: str, density: float, x, y) -> tuple:
    """The model, not compiled, and the callbacks of the method."""
    import keras

    import keras_sparse_ortho as kso

    layers = keras.layers
    dense = keras.Sequential(
        [
            keras.Input((784,)),
            layers.Dense(300, activation="relu", name="hidden_1"),
            layers.Dense(100, activation="relu", name="hidden_2"),
            layers.Dense(10, name="head"),
        ]
    )
    ramp = kso.schedules.Cubic(density)
    if method in ("FixedMask", "SET", "RigL"):
        model = kso.sparsify(dense, density, seed=0)
        moving = {"SET": kso.callbacks.SET, "RigL": lambda: kso.callbacks.RigL((x, y), 128)}
        return model, [moving[method]()] if method in moving else []
    if method in ("GMP", "DNW"):
        kind = {"GMP": kso.MagnitudeMask, "DNW": kso.parametrizations.StraightThroughTopK}[method]
        return kso.parametrize(dense, kind(ramp)), [kso.callbacks.UpdateMasks()]
    if method == "STR":
        return kso.parametrize(dense, kso.SoftThreshold), [kso.callbacks.TargetDensity(density)]
    model = kso.parametrize(dense, kso.parametrizations.ChannelSoftThreshold, exclude="head")
    # Fewer whole channels can be removed: half of them.
    return model, [kso.callbacks.TargetDensity(0.5)]


def run(method: str, density: float, epochs: int, samples: int, careful: bool) -> dict:
    """One run."""
    import keras

    import keras_sparse_ortho as kso

    sys.path.insert(0, str(ROOT / "examples"))
    from data import load

    data = load("fashion_mnist")
    some = slice(samples + samples // 4)
    x, y = data.x_train[some].reshape(-1, 784), data.y_train[some]
    keras.utils.set_random_seed(0)
    model, callbacks = network(method, density, x[:samples], y[:samples])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"])
    stop = keras.callbacks.EarlyStopping(
        "val_accuracy", mode="max", patience=2, restore_best_weights=True
    )
    around = kso.callbacks.BestAtDensity(stop) if careful else stop
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        history = model.fit(
            *(x[:samples], y[:samples], 128, epochs),
            verbose=0,
            validation_data=(x[samples:], y[samples:]),
            callbacks=[*callbacks, around],
        )
    weights = [w for w in kso.prunable_weights(model) if w.parametrization is not None]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kso.errors.DensityWarning)
        _, accuracy = model.evaluate(data.x_test.reshape(-1, 784), data.y_test, verbose=0)
    return {
        "epochs": len(history.history["loss"]),
        "best": stop.best_epoch + 1,
        "size": sum(w.size for w in weights),
        "live": sum(w.live for w in weights),
        "warned": any(w.category is kso.errors.DensityWarning for w in told),
        "accuracy": accuracy,
    }


def early_stopping() -> None:
    """Final density with early stopping, for every method.

        python benchmarks/target_density.py early_stopping [--density 0.05] [--epochs 20]

    An MLP 784-300-100-10 on 20,000 images of Fashion-MNIST and 5,000 more for validation, with
    each method, for at most `epochs` epochs: once with `EarlyStopping(patience=2,
    restore_best_weights=True)` alone, once inside `BestAtDensity`. Writes
    `results/early_stopping.md`; fails unless every run with `BestAtDensity` ends at the target
    density, and every other run does or warns.
    """
    parser = described(early_stopping)
    parser.add_argument("--density", type=float, default=0.05)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--samples", type=int, default=20000)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    arguments = parsed(parser, {"epochs": 4, "samples": 2000, "methods": ["STR", "GMP"]})
    lines = [
        "# EarlyStopping, and the density asked for",
        "",
        f"784-300-100-10 on {arguments.samples:,} pictures of",
        f"Fashion-MNIST, at most {arguments.epochs} epochs, one seed, "
        "`EarlyStopping(patience=2, restore_best_weights=True)` alone and",
        "inside `BestAtDensity`. The best epoch is the one that was restored; accuracy is that of",
        "the test set. Channels of the last layer stay, the others end at half.",
        "",
        "| method | asked | alone: of epochs, the best | density | warned | accuracy "
        "| `BestAtDensity`: of epochs, the best | density | warned | accuracy |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    wrong = []
    for method in arguments.methods:
        asked = 0.5 if method == "channel STR" else arguments.density
        cells = []
        for careful in (False, True):
            told = run(method, arguments.density, arguments.epochs, arguments.samples, careful)
            # To within one entry of each weight, or one channel.
            slack = 784 if method == "channel STR" else 3
            there = abs(told["live"] - asked * told["size"]) <= slack
            if not there and (careful or not told["warned"]):
                wrong.append((method, careful, told))
            cells.append(
                f"{told['epochs']}, {told['best']} | {told['live'] / told['size']:.4f} "
                f"| {'yes' if told['warned'] else 'no'} | {told['accuracy']:.4f}"
            )
            print(method, "BestAtDensity" if careful else "alone", told, flush=True)
        lines.append(f"| {method} | {asked} | {cells[0]} | {cells[1]} |")
    if wrong:
        sys.exit(f"not at the density asked for, and no warning: {wrong}")
    write("early_stopping", "\n".join(lines) + "\n")


if __name__ == "__main__":
    chosen(target, early_stopping)
