"""Draws the pictures of docs/: gains of the package, and illustrations of the methods.

    python benchmarks/pictures.py                    # all, into docs/
    python benchmarks/pictures.py --only thresholds

Those in `SOURCES` are drawn from `results/` and marked with a digest of them, so that
`tools/figures.py --check` can tell when they are old. The others show masks, densities and
thresholds computed by the package.
"""

import ast
import graphlib
import io
import os
import re
from decimal import Decimal
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from record import (
    RESULTS,
    cells,
    digest,
    finished,
    matching,
    middle_of_processes,
    number,
    one_cell,
    rounded,
)
from runner import Measurement, Setting, main

import keras_sparse_ortho as kso
from keras_sparse_ortho.orthogonal import exact_orthogonal, expected_density

HEIGHT = 3.4  # inches of a picture with one panel: all of them have one size
WIDTH = 5.2  # inches: on a phone of 390 pixels a label is 11 pixels high
# Each can be read on white and on black.
DENSE, PLAIN, OURS, OTHER = "#8a8f98", "#b8860b", "#d1495b", "#2e86ab"
GREEN, VIOLET = "#6a994e", "#b05fa8"
MASK = ListedColormap(["#00000000", OURS])
"""The colours of dead and live entries."""

_INK = "#010203"  # stands for the colour of text and axes
_STYLE = """<style>
svg { --ink: #24292f; }
@media (prefers-color-scheme: dark) { svg { --ink: #d8dade; } }
</style>
"""
mpl.rcParams.update(
    {
        "font.size": 11,
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
        "legend.fontsize": 10,
        "legend.frameon": False,
        "xtick.labelsize": 10,
        "ytick.labelsize": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.facecolor": "none",
        "svg.fonttype": "none",  # text stays text: it can be searched and read aloud
        "svg.hashsalt": "keras_sparse_ortho",  # the same names of clip paths each time
        **dict.fromkeys(
            (
                "text.color",
                "axes.edgecolor",
                "axes.labelcolor",
                "xtick.color",
                "ytick.color",
            ),
            _INK,
        ),
    }
)


def new(height: float) -> Figure:
    """An empty picture of the common width."""
    return Figure(figsize=(WIDTH, height), layout="constrained")


def mask(panel: Axes, live: object, title: str) -> None:
    """Draws a mask, with a frame."""
    panel.imshow(live, cmap=MASK, vmin=0, vmax=1, interpolation="nearest")
    panel.set(xticks=[], yticks=[])
    panel.set_title(title, fontsize=9)
    panel.spines[:].set_visible(True)


def save(figure: Figure, path: Path, sources: list[str] = ()) -> None:
    """Writes an SVG, marked with a digest of the results that it was drawn from."""
    marks = {"Date": None, "Creator": None, "Title": path.stem}
    if sources:
        marks["Source"] = digest(sources, RESULTS)
    buffer = io.StringIO()
    figure.savefig(
        buffer, format="svg", transparent=True, metadata=marks, dpi=200
    )
    drawn = buffer.getvalue().replace(_INK, "var(--ink)")
    drawn = re.sub(
        r"(<svg\b[^>]*>\s*)", lambda found: found[0] + _STYLE, drawn, count=1
    )
    path.write_text(
        "\n".join(line.rstrip() for line in drawn.splitlines()) + "\n", "utf-8"
    )


DOCS = Path(__file__).resolve().parents[1] / "docs"
STYLES = {
    "dense": ("dense", DENSE, "-"),
    "masked": ("masked", PLAIN, "--"),
    "compact": ("compact", OTHER, "-."),
    "blocks 32": ("blocks of 32", OURS, "-"),
    "blocks 64": ("blocks of 64", VIOLET, "-"),
}


GROWTH = {"jax": ("JAX", OURS), "tensorflow XLA": ("TensorFlow XLA", OTHER)}
"""By backend the label and colour."""


