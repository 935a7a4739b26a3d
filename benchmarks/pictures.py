"""Draws the pictures of docs/: gains of the package, and illustrations of the methods.

    python benchmarks/pictures.py                    # all, into docs/
    python benchmarks/pictures.py --only thresholds

`gain` and `very_deep` are drawn from `results/` and marked with a digest of them, so that
`tools/figures.py --check` can tell when they are old. The others show masks, densities and
thresholds computed by the package.
"""

import argparse
import os
from decimal import Decimal
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from cells import digest, number, one_cell, rounded
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from record import RESULTS, finished, parsed

import keras_sparse_ortho as kso
from keras_sparse_ortho.orthogonal import exact_orthogonal, expected_density

DOCS = Path(__file__).resolve().parents[1] / "docs"
DENSE, PLAIN, OURS, OTHER = "#8a8f98", "#b8860b", "#d1495b", "#2e86ab"
SOURCES = {
    "gain": ["blocks.md", "deep.md", "litert.md", "methods.md"],
    "very_deep": ["deep.jsonl"],
}


def value(source: str) -> Decimal:
    """A number of the results."""
    return number(one_cell(source, RESULTS))


def bars(panel: Axes, rows: list[tuple[str, str, Decimal]], title: str, form: str) -> None:
    """Horizontal bars with their numbers, from top to bottom."""
    labels, colors, exact = zip(*rows, strict=True)
    values = [float(one) for one in exact]
    places = range(len(rows))
    panel.barh(places, values, color=colors, height=0.62)
    panel.set_yticks(places, labels, fontsize=8)
    panel.set(title=title, xlim=(0, 1.22 * max(values)))
    panel.title.set_fontsize(9)
    panel.invert_yaxis()
    panel.set_xticks([])
    panel.spines[["top", "right", "bottom"]].set_visible(False)
    for place, length in zip(places, exact, strict=True):
        panel.text(float(length), place, f" {rounded(length, form)}", va="center", fontsize=8)


def gain() -> Figure:
    """Wins and a loss, as measured."""
    figure = Figure(figsize=(9.0, 4.6), layout="constrained")
    deep, step, file, shallow = figure.subplots(2, 2).flat
    where = "deep#deep_mlp, epochs | density={}; method={} | test accuracy [%]"
    bars(
        deep,
        [
            ("dense, orthogonal", DENSE, value(where.format(1, "dense_orthogonal"))),
            ("5%: exactly orthogonal", OURS, value(where.format(0.05, "eoi_erk"))),
            ("5%: random, rescaled", PLAIN, value(where.format(0.05, "base_scaled"))),
            ("5%: random mask", PLAIN, value(where.format(0.05, "base_erk"))),
        ],
        "50 tanh layers without normalization:\ntest accuracy, %",
        ".1f",
    )
    where = "blocks | setting=jax; model=mlp4096; batch=128; density=0.1; rival={} | ratio"
    bars(
        step,
        [
            ("dense", DENSE, value(where.format("dense"))),
            ("10%: blocks of 64", OURS, value(where.format("blocks 64"))),
            ("10%: blocks of 32", OURS, value(where.format("blocks 32"))),
            ("10%: masks", PLAIN, value(where.format("masked"))),
        ],
        "Training step, 4 layers of 4096 units:\ntime as part of the dense one",
        ".2f",
    )
    where = "litert#MLP, density 0.1 | zeros={}; route=`{}` | {}"
    bars(
        file,
        [
            ("float32", DENSE, value(where.format("elements", "float32", "MB"))),
            ("int8", DENSE, value(where.format("elements", "dynamic_int8", "MB"))),
            ("10%, int8", OURS, value(where.format("blocks 16x1", "dynamic_int8+1x16", "MB"))),
        ],
        "LiteRT file of an MLP, 9.4 million weights:\nMB",
        ".1f",
    )
    where = "methods#cnn, epochs: 4 | density={}; method={} | test accuracy [%]"
    bars(
        shallow,
        [
            ("dense", DENSE, value(where.format(1, "dense"))),
            ("10%: random mask", PLAIN, value(where.format(0.1, "base_erk"))),
            ("10%: exactly orthogonal", OURS, value(where.format(0.1, "eoi_erk"))),
        ],
        "Where it gains nothing: a shallow CNN with\nbatch normalization: test accuracy, %",
        ".1f",
    )
    return figure


def very_deep() -> Figure:
    """Accuracy over the steps of training, mean and range of the seeds."""
    starts = {
        "dense_orthogonal": ("dense, orthogonal", DENSE),
        "eoi_erk": ("exactly orthogonal", OURS),
        "sao": ("SAO", "#6a994e"),
        "ai": ("AI", OTHER),
        "base_scaled": ("random, rescaled", "#8f2d56"),
        "base_erk": ("random mask", PLAIN),
    }
    titles = {
        "thousand_mlp": "MLP of 1000 tanh layers",
        "circular_cnn": "CNN of 100 tanh layers",
    }
    runs = finished(RESULTS / "deep.jsonl")
    runs = [run for run in runs if "accuracy" in run and not run.get("settings")]  # of these depths
    nets = [net for net in titles if any(run["net"] == net for run in runs)]
    figure = Figure(figsize=(9.0, 3.2), layout="constrained")
    for panel, net in zip(figure.subplots(1, len(nets), squeeze=False).flat, nets, strict=True):
        for method, (label, color) in starts.items():
            curves = [
                run["progress"] for run in runs if (run["net"], run["method"]) == (net, method)
            ]
            if not curves:
                continue
            steps = [step for step, _ in curves[0]]
            values = 100 * np.array([[accuracy for _, accuracy in curve] for curve in curves])
            panel.plot(steps, values.mean(axis=0), color=color, label=label)
            panel.fill_between(
                steps, values.min(axis=0), values.max(axis=0), color=color, alpha=0.2
            )
        panel.set(title=f"{titles[net]}, density 0.125", xlabel="step", ylim=(0, 100))
        panel.title.set_fontsize(9)
        panel.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("accuracy on unseen images, %")
    figure.axes[0].legend(frameon=False, fontsize=8)
    return figure


