"""One learning rate for all widths and densities: sparse maximal update parametrization.

    KERAS_BACKEND=jax python benchmarks/one_rate.py [--networks mlp text]
    python benchmarks/one_rate.py --summary

S-muPar (Dey et al., 2024, arXiv 2405.15743) scales what dense muP scales by width also by density:
with Adam, a hidden kernel of width `w` and density `d` has variance `1 / (w d)`, which exactly
orthogonal kernels have by themselves, and the learning rate `r (w0 / w) (d0 / d)`; the head's
outputs are multiplied by `w0 / w`. "plain" has one rate for all variables, and no factor. Heads
start at zero. Each rate of a grid trains once per width, density and seed; a grid goes on while its
best rate is an edge. Runs are lines of `results/one_rate.jsonl`, the table is
`results/one_rate.md`.
"""

import argparse
import os
import statistics

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from record import RESULTS, append, finished, markdown, parsed, write

import keras_sparse_ortho as kso

LINES = RESULTS / "one_rate.jsonl"
RATES = {"mlp": [2.0**-k for k in range(12, 6, -1)], "text": [2.0**-k for k in range(11, 6, -1)]}
WIDTHS = {"mlp": [128, 512], "text": [64, 128]}
DENSITIES = {"mlp": [1.0, 0.1], "text": [1.0, 0.1]}
BASE = {"mlp": 128, "text": 64}  # whose rate at density 1 is the one for all
KINDS = ("plain", "S-muPar")


class ScaledAdam(keras.optimizers.Adam):
    """Adam with a factor on the rate of some variables, by their paths."""

    def __init__(self, rate, scales: dict[str, float]) -> None:
        super().__init__(rate)
        self.scales = scales

    def update_step(self, gradient, variable, learning_rate):
        """A step at the variable's rate."""
        scale = self.scales.get(variable.path, 1.0)
        super().update_step(gradient, variable, scale * learning_rate)


def mlp(width: int) -> keras.Model:
    """Three hidden layers, of which two are square."""
    layers, orthogonal = keras.layers, keras.initializers.Orthogonal
    hidden = [
        layers.Dense(
            width, activation="relu", name=f"h{k}", kernel_initializer=orthogonal(2**0.5, seed=k)
        )
        for k in range(3)
    ]
    return keras.Sequential([keras.Input((784,)), *hidden])