def relative_steps(
    quantity: str, setting: str, model: str, batch: int
) -> Figure:
    """A quantity of a training step relative to the dense one, over the density, by storage.

    Args:
        quantity: str. `"wall_ratio"`, or `"state"` for the memory of weights and optimizer.
        setting: str. The backend.
        model: str. The network.
        batch: int. Its batch.
    """
    conditions = (setting, model, batch)
    measured = [
        line
        for line in finished(RESULTS / "blocks.jsonl")
        if (line["setting"], line["model"], line["batch"]) == conditions
    ]
    lines = middle_of_processes(
        measured, lambda line: (line["rival"], line["density"]), "wall_ratio"
    )
    places = {line["machine"] for line in lines.values()}
    densities = sorted({density for _, density in lines})
    figure = new(HEIGHT)
    panel = figure.subplots()
    for rival, (label, color, dash) in STYLES.items():
        each = [lines[rival, d] for d in densities if (rival, d) in lines]
        # Blocks are plotted at their actual density.
        key = "density" if rival == "dense" else "live"
        values = [line["wall_ratio"] for line in each]
        if quantity == "state":
            dense = [
                lines["dense", line["density"]]["state_mib"] for line in each
            ]
            values = [
                line["state_mib"] / base
                for line, base in zip(each, dense, strict=True)
            ]
        style = {"color": color, "marker": "o", "markersize": 4}
        panel.plot(
            [line[key] for line in each], values, dash, label=label, **style
        )
    panel.set(ylim=(0, None))
    panel.set_xticks(densities, [f"{density:g}" for density in densities])
    title = f"{setting}, {model}, batch {batch}, {'; '.join(sorted(places))}"
    panel.set_xlabel(f"density (live fraction)\n{title}", fontsize=9)
    panel.legend()
    return figure


def faster() -> Figure:
    """Time of a training step over the density, by storage."""
    figure = relative_steps("wall_ratio", "jax", "mlp2048", 128)
    figure.axes[0].set_title("time of a training step, dense = 1")
    return figure


def faster_memory() -> Figure:
    """Memory of weights and optimizer over the density, by storage."""
    figure = relative_steps("state", "jax", "mlp2048", 128)
    figure.axes[0].set_title("weights and optimizer, dense = 1")
    return figure


def growth_over(
    points: dict[float, tuple[int, int, float]], title: str
) -> Figure:
    """The step on blocks of 64 relative to the dense one, and its floor.

    Args:
        points: dict from places on the axis to width, batch and density.
        title: str. The axis, and the conditions that are fixed.
    """
    kind = ("setting", "model", "batch", "density", "rival")
    lines = middle_of_processes(
        finished(RESULTS / "blocks.jsonl"),
        lambda line: tuple(line[k] for k in kind),
        "wall_ratio",
    )
    figure = new(HEIGHT)
    panel = figure.subplots()
    for setting, (label, color) in GROWTH.items():
        each = [
            lines[setting, f"mlp{width}", batch, density, "blocks 64"]
            for width, batch, density in points.values()
        ]
        ratios = [line["wall_ratio"] for line in each]
        style = {"color": color, "marker": "o", "markersize": 4}
        panel.plot([*points], ratios, label=label, **style)
    floor = [line["live"] for line in each]
    panel.plot(
        [*points], floor, "--", color=DENSE, label="floor: live fraction"
    )
    panel.set(
        title=f"step over {title}, dense = 1", ylim=(0, None), xscale="log"
    )
    panel.set_xticks([*points], [f"{x:g}" for x in points])
    panel.minorticks_off()
    panel.legend()
    return figure


def growth() -> Figure:
    """The step on blocks over the width."""
    points = {width: (width, 128, 0.1) for width in (1024, 2048, 4096)}
    return growth_over(points, "width, density 0.1, batch 128")


def growth_density() -> Figure:
    """The step on blocks over the density."""
    points = {density: (4096, 128, density) for density in (0.05, 0.1, 0.2)}
    return growth_over(points, "density, width 4096, batch 128")


def growth_batch() -> Figure:
    """The step on blocks over the batch."""
    points = {batch: (4096, batch, 0.1) for batch in (32, 128, 512)}
    return growth_over(points, "batch, width 4096, density 0.1")


