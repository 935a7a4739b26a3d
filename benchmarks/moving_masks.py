"""RigL against the random mask it starts from, by the steps between its updates.

    python benchmarks/moving_masks.py [--nets mlp cnn] [--epochs 10 40]

An MLP 784-300-300-10 at density 0.02 and the small CNN of methods.py at 0.05, Adam, cosine decay,
on scikit-learn's digits enlarged to 28 x 28: each is drawn several times, turned, moved and scaled,
with noise; no digit is in both sets. Every run is a line of `results/moving_masks.jsonl`, and is
not repeated. Writes `results/moving_masks.md`.
"""

import argparse
import itertools
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import methods
import numpy as np
from example_data import Dataset
from methods_summary import beside, mean_and_deviation
from record import RESULTS, append, finished, markdown, parsed, told, write

L = keras.layers
LINES = RESULTS / "moving_masks.jsonl"
NETS = {
    "mlp": {"density": 0.02, "rates": [0.002], "epochs": [10, 40]},
    "cnn": {"density": 0.05, "rates": [0.008], "epochs": [20]},
}
OPTIONS = {"filters": [24, 48, 48], "batch_size": 128, "jit": True}
PUBLISHED = 100
KEY = ("net", "density", "rate", "epochs", "frequency", "seed")


def mlp(shape: tuple[int, ...], classes: int, options: dict) -> keras.Model:
    """784-300-300-10."""
    hidden = [L.Dense(300, "relu", name=f"hidden_{k}") for k in range(2)]
    return keras.Sequential([keras.Input(shape), L.Flatten(), *hidden, L.Dense(classes)])


def drawn(images: np.ndarray, copies: int, rng: np.random.Generator) -> np.ndarray:
    """Images of 8 x 8 on 28 x 28, each `copies` times, turned, moved and scaled a little."""
    from scipy import ndimage

    found = np.empty((copies * len(images), 28, 28, 1), np.float32)
    for place, image in zip(found, itertools.cycle(images), strict=False):
        angle, scale = rng.uniform(-0.35, 0.35), rng.uniform(0.75, 1.2)
        turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        turn *= 7 / 27 / scale
        center = np.array([13.5, 13.5]) + rng.uniform(-3, 3, 2)
        shift = np.array([3.5, 3.5]) - turn @ center
        place[..., 0] = ndimage.affine_transform(image, turn, shift, (28, 28), order=1)
    return found + rng.normal(0, 0.15, found.shape).astype(np.float32)


def digits(copies: int = 12, test_copies: int = 10) -> Dataset:
    """The training and the test set."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    x, y = load_digits(return_X_y=True)
    x, x_test, y, y_test = train_test_split(
        x.reshape(-1, 8, 8) / 16, y, test_size=0.25, stratify=y, random_state=0
    )
    rng = np.random.default_rng(0)
    train, test = drawn(x, copies, rng), drawn(x_test, test_copies, rng)
    mean, std = train.mean(), train.std()
    labels = np.tile(y, copies), np.tile(y_test, test_copies)
    return Dataset("digits", (train - mean) / std, labels[0], (test - mean) / std, labels[1])


def train(run: dict, data: Dataset) -> dict:
    """One run."""
    keras.utils.clear_session()
    moves = run["frequency"] is not None
    method = "rigl_random" if moves else "base_erk"
    options = OPTIONS | {"epochs": run["epochs"], "frequency": run["frequency"] or PUBLISHED}
    options["budgets"] = RESULTS
    net, density, seed, rate = (run[name] for name in ("net", "density", "seed", "rate"))
    model, callbacks, _ = methods.build(net, method, density, seed, data, options, rate)
    methods.fit(model, callbacks, data, options, seed)
    accuracy = model.evaluate(data.x_test, data.y_test, batch_size=500, verbose=0)[1]
    return run | {"accuracy": float(accuracy)}


def wanted(nets: list[str], epochs: list[int] | None, seeds: list[int], steps: int) -> list[dict]:
    """All runs; an update every 100 steps, as in the paper, and by default."""
    runs = []
    for net, seed in itertools.product(nets, seeds):
        own = NETS[net]
        for length, rate in itertools.product(epochs or own["epochs"], own["rates"]):
            default = min(max(3 * steps * length // 400, 1), PUBLISHED)
            for frequency in dict.fromkeys([None, PUBLISHED, 2 * default, default]):
                row = (net, own["density"], rate, length, frequency, seed)
                runs.append(dict(zip(KEY, row, strict=True)))
    return runs


def summarize() -> None:
    """The table."""
    runs = finished(LINES)
    groups: dict[tuple, list[float]] = {}
    for run in runs:
        row = tuple(run[name] for name in KEY[:-1])
        groups.setdefault(row, []).append(run["accuracy"])
    rows = []
    for row, found in sorted(groups.items(), key=lambda pair: [x or 0 for x in pair[0][1:]]):
        net, density, rate, epochs, frequency = row
        static = groups.get((*row[:-1], None), [])
        least = min((other[4] for other in groups if other[4] and other[:4] == row[:4]), default=0)
        often = {PUBLISHED: "published", least: "by default"}
        against = beside(found, static) if frequency and static else ["-", "-"]
        rows.append(
            [
                *(net, f"{density:g}", f"{epochs}", f"{rate:g}"),
                "random mask" if frequency is None else f"RigL, {often.get(frequency, 'rarer')}",
                f"{frequency or '-'}",
                mean_and_deviation(found, 100),
                *against,
                f"{len(found)}",
                *("1", "not tuned"),
            ]
        )
    text = "# Moving masks\n\nRigL and the random mask that it starts from, ERK, on scikit-learn's "
    text += "digits enlarged to 28 x 28, all at one learning rate of Adam. Ahead are "
    text += "points; the verdict is that of Student's test over the seeds at 5%.\n\n"
    header = ["net", "density", "epochs", "rate", "method", "every", "test accuracy [%]"]
    header += ["ahead", "verdict", "seeds", "tries", "edge"]
    write("moving_masks", text + markdown(header, rows), {run["seed"] for run in runs})


def main() -> None:
    """The runs that are missing, and the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS))
    parser.add_argument("--epochs", nargs="+", type=int)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--copies", type=int, default=12)
    quick = {"nets": ["mlp"], "epochs": [2], "seeds": [0], "copies": 2}
    options = parsed(parser, quick)
    methods.NETWORKS["mlp"] = mlp
    data = digits(options.copies)
    there = [tuple(run[name] for name in KEY) for run in finished(LINES)]
    steps = len(data.x_train) // OPTIONS["batch_size"]
    runs = wanted(options.nets, options.epochs, options.seeds, steps)
    for run in told("moving masks", [run for run in runs if tuple(run.values()) not in there]):
        append(LINES, train(run, data))
    summarize()


if __name__ == "__main__":
    main()
