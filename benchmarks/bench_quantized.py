"""The time of a compiled step of quantization-aware training, beside that of the masked network.

    KERAS_BACKEND=jax python benchmarks/bench_quantized.py

Steps of the CNN of `one_shot.py` and of an MLP of three layers of 1024 units, density 0.1, batch
128, under XLA and interleaved, are lines of `results/quantized_step.jsonl`;
`results/quantized_step.md` has the last of each backend.
"""

import argparse
import functools
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from one_shot import network
from timing import RESULTS, append, finished, markdown, parsed, wall_and_cpu, write

import keras_sparse_ortho as kso

LINES = RESULTS / "quantized_step.jsonl"
L = keras.layers
STEPS = 3  # of one measurement


def mlp() -> keras.Model:
    """Three layers of 1024 units, and a head."""
    hidden = [L.Dense(1024, activation="relu") for _ in range(3)]
    return keras.Sequential([keras.Input((1024,)), *hidden, L.Dense(10)])


NETS = {"CNN": (network, (28, 28, 1)), "MLP of 1024": (mlp, (1024,))}


def some_steps(model: keras.Model, x: np.ndarray, y: np.ndarray) -> None:
    """Steps, each waited for."""
    for _ in range(STEPS):
        float(model.train_on_batch(x, y))


def measure(name: str, rounds: int) -> None:
    """Appends the times of the steps of one network."""
    make, shape = NETS[name]
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(128, *shape)).astype("float32"), rng.integers(0, 10, 128)
    masked = kso.sparsify(make(), 0.1, seed=0)
    models = {"masked": masked, "int8, weights alone": kso.quantize_aware(masked, "int8", None)}
    for method in ("int8", "int4"):
        models[method] = kso.quantize_aware(masked, method)
    for model in models.values():
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-3), loss, jit_compile=True)
    cases = {kind: functools.partial(some_steps, model, x, y) for kind, model in models.items()}
    times = wall_and_cpu(cases, rounds, warm_up=2)
    for kind, (wall, cpu) in times.items():
        row = {"backend": keras.backend.backend(), "network": name, "kind": kind}
        row |= {"ms": 1e3 * wall / STEPS, "cpu_ms": 1e3 * cpu / STEPS}
        row |= {"relative": wall / times["masked"][0], "cpu": cpu / times["masked"][1]}
        append(LINES, row)
        print(row, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nets", nargs="+", default=list(NETS), choices=NETS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--summary", action="store_true", help="only write the table")
    given = parsed(parser, quick={"rounds": 1})
    if not given.summary:
        for name in given.nets:
            measure(name, given.rounds)
    last = {(run["backend"], run["network"], run["kind"]): run for run in finished(LINES)}
    rows = [
        [*key, f"{run['ms']:.1f}", f"{run['relative']:.2f}", f"{run['cpu']:.2f}"]
        for key, run in sorted(last.items())
    ]
    header = ["backend", "network", "weights", "step [ms]", "to masked", "CPU time to masked"]
    write(
        "quantized_step",
        "# A step of quantization-aware training\n\nUnder XLA, batch 128, density 0.1; medians of "
        "interleaved calls. Activations are int8 but in the second kind.\n\n"
        + markdown(header, rows),
    )


if __name__ == "__main__":
    main()
