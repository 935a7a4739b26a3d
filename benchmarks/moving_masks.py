"""Small questions about masks and their training: RigL's updates, floors, order.

    python benchmarks/moving_masks.py NAME [options]

The measurements:

- `rigl`: RigL against the random mask it starts from, by the steps between its updates.
- `floors`: STR under `TargetDensity` with and without its floor, and its rank of entries out of
  reach.
- `order`: accuracy lost because Keras on TensorFlow repeats the order of batches once a seed is
  set.
"""

import dataclasses
import itertools
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import methods
import numpy as np
from methods_summary import beside, mean_and_deviation
from record import (
    RESULTS,
    announced,
    append,
    chosen,
    described,
    finished,
    machine,
    markdown,
    parsed,
    write,
)
from training import Dataset, load, shuffled, whole_batches

import keras_sparse_ortho as kso
from keras_sparse_ortho.callbacks import _target_density

# --- rigl -----------------------------------------------------------------------------------------


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


def rigl() -> None:
    """RigL against the random mask it starts from, by the steps between its updates.

        python benchmarks/moving_masks.py rigl [--nets mlp cnn] [--epochs 10 40]

    An MLP 784-300-300-10 at density 0.02 and the small CNN of methods.py at 0.05, Adam, cosine
    decay, on scikit-learn's digits enlarged to 28 x 28: each is drawn several times, turned,
    moved and scaled, with noise; no digit is in both sets. Every run is a line of
    `results/moving_masks.jsonl`, and is not repeated. Writes `results/moving_masks.md`.
    """
    parser = described(rigl)
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
    for run in announced("moving masks", [run for run in runs if tuple(run.values()) not in there]):
        append(LINES, train(run, data))
    summarize()


# --- floors ---------------------------------------------------------------------------------------


FLOORS_LINES = RESULTS / "floors.jsonl"
DENSITY = 0.05
FLOORS_OPTIONS = {"filters": [24, 48, 48], "batch_size": 128, "frequency": 50, "jit": True}
VARIANTS = {
    "floor, by magnitude": (0.3, True),
    "floor, by place": (0.3, False),
    "no floor, by magnitude": (0.0, True),
    "no floor, by place": (0.0, False),
}
FLOORS_KEY = ("net", "variant", "rate", "seed", "epochs")
by_magnitude = _target_density.entries_of


def by_place(threshold) -> _target_density.Entries:
    """Entries out of reach, all equal, so that the first of them are kept."""
    found = by_magnitude(threshold)
    return found._replace(scales=np.where(found.critical > -np.inf, 0.0, -np.inf))


def pooled(data: Dataset) -> Dataset:
    """Images of half the height and width."""

    def halved(x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(x.reshape(-1, 14, 2, 14, 2, 1).mean((2, 4)))

    return dataclasses.replace(data, x_train=halved(data.x_train), x_test=halved(data.x_test))


def floors_train(run: dict, data: Dataset) -> dict:
    """One run."""
    keras.utils.clear_session()
    floor, ranked = VARIANTS[run["variant"]]
    _target_density.entries_of = by_magnitude if ranked else by_place

    def method(model: keras.Model, plan: dict) -> tuple:
        model = kso.parametrize(model, kso.SoftThreshold())
        return model, [kso.callbacks.TargetDensity(plan["density"], floor=floor)]

    methods.METHODS["floors"] = method
    options = FLOORS_OPTIONS | {"epochs": run["epochs"], "budgets": RESULTS}
    seed, rate = run["seed"], run["rate"]
    model, callbacks, _ = methods.build("cnn", "floors", DENSITY, seed, data, options, rate)
    methods.fit(model, callbacks, data, options, seed)
    accuracy = model.evaluate(data.x_test, data.y_test, batch_size=500, verbose=0)[1]
    weights = kso.prunable_weights(model)
    shares = [weight.density for weight in weights]
    live, size = sum(w.live for w in weights), sum(w.size for w in weights)
    return run | {"accuracy": float(accuracy), "live": live, "size": size, "shares": shares}


def floors_summarize() -> None:
    """The table."""
    runs = finished(FLOORS_LINES)
    rows = []
    keys = sorted({tuple(run[name] for name in FLOORS_KEY[:3]) for run in runs})
    for net, variant, rate in sorted(keys, key=lambda k: (k[0], list(VARIANTS).index(k[1]), k[2])):
        mine = [
            run
            for run in runs
            if tuple(run[name] for name in FLOORS_KEY[:3]) == (net, variant, rate)
        ]
        found = [run["accuracy"] for run in mine]
        shares = np.mean([run["shares"] for run in mine], axis=0)
        counts = {run["live"] for run in mine}
        rows.append(
            [
                *(net, variant, f"{rate:g}", mean_and_deviation(found, 100)),
                f"{100 * min(found):.2f}",
                "/".join(f"{share:.3f}" for share in shares),
                ", ".join(f"{count}" for count in sorted(counts)),
                f"{len(mine)}",
            ]
        )
    text = "# Floors of TargetDensity\n\nSTR on Fashion-MNIST at density 0.05: 1590 of 31800 "
    text += "entries. Shares are the densities of the layers in order, the head last.\n\n"
    header = ["net", "variant", "rate", "test accuracy [%]", "worst", "shares", "live", "seeds"]
    write("floors", text + markdown(header, rows), {run["seed"] for run in runs})


def floors() -> None:
    """STR under `TargetDensity` with and without its floor, and its rank of entries out of reach.

        python benchmarks/moving_masks.py floors [--nets cnn14 cnn] [--rates 0.016 0.032]

    The small CNN of methods.py on Fashion-MNIST at density 0.05, Adam, cosine decay, four epochs;
    `cnn14` has the same weights on images pooled to 14 x 14, a third of the work. Entries of
    magnitude 1 and more are out of a sigmoid's reach: they are ranked by magnitude, or, as
    before, by place. Every run is a line of `results/floors.jsonl`, and is not repeated. Writes
    `results/floors.md`.
    """
    parser = described(floors)
    parser.add_argument("--nets", nargs="+", choices=["cnn14", "cnn"], default=["cnn14", "cnn"])
    parser.add_argument("--rates", nargs="+", type=float, default=[0.008, 0.016, 0.032, 0.064])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=4)
    quick = {"nets": ["cnn14"], "rates": [0.032], "seeds": [0], "epochs": 1}
    options = parsed(parser, quick)
    data = load("fashion_mnist")
    sets = {"cnn": data, "cnn14": pooled(data)}
    there = [tuple(run[name] for name in FLOORS_KEY) for run in finished(FLOORS_LINES)]
    grid = itertools.product(options.nets, VARIANTS, options.rates, options.seeds)
    missing = []
    for net, variant, rate, seed in grid:
        ablated = net == "cnn14" and rate in (0.016, 0.032) and seed == 0
        row = (net, variant, rate, seed, options.epochs)
        if row not in there and (ablated or variant == "floor, by magnitude"):
            missing.append(dict(zip(FLOORS_KEY, row, strict=True)))
    for run in announced("floors", missing):
        append(FLOORS_LINES, floors_train(run, sets[run["net"]]))
    floors_summarize()