SOURCES = {
    "gain": ["blocks.md", "deep.md", "litert_blocks.md", "methods.md"],
    "very_deep": ["deep.jsonl"],
    "very_deep_cnn": ["deep.jsonl"],
    "mlp7_losses": ["deep.jsonl"],
    "forces": ["learnt.jsonl"],
    "forces_loss": ["learnt.jsonl"],
    "forces_penalty": ["learnt.jsonl"],
    "resnet_densities": ["methods.jsonl"],
    "routes": ["litert_blocks.md"],
    "routes_without_amx": ["litert_blocks.md"],
    "faster": ["blocks.jsonl"],
    "faster_memory": ["blocks.jsonl"],
    "growth": ["blocks.jsonl"],
    "growth_density": ["blocks.jsonl"],
    "growth_batch": ["blocks.jsonl"],
    "mean_singular_values": ["spectrum.md"],
    "frontier": ["real_shrunk.jsonl"],
}


def value(source: str) -> Decimal:
    """A number of the results."""
    return number(one_cell(source, RESULTS))


def bars(
    panel: Axes, rows: list[tuple[str, str, Decimal]], title: str, form: str
) -> None:
    """Horizontal bars with their numbers, from top to bottom."""
    labels, colors, exact = zip(*rows, strict=True)
    values = [float(one) for one in exact]
    places = range(len(rows))
    panel.barh(places, values, color=colors, height=0.62)
    panel.set_yticks(places, labels)
    panel.set(xlim=(0, 1.15 * max(values)))
    panel.set_title(title, x=-0.45)  # above the labels, too
    panel.invert_yaxis()
    panel.set_xticks([])
    panel.spines["bottom"].set_visible(False)
    for place, length in zip(places, exact, strict=True):
        panel.text(
            float(length),
            place,
            f"\u00a0{rounded(length, form)}",
            va="center",
            fontsize=10,
        )


def gain() -> Figure:
    """Wins and a loss, as measured."""
    figure = new(6.2)
    figure.get_layout_engine().set(h_pad=0.08)
    deep, step, file, shallow = figure.subplots(4, height_ratios=(4, 4, 3, 3))
    where = "deep#deep_mlp, epochs | density={}; method={} | test accuracy [%]"
    bars(
        deep,
        [
            (
                "dense, orthogonal",
                DENSE,
                value(where.format(1, "dense_orthogonal")),
            ),
            (
                "5%: exactly orthogonal",
                OURS,
                value(where.format(0.05, "eoi_erk")),
            ),
            (
                "5%: random, rescaled",
                PLAIN,
                value(where.format(0.05, "base_scaled")),
            ),
            ("5%: random mask", PLAIN, value(where.format(0.05, "base_erk"))),
        ],
        "50 tanh layers, no normalization: accuracy, %",
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
        "Step of 4 layers of 4096 (JAX): time, dense = 1",
        ".2f",
    )
    where = "litert_blocks | network=mlp; block=32; batch=1; AMX=EPYC; threads=1 | {}"
    bars(
        file,
        [
            ("dense, int8", DENSE, value(where.format("int8 kB"))),
            ("dense, int4", DENSE, value(where.format("int4 kB"))),
            ("1 in 8 blocks, int8", OURS, value(where.format("kB"))),
        ],
        "LiteRT file of an MLP, 4.2 million weights: kB",
        ".0f",
    )
    where = "methods#cnn, epochs: 4 | density={}; method={} | test accuracy [%]"
    bars(
        shallow,
        [
            ("dense", DENSE, value(where.format(1, "dense"))),
            ("10%: random mask", PLAIN, value(where.format(0.1, "base_erk"))),
            (
                "10%: exactly orthogonal",
                OURS,
                value(where.format(0.1, "eoi_erk")),
            ),
        ],
        "No gain: CNN, batch normalization: accuracy, %",
        ".1f",
    )
    return figure


STARTS = {
    "dense_orthogonal": ("dense, orthogonal", DENSE),
    "eoi_erk": ("exactly orthogonal", OURS),
    "sao": ("SAO", GREEN),
    "ai": ("AI", OTHER),
    "base_scaled": ("random, rescaled", VIOLET),
    "base_erk": ("random mask", PLAIN),
}
"""Label and colour by method, for deep networks."""


def draw_curves(panel, net: str, key: str, scale: float) -> None:
    """Draws what the runs of a network record over their steps: mean and range of the seeds."""
    runs = finished(RESULTS / "deep.jsonl")  # of the usual depths:
    runs = [run for run in runs if run["net"] == net and "accuracy" in run]
    runs = [run for run in runs if not run.get("settings")]
    for method, (label, color) in STARTS.items():
        if curves := [run[key] for run in runs if run["method"] == method]:
            # Theirs are of an epoch.
            steps = curves[0][0][0] * np.arange(1, len(curves[0]) + 1)
            values = scale * np.array(
                [[value for _, value in curve] for curve in curves]
            )
            panel.plot(steps, values.mean(axis=0), color=color, label=label)
            style = {"color": color, "alpha": 0.2}
            panel.fill_between(
                steps, values.min(axis=0), values.max(axis=0), **style
            )


