"""Time of a training step of our TFMOT wrappers against TFMOT's own, interleaved, in tf_keras.

    python benchmarks/tfmot.py

Writes `results/tfmot.md`. Rivals are the dense model, the same model in TFMOT's wrapper (between
updates of its masks, and in a step that updates them), in `PruneWithMask` and in
`PruneWithSoftThreshold`, and a second dense model, whose ratio to the first is the noise of the
measurement. Also lists the operations of the graph: TFMOT finds its thresholds by sorting, in a
branch of every step.
"""

import argparse
import functools
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf
from record import interleaved, machine, markdown, parsed, write

import keras_sparse_ortho as kso

tf_keras = kso.tfmot.register_initializers()
from tensorflow_model_optimization.sparsity import keras as sparsity  # noqa: E402

L = tf_keras.layers
STEPS = 2  # training steps in one sample: rivals take turns often, as the load may change
PERIOD = 100  # TFMOT's own default between two updates
NEVER = 10**9
SORTS = {"TopKV2", "TopK", "Sort", "ApproxTopK"}


def mlp(width: int) -> tf_keras.Model:
    layers = [L.Dense(width, activation="relu", name=f"hidden_{k}") for k in range(4)]
    return tf_keras.Sequential([tf_keras.Input((width,)), *layers, L.Dense(10, name="head")])


def cnn() -> tf_keras.Model:
    layers = [tf_keras.Input((32, 32, 3))]
    for k, filters in enumerate((32, 64, 64, 128)):
        layers += [
            L.Conv2D(filters, 3, strides=1 + k % 2, padding="same", use_bias=False, name=f"c{k}"),
            L.BatchNormalization(name=f"n{k}"),
            L.ReLU(name=f"r{k}"),
        ]
    layers += [L.GlobalAveragePooling2D(name="pool"), L.Dense(10, name="head")]
    return tf_keras.Sequential(layers)


class Stepper:
    """Trains `STEPS` steps on data that is in memory already."""

    def __init__(self, model: tf_keras.Model, jit: bool, batch: int) -> None:
        self.model = model
        model.compile(
            tf_keras.optimizers.Adam(1e-4),
            tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=jit,
        )
        rng = np.random.default_rng(0)
        x = rng.normal(size=(4 * batch, *model.input_shape[1:])).astype("float32")
        y = rng.integers(0, 10, 4 * batch).astype("int32")
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch, drop_remainder=True).cache()
        self._batches = iter(data.repeat())
        self._train = model.make_train_function()
        update = sparsity.UpdatePruningStep()
        update.set_model(model)
        update.on_train_begin()  # without it TFMOT's wrapper refuses to train

    def steps(self, count: int) -> None:
        """Trains some steps, and waits for them."""
        for _ in range(count):
            logs = self._train(self._batches)
        float(logs["loss"])

    def __call__(self) -> None:
        """One sample."""
        self.steps(STEPS)


def tfmot_model(dense: tf_keras.Model, schedule: sparsity.PruningSchedule) -> tf_keras.Model:
    """All layers with kernels in TFMOT's wrapper: a budget of 0.1 for each."""
    return kso.tfmot.prune_by_budget(dense, 0.1, "uniform", schedule)


def operations(model: tf_keras.Model) -> set[str]:
    """The kinds of operations in the graph of a call in training, branches included."""
    spec = tf.TensorSpec((1, *model.input_shape[1:]), "float32")
    graph = tf.function(lambda x: model(x, training=True)).get_concrete_function(spec).graph
    found: set[str] = set()
    for one in (graph.as_graph_def(), *graph.as_graph_def().library.function):
        found |= {node.op for node in getattr(one, "node", getattr(one, "node_def", ()))}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--width", type=int, default=1024, help="of the MLP")
    parser.add_argument("--no-cnn", dest="cnn", action="store_false")
    given = parsed(parser, {"rounds": 3, "width": 128, "cnn": False})
    rounds = given.rounds
    cases = [(f"MLP 4 x {given.width}", functools.partial(mlp, given.width), 128)]
    cases += [("CNN", cnn, 64)] if given.cnn else []
    rows = []
    for name, build, batch in cases:
        for jit in (False,) if given.quick else (False, True):
            dense = build()
            models = {
                "dense": dense,
                "TFMOT, between updates": tfmot_model(
                    dense, sparsity.ConstantSparsity(0.9, begin_step=NEVER)
                ),
                "PruneWithMask": kso.tfmot.prune_exact_orthogonal(dense, 0.1, seed=0),
                "PruneWithSoftThreshold": kso.tfmot.prune_with_soft_threshold(dense, s_init=-5.0),
                "dense again": tf_keras.models.clone_model(dense),
            }
            rivals = {key: Stepper(model, jit, batch) for key, model in models.items()}
            times = interleaved(rivals, rounds, warm_up=3)
            updating = Stepper(
                tfmot_model(dense, sparsity.ConstantSparsity(0.9, 0, frequency=1)), jit, batch
            )
            updating.steps(2)
            times["TFMOT, a step that updates"] = STEPS * interleaved(
                {"update": lambda: updating.steps(1)}, 5  # noqa: B023
            )["update"]  # fmt: skip
            models["TFMOT, a step that updates"] = updating.model
            base, theirs = times["dense"], times["TFMOT, between updates"]
            spread = theirs + (times["TFMOT, a step that updates"] - theirs) / PERIOD
            times[f"TFMOT, updates every {PERIOD} steps"] = spread
            for key, value in times.items():
                sorts = ""
                if key in models:
                    sorts = "yes" if operations(models[key]) & SORTS else "no"
                rows.append(
                    [
                        f"{name}, batch {batch}, {'XLA' if jit else 'no XLA'}",
                        key,
                        f"{1e3 * value / STEPS:.2f}",
                        f"{value / base:.3f}",
                        f"{value / theirs:.3f}",
                        sorts,
                    ]
                )
                print(rows[-1], flush=True)
    text = "# Training step in tf_keras: our wrappers against TFMOT's own\n\n"
    text += f"{machine()}, tf_keras {tf_keras.__version__}, TensorFlow {tf.__version__}. Adam, "
    text += f"float32, density 0.1. Medians of {rounds} interleaved samples of {STEPS} steps, of 5 "
    text += 'single steps for the step that updates. "dense again" is the dense model against '
    text += f'itself: the noise. "Updates every {PERIOD} steps" is computed from the two above.\n\n'
    header = [
        "model",
        "rival",
        "step [ms]",
        "to dense",
        "to TFMOT between updates",
        "sort in graph",
    ]
    write("tfmot", text + markdown(header, rows))


if __name__ == "__main__":
    main()
