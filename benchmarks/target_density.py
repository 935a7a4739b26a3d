"""Target and final densities of soft thresholds under `TargetDensity`.

    python benchmarks/target_density.py [--backends tensorflow jax]

Sparsities of 50, 90, 95, 98 and 99% x MLP and CNN x SGD and Adam x 3 seeds x backends, under XLA,
on scikit-learn's digits: 120 runs, one process for each backend. Every run is a line of
`results/target_density.jsonl`; finished runs are not repeated.
Writes `results/target_density.md`.
"""

import argparse
import itertools
import os
import subprocess
import sys

from record import RESULTS, append, finished, markdown, parsed, told, write

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
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
    for settings in told(backend, missing):
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
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
        command = [sys.executable, *sys.argv, "--worker"]
        subprocess.run(command, env=os.environ | {"KERAS_BACKEND": backend}, check=True)
    summarize()


if __name__ == "__main__":
    main()