def under(figure: Figure) -> Figure:
    """The figure with steps on its axis and one legend below."""
    figure.axes[-1].set_xlabel("step")
    figure.legend(
        *figure.axes[0].get_legend_handles_labels(),
        loc="outside lower left",
        ncols=2,
    )
    return figure


def accuracies_over_steps(net: str, title: str) -> Figure:
    """Accuracy of a network over the steps of training, by initialization."""
    figure = new(HEIGHT)
    panel = figure.subplots()
    draw_curves(panel, net, "progress", 100)
    panel.set(
        title=f"{title}, density 0.125",
        ylim=(0, 100),
        ylabel="test accuracy, %",
    )
    return under(figure)


def very_deep() -> Figure:
    """Accuracy of a thousand layers over the steps of training."""
    return accuracies_over_steps("thousand_mlp", "MLP of 1000 tanh layers")


def very_deep_cnn() -> Figure:
    """Accuracy of a hundred convolutions over the steps of training."""
    return accuracies_over_steps("circular_cnn", "CNN of 100 tanh layers")


def mlp7_losses() -> Figure:
    """Training loss of the MLP of 7 layers."""
    figure = new(HEIGHT)
    panel = figure.subplots()
    draw_curves(panel, "mlp7", "losses", 1)
    panel.set(
        title="MLP of 7 tanh layers, density 0.05",
        ylabel="training loss",
        yscale="log",
    )
    panel.set_yticks(
        [0.4, 0.6, 1.0, 2.0], ["0.4", "0.6", "1", "2"], minor=False
    )
    panel.minorticks_off()
    return under(figure)


COLORS = {
    "eoi_auto": ("exactly orthogonal, EOI", OURS),
    "ai": ("AI", OTHER),
    "base_orthogonal": ("Base: dense orthogonal, masked", VIOLET),
    "base_erk": ("usual initializer, masked", PLAIN),
}
"""By method the label and colour."""


def resnet_densities() -> Figure:
    """Accuracy of a small ResNet over the density, each start at its best rate; range of seeds."""
    found: dict[float, dict[str, list[float]]] = {}
    for run in finished(RESULTS / "methods.jsonl"):
        if run["net"] == "digits_resnet8" and "accuracy" in run:
            each = found.setdefault(
                run["density"], {name: [] for name in COLORS}
            )
            each[run["method"]].append(100 * run["accuracy"])
    densities = sorted(
        d for d, each in found.items() if min(map(len, each.values())) > 2
    )
    figure = new(HEIGHT)
    panel = figure.subplots()
    for method, (label, color) in COLORS.items():
        values = [found[density][method] for density in densities]
        means = [np.mean(each) for each in values]
        panel.plot(
            densities, means, color=color, label=label, marker="o", markersize=4
        )
        ends = [[end(each) for each in values] for end in (min, max)]
        panel.fill_between(densities, *ends, color=color, alpha=0.2, lw=0)
    panel.set(title="ResNet-8 on digits, 8 epochs", xscale="log")
    panel.set(xlabel="density (live fraction)", ylabel="test accuracy, %")
    panel.set_xticks(densities, [f"{density:g}" for density in densities])
    panel.minorticks_off()
    panel.legend(loc="lower right")
    return figure


def density_law() -> Figure:
    """How rotations fill a matrix: four of them, and the expected density over their number."""
    figure = new(3.8)
    above, below = figure.subfigures(2, height_ratios=(1, 1.5))
    grids, curve = above.subplots(1, 4), below.subplots()
    n = 48
    for panel, density in zip(grids, (1 / n, 0.05, 0.15, 0.5), strict=True):
        kernel, _ = exact_orthogonal((n, n), density, seed=3)
        mask(panel, np.abs(kernel) > 0, f"density {density:.2f}")
    rotations = np.arange(0, 161, 4)
    curve.plot(
        rotations,
        [expected_density(int(t), n, n) for t in rotations],
        color=OURS,
    )
    curve.set(xlabel="rotations", ylim=(0, None))
    curve.set_title(f"expected density, {n} x {n}")
    return figure


