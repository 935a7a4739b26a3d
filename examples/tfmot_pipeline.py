"""The whole TFMOT pipeline with kernels that are sparse and orthogonal from the first step.

    python examples/tfmot_pipeline.py                      # digits, seconds
    python examples/tfmot_pipeline.py --dataset fashion_mnist --epochs 3

A tf_keras network is pruned with exactly orthogonal kernels under an ERK budget, trained with
TFMOT's callback, stripped by TFMOT, quantized by its prune-preserving scheme, converted to TFLite
and run; the stripped model is also clustered by TFMOT's sparsity-preserving scheme. Every stage
counts all zeros of the masks and prints the accuracy. A lost zero ends the program.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import quiet  # noqa: F401 - before Keras: no start-up messages of TensorFlow

# isort: split
import numpy as np
from data import Dataset, load

import keras_sparse_ortho as kso

tf_keras = kso.tfmot.register_initializers()

# After the line above, which keeps TFMOT from turning `tf.keras` into tf_keras.
import tensorflow as tf  # noqa: E402
import tensorflow_model_optimization as tfmot  # noqa: E402
from ai_edge_litert.interpreter import Interpreter  # noqa: E402

# TFMOT 0.8.1 exports it from no public module; its guide imports it from here.
from tensorflow_model_optimization.python.core.clustering.keras.experimental.cluster import (  # noqa: E402
    cluster_weights,
)

L = tf_keras.layers
Masks = dict[str, np.ndarray]


def network(shape: tuple[int, ...], classes: int) -> tf_keras.Model:
    inputs = tf_keras.Input(shape, name="x")
    x = L.Conv2D(16, 3, padding="same", activation="relu", name="conv_0")(
        inputs
    )
    x = L.MaxPooling2D()(x)
    x = L.Conv2D(32, 3, padding="same", activation="relu", name="conv_1")(x)
    x = L.Flatten()(L.MaxPooling2D()(x))
    x = L.Dense(64, activation="relu", name="hidden")(x)
    return tf_keras.Model(inputs, L.Dense(classes, name="head")(x))


def train(
    model: tf_keras.Model,
    data: Dataset,
    epochs: int,
    rate: float,
    *,
    jit_compile: bool = False,
    callbacks: Sequence[tf_keras.callbacks.Callback] = (),
) -> None:
    model.compile(
        tf_keras.optimizers.Adam(rate),
        tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=jit_compile,
    )
    model.fit(
        data.x_train,
        data.y_train,
        batch_size=64,
        epochs=epochs,
        verbose=0,
        callbacks=callbacks,
    )


def opened(content: bytes) -> Interpreter:
    interpreter = Interpreter(model_content=content)
    interpreter.allocate_tensors()
    return interpreter


def file_kernels(interpreter: Interpreter, masks: Masks) -> Masks:
    """The int8 kernels in a file, found by their shapes: TFLite keeps them as (out, ..., in)."""
    found = {}
    for path, mask in masks.items():
        for detail in interpreter.get_tensor_details():
            shape = np.moveaxis(mask, -1, 0).shape
            if tuple(detail["shape"]) == shape and detail["dtype"] == np.int8:
                if detail["quantization_parameters"]["zero_points"].any():
                    raise ValueError(
                        f"Kernels are symmetric in int8. Received: {detail}"
                    )
                found[path] = np.moveaxis(
                    interpreter.get_tensor(detail["index"]), 0, -1
                )
    return found


def run_file(interpreter: Interpreter, x: np.ndarray) -> np.ndarray:
    entry, result = (
        interpreter.get_input_details()[0],
        interpreter.get_output_details()[0],
    )
    answers = []
    for row in x:
        interpreter.set_tensor(entry["index"], row[None])
        interpreter.invoke()
        answers.append(interpreter.get_tensor(result["index"])[0])
    return np.stack(answers)


class Ledger:
    """Counts the masks' zeros and prints the accuracy, stage by stage."""

    def __init__(self, data: Dataset, masks: Masks) -> None:
        self.masks = masks
        self.stages: dict[str, dict[str, float]] = {}
        self._data = data
        self._dead = sum(
            int(np.count_nonzero(~mask)) for mask in masks.values()
        )

    def note(self, stage: str, kernels: Masks, logits: np.ndarray) -> None:
        """Records a stage; ends the program if a zero was lost."""
        lost = sum(
            np.count_nonzero(kernels[path][~mask])
            for path, mask in self.masks.items()
        )
        right = float(np.mean(np.argmax(logits, axis=1) == self._data.y_test))
        print(
            f"{stage:24} accuracy {right:7.2%}   zeros {self._dead - lost} of {self._dead}"
        )
        if lost:
            raise SystemExit(
                f"{stage}: {lost} entries that the masks leave out are not 0"
            )
        self.stages[stage] = {
            "accuracy": right,
            "zeros": self._dead,
            "lost": int(lost),
        }

    def note_model(self, stage: str, model: tf_keras.Model) -> None:
        """Records a stage that has a model."""
        logits = model.predict(self._data.x_test, batch_size=256, verbose=0)
        self.note(stage, kernels_of(model, self.masks), logits)


