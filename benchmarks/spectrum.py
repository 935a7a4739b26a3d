"""Singular values of the input-output Jacobian of sparse MLPs: Figure 3 of the EOI paper.

    KERAS_BACKEND=tensorflow python benchmarks/spectrum.py

An MLP of 7 layers of width 100, four activations, densities from .03 to 1, the layerwise budgets
uniform, ERK, SNIP, GraSP and SynFlow. *Base*: dense orthogonal kernels times a mask, the saliency's
own one or a random one of the budget. *EOI*: exactly orthogonal kernels with the densities of the
budget. Both without biases, at the critical gain of the activation. Writes `results/spectrum.md`
and `results/spectrum.png`; takes no times.

"""

import argparse
import os
import warnings

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from timing import RESULTS, markdown, write

import keras_sparse_ortho as kso
from keras_sparse_ortho import budgets
from keras_sparse_ortho.analysis import critical_gain, jacobian_singular_values
from keras_sparse_ortho.errors import BudgetError
from keras_sparse_ortho.initializers import ExactOrthogonal, RandomSparse

L = keras.layers
WIDTH, DEPTH, SAMPLES = 100, 7, 8
DENSITIES = (0.03, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0)
ACTIVATIONS = ("linear", "tanh", "hard_tanh", "relu")
NAMES = ("uniform", "erk", "snip", "grasp", "synflow")


def mlp(activation: str, seed: int) -> keras.Model:
    """Dense orthogonal kernels; the loss is on the last layer, as on logits."""
    gain = critical_gain(activation)
    layers = [
        L.Dense(
            WIDTH,
            activation=activation,
            use_bias=False,
            kernel_initializer=keras.initializers.Orthogonal(gain, seed=seed * DEPTH + k),
            name=f"layer_{k}",
        )
        for k in range(DEPTH)
    ]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(loss=loss, jit_compile=keras.backend.backend() == "jax")
    return model


def planned(model: keras.Model, name: str, density: float, seed: int):
    """A `Budget` or a `Saliency`."""
    if name in ("uniform", "erk"):
        return getattr(budgets, name)(model, density, orthogonal=False)
    if name == "synflow":
        return budgets.synflow(model, density, on_collapse="warn")
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(256, WIDTH)).astype("float32"), rng.integers(0, WIDTH, 256)
    score = {"snip": budgets.snip, "grasp": budgets.grasp}[name]
    return score(model, density, x, y, batch_size=256, seed=seed, on_collapse="warn")


def spectrum(model: keras.Model, kernels: list[np.ndarray], x: np.ndarray) -> tuple[float, float]:
    """Largest and mean singular value with these kernels in the place of the model's."""
    before = model.get_weights()
    model.set_weights(kernels)
    found = jacobian_singular_values(model, x)
    model.set_weights(before)
    return found.max, found.mean


def base(model: keras.Model, plan, seed: int) -> list[np.ndarray]:
    weights = kso.prunable_weights(model, flops=False)
    if isinstance(plan, budgets.Saliency):
        return [w.raw_value() * plan.masks[w.path] for w in weights]
    draw = [RandomSparse(plan[w.path], seed=seed * DEPTH + k) for k, w in enumerate(weights)]
    return [w.raw_value() * one.sample(w.shape)[1] for w, one in zip(weights, draw, strict=True)]


def exact(model: keras.Model, plan, seed: int, gain: float) -> list[np.ndarray]:
    weights = kso.prunable_weights(model, flops=False)
    if isinstance(plan, budgets.Saliency):
        plan = plan.orthogonal_budget
    draw = [
        ExactOrthogonal(plan[w.path], gain, seed=seed * DEPTH + k) for k, w in enumerate(weights)
    ]
    return [one.sample(w.shape)[0] for w, one in zip(weights, draw, strict=True)]