def density_law() -> Figure:
    """How rotations fill a matrix: four of them, and the expected density over their number."""
    figure = Figure(figsize=(9.0, 2.5), layout="constrained")
    *grids, curve = figure.subplots(1, 5, width_ratios=(1, 1, 1, 1, 2.2))
    n = 48
    for panel, density in zip(grids, (1 / n, 0.05, 0.15, 0.5), strict=True):
        kernel, _ = exact_orthogonal((n, n), density, seed=3)
        panel.imshow(np.abs(kernel) > 0, cmap="Greys", interpolation="nearest")
        panel.set(xticks=[], yticks=[])
        panel.set_title(f"density {density:.2f}", fontsize=8)
    rotations = np.arange(0, 161, 4)
    curve.plot(rotations, [expected_density(int(t), n, n) for t in rotations], color=OURS)
    curve.set(xlabel="rotations", ylim=(0, None))
    curve.set_title(f"expected density, {n} x {n}", fontsize=8)
    curve.spines[["top", "right"]].set_visible(False)
    return figure


def thresholds() -> Figure:
    """The soft threshold, and the schedules."""
    figure = Figure(figsize=(9.0, 2.7), layout="constrained")
    function, schedules = figure.subplots(1, 2)
    weights = np.linspace(-1, 1, 401)
    function.plot(weights, weights, color=DENSE, lw=1, ls=":", label="w")
    hard = np.where(np.abs(weights) > 0.3, weights, np.nan)
    function.plot(weights, hard, color=OTHER, label="mask by magnitude")
    soft = np.sign(weights) * np.maximum(np.abs(weights) - 0.3, 0)
    function.plot(weights, soft, color=OURS, label="soft threshold")
    function.set(xlabel="weight w", title="effective weight, threshold 0.3")
    steps = np.arange(0, 1001, 5)
    end = {"begin_step": 100, "end_step": 700}
    for name, color in (("Cubic", OURS), ("Linear", OTHER), ("OneShot", PLAIN)):
        options = {"step": 400} if name == "OneShot" else end
        schedule = getattr(kso.schedules, name)(0.1, **options)
        schedules.plot(steps, [schedule.density(int(t)) for t in steps], color=color, label=name)
    schedules.set(xlabel="step", title="density asked for", ylim=(0, 1.05))
    for panel in (function, schedules):
        panel.legend(frameon=False, fontsize=8)
        panel.title.set_fontsize(9)
        panel.spines[["top", "right"]].set_visible(False)
    return figure


def structures() -> Figure:
    """One mask of each structure, all exactly orthogonal at density 1/4."""
    kinds = {
        "single entries": None,
        "Block(8, 1)": kso.Block(8, 1),
        "Block(8, 8, regular=True)": kso.Block(8, 8, regular=True),
        'ConstantFan("in")': kso.ConstantFan("in"),
        "NByM(2, 4)": kso.NByM(2, 4),
    }
    figure = Figure(figsize=(9.0, 2.1), layout="constrained")
    for panel, (title, structure) in zip(figure.subplots(1, 5), kinds.items(), strict=True):
        initializer = kso.initializers.ExactOrthogonal(0.25, seed=1, structure=structure)
        _, mask = initializer.sample((64, 64))
        panel.imshow(mask, cmap="Greys", interpolation="nearest")
        panel.set(xticks=[], yticks=[])
        panel.set_title(title, fontsize=8)
    return figure


def budgets() -> Figure:
    """The densities of three budgets for the layers of a small CNN."""
    layers = [keras.layers.Conv2D(f, 3, name=f"conv_{k}") for k, f in enumerate((16, 32, 64))]
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            *layers,
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(128, name="dense"),
            keras.layers.Dense(10, name="head"),
        ]
    )
    figure = Figure(figsize=(9.0, 2.7), layout="constrained")
    panel = figure.subplots()
    colors = {"uniform": DENSE, "er": OTHER, "erk": OURS}
    for k, (name, color) in enumerate(colors.items()):
        budget = getattr(kso.budgets, name)(model, 0.1)
        paths = [*budget]
        places = np.arange(len(paths)) + 0.27 * (k - 1)
        panel.bar(places, [budget[path] for path in paths], 0.25, color=color, label=name)
    panel.set_xticks(range(len(paths)), [path.removesuffix("/kernel") for path in paths])
    panel.set(ylabel="density", title="three budgets of one global density, 0.1")
    panel.title.set_fontsize(9)
    panel.legend(frameon=False, fontsize=8)
    panel.spines[["top", "right"]].set_visible(False)
    return figure


DRAWN = (gain, very_deep, density_law, thresholds, structures, budgets)
PICTURES = {draw.__name__: draw for draw in DRAWN}


def main() -> None:
    """Draws what the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PICTURES)
    parser.add_argument("--folder", type=Path, default=DOCS)
    drawn_quickly = [name for name in PICTURES if name not in SOURCES]
    given = parsed(parser, {"folder": RESULTS, "only": drawn_quickly})
    for name in given.only or PICTURES:
        marks = {"Sources": digest(SOURCES[name], RESULTS)} if name in SOURCES else {}
        marks |= {"Software": "", "Title": name}
        PICTURES[name]().savefig(given.folder / f"{name}.png", dpi=130, metadata=marks)
        print(given.folder / f"{name}.png")


if __name__ == "__main__":
    main()
