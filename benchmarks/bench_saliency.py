"""Time of the saliencies on ResNet-50 at 224 pixels, with random weights.

    KERAS_BACKEND=tensorflow python benchmarks/bench_saliency.py
    KERAS_BACKEND=tensorflow python benchmarks/bench_saliency.py --rounds 5 --only synflow

Writes `results/saliency_<backend>.md`, unless `--only` asks for a part. A single run of each, with
tracing and compilation in it, since that is what a user waits for.

"""

import argparse
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from timing import machine, markdown, write

from keras_sparse_ortho import budgets

DENSITY = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--only", choices=["snip", "grasp", "synflow", "synflow32", "random"])
    arguments = parser.parse_args()
    backend = keras.backend.backend()
    keras.utils.set_random_seed(0)
    model = keras.applications.ResNet50(weights=None)
    # XLA on TensorFlow compiles longer than the few steps of a saliency take.
    model.compile(loss="sparse_categorical_crossentropy", jit_compile=backend == "jax")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(arguments.batch, 224, 224, 3)).astype("float32")
    y = rng.integers(0, 1000, arguments.batch)
    rounds = arguments.rounds
    runs = {
        "random": lambda: budgets.random(model, DENSITY, seed=0),
        "magnitude": lambda: budgets.magnitude(model, DENSITY),
        "snip": lambda: budgets.snip(model, DENSITY, x, y, on_collapse="warn"),
        "grasp": lambda: budgets.grasp(model, DENSITY, x, y, on_collapse="warn"),
        "synflow": lambda: budgets.synflow(model, DENSITY, rounds=rounds, verbose=1),
        "synflow32": lambda: budgets.synflow(
            model, DENSITY, rounds=rounds, dtype="float32", verbose=1
        ),
    }
    samples = {"snip": arguments.batch, "grasp": arguments.batch}
    rows = []
    for name, run in runs.items():
        if arguments.only not in (None, name):
            continue
        start = time.perf_counter()
        try:
            found = run()
            note = f"{len(found.collapsed)} layers collapsed" if found.collapsed else ""
        except ValueError as error:  # float32 overflows: that is what is to be shown
            note = str(error).split(". Received")[0]
        seconds = time.perf_counter() - start
        what = f"{rounds} rounds" if name.startswith("synflow") else f"{samples.get(name, 0)}"
        rows.append([name, what, f"{seconds:.1f}", note])
        print(rows[-1], flush=True)
    if arguments.only is None:
        text = f"# Saliencies of ResNet-50 (224 pixels, random weights) on {backend}\n\n{machine()}"
        text += f", Keras {keras.__version__}. Density {DENSITY}; one run of each, compilation "
        text += "included. `synflow` computes in float64, `synflow32` in float32.\n\n"
        header = ["method", "samples or rounds", "seconds", "note"]
        write(f"saliency_{backend}", text + markdown(header, rows))


if __name__ == "__main__":
    main()
