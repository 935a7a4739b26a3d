"""Singular values of the input-output Jacobian of sparse MLPs: Figure 3 of the EOI paper.

    KERAS_BACKEND=tensorflow OPENBLAS_NUM_THREADS=1 python benchmarks/spectrum.py

An MLP of 7 layers of width 100 without biases, an activation after all but the last, kernels at
the critical gain of the activation, standard normal inputs. The layerwise budgets are uniform, ERK,
SNIP, GraSP and SynFlow. With the densities of each:

- *base*: dense orthogonal kernels times a mask, the saliency's own one or a random one;
- *AI*: the same masks, with live entries optimized towards an isometry;
- *SAO*: permuted dense orthogonal blocks of the nearest degree that divides the width (for ReLU in
  the form made for it), so that its density is not quite the one asked for;
- *EOI*: exactly orthogonal kernels.

Jacobians are computed in NumPy, which for so many small networks is much faster than tracing each;
some are compared with `kso.analysis.jacobian_singular_values`. Writes `results/spectrum.md` and
`docs/spectrum.svg`.
"""

import argparse
import itertools
import os
from collections.abc import Iterator

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import keras
import numpy as np
from record import markdown, parsed, write

import keras_sparse_ortho as kso
from keras_sparse_ortho import budgets, saliency
from keras_sparse_ortho.analysis import critical_gain, jacobian_singular_values
from keras_sparse_ortho.initializers import ExactOrthogonal, RamanujanOrthogonal, RandomSparse
from keras_sparse_ortho.orthogonal import approximate_isometry

ACTIVATIONS = ("linear", "tanh", "hard_tanh", "relu")
BUDGETS = ("uniform", "erk", "snip", "grasp", "synflow")
STARTS = ("base", "AI", "SAO", "EOI")
# Kept: both singular values within this factor of the dense network's.
KEPT = 2.0


def kinds(rows: list[dict]) -> tuple[list[str], list[float]]:
    """The measured budgets and densities."""
    names = {r["budget"] for r in rows}
    return [name for name in BUDGETS if name in names], sorted({r["asked"] for r in rows})


def dense_values(rows: list[dict]) -> dict[str, tuple[float, float]]:
    """Largest and mean of the dense orthogonal network of every activation."""
    return {
        r["activation"]: (r["largest"], r["mean"])
        for r in rows
        if (r["asked"], r["budget"], r["start"]) == (1.0, "uniform", "base")
    }


def shares(rows: list[dict], start: str, activation: str | None = None) -> np.ndarray:
    """`(largest, mean)` relative to the dense network, at densities under .2."""
    dense = dense_values(rows)
    return np.array(
        [
            (r["largest"] / dense[r["activation"]][0], r["mean"] / dense[r["activation"]][1])
            for r in rows
            if r["asked"] < 0.2 and r["start"] == start and activation in (None, r["activation"])
        ]
    )


def verdict(rows: list[dict]) -> str:
    """Who keeps both values, and whether it is only EOI."""
    keeps: dict[str, list[str]] = {}
    for start in STARTS:
        for activation in ACTIVATIONS:
            found = shares(rows, start, activation)
            if len(found):
                kept = bool(((found < KEPT) & (found > 1 / KEPT)).all())
                keeps.setdefault(start, []).extend([activation] if kept else [])
    who = "; ".join(f"{start}: {', '.join(found) or 'none'}" for start, found in keeps.items())
    others = [start for start in keeps if start != "EOI" and set(keeps[start]) & set(keeps["EOI"])]
    if not keeps["EOI"]:
        answer = "EOI does not"
    else:
        answer = f"EOI does, and {' and '.join(others)} too" if others else "Only EOI does"
        lost = [activation for activation in ACTIVATIONS if activation not in keeps["EOI"]]
        answer += f"; under {', '.join(lost)} EOI does not" if lost else ""
    return (
        "At every density under .2 and under every budget, both the largest and the mean singular "
        f"value stay within a factor {KEPT:g} of the dense orthogonal network's for: {who}. "
        f"{answer}."
    )


