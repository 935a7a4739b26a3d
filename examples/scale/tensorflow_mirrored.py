"""Sparse training on two devices of one process, by TensorFlow's MirroredStrategy.

    python examples/scale/tensorflow_mirrored.py --methods rigl blocks

Make, wrap and compile the model in the strategy's scope; `fit` does the rest. Without XLA: with
`jit_compile=True` Keras fails under this strategy for dense models, too.
"""

import os

os.environ["KERAS_BACKEND"] = "tensorflow"
# Two halves of the CPU stand for two GPUs.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import contextlib

import recipe
import tensorflow as tf


def begin(place):
    cpu = tf.config.list_physical_devices("CPU")[0]
    halves = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, halves)
    global scope
    scope = contextlib.nullcontext
    if place.way == "two devices":
        scope = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope


def train(method, place):
    with scope():
        model = recipe.sparse_model(method)
    x, y = recipe.data()
    model.fit(
        x,
        y,
        batch_size=recipe.BATCH,
        epochs=recipe.EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=recipe.callbacks(method, 0, 1),
    )
    return model


if __name__ == "__main__":
    recipe.main(
        [recipe.Way("one device"), recipe.Way("two devices")], train, begin
    )
