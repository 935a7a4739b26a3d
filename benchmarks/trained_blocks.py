"""Trained networks onto live blocks: accuracy at once and after some training, and the step's time.

    python benchmarks/trained_blocks.py [--seeds 3] [--networks mlp text]
    python benchmarks/trained_blocks.py --time
    python benchmarks/trained_blocks.py --summary

An MLP on Fashion-MNIST and the model of `small_language_model.py` are trained, and pruned to blocks
at one density. Then they are trained on live blocks: the MLP for an epoch, the language
model for as many steps as it was trained before, and for an epoch of its text. Each run is a line
of `results/trained_blocks.jsonl`; `results/trained_blocks.md` has the means.
"""

import argparse
import dataclasses
import os
import statistics
import time

from one_shot import HERE, accuracy, fitted, given_data, shown
from record import QUICK, RESULTS, announced, append, finished, markdown, parsed, write

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

import keras_sparse_ortho as kso

LINES = RESULTS / "trained_blocks.jsonl"
WIDTH, EPOCHS, BATCH = 1024, 4, 128
CALIBRATION = {"mlp": 2048, "text": 512}
METHODS = {
    "OBS": {"score": "obs"},
    "OBS, any pattern": {"score": "obs"},
    "magnitude, refit": {"score": "magnitude"},
}
# Method, side of a block.
CASES = {"mlp": [(method, 32) for method in METHODS]}
CASES["text"] = [*CASES["mlp"], ("OBS", 16), ("OBS, any pattern", 16)]
CASES["text_epoch"] = [("OBS", 32)]
OTHERS = {"mlp": ["head"], "text": ["embedding", "head"], "text_epoch": ["embedding", "head"]}
"""Layers that stay dense."""


def mlp(width: int = WIDTH):
    """Three hidden layers for images with a frame, so that blocks divide the inputs."""
    layers = keras.layers
    hidden = [layers.Dense(width, activation="relu", name=f"hidden_{k}") for k in range(3)]
    head = layers.Dense(10, name="head")
    return keras.Sequential([keras.Input((32, 32)), layers.Flatten(), *hidden, head])