def text(width: int) -> keras.Model:
    """The blocks of the small language model, without its head."""
    import small_language_model as lm

    full = lm.decoder(lm.LENGTH, lm.SYMBOLS, width, lm.DEPTH, max(width // 32, 2), 4 * width)
    return keras.Model(full.inputs, full.get_layer("head").input)


def headed(name: str, kind: str, width: int, density: float, rate: float, seed: int, steps: int):
    """A compiled network under a parametrization."""
    keras.utils.set_random_seed(seed)
    body = {"mlp": mlp, "text": text}[name](width)
    hidden = ["h1", "h2"] if name == "mlp" else [".*kernel"]
    options = {"include": hidden}
    if density < 1:
        body = kso.sparsify(body, density, budget="uniform", seed=seed, **options)
    wide = width / BASE[name]
    outputs = body.outputs[0]
    if kind == "S-muPar":
        outputs = keras.layers.Rescaling(1 / wide)(outputs)
    classes = 10 if name == "mlp" else 97
    head = keras.layers.Dense(classes, kernel_initializer="zeros", name="classes")
    model = keras.Model(body.inputs, head(outputs))
    others = ("h0", "classes", "embedding", "positions")
    found = kso.prunable_weights(model, unregistered=True)
    kernels = [w for w in found if w.path.split("/")[0] not in others]
    scales = {w.variable.path: 1 / (wide * density) for w in kernels}
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0, steps, warmup_target=rate, warmup_steps=max(steps // 20, 1)
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(ScaledAdam(schedule, scales if kind == "S-muPar" else {}), loss)
    return model


def data(name: str, steps: int) -> tuple:
    """Inputs and targets to train on, once, and to test."""
    if name == "text":
        import small_language_model as lm

        (trained, tested), size = lm.text(), lm.BATCH
        return (*lm.windows(trained, size * steps, 0), *lm.windows(tested, 256, 1), size)
    from example_data import load

    images = load("fashion_mnist")
    rows, size = np.random.default_rng(0).permutation(55000)[: 128 * steps], 128
    x, y = images.x_train.reshape(-1, 784), images.y_train
    return x[rows], y[rows], x[55000:], y[55000:], size


def measure(name: str, given: argparse.Namespace) -> None:
    """Appends the runs that are missing."""
    x, y, x_test, y_test, size = data(name, given.steps)
    done = {_key(run): run["loss"] for run in finished(LINES)}

    def trained(kind, width, density, rate):
        found = []
        for seed in range(given.seeds):
            key = (name, kind, width, density, given.steps, rate, seed)
            if key not in done:
                keras.utils.clear_session()
                model = headed(name, kind, width, density, rate, seed, given.steps)
                model.fit(x, y, batch_size=size, verbose=0)
                loss = float(model.evaluate(x_test, y_test, batch_size=256, verbose=0))
                done[key] = loss if np.isfinite(loss) else 99.0
                run = dict(zip(KEYS, key, strict=True)) | {"loss": done[key]}
                append(LINES, run)
                print(run, flush=True)
            found.append(done[key])
        return statistics.mean(found)

    for density in given.densities or DENSITIES[name]:
        for width in given.widths or WIDTHS[name]:
            for kind in KINDS:
                losses = {rate: trained(kind, width, density, rate) for rate in RATES[name]}
                for _ in range(4):
                    best = min(losses, key=losses.__getitem__)
                    if min(losses) < best < max(losses):
                        break
                    rate = best * 2 if best == max(losses) else best / 2
                    losses[rate] = trained(kind, width, density, rate)


KEYS = ("network", "kind", "width", "density", "steps", "rate", "seed")


def _key(run: dict) -> tuple:
    return tuple(run[key] for key in KEYS)


def summarize(steps: int) -> None:
    """Writes the table: best rates, and what the rate of the smallest dense network costs."""
    runs = [run for run in finished(LINES) if run["steps"] == steps]
    losses: dict[tuple, dict[float, list[float]]] = {}
    for run in {_key(run): run for run in runs}.values():
        case = run["network"], run["kind"], run["width"], run["density"]
        losses.setdefault(case, {}).setdefault(run["rate"], []).append(run["loss"])
    means = {c: {r: statistics.mean(v) for r, v in by.items()} for c, by in losses.items()}
    rows = []
    for (name, kind, width, density), by in sorted(means.items()):
        best = min(by, key=by.__getitem__)
        base = means[name, kind, BASE[name], 1.0]
        given = min(base, key=base.__getitem__)
        edge = "-" if min(by) < best < max(by) else "yes"
        cost = f"{by[given] - by[best]:+.3f}" if given in by else ""
        row = [name, kind, str(width), f"{density:g}", f"2^{np.log2(best):.0f}", f"{by[best]:.3f}"]
        rows.append([*row, cost, str(len(by)), edge])
    header = ["network", "parametrization", "width", "density", "best rate", "loss"]
    table = markdown([*header, "with the base's rate", "tries", "edge"], rows)
    intro = (
        "# One learning rate for all widths and densities\n\n"
        f"Adam, {steps} steps with warm-up and cosine decay, test loss; mlp: Fashion-MNIST, two "
        "sparse square layers; text: the blocks of the small language model. The base is the "
        "smallest width at density 1; `with the base's rate`: how much higher the loss is with "
        "its best rate than with the network's own.\n\n"
    )
    write("one_rate", intro + table, sorted({run["seed"] for run in runs}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", default=["mlp", "text"], choices=["mlp", "text"])
    parser.add_argument("--widths", nargs="+", type=int)
    parser.add_argument("--densities", nargs="+", type=float)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--summary", action="store_true", help="only write the table")
    quick = {"networks": ["mlp"], "widths": [128], "densities": [1.0, 0.1], "steps": 4}
    given = parsed(parser, quick=quick)
    for name in [] if given.summary else given.networks:
        measure(name, given)
    summarize(given.steps)


if __name__ == "__main__":
    main()