def kernels_of(model: tf_keras.Model, masks: Masks) -> Masks:
    """The kernels of wrapped, plain, quantized or clustered layers, by the paths of the masks."""
    found = {}
    for path, mask in masks.items():
        # Wrappers add to the layer's name, and clustering renames the variable.
        [layer] = [
            one for one in model.layers if one.name.endswith(path.split("/")[0])
        ]
        found[path] = next(
            v.numpy() for v in layer.weights if v.shape == mask.shape
        )
    return found


def copy_of(model: tf_keras.Model) -> tf_keras.Model:
    """A copy, because TFMOT's wrappers share weights with the given model."""
    copy = tf_keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    return copy


def pipeline(
    data: Dataset, density: float, epochs: int
) -> tuple[dict[str, dict], bytes]:
    """Runs all stages; returns the records and the file."""
    dense = network(data.x_train.shape[1:], data.classes)
    model = kso.tfmot.prune_exact_orthogonal(
        dense, density, budget="erk", seed=0
    )
    weights = kso.tfmot.prunable_weights(model)
    ledger = Ledger(
        data, {weight.path: weight.state.mask() for weight in weights}
    )
    print(
        kso.Budget(
            {w.path: w.density for w in weights},
            {w.path: w.size for w in weights},
        )
    )
    ledger.note_model("pruned, not trained", model)

    update = tfmot.sparsity.keras.UpdatePruningStep()
    train(model, data, epochs, 3e-3, jit_compile=True, callbacks=[update])
    ledger.note_model("trained with XLA", model)
    plain = tfmot.sparsity.keras.strip_pruning(model)
    ledger.note_model("stripped", plain)

    clustering = tfmot.clustering.keras
    clustered = cluster_weights(
        copy_of(plain),
        number_of_clusters=32,
        cluster_centroids_init=clustering.CentroidInitialization.KMEANS_PLUS_PLUS,
        preserve_sparsity=True,
    )
    train(clustered, data, max(epochs // 4, 1), 3e-4)
    ledger.note_model(
        "clustered, stripped", clustering.strip_clustering(clustered)
    )

    quantization = tfmot.quantization.keras
    quantized = quantization.quantize_apply(
        quantization.quantize_annotate_model(plain),
        tfmot.experimental.combine.Default8BitPrunePreserveQuantizeScheme(),
    )
    train(quantized, data, max(epochs // 4, 1), 3e-4)
    ledger.note_model("quantization-aware", quantized)

    converter = tf.lite.TFLiteConverter.from_keras_model(quantized)
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    content = converter.convert()
    file = opened(content)
    logits = run_file(file, data.x_test)
    ledger.note(
        f"int8 file, {len(content):,} bytes",
        file_kernels(file, ledger.masks),
        logits,
    )
    return ledger.stages, content


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--dataset", choices=["digits", "fashion_mnist"], default="digits"
    )
    parser.add_argument(
        "--epochs", type=int, help="default: 16 on digits, 3 on Fashion-MNIST"
    )
    parser.add_argument(
        "--density", type=float, default=0.2, help="live fraction (default 0.2)"
    )
    parser.add_argument("--output", type=Path, default=Path("tfmot_output"))
    options = parser.parse_args()
    epochs = (
        options.epochs or {"digits": 16, "fashion_mnist": 3}[options.dataset]
    )
    tf_keras.utils.set_random_seed(0)
    stages, content = pipeline(load(options.dataset), options.density, epochs)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "model.tflite").write_bytes(content)
    (options.output / "stages.json").write_text(
        json.dumps(stages, indent=1) + "\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
