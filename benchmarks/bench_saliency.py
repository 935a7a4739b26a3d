"""Time of the saliencies on ResNet-50 at 224 pixels, with random weights.

    KERAS_BACKEND=tensorflow python benchmarks/bench_saliency.py
    KERAS_BACKEND=tensorflow python benchmarks/bench_saliency.py --rounds 5 --only synflow

Writes `results/saliency.md`, unless `--only` asks for a part. A single run of each, with tracing
and compilation in it, since that is what a user waits for.
"""

import argparse
import os
import time
import warnings

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from networks import cnn
from timing import interleaved, machine, markdown, parsed, write

from keras_sparse_ortho import saliency

DENSITY = 0.1
NETWORKS = {
    "ResNet-50 (224 pixels)": lambda: keras.applications.ResNet50(weights=None),
    "a CNN 8-16-16 (28 pixels)": lambda: cnn((28, 28, 1), 10, {"filters": (8, 16, 16)}),
}


def bare_passes(model: keras.Model) -> str:
    """Seconds of one forward and backward pass of one sample, without masks and scores."""
    import tensorflow as tf

    lines = []
    for dtype in ("float32", "float64"):
        twin = keras.models.clone_model(model, clone_function=lambda layer, d=dtype: cast(layer, d))
        x = tf.ones((1, *model.input_shape[1:]), dtype)

        @tf.function
        def step(x, twin=twin):
            with tf.GradientTape() as tape:
                total = tf.reduce_sum(twin(x, training=False))
            kernels = [v.value for v in twin.trainable_variables if "kernel" in v.path]
            return tape.gradient(total, kernels)

        seconds = interleaved({dtype: lambda step=step, x=x: step(x)}, 5)[dtype]
        lines.append(f"{dtype} {seconds:.2f} s")
    return ", ".join(lines)


def cast(layer: keras.layers.Layer, dtype: str) -> keras.layers.Layer:
    return type(layer).from_config({**layer.get_config(), "dtype": dtype})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--only", choices=["snip", "grasp", "synflow", "synflow32", "random"])
    big, small = NETWORKS
    parser.add_argument("--network", choices=NETWORKS, default=big)
    arguments = parsed(parser, {"network": small, "rounds": 10})
    backend = keras.backend.backend()
    keras.utils.set_random_seed(0)
    model = NETWORKS[arguments.network]()
    # XLA on TensorFlow compiles longer than the few steps of a saliency take.
    model.compile(loss="sparse_categorical_crossentropy", jit_compile=backend == "jax")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(arguments.batch, *model.input_shape[1:])).astype("float32")
    y = rng.integers(0, model.output_shape[-1], arguments.batch)
    rounds = arguments.rounds
    options = {"on_collapse": "warn"}
    deep = {**options, "rounds": rounds, "verbose": 1}
    runs = {
        "random": lambda: saliency.random(model, DENSITY, seed=0, **options),
        "magnitude": lambda: saliency.magnitude(model, DENSITY, **options),
        "snip": lambda: saliency.snip(model, DENSITY, (x, y), **options),
        "grasp": lambda: saliency.grasp(model, DENSITY, (x, y), **options),
        "synflow": lambda: saliency.synflow(model, DENSITY, **deep),
        "synflow32": lambda: saliency.synflow(model, DENSITY, dtype="float32", **deep),
    }
    warnings.filterwarnings("ignore", message="Layer collapse")
    samples = {"snip": arguments.batch, "grasp": arguments.batch}
    rows = []
    for name, run in runs.items():
        if arguments.only not in (None, name):
            continue
        start = time.perf_counter()
        try:
            found = run()
            names = [path.removesuffix("/kernel") for path in found.collapsed]
            note = f"nothing left of {', '.join(names)}" if names else ""
        except ValueError as error:  # float32 overflows: that is what is to be shown
            note = str(error).split(". Received")[0]
        seconds = time.perf_counter() - start
        what = f"{rounds} rounds" if name.startswith("synflow") else f"{samples.get(name, 0)}"
        rows.append([name, what, f"{seconds:.1f}", note])
        print(rows[-1], flush=True)
    if arguments.only is None:
        text = f"# Saliencies of {arguments.network}, random weights, on {backend}\n\n{machine()}"
        text += f", Keras {keras.__version__}. Density {DENSITY}; one run of each, compilation "
        text += "included. `synflow` computes in float64, `synflow32` in float32.\n\n"
        if backend == "tensorflow":
            text += "One plain forward and backward pass of one sample for the gradient of all "
            text += f"kernels: {bare_passes(model)}.\n\n"
        header = ["method", "samples or rounds", "seconds", "note"]
        write("saliency", text + markdown(header, rows))


if __name__ == "__main__":
    main()
