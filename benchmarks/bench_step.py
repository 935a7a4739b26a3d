"""Time of a training step with fixed masks against the dense model, in one interleaved run.

    KERAS_BACKEND=tensorflow python benchmarks/bench_step.py
    KERAS_BACKEND=jax        python benchmarks/bench_step.py

Writes `results/step_<backend>.md`. Rivals are the dense model, the same model with masks of
density 0.1, and a second dense model, whose ratio to the first is the noise of the measurement.

"""

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from timing import interleaved, machine, markdown, write

import keras_sparse_ortho as kso

L = keras.layers
STEPS = 10  # train_on_batch calls in one sample


def mlp() -> keras.Model:
    layers = [L.Dense(1024, activation="relu", name=f"hidden_{k}") for k in range(4)]
    return keras.Sequential([keras.Input((1024,)), *layers, L.Dense(10, name="head")])


def cnn() -> keras.Model:
    layers: list[keras.layers.Layer] = [keras.Input((32, 32, 3))]
    for k, filters in enumerate((32, 64, 64, 128)):
        layers += [
            L.Conv2D(filters, 3, strides=1 + k % 2, padding="same", use_bias=False, name=f"c{k}"),
            L.BatchNormalization(),
            L.ReLU(),
        ]
    return keras.Sequential([*layers, L.GlobalAveragePooling2D(), L.Dense(10, name="head")])


def stepper(model: keras.Model, jit: bool, batch: int):
    """A function that trains `STEPS` steps on data that is on the device already."""
    model.compile(
        keras.optimizers.Adam(1e-4),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=jit,
    )
    rng = np.random.default_rng(0)
    x = rng.normal(size=(STEPS * batch, *model.inputs[0].shape[1:])).astype("float32")
    y = rng.integers(0, 10, STEPS * batch).astype("int32")

    if keras.backend.backend() != "tensorflow":
        return lambda: model.fit(x, y, batch_size=batch, epochs=1, shuffle=False, verbose=0)
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch, drop_remainder=True).cache()
    batches = iter(data.repeat())
    model.make_train_function()

    def run() -> None:
        for _ in range(STEPS):
            logs = model.train_function(batches)
        float(logs["loss"])  # waits for the device

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=31)
    rounds = parser.parse_args().rounds
    backend = keras.backend.backend()
    settings = {"tensorflow": (True, False), "jax": (True,), "torch": (False,)}[backend]
    rows = []
    for name, build, batch in (("MLP 4 x 1024", mlp, 128), ("CNN", cnn, 64)):
        for jit in settings:
            dense = build()
            rivals = {
                "dense": dense,
                "fixed mask": kso.sparsify(dense, 0.1, seed=0),
                "dense again": keras.models.clone_model(dense),
            }
            steps = {key: stepper(model, jit, batch) for key, model in rivals.items()}
            times = interleaved(steps, rounds, warm_up=3)
            rows.append(
                [
                    name,
                    f"{batch}",
                    "XLA" if jit else "no XLA",
                    f"{1e3 * times['dense'] / STEPS:.2f}",
                    f"{1e3 * times['fixed mask'] / STEPS:.2f}",
                    f"{times['fixed mask'] / times['dense']:.3f}",
                    f"{times['dense again'] / times['dense']:.3f}",
                ]
            )
            print(rows[-1], flush=True)
    text = (
        f"# Training step on {backend}: fixed masks of density 0.1 against dense\n\n{machine()}, "
    )
    text += f"Keras {keras.__version__}. Adam, float32. Medians of {rounds} interleaved samples "
    text += f"of {STEPS} steps; the last column is the dense model against itself.\n\n"
    header = ["model", "batch", "compiled", "dense [ms]", "fixed mask [ms]", "ratio", "noise"]
    write(f"step_{backend}", text + markdown(header, rows))


if __name__ == "__main__":
    main()