# --- order ----------------------------------------------------------------------------------------


ORDER_BATCH, ORDER_DENSITY = 128, 0.1


def fed(data: Dataset, how: str, seed: int) -> dict:
    """The arguments of `fit`."""
    if how == "dataset":
        return shuffled(data.x_train, data.y_train, ORDER_BATCH, seed)
    return whole_batches(data.x_train, data.y_train, ORDER_BATCH)


def orders(how: str, epochs: int = 3) -> int:
    """Number of different first batches over some epochs, seen by a model that does not learn."""
    seen: list[float] = []

    class First(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
            if batch == 0:
                seen.append(float((logs or {})["loss"]))

    rows = np.arange(10 * ORDER_BATCH, dtype="float32")[:, None]
    data = Dataset("rows", rows, rows[:, 0], rows, rows[:, 0])
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Activation("linear")])
    model.compile(loss=lambda y, found: found, jit_compile=False)
    model.fit(**fed(data, how, 0), epochs=epochs, verbose=0, callbacks=[First()])
    return len(set(seen))


def accuracy(kind: str, how: str, seed: int, data: Dataset, epochs: int) -> float:
    """On the test set, in percent."""
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input(data.x_train.shape[1:]),
            layers.Flatten(),
            layers.Dense(512, activation="relu"),
            layers.Dense(256, activation="relu"),
            layers.Dense(10),
        ]
    )
    if kind == "sparse":
        model = kso.sparsify(model, ORDER_DENSITY, initializer="random_sparse", seed=seed)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"], jit_compile=False)
    model.fit(**fed(data, how, seed), epochs=epochs, verbose=0)
    return 100 * model.evaluate(data.x_test, data.y_test, batch_size=500, verbose=0)[1]


def order() -> None:
    """Accuracy lost because Keras on TensorFlow repeats the order of batches once a seed is set.

        python benchmarks/moving_masks.py order

    An MLP 784-512-256-10 on Fashion-MNIST, Adam, batch 128, dense and with a random mask: `fit`
    on arrays, and on a dataset that has another order in each epoch (training.py). Counts the
    orders that the first epochs see. Writes `results/batch_order.md`.
    """
    parser = described(order)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--samples", type=int, help="train on so many only")
    given = parsed(parser, {"epochs": 2, "seeds": [0], "samples": 2048})
    data, few = load("fashion_mnist"), slice(given.samples)
    data = Dataset(data.name, data.x_train[few], data.y_train[few], data.x_test, data.y_test)
    rows = []
    for how in ("arrays", "dataset"):
        cells = [how, f"{orders(how)} of 3"]
        for kind in ("dense", "sparse"):
            found = [accuracy(kind, how, seed, data, given.epochs) for seed in given.seeds]
            print(how, kind, found, flush=True)
            cells.append(mean_and_deviation(found))
        rows.append(cells)
    text = f"# The order of batches\n\n{machine()}, {keras.backend.backend()}. MLP 784-512-256-10, "
    text += f"Fashion-MNIST, {given.epochs} epochs of Adam, after `keras.utils.set_random_seed`; "
    text += f"the random mask has the density {ORDER_DENSITY}. Test accuracy in percent, mean and "
    text += "standard deviation over seeds.\n\n"
    header = ["`fit` on", "orders of epochs", "dense", "random mask"]
    write("batch_order", text + markdown(header, rows), given.seeds)


if __name__ == "__main__":
    chosen(rigl, floors, order)