def picture(rows: list[dict]) -> None:
    from pictures import DENSE, DOCS, GREEN, OTHER, OURS, PLAIN, new, save

    colors = {"base": DENSE, "AI": OTHER, "SAO": GREEN, "EOI": OURS}
    figure = new(8.4)
    axes = figure.subplots(len(ACTIVATIONS), 2, sharex=True)
    dense = dense_values(rows)
    budgets, densities = kinds(rows)
    for row, activation in enumerate(ACTIVATIONS):
        for column, key in enumerate(("mean", "largest")):
            ax, top = axes[row, column], 0.0
            for k, start in enumerate(STARTS):
                lines = np.array(
                    [
                        [
                            r[key]
                            for r in rows
                            if (r["activation"], r["budget"], r["start"])
                            == (activation, name, start)
                        ]
                        for name in budgets
                    ]
                )
                style = {"color": colors[start], "zorder": 3 + k}
                ax.plot(densities, np.median(lines, axis=0), "o-", ms=3, label=start, **style)
                ax.fill_between(
                    densities, lines.min(axis=0), lines.max(axis=0), alpha=0.18, lw=0, **style
                )
                if start != "base":  # which GraSP takes far out of the picture
                    top = max(top, lines.max())
            value = dense[activation][0 if key == "largest" else 1]
            ax.axhline(value, color=PLAIN, lw=1, ls=":", label="dense orthogonal")
            ax.set(xscale="log", ylim=(0, 1.2 * top), title=f"{activation}: {key}")
            shown = densities[::2]  # all would touch each other
            ax.set_xticks(shown, [f"{d:g}" for d in shown], minor=False)
            ax.minorticks_off()
            ax.grid(alpha=0.25)
    for ax in axes[-1]:
        ax.set_xlabel("density asked for")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower left", ncols=3)
    save(figure, DOCS / "spectrum.svg")


def table(rows: list[dict]) -> str:
    """A line for each activation, budget and density: largest / mean of each start."""
    cells = {(r["activation"], r["budget"], r["asked"], r["start"]): r for r in rows}
    starts = [start for start in STARTS if any(r["start"] == start for r in rows)]
    lines = []
    budgets, densities = kinds(rows)
    for activation in ACTIVATIONS:
        for name in budgets:
            for density in densities:
                found = {s: cells[activation, name, density, s] for s in starts}
                values = [f"{r['largest']:.3g} / {r['mean']:.3g}" for r in found.values()]
                actual = [f"{found['SAO']['density']:.3g}"] if "SAO" in found else []
                lines.append([activation, name, f"{density:g}", *values, *actual])
    header = ["activation", "budget", "density", *starts]
    return markdown([*header, "density of SAO"] if "SAO" in starts else header, lines)


def ranges(rows: list[dict]) -> str:
    lines = []
    for activation, start in itertools.product(ACTIVATIONS, STARTS):
        found = shares(rows, start, activation)
        if len(found):
            low, high = found.min(axis=0), found.max(axis=0)
            cells = [f"{a:.3g} to {b:.3g}" for a, b in zip(low, high, strict=True)]
            lines.append([activation, start, *cells])
    return markdown(["activation", "start", "largest", "mean"], lines)


L = keras.layers
WIDTH, DEPTH, SAMPLES = 100, 7, 8
DENSITIES = (0.03, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0)
# Activation and derivative.
FUNCTIONS = {
    "linear": (lambda a: a, np.ones_like),
    "tanh": (np.tanh, lambda a: 1 - np.tanh(a) ** 2),
    "hard_tanh": (lambda a: np.clip(a, -1, 1), lambda a: (np.abs(a) < 1).astype(float)),
    "relu": (lambda a: np.maximum(a, 0), lambda a: (a > 0).astype(float)),
}

Kernels = list[np.ndarray]


def spectrum(activation: str, kernels: Kernels, x: np.ndarray) -> np.ndarray:
    """Singular values of the Jacobian at every sample, by the chain rule."""
    function, slope = FUNCTIONS[activation]
    jacobian = np.broadcast_to(np.eye(x.shape[1]), (len(x), x.shape[1], x.shape[1]))
    for k, kernel in enumerate(kernels):
        x, jacobian = x @ kernel, jacobian @ kernel
        if k < len(kernels) - 1:
            x, jacobian = function(x), jacobian * slope(x)[:, None]
    return np.linalg.svd(jacobian, compute_uv=False)


