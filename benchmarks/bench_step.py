r"""Time of a training step of every parametrization against the dense model, interleaved.

    KERAS_BACKEND=tensorflow python benchmarks/bench_step.py
    KERAS_BACKEND=jax        python benchmarks/bench_step.py

Writes `results/step_<backend>.md`. Rivals are the dense model, the same model with fixed masks of
density 0.1, the same in compact storage, with soft thresholds, with scheduled masks and with
straight-through top-k, and a second dense model, whose ratio to the first is the noise of the
measurement. Scheduled masks are updated every 100 steps; the time of an update is measured
separately and spread over them. The time of the selects, one for each kernel forward and one
backward, is measured separately, too: it is the work that a mask adds to a step.

On JAX glibc returns XLA's temporary memory and faults it in again, in some processes at most steps
and in others hardly ever; then a fixed mask costs the MLP up to 1.15 instead of 1.03. This setting
makes it keep memory:

    GLIBC_TUNABLES=glibc.malloc.arena_max=1:glibc.malloc.mmap_threshold=4294967296:\
    glibc.malloc.trim_threshold=8589934592
"""

import argparse
import functools
import os
import warnings

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from timing import interleaved, machine, markdown, parsed, write

import keras_sparse_ortho as kso

# Steps and updates are timed apart.
warnings.simplefilter("ignore", kso.errors.DensityWarning)

L = keras.layers
STEPS = 10  # training steps in one sample
PERIOD = 100  # steps between two mask updates


def mlp(width: int) -> keras.Model:
    layers = [L.Dense(width, activation="relu", name=f"hidden_{k}") for k in range(4)]
    return keras.Sequential([keras.Input((width,)), *layers, L.Dense(10, name="head")])


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


def renewal(model: keras.Model, rounds: int) -> float:
    """Seconds of `UpdateMasks` for all masks, once every `PERIOD` steps."""
    model.compile(keras.optimizers.Adam(1e-4), "mse")
    model.optimizer.build(model.trainable_variables)  # its slots are reset with the masks
    callback = kso.callbacks.UpdateMasks()
    callback.set_model(model)
    callback.on_train_begin()
    return interleaved({"renewal": lambda: callback.on_step(0, 1)}, rounds)["renewal"]


def selects(model: keras.Model, rounds: int) -> float:
    """Seconds of `where(mask, kernel, 0)` for all kernels, twice: forward and backward."""
    ops = keras.ops
    weights = kso.prunable_weights(model)
    masks = [ops.convert_to_tensor(w.parametrization.mask_value()) for w in weights]
    kernels = [ops.convert_to_tensor(w.raw_value()) for w in weights]

    def select(kernels: list, masks: list) -> list:
        return [
            ops.where(m, k, ops.zeros((), k.dtype)) for k, m in zip(kernels, masks, strict=False)
        ]

    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        compiled = tf.function(select, jit_compile=True)
    else:
        import jax

        compiled = jax.jit(select)

    def run() -> None:
        for _ in range(2 * STEPS):
            last = compiled(kernels, masks)
        np.asarray(last[0])

    return interleaved({"selects": run}, rounds, warm_up=2)["selects"] / STEPS


def parametrized(dense: keras.Model) -> dict[str, keras.Model]:
    """The rivals of the dense model."""
    kinds = kso.parametrizations
    return {
        "fixed mask": kso.sparsify(dense, 0.1, seed=0),
        "compact": kso.sparsify(dense, 0.1, seed=0, storage="compact"),
        "soft threshold": kso.parametrize(dense, kinds.SoftThreshold(s_init=-5.0)),
        "magnitude mask": kso.parametrize(dense, kinds.MagnitudeMask(0.1, frequency=PERIOD)),
        "straight-through top-k": kso.parametrize(
            dense, kinds.StraightThroughTopK(0.1, frequency=PERIOD)
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--width", type=int, default=1024, help="of the MLP")
    parser.add_argument("--batches", type=int, nargs="+", default=[128, 512], help="of the MLP")
    parser.add_argument("--no-cnn", dest="cnn", action="store_false")
    quick = {"rounds": 3, "width": 256, "batches": [128], "cnn": False}
    given = parsed(parser, quick)
    rounds, dense_mlp = given.rounds, functools.partial(mlp, given.width)
    cases = [(f"MLP 4 x {given.width}", dense_mlp, batch) for batch in given.batches]
    cases += [("CNN", cnn, 64)] if given.cnn else []
    backend = keras.backend.backend()
    settings = {"tensorflow": (True, False), "jax": (True,), "torch": (False,)}[backend]
    settings = settings[:1] if given.quick else settings
    rows = []
    for name, build, batch in cases:
        for jit in settings:
            dense = build()
            rivals = {"dense": dense, **parametrized(dense)}
            # Measurements outside of training come first: on JAX `fit` holds the variables.
            renewals = {key: renewal(rivals[key], 5) for key in list(rivals)[-2:]}
            masking = selects(rivals["fixed mask"], 11) if backend != "torch" else float("nan")
            rivals["dense again"] = keras.models.clone_model(dense)
            steps = {key: stepper(model, jit, batch) for key, model in rivals.items()}
            times = interleaved(steps, rounds, warm_up=3)
            base = times["dense"] / STEPS
            for key in list(rivals)[1:]:
                step = times[key] / STEPS
                spread = step + renewals.get(key, 0.0) / PERIOD
                rows.append(
                    [
                        f"{name}, batch {batch}, {'XLA' if jit else 'no XLA'}",
                        key,
                        f"{1e3 * base:.2f}",
                        f"{1e3 * step:.2f}",
                        f"{step / base:.3f}",
                        f"{1e3 * renewals[key]:.1f}" if key in renewals else "",
                        f"{spread / base:.3f}" if key in renewals else "",
                        f"{1e3 * masking:.2f}" if key == "fixed mask" else "",
                    ]
                )
                print(rows[-1], flush=True)
    text = (
        f"# Training step on {backend}: parametrizations against the dense model\n\n{machine()}, "
    )
    text += f"Keras {keras.__version__}. Adam, float32. Medians of {rounds} interleaved samples "
    text += f'of {STEPS} steps. "dense again" is the dense model against itself: the noise. '
    text += f"Renewals of masks are spread over {PERIOD} steps.\n\n"
    if "GLIBC_TUNABLES" in os.environ:
        text += f"GLIBC_TUNABLES={os.environ['GLIBC_TUNABLES']}\n\n"
    header = ["model", "rival", "dense [ms]", "step [ms]", "ratio"]
    header += ["renewal [ms]", "ratio with renewals", "selects alone [ms]"]
    write(f"step_{backend}", text + markdown(header, rows))


if __name__ == "__main__":
    main()