def thresholds() -> Figure:
    """The soft threshold beside a mask by magnitude."""
    figure = new(HEIGHT)
    panel = figure.subplots()
    weights = np.linspace(-1, 1, 401)
    panel.plot(weights, weights, color=DENSE, lw=1, ls=":", label="w")
    hard = np.where(np.abs(weights) > 0.3, weights, np.nan)
    panel.plot(weights, hard, color=OTHER, label="mask by magnitude")
    soft = np.sign(weights) * np.maximum(np.abs(weights) - 0.3, 0)
    panel.plot(weights, soft, color=OURS, label="soft threshold")
    panel.set(xlabel="weight w", title="effective weight, threshold 0.3")
    panel.legend()
    return figure


def schedules() -> Figure:
    """The density over the steps, by schedule."""
    figure = new(HEIGHT)
    panel = figure.subplots()
    steps = np.arange(0, 1001, 5)
    span = {"begin_step": 100, "end_step": 700}
    falls = {
        "Cubic": (OURS, kso.schedules.Cubic(0.1, **span)),
        "Linear": (OTHER, kso.schedules.Linear(0.1, **span)),
        "OneShot": (PLAIN, kso.schedules.OneShot(0.1, step=400)),
    }
    for name, (color, schedule) in falls.items():
        densities = [schedule.at(int(step)) for step in steps]
        panel.plot(steps, densities, color=color, label=name)
    panel.set(xlabel="step", title="density by schedule", ylim=(0, 1.05))
    panel.legend()
    return figure


def movements(quantity: int, title: str) -> Figure:
    """The movement of the thresholds of a network over the epochs, by layer.

    Args:
        quantity: int. Its place in a recorded curve: 0 for `s`, 1 for its sum of steps by L2, 2 by
            the loss, 3 for the threshold.
        title: str. The title of the picture.
    """
    [*_, run] = [
        run
        for run in finished(RESULTS / "learnt.jsonl")
        if run["part"] == "forces"
    ]
    # of steps, of quantities, of layers
    curves = np.array(run["curves"])
    epochs = run["epochs"] / len(curves) * np.arange(1, len(curves) + 1)
    figure = new(HEIGHT)
    panel = figure.subplots()
    colors = (OURS, OTHER, GREEN, PLAIN)
    for layer, color in zip(range(curves.shape[2]), colors, strict=True):
        curve = curves[:, quantity, layer]
        panel.plot(epochs, curve, color=color, label=f"layer {layer + 1}")
    panel.set(title=title, xlabel="epoch")
    panel.legend()
    return figure


def forces() -> Figure:
    """The learnt thresholds over the epochs."""
    return movements(3, "threshold t = g(s)")


def forces_penalty() -> Figure:
    """How far L2 has moved the parameter of each threshold."""
    return movements(1, "s, moved by L2")


def forces_loss() -> Figure:
    """How far the loss has moved the parameter of each threshold."""
    return movements(2, "s, moved by the loss")


def structures() -> Figure:
    """One mask of each structure, all exactly orthogonal at density 1/4."""
    kinds = {
        "single entries": None,
        "Block(8, 1)": kso.Block(8, 1),
        "Block(8, 8,\nregular=True)": kso.Block(8, 8, regular=True),
        "NByM(2, 4)": kso.NByM(2, 4),
    }
    figure = new(2.2)
    panels = figure.subplots(1, 4)
    for panel, (title, structure) in zip(panels, kinds.items(), strict=True):
        initializer = kso.initializers.ExactOrthogonal(
            0.25, seed=1, structure=structure
        )
        mask(panel, initializer.sample((64, 64))[1], title)
    return figure