def mlp(activation: str, kernels: Kernels) -> keras.Model:
    layers = [
        L.Dense(
            WIDTH, "linear" if k == DEPTH - 1 else activation, use_bias=False, name=f"layer_{k}"
        )
        for k in range(DEPTH)
    ]
    model = keras.Sequential([keras.Input((len(kernels[0]),)), *layers])
    model.set_weights(kernels)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(loss=loss, jit_compile=False)
    return model


def dense_kernels(inputs: int, seed: int) -> Kernels:
    return [
        ExactOrthogonal(1.0, seed=1000 * seed + k).sample((inputs if k == 0 else WIDTH, WIDTH))[0]
        for k in range(DEPTH)
    ]


def gains(activation: str) -> list[float]:
    return [critical_gain(activation)] * (DEPTH - 1) + [1.0]


class Plans:
    """Densities and masks of all budgets for one initialization and activation, scored once."""

    def __init__(self, model: keras.Model, seed: int, synflow: dict[float, saliency.Saliency]):
        self._model, self._seed, self._synflow = model, seed, synflow
        self._weights = kso.prunable_weights(model)
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(256, model.input_shape[1])).astype("float32")
        y = rng.integers(0, WIDTH, 256)
        self._scores = {
            name: score(model, 1.0, (x, y), batch_size=256, seed=seed).scores
            for name, score in (("snip", saliency.snip), ("grasp", saliency.grasp))
        }

    def __call__(self, name: str, density: float) -> tuple[list[float], Kernels]:
        """Densities for orthogonal kernels, and masks."""
        paths = [weight.path for weight in self._weights]
        if name in ("uniform", "erk"):
            plan = getattr(budgets, name)(self._model, density)
            draws = [RandomSparse(plan[p], seed=500 * self._seed + k) for k, p in enumerate(paths)]
            masks = [d.sample(w.shape)[1] for d, w in zip(draws, self._weights, strict=True)]
            return [plan[path] for path in paths], masks
        if name == "synflow":
            if density not in self._synflow:
                scored = saliency.synflow(self._model, density, on_collapse="ignore")
                self._synflow[density] = scored
            scored = self._synflow[density]
        else:
            scores = list(self._scores[name].values())
            scored = saliency.Saliency(name, density, self._weights, scores, "ignore")
        plan = scored.orthogonal_budget
        return [plan[path] for path in paths], [scored.masks[path] for path in paths]


def permuted_blocks(density: float, gain: float, seed: int, relu: bool) -> RamanujanOrthogonal:
    """SAO of the admissible degree nearest to the wanted one, by ratio."""
    fit = [d for d in range(1, WIDTH + 1) if WIDTH % d == 0 and not (relu and d % 2)]
    degree = min(fit, key=lambda d: abs(np.log(d / (density * WIDTH))))
    return RamanujanOrthogonal(degree, gain, seed, relu=relu)


class Drawer:
    """The kernels of the four initializations; AI, which is slow, once for each set of masks."""

    def __init__(self, dense: Kernels, seed: int) -> None:
        self._dense, self._seed = dense, seed
        self._isometries: dict[bytes, Kernels] = {}

    def __call__(
        self, activation: str, densities: list[float], masks: Kernels
    ) -> Iterator[tuple[str, Kernels]]:
        """Name and kernels of every initialization that supports these shapes."""
        gain = gains(activation)
        yield "base", [g * w * m for g, w, m in zip(gain, self._dense, masks, strict=True)]
        isometries = self._isometry(masks)
        yield "AI", [g * w for g, w in zip(gain, isometries, strict=True)]
        seeds = [100 * self._seed + k for k in range(DEPTH)]
        shapes = [mask.shape for mask in masks]
        settings = list(zip(densities, gain, seeds, strict=True))
        if len(set(shapes)) == 1:  # it takes square kernels only
            sao = [permuted_blocks(*setting, relu=activation == "relu") for setting in settings]
            yield "SAO", [one.sample(shapes[0])[0] for one in sao]
        eoi = [ExactOrthogonal(*setting) for setting in settings]
        yield "EOI", [one.sample(shape)[0] for one, shape in zip(eoi, shapes, strict=True)]

    def _isometry(self, masks: Kernels) -> Kernels:
        """Linear in the gain, so gain 1 is enough for all activations."""
        key = b"".join(np.packbits(mask).tobytes() for mask in masks)
        if key not in self._isometries:
            self._isometries[key] = [
                # Replaces a collapsed layer, which has no live entry.
                approximate_isometry(w * _scale(m), m, max_iterations=300) if m.any() else 0.0 * w
                for w, m in zip(self._dense, masks, strict=True)
            ]
        return self._isometries[key]