def measure(seeds: int) -> list[dict]:
    rows = []
    for activation in ACTIVATIONS:
        gain = critical_gain(activation)
        for name in NAMES:
            for density in DENSITIES:
                found: dict[str, list[tuple[float, float]]] = {"base": [], "EOI": []}
                for seed in range(seeds):
                    model = mlp(activation, seed)
                    # Small inputs, around which smooth activations are linear.
                    x = np.random.default_rng(seed).normal(size=(SAMPLES, WIDTH), scale=0.1)
                    plan = planned(model, name, density, seed)
                    found["base"].append(spectrum(model, base(model, plan, seed), x))
                    try:
                        kernels = exact(model, plan, seed, gain)
                    except BudgetError:
                        continue
                    found["EOI"].append(spectrum(model, kernels, x))
                for variant, values in found.items():
                    if values:
                        largest, mean = np.mean(values, axis=0)
                        rows.append(
                            {
                                "activation": activation,
                                "budget": name,
                                "density": density,
                                "start": variant,
                                "largest": float(largest),
                                "mean": float(mean),
                            }
                        )
        print(activation, "done", flush=True)
    return rows


def picture(rows: list[dict]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        2, len(ACTIVATIONS), figsize=(13, 6), sharex=True, sharey="row", layout="constrained"
    )
    for column, activation in enumerate(ACTIVATIONS):
        for row, key in enumerate(("largest", "mean")):
            ax = axes[row, column]
            for k, name in enumerate(NAMES):
                for start, style in (("base", "--"), ("EOI", "-")):
                    points = [
                        (r["density"], r[key])
                        for r in rows
                        if (r["activation"], r["budget"], r["start"]) == (activation, name, start)
                    ]
                    if points:
                        ax.plot(*zip(*points, strict=True), style, color=f"C{k}")
            ax.set_xscale("log")
            ax.set_title(f"{activation}, {key}")
    for ax in axes[-1]:
        ax.set_xlabel("density")
    for k, name in enumerate(NAMES):
        axes[0, 0].plot([], [], color=f"C{k}", label=name)
    axes[0, 0].plot([], [], "k--", label="base")
    axes[0, 0].plot([], [], "k-", label="EOI")
    axes[0, 0].legend(fontsize=7)
    figure.supylabel("singular value of the Jacobian")
    figure.savefig(RESULTS / "spectrum.png", dpi=110)
    plt.close(figure)


def kept(rows: list[dict], start: str) -> str:
    """Ranges of both singular values at densities under .2, relative to the dense network."""
    dense = {
        (r["activation"], key): r[key]
        for r in rows
        for key in ("largest", "mean")
        if (r["density"], r["budget"], r["start"]) == (1.0, "uniform", "base")
    }
    parts = []
    for key in ("largest", "mean"):
        shares = [
            r[key] / dense[r["activation"], key]
            for r in rows
            if r["density"] < 0.2 and r["start"] == start
        ]
        parts.append(f"{key} {min(shares):.3g} to {max(shares):.3g}")
    return f"{start}: " + ", ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    seeds = parser.parse_args().seeds
    warnings.filterwarnings("ignore", message="Layer collapse")
    rows = measure(seeds)
    picture(rows)
    header = ["activation", "budget", "density", "start", "largest", "mean"]
    text = "# Singular values of the Jacobian of sparse MLPs\n\n"
    text += f"{DEPTH} layers of width {WIDTH}, {seeds} seed(s), {SAMPLES} samples, on "
    text += f"{keras.backend.backend()}. Relative to the dense network, at densities under .2, "
    text += f"over all budgets and activations: {kept(rows, 'base')}; {kept(rows, 'EOI')}. AI and "
    text += "SAO are not in this table.\n\n![spectrum](spectrum.png)\n\n"
    table = [
        [f"{row[key]:.3g}" if isinstance(row[key], float) else row[key] for key in header]
        for row in rows
    ]
    write("spectrum", text + markdown(header, table))


if __name__ == "__main__":
    main()