def taps() -> Figure:
    """Where the matrix H stands in a convolution's kernel, tap by tap."""
    kinds = {
        "center": "center tap",
        "dense_center": "denser center tap",
        "all": "all taps",
    }
    figure = new(2.2)
    for panel, (name, title) in zip(
        figure.subplots(1, 3), kinds.items(), strict=True
    ):
        kernel, live = exact_orthogonal((3, 3, 24, 24), 0.1, seed=1, taps=name)
        shades = np.where(kernel != 0, 2, np.where(live, 1, 0))
        framed = np.pad(
            shades, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=3
        )
        panel.imshow(
            np.block([[framed[i, j] for j in range(3)] for i in range(3)]),
            cmap=ListedColormap(["#00000000", OTHER, OURS, DENSE]),
            vmin=0,
            vmax=3,
            interpolation="nearest",
        )
        panel.set(xticks=[], yticks=[])
        panel.set_title(title, fontsize=9)
        panel.spines[:].set_visible(False)
    return figure


def budgets() -> Figure:
    """The densities of three budgets for the layers of a small CNN."""
    layers = [
        keras.layers.Conv2D(f, 3, name=f"conv_{k}")
        for k, f in enumerate((16, 32, 64))
    ]
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            *layers,
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(128, name="dense"),
            keras.layers.Dense(10, name="head"),
        ]
    )
    figure = new(2.8)
    panel = figure.subplots()
    colors = {"uniform": DENSE, "er": OTHER, "erk": OURS}
    for k, (name, color) in enumerate(colors.items()):
        budget = getattr(kso.budgets, name)(model, 0.1)
        paths = [*budget]
        places = np.arange(len(paths)) + 0.27 * (k - 1)
        panel.bar(
            places,
            [budget[path] for path in paths],
            0.25,
            color=color,
            label=name,
        )
    panel.set_xticks(
        range(len(paths)), [path.removesuffix("/kernel") for path in paths]
    )
    panel.set(
        ylabel="density", title="three budgets of one global density, 0.1"
    )
    panel.legend()
    return figure