def _scale(mask: np.ndarray) -> float:
    return float(np.sqrt(mask.size / mask.sum()))


def measure(inputs: int, seeds: int, chosen: list[str], densities: list[float]) -> list[dict]:
    found: dict[tuple, list[tuple[float, float, float]]] = {}
    differences = []
    for seed in range(seeds):
        dense = dense_kernels(inputs, seed)
        drawer, synflow = Drawer(dense, seed), {}
        x = np.random.default_rng(seed).normal(size=(SAMPLES, inputs))
        for activation in ACTIVATIONS:
            start = [g * w for g, w in zip(gains(activation), dense, strict=True)]
            model = mlp(activation, start)
            # All weights times a constant: SynFlow's masks are those of every gain.
            plans = Plans(model, seed, synflow)
            for name, density in itertools.product(chosen, densities):
                for method, kernels in drawer(activation, *plans(name, density)):
                    values = spectrum(activation, kernels, x)
                    live = sum(np.count_nonzero(kernel) for kernel in kernels)
                    share = live / sum(kernel.size for kernel in kernels)
                    key = (activation, name, density, method)
                    of_seed = (values.max(axis=1).mean(), values.mean(), share)
                    found.setdefault(key, []).append(of_seed)
                    if seed == 0 and (name, density) == ("uniform", 0.2):
                        differences.append(compare(model, kernels, x, values))
                        model.set_weights(start)
            print(f"{inputs} inputs, seed {seed}, {activation}: done", flush=True)
    print(f"Largest difference from jacobian_singular_values: {max(differences):.1e}", flush=True)
    names = ("activation", "budget", "asked", "start", "largest", "mean", "density")
    means = {key: np.mean(values, axis=0).tolist() for key, values in found.items()}
    return [dict(zip(names, (*key, *mean), strict=True)) for key, mean in means.items()]


def compare(model: keras.Model, kernels: Kernels, x: np.ndarray, values: np.ndarray) -> float:
    """Largest difference from the package's own function, relative to the largest value."""
    model.set_weights(kernels)
    found = jacobian_singular_values(model, x.astype("float32"))
    difference = float(np.abs(found - values).max() / max(values.max(), 1.0))
    if difference > 1e-3:
        raise AssertionError(f"NumPy's Jacobian is another one: it differs by {difference:.2g}")
    return difference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--budgets", nargs="+", choices=BUDGETS, default=BUDGETS)
    parser.add_argument("--densities", nargs="+", type=float, default=DENSITIES)
    quick = {"seeds": 1, "budgets": ["uniform"], "densities": [0.1, 0.2, 1.0]}
    given = parsed(parser, quick)
    seeds = given.seeds
    text = "# Singular values of the Jacobian of sparse MLPs\n\n"
    text += (
        f"{DEPTH} layers of width {WIDTH}, mean of {seeds} seed(s) and {SAMPLES} samples each, on "
    )
    text += f"{keras.backend.backend()}. Cells: largest / mean singular value. SAO has the nearest "
    text += "admissible degree of each layer, for ReLU in its ReLU form; the last column says the "
    text += "density that this is.\n"
    for inputs in (WIDTH, 784):
        rows = measure(inputs, seeds if inputs == WIDTH else 1, given.budgets, given.densities)
        if inputs == WIDTH:
            picture(rows)
            text += "\n![spectrum](../../docs/spectrum.svg)\n\n## Square kernels\n\n"
            text += "All kernels have one shape, so ERK is uniform.\n\n"
        else:
            text += f"\n## With {inputs} inputs, as those of MNIST\n\n"
            text += "One seed. The first kernel is not square, so that SAO has no place here.\n\n"
        text += f"**{verdict(rows)}**\n\nRelative to the dense orthogonal network, at densities "
        text += f"under .2, over all budgets:\n\n{ranges(rows)}\n{table(rows)}"
    write("spectrum", text, seeds=range(seeds))


if __name__ == "__main__":
    main()