class Mlp:
    """The MLP: percent of the test images."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        data = given_data("cnn", given.images)

        def framed(x):
            return np.pad(x[..., 0], ((0, 0), (2, 2), (2, 2)))

        self.data = dataclasses.replace(
            data, x_train=framed(data.x_train), x_test=framed(data.x_test)
        )
        self.inputs = self.data.x_train[: CALIBRATION["mlp"]]

    def trained(self, seed: int):
        """The dense network, from its file if there is one."""
        import keras

        folder = HERE / "out" / ("quick/trained_blocks" if QUICK else "trained_blocks")
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{self.given.width}-{seed}-{self.given.images}.weights.h5"
        keras.utils.set_random_seed(seed)
        model = mlp(self.given.width)
        if file.exists():
            model.load_weights(file)
        else:
            fitted(model, self.data, EPOCHS, 1e-3)
            model.save_weights(file)
        return model

    def train_on(self, model, seed: int) -> None:
        """One epoch."""
        fitted(model, self.data, 1, 5e-4)

    def score(self, model) -> float:
        """Percent."""
        return accuracy(model, self.data)


class Text:
    """The language model: perplexity."""

    def __init__(self, given: argparse.Namespace) -> None:
        import small_language_model as lm

        self.lm, self.steps = lm, given.steps
        self.inputs, _ = lm.windows(lm.text()[0], CALIBRATION["text"], 7)

    def trained(self, seed: int):
        """The dense model."""
        return self.lm.trained(seed, self.steps)

    def train_on(self, model, seed: int) -> None:
        """As many steps as before, on other windows."""
        self.lm.fit(model, self.steps, 100 + seed, 3e-3)

    def score(self, model) -> float:
        """Perplexity."""
        return self.lm.perplexity(model)


class TextEpoch(Text):
    """The language model, trained on for as many steps as have its whole text once."""

    def train_on(self, model, seed: int) -> None:
        """An epoch."""
        symbols = self.lm.BATCH * self.lm.LENGTH
        self.lm.fit(model, len(self.lm.text()[0]) // symbols, 100 + seed, 3e-3)


TASKS = {"mlp": Mlp, "text": Text, "text_epoch": TextEpoch}


def on_blocks(model, name: str, case: tuple[str, int], density: float, inputs):
    """The trained model of a network on live blocks."""
    method, side = case
    block = kso.Block(side, side, regular="any" not in method)
    options = {"structure": block, "storage": "blocks", "exclude": OTHERS[name]}
    return kso.prune(model, density, data=inputs, **options | METHODS[method])


def measure(name: str, seed: int, given: argparse.Namespace) -> None:
    """Appends the lines of a network and seed that are missing."""
    setting = {"network": name, "seed": seed, "density": given.density}
    setting |= {"width": given.width} if name == "mlp" else {"steps": given.steps}
    keys = ("method", "block")
    done = [tuple(r.get(k) for k in keys) for r in finished(LINES) if setting.items() <= r.items()]
    missing = [case for case in [("dense", 0), *CASES[name]] if case not in done]
    task = TASKS[name](given) if missing else None
    for case in announced(f"{name}, seed {seed}", missing):
        method, block = case
        model = task.trained(seed)
        start = time.perf_counter()
        if method != "dense":
            model = on_blocks(model, name, case, given.density, task.inputs)
        run = {"method": method, "block": block}
        run |= {"seconds": time.perf_counter() - start, "at_once": task.score(model)}
        kernels = [w for w in kso.prunable_weights(model) if w.live < w.size]
        if kernels:
            run["live"] = sum(w.live for w in kernels) / sum(w.size for w in kernels)
        start = time.perf_counter()
        task.train_on(model, seed)
        run |= {"training": time.perf_counter() - start, "after": task.score(model)}
        append(LINES, setting | run)
        print(setting | run, flush=True)


def measure_time(given: argparse.Namespace) -> None:
    """Appends the times of training steps of dense models and on blocks, measured in turns."""
    from record import wall_and_cpu
    from small_language_model import decoder

    rng = np.random.default_rng(0)

    def stepper(model, x, y, batch):
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-4), loss)
        fit = {"batch_size": batch, "epochs": 1, "shuffle": False, "verbose": 0}
        return lambda: model.fit(x, y, **fit)

    for name, width, batch, steps in given.timed:
        count = int(batch) * int(steps)
        if name == "mlp":
            model = mlp(int(width))
            x, y = rng.normal(size=(count, 32, 32)), rng.integers(0, 10, count)
        else:
            heads = int(width) // (32 if int(width) < 256 else 64)
            model = decoder(64, 97, int(width), 2, heads, 4 * int(width))
            x = y = rng.integers(0, 97, (count, 64)).astype("int32")
        models = {0: model}
        for side in given.blocks:
            options = {"structure": kso.Block(side, side), "storage": "blocks"}
            options["exclude"] = OTHERS[name]
            if side < int(width) // 2:
                models[side] = kso.prune(model, given.density, **options)
        runs = {side: stepper(one, x, y, int(batch)) for side, one in models.items()}
        times = wall_and_cpu(runs, given.rounds, warm_up=2)
        for side, (wall, cpu) in times.items():
            run = {"timed": name, "width": int(width), "batch": int(batch), "block": side}
            run |= {"density": given.density, "wall": wall / int(steps), "cpu": cpu / int(steps)}
            run |= {"wall_ratio": wall / times[0][0], "cpu_ratio": cpu / times[0][1]}
            append(LINES, run | {"backend": keras.backend.backend()})
            print(run, flush=True)


def summarize(given: argparse.Namespace) -> None:
    """Writes the tables of all lines."""
    runs = [run for run in finished(LINES) if run["density"] == given.density]
    text = "# Trained networks onto live blocks\n\n"
    text += (
        f"Kernels of blocks at density {given.density:g}, regular or in any pattern, all but "
        "embeddings and heads; mean and standard deviation over the seeds. OBS and refits on "
        "calibration data. Dense networks are trained on for as many steps, too; differences are "
        "to the dense one before that.\n\n"
    )
    about = {
        "mlp": f"MLP\n\nFashion-MNIST, three hidden layers of {given.width}, {EPOCHS} epochs on "
        f"{given.images} images, then one epoch; {CALIBRATION['mlp']} images for calibration. "
        "Test accuracy in percent.",
        "text": "Language model\n\nThe one of `one_shot.py on_text`, 128 wide, trained for "
        f"{given.steps} batches, and for as many again; {CALIBRATION['text']} windows for "
        "calibration. Perplexity; differences in percent.",
    }
    about["text_epoch"] = (
        "An epoch of the text\n\nThe language model, trained on for as many steps as have all "
        "text once."
    )
    for name, title in about.items():
        own = [run for run in runs if run.get("network") == name]
        own = [run for run in own if run.get("width", given.width) == given.width]
        if own:
            text += f"## {title}\n\n{_accuracies(name, own)}\n"
    timed = {
        (r["backend"], r["timed"], r["width"], r["batch"], r["block"]): r
        for r in runs
        if "timed" in r
    }
    if timed:
        rows = []
        for key, run in timed.items():
            times = [f"{1000 * run[clock]:.1f}" for clock in ("wall", "cpu")]
            ratios = [f"{run[f'{clock}_ratio']:.2f}" for clock in ("wall", "cpu")]
            rows.append([*map(str, key[:4]), str(key[4] or "dense"), *times, *ratios])
        header = ["backend", "network", "width", "batch", "block", "step [ms]", "cores [ms]"]
        text += (
            "## Time of a training step\n\nAdam, medians of interleaved runs of `fit`; `cores` is "
            "the time that all cores have worked; ratios to dense.\n\n"
            + markdown([*header, "ratio", "ratio of cores"], rows)
        )
    write("trained_blocks", text, sorted({run["seed"] for run in runs if "seed" in run}))


def _accuracies(name: str, runs: list[dict]) -> str:
    dense = {run["seed"]: run["at_once"] for run in runs if run["method"] == "dense"}

    def change(run, key):
        before = dense[run["seed"]]
        return run[key] - before if name == "mlp" else 100 * (run[key] / before - 1)

    rows = []
    for case in [("dense", 0), *CASES[name]]:
        own = [r for r in runs if (r["method"], r["block"]) == case]
        if not own:
            continue
        row = [case[0], str(case[1] or "")]
        for key in ("at_once", "after"):
            row.append(shown([run[key] for run in own]))
            row.append(f"{statistics.mean(change(run, key) for run in own):+.2f}")
        rows.append([*row, f"{statistics.mean(run['seconds'] for run in own):.0f}"])
    header = ["method", "block", "at once", "to dense", "after training"]
    return markdown([*header, "then to dense", "time to prune [s]"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", default=[*TASKS], choices=[*TASKS])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--density", type=float, default=0.25)
    parser.add_argument("--width", type=int, default=WIDTH, help="of the MLP")
    parser.add_argument("--images", type=int, default=50000, help="for the MLP")
    parser.add_argument("--steps", type=int, default=1500, help="of the language model")
    parser.add_argument("--blocks", type=int, nargs="+", default=[32, 64, 128], help="timed")
    timed = ["mlp-2048-128-12", "mlp-2048-64-20", "text-128-16-24", "text-512-16-4"]
    parser.add_argument("--timed", nargs="+", default=timed, help="network-width-batch-steps")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--time", action="store_true", help="only time steps")
    parser.add_argument("--summary", action="store_true", help="only write the tables")
    quick = {"seeds": 1, "networks": ["mlp"], "width": 128, "images": 2000}
    given = parsed(parser, quick=quick)
    given.timed = [one.split("-") for one in given.timed]
    if given.time:
        measure_time(given)
    elif not given.summary:
        for seed in range(given.seeds):
            for name in given.networks:
                measure(name, seed, given)
    summarize(given)


if __name__ == "__main__":
    main()