def sensitivity() -> Figure:
    """Error by density of the layers of an MLP for digits: in their outputs and in the model's."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    keras.utils.set_random_seed(0)
    dense, relu = keras.layers.Dense, {"activation": "relu"}
    hidden = [dense(128, name=f"hidden_{k}", **relu) for k in range(1, 4)]
    model = keras.Sequential(
        [keras.Input((64,)), *hidden, dense(10, name="head")]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(2e-3), loss)
    model.fit(images / 16, labels, batch_size=64, epochs=10, verbose=0)
    table = kso.sensitivity(model, images[:512] / 16)
    figure = new(3.4)
    panel = figure.subplots()
    for (path, errors), color in zip(
        table.errors.items(), (OURS, OTHER, GREEN, VIOLET), strict=True
    ):
        points = [(x, y) for x, y in errors.items() if not isinstance(x, str)]
        shares, lost = zip(*points, strict=True)
        name = path.removesuffix("/kernel")
        panel.plot(
            shares, lost, color=color, label=name, marker="o", markersize=4
        )
        of_model = [table.gains[path] * error for error in lost]
        panel.plot(shares, of_model, "--", color=color, linewidth=1)
    panel.set(
        xscale="log",
        yscale="log",
        xlabel="density",
        ylabel="relative squared error",
    )
    panel.set_xticks(shares, [f"{share:g}" for share in shares])
    panel.minorticks_off()
    panel.set_title("outputs of a layer; dashed: outputs of the model")
    panel.legend()
    return figure


def frontier(network: str = "rnet") -> Figure:
    """Every file that `shrink` tried for a network, by bytes and score."""
    lines = finished(RESULTS / "real_shrunk.jsonl")
    line = matching(lines, network=network, how="shrink")[-1]
    figure = new(HEIGHT)
    panel = figure.subplots()
    kinds = {
        "dense": (DENSE, "s", lambda name: name.startswith("dense")),
        "narrowed": (OURS, "o", lambda name: name.startswith("narrowed")),
    }
    for label, (color, marker, belongs) in kinds.items():
        trials = [trial for trial in line["trials"] if belongs(trial["name"])]
        panel.plot(
            [trial["bytes"] / 1000 for trial in trials],
            [trial["score"] for trial in trials],
            marker,
            color=color,
            label=label,
        )
    for trial in line["trials"]:
        is_taken = (trial["name"], trial["route"]) == (
            line["model"],
            line["route"],
        )
        if is_taken or trial["name"].startswith("dense"):
            text = "written by shrink" if is_taken else trial["route"]
            panel.annotate(
                text,
                (trial["bytes"] / 1000, trial["score"]),
                xytext=(8, 0),
                textcoords="offset points",
                verticalalignment="center",
            )
    panel.set(xlim=(0, 260), xlabel="file, kB", ylabel="score")
    panel.legend(loc="lower right")
    return figure


def times_as_fast(amx: str, title: str) -> Figure:
    """How many times as fast files of blocks are as the best dense int8 file, as measured."""
    networks = {
        "mlp": "MLP",
        "convolutions": "3x3",
        "cnn": "CNN",
        "encoder": "encoder",
    }
    where = "litert_blocks | network={}; block={}; batch=1; AMX={}; threads=1 | x int8"
    rows = []
    for network, label in networks.items():
        for block in (32, 64):
            times = value(where.format(network, block, amx))
            color = OURS if times >= 1 else PLAIN
            rows.append((f"{label}, blocks of {block}", color, times))
    figure = new(HEIGHT)
    panel = figure.subplots()
    bars(panel, rows, f"Times as fast as dense int8, {title}", ".1f")
    panel.axvline(1, color=DENSE, linestyle="--", linewidth=1)
    return figure


def routes() -> Figure:
    """Files of blocks beside dense int8 on a processor with AMX."""
    return times_as_fast("yes", "with AMX")


def routes_without_amx() -> Figure:
    """Files of blocks beside dense int8 without AMX."""
    return times_as_fast("no", "the same processor without AMX")


def mean_singular_values() -> Figure:
    """The mean singular value of the Jacobian of seven tanh layers over the density, by start."""
    where = "spectrum#Square kernels | activation=tanh; budget=uniform | {}"
    starts = {
        "EOI": ("exactly orthogonal, EOI", OURS),
        "SAO": ("SAO", GREEN),
        "AI": ("AI", OTHER),
        "base": ("dense orthogonal, masked", PLAIN),
    }
    figure = new(HEIGHT)
    panel = figure.subplots()
    for start, (label, color) in starts.items():
        axis = "density of SAO" if start == "SAO" else "density"
        texts = cells(where.format(axis), RESULTS)
        pairs = cells(where.format(start), RESULTS)
        points = [
            (float(density), float(pair.split("/")[1]))
            for density, pair in zip(texts, pairs, strict=True)
            if "/" in pair
        ]
        panel.plot(
            *zip(*points, strict=True),
            color=color,
            label=label,
            marker="o",
            markersize=4,
        )
    panel.set(xscale="log", yscale="log", xlabel="density")
    panel.set_title("mean singular value, Jacobian of 7 tanh layers")
    panel.legend()
    return figure


DRAWS = {
    "exactly orthogonal": (OURS, kso.initializers.ExactOrthogonal(gain=1.0)),
    "random mask, rescaled": (
        VIOLET,
        kso.initializers.RandomSparse(initializer="orthogonal", rescale=True),
    ),
    "random mask": (
        PLAIN,
        kso.initializers.RandomSparse(initializer="orthogonal"),
    ),
}
"""By label the colour and the initializer."""


def deep(depth: int, density: float, initializer: object) -> keras.Model:
    """A deep tanh network without normalization, made sparse."""
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Dense(128, activation="tanh", name=f"h{k}")
        for k in range(depth)
    ]
    dense = keras.Sequential([keras.Input((128,)), *layers])
    return kso.sparsify(dense, density, initializer=initializer, seed=0)


def singular_values() -> Figure:
    """The singular values of one kernel of density 1/8, by initialization."""
    figure = new(HEIGHT)
    panel = figure.subplots()
    for label, (color, initializer) in DRAWS.items():
        (weight,) = kso.prunable_weights(deep(1, 0.125, initializer))
        values = np.linalg.svd(np.array(weight.value), compute_uv=False)
        panel.plot(values, color=color, label=label)
    panel.set(
        xlabel="number",
        ylabel="singular value",
        title="A kernel of 128 x 128, density 1/8",
    )
    panel.legend()
    return figure


def jacobian() -> Figure:
    """The singular values of the Jacobian of twenty layers, by initialization."""
    figure = new(HEIGHT)
    panel = figure.subplots()
    rows = 0.1 * np.random.default_rng(0).normal(size=(2, 128)).astype(
        "float32"
    )
    for label, (color, initializer) in DRAWS.items():
        values = kso.analysis.jacobian_singular_values(
            deep(20, 0.125, initializer), rows
        )
        panel.plot(np.sort(values, axis=-1)[0, ::-1], color=color, label=label)
    panel.set(
        xlabel="number",
        ylabel="singular value",
        yscale="log",
        ylim=(1e-12, 1e2),
    )
    panel.set_title("Jacobian of 20 tanh layers, density 1/8")
    panel.legend()
    return figure


ROOM_COLORS = {
    OTHER: "orthogonal kernels initializers schedules parametrizations layers "
    "storages models families",
    VIOLET: "budgets saliency calibration pruning",
    OURS: "callbacks recovery",
    GREEN: "quantization export",
    PLAIN: "analysis shrinking cli tfmot",
}
"""Sparse layers and models; what stays; training; files; what stands around. Others: backends."""


def imported_rooms() -> dict[str, set[str]]:
    """The rooms that each room of the package imports, read from its files."""
    package = Path(kso.__file__).parent
    rooms: dict[str, set[str]] = {}
    for path in sorted(package.rglob("*.py")):
        room = path.relative_to(package).parts[0].removesuffix(".py")
        if room.startswith("__"):
            continue
        imported = rooms.setdefault(room, set())
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                package_name, _, inside = node.module.partition(".")
                if package_name == kso.__name__:
                    names = [inside] if inside else [a.name for a in node.names]
                    imported |= {name.partition(".")[0] for name in names}
    return {
        room: {name for name in imported if name in rooms and name != room}
        for room, imported in rooms.items()
    }


def rooms() -> Figure:
    """The rooms of the package on floors: each above all that it imports."""
    imports = imported_rooms()
    floors: dict[str, int] = {}
    below: dict[str, set[str]] = {}  # all rooms that a room needs
    for room in graphlib.TopologicalSorter(imports).static_order():
        floors[room] = 1 + max(
            (floors[name] for name in imports[room]), default=0
        )
        below[room] = imports[room].union(
            *(below[name] for name in imports[room])
        )
    colors = {
        room: color
        for color, names in ROOM_COLORS.items()
        for room in names.split()
    }
    figure = new(8.0)
    panel = figure.subplots()
    places = {}
    for floor in range(1, max(floors.values()) + 1):
        on_floor = sorted(room for room in floors if floors[room] == floor)
        for k, room in enumerate(on_floor):
            places[room] = ((k + 0.5) / len(on_floor), floor)
    for room, (x, y) in places.items():
        for name in imports[room]:
            # A room that another import brings needs no line of its own.
            if not any(name in below[other] for other in imports[room]):
                panel.plot(
                    *zip((x, y), places[name], strict=True), color=DENSE, lw=1
                )
        frame = {
            "boxstyle": "round",
            "facecolor": colors.get(room, DENSE),
            "edgecolor": "none",
        }
        panel.text(
            x,
            y,
            room,
            color="white",
            ha="center",
            va="center",
            fontsize=9,
            bbox=frame,
        )
    panel.set(xlim=(0, 1), ylim=(0.5, max(floors.values()) + 0.5))
    panel.axis("off")
    return figure


DRAWN = (gain, mlp7_losses, resnet_densities, frontier, mean_singular_values)
DRAWN += (very_deep, very_deep_cnn, routes, routes_without_amx)
DRAWN += (faster, faster_memory, growth, growth_density, growth_batch)
DRAWN += (thresholds, schedules, forces, forces_penalty, forces_loss)
DRAWN += (density_law, structures, taps, budgets, sensitivity)
DRAWN += (singular_values, jacobian, rooms)
PICTURES = {draw.__name__: draw for draw in DRAWN}


class Pictures(Measurement):
    """Draws the pictures of docs/: gains of the package, and illustrations of the methods.

    python benchmarks/pictures.py                    # all, into docs/
    python benchmarks/pictures.py --only thresholds
    """

    settings = {
        "only": Setting(
            [*PICTURES],
            choices=PICTURES,
            quick=[name for name in PICTURES if name not in SOURCES],
        ),
        "folder": Setting(DOCS, quick=RESULTS),
    }

    def measure(self) -> None:
        """Draws what the command line names."""
        for name in self.given.only:
            path = self.given.folder / f"{name}.svg"
            save(PICTURES[name](), path, SOURCES.get(name, []))
            print(path)


if __name__ == "__main__":
    main(Pictures)
