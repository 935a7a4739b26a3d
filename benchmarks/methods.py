"""Accuracy and FLOPs of sparse training methods on Fashion-MNIST.

    python benchmarks/methods.py                                  # the small CNN, the whole grid
    python benchmarks/methods.py --net resnet20 --methods dense eoi_erk rigl
    python benchmarks/methods.py --summary                        # the table of what is there

Settings stand in `methods.toml`. Every finished run is a line of `results/methods.jsonl`; runs that
are there are not repeated, so the script can be killed, started again, and run in parts. The table
goes to `results/methods.md`, with the time ratios that `methods_time.py` has measured.
"""

import argparse
import itertools
import json
import os
import pathlib
import statistics
import tomllib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from example_data import Dataset, load
from methods_table import METHODS
from networks import NETWORKS
from timing import machine, markdown

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import BudgetError

HERE = pathlib.Path(__file__).parent
TIMES = "methods_time.json"
Run = dict


def build(net: str, method: str, density: float, seed: int, data: Dataset, options: dict) -> tuple:
    """A fresh network under a method, compiled; its callbacks; and the plan of the run."""
    keras.utils.set_random_seed(seed)
    steps = len(data.x_train) // options["batch_size"] * options["epochs"]
    dense = NETWORKS[net](data.x_train.shape[1:], data.classes, options["filters"])
    frequency = min(options["frequency"], max(steps // 10, 1))
    plan = {"density": density, "seed": seed, "steps": steps, "frequency": frequency}
    plan |= {"data": (data.x_train, data.y_train), "batch_size": options["batch_size"]}
    name = f"{net}_{options['epochs']}_epochs_str_{density}_{seed}.csv"
    plan["budget_file"] = options["budgets"] / name
    model, callbacks = METHODS[method](dense, plan)
    rate = keras.optimizers.schedules.CosineDecay(options["learning_rate"], steps)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        keras.optimizers.Adam(rate), loss, metrics=["accuracy"], jit_compile=options["jit"]
    )
    return model, callbacks, plan


def train(net: str, method: str, density: float, seed: int, data: Dataset, options: dict) -> Run:
    """One run: a fresh network, the method, training, the test set."""
    keras.utils.clear_session()
    model, callbacks, plan = build(net, method, density, seed, data, options)
    kept = len(data.x_train) // options["batch_size"] * options["batch_size"]
    model.fit(
        data.x_train[:kept],  # whole batches: one compilation
        data.y_train[:kept],
        batch_size=options["batch_size"],
        epochs=options["epochs"],
        verbose=0,
        callbacks=callbacks,
    )
    accuracy = model.evaluate(data.x_test, data.y_test, batch_size=500, verbose=0)[1]
    if method == "str":
        plan["budget_file"].parent.mkdir(parents=True, exist_ok=True)
        kso.Budget.from_model(model).save(plan["budget_file"])
    weights = kso.prunable_weights(model, flops=True)
    return {
        "net": net,
        "method": method,
        "density": density,
        "seed": seed,
        "accuracy": float(accuracy),
        "live": sum(weight.live for weight in weights),
        "size": sum(weight.size for weight in weights),
        "flops": sum(weight.sparse_flops or 0 for weight in weights),
        "epochs": options["epochs"],
        "jit": options["jit"],
        "backend": keras.backend.backend(),
    }


def finished(lines: pathlib.Path) -> list[Run]:
    """The runs in a file of JSON lines; a line that was cut off by a kill is not one."""
    runs = []
    for line in lines.read_text().splitlines() if lines.exists() else []:
        try:
            runs.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return runs


def identity(run: Run) -> tuple:
    """What tells runs apart; a dense network has no density."""
    density = None if run["method"] == "dense" else run["density"]
    return run["net"], run["epochs"], run["method"], density, run["seed"]


def run_missing(lines: pathlib.Path, net: str, grid: dict, data: Dataset, options: dict) -> None:
    """Trains what is asked for and not there yet, `str` before what takes its budget."""
    there = {identity(run) for run in finished(lines)}
    order = sorted(grid["methods"], key=list(METHODS).index)
    for seed, density, method in itertools.product(grid["seeds"], grid["densities"], order):
        wanted = {"net": net, "method": method, "density": density, "seed": seed}
        wanted["epochs"] = options["epochs"]
        if identity(wanted) in there:
            continue
        try:
            run = train(net, method, density, seed, data, options)
        except BudgetError as error:  # a mask that leaves a layer nothing: no run, and no line
            print(f"{net} {method} density {density} seed {seed}: {error}", flush=True)
            continue
        there.add(identity(run))
        lines.parent.mkdir(parents=True, exist_ok=True)
        with lines.open("a") as file:
            file.write(json.dumps(run) + "\n")
        print(
            f"{net} {method} density {density} seed {seed}: accuracy {run['accuracy']:.4f}",
            flush=True,
        )


def _mean(values: list[float], scale: float = 1.0) -> str:
    mean = scale * statistics.mean(values)
    if len(values) == 1:
        return f"{mean:.2f}"
    return f"{mean:.2f} +- {scale * statistics.stdev(values):.2f}"


def table(runs: list[Run], ratios: dict[str, float]) -> str:
    """Mean and standard deviation over the seeds, for each method and density."""
    densities = {run["density"] for run in runs if run["method"] != "dense"}
    densities = sorted(densities, reverse=True)
    rows = []
    for density, method in itertools.product([None, *densities], METHODS):
        mine = [run for run in runs if identity(run)[2:4] == (method, density)]
        if not mine:
            continue
        flops = np.mean([run["flops"] for run in mine]) / 1e6
        rows.append(
            [
                "1" if density is None else f"{density}",
                method,
                _mean([run["accuracy"] for run in mine], 100),
                f"{len(mine)}",
                f"{np.mean([run['live'] / run['size'] for run in mine]):.4f}",
                f"{flops:.3f}",
                f"{ratios[method]:.2f}" if method in ratios else "-",
            ]
        )
    header = ["density", "method", "test accuracy [%]", "seeds", "reached", "MFLOPs", "time ratio"]
    return markdown(header, rows)


def summarize(lines: pathlib.Path, settings: dict) -> str:
    """The text of `results/methods.md`."""
    runs = finished(lines)
    text = f"# Methods on Fashion-MNIST\n\n{machine()}, Keras {keras.__version__} on "
    text += f"{', '.join(sorted({run['backend'] for run in runs}))}. Adam, cosine decay. "
    text += "Mean and standard deviation over seeds. `reached` is the live fraction in the end, "
    text += "MFLOPs are multiply-adds of the live entries for one sample. The time ratio is that "
    text += "of training against the dense network, without compilation and what sets up an epoch, "
    text += "timed apart and interleaved by `methods_time.py` at one density. A method without a "
    text += "row has not been run, or left a layer without any live entry (layer collapse).\n"
    times = lines.with_name(TIMES)
    ratios = json.loads(times.read_text()) if times.exists() else {}
    for net, epochs in sorted({identity(run)[:2] for run in runs}):
        mine = [run for run in runs if identity(run)[:2] == (net, epochs)]
        about = ", ".join(f"{key} {settings[net][key]}" for key in ("filters", "batch_size"))
        compiled = sorted({run["jit"] for run in mine})
        about += ", " + " and ".join("XLA" if jit else "no XLA" for jit in compiled)
        timed = ratios.get(net, {})
        text += f"\n## {net}, epochs: {epochs}\n\n{about}\n\n{table(mine, timed)}"
        if timed:
            text += f"\nThe dense network against itself: {timed['dense again']:.2f}.\n"
    return text


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    settings = tomllib.loads((HERE / "methods.toml").read_text())
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--net", choices=settings, default="cnn")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--densities", nargs="+", type=float)
    parser.add_argument("--seeds", nargs="+", type=int)
    parser.add_argument("--dataset", choices=["digits", "fashion_mnist"])
    parser.add_argument("--samples", type=int, help="train on so many samples only")
    parser.add_argument("--epochs", type=int, help="instead of those of methods.toml")
    parser.add_argument("--no-jit", action="store_true", help="without XLA")
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results" / "methods.jsonl")
    parser.add_argument("--summary", action="store_true", help="only write the table")
    given = parser.parse_args(arguments)
    options = dict(settings[given.net])
    options["jit"] = not given.no_jit
    options["budgets"] = given.out.parent / "budgets"
    if given.epochs:
        options["epochs"] = given.epochs
    if not given.summary:
        data = load(given.dataset or options["dataset"])
        if given.samples:
            data = Dataset(
                data.name,
                data.x_train[: given.samples],
                data.y_train[: given.samples],
                data.x_test[: given.samples],
                data.y_test[: given.samples],
            )
        grid = {
            "methods": given.methods,
            "densities": given.densities or options["densities"],
            "seeds": given.seeds or options["seeds"],
        }
        run_missing(given.out, given.net, grid, data, options)
    text = summarize(given.out, settings)
    given.out.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
