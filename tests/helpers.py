"""What several test folders share."""

import contextlib
import functools
import os
import subprocess
import sys
import warnings

import keras
import numpy as np
import pytest

# What has no public name, and several tests need, comes from here.
from keras_sparse_ortho._backend import compiled as compiled
from keras_sparse_ortho._backend import second_derivatives as second_derivatives
from keras_sparse_ortho._keras_internals import (
    optimizer_slots as optimizer_slots,
)
from keras_sparse_ortho._workers import Workers as Workers
from keras_sparse_ortho.callbacks import StepCallback as StepCallback
from keras_sparse_ortho.errors import DensityWarning


@functools.cache
def two_device_strategy():
    """TensorFlow's MirroredStrategy over the two halves of the CPU.

    One for the whole run: the numbers by which a second one tells its reductions apart start anew
    and clash with those of the first.
    """
    import tensorflow as tf

    devices = tf.config.list_logical_devices("CPU")
    assert len(devices) == 2
    return tf.distribute.MirroredStrategy([device.name for device in devices])


@contextlib.contextmanager
def on_two_devices():
    """Inside, TensorFlow and JAX train on two devices."""
    if keras.backend.backend() == "tensorflow":
        with two_device_strategy().scope():
            yield
        return
    before = keras.distribution.distribution()
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    try:
        yield
    finally:
        keras.distribution.set_distribution(before)


def run_python(*arguments, cwd=None, **environment):
    """What a process of Python prints, with these arguments and this beside our environment."""
    command, own = (
        [sys.executable, *map(str, arguments)],
        {**os.environ, **environment},
    )
    done = subprocess.run(
        command, env=own, cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


def array(value):
    """A tensor or variable as a NumPy array."""
    return keras.ops.convert_to_numpy(value)


def assert_same(one, other):
    """Arrays or variables in order, to the bit."""
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(
            array(a), array(b), err_msg=getattr(a, "path", "")
        )


def reloaded(model, folder):
    """The model, saved and loaded again."""
    model.save(folder / "model.keras")
    return keras.saving.load_model(folder / "model.keras")


def jit(*, always=False):
    """The `jit_compile` to test with: XLA wherever Keras has it.

    In the quick run on TensorFlow, where XLA takes long to compile, only with `always`.
    """
    backend = keras.backend.backend()
    return backend == "jax" or (
        backend == "tensorflow" and (always or "KSO_SLOW" in os.environ)
    )


def jit_if_quicker():
    """The `jit_compile` for tests that compile much and run little: on JAX all else is eager."""
    return keras.backend.backend() == "jax"


slow_on_jax = pytest.mark.slow_on("jax")  # it compiles for long
slow_on_tensorflow = pytest.mark.slow_on("tensorflow")  # it is traced for long
# So many kinds of layers.
slow_where_traced = pytest.mark.slow_on("tensorflow", "jax")


def slow_case_on_jax(*values):
    """The parameters of a case that takes seconds on JAX, where it is left to the slow tests."""
    return pytest.param(*values, marks=slow_on_jax)


@contextlib.contextmanager
def part_of_a_run():
    """Inside, training that ends before its schedule is no fault: the rest is to follow."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DensityWarning)
        yield


def gradients(model, x, y, loss):
    """The gradient of `loss(y, model(x))` for every trainable variable, on any backend."""
    backend = keras.backend.backend()
    if backend == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        found = tape.gradient(
            value, [v.value for v in model.trainable_variables]
        )
        return [array(tf.convert_to_tensor(g)) for g in found]
    if backend == "jax":
        import jax

        def objective(trainable):
            fixed = [v.value for v in model.non_trainable_variables]
            outputs, _ = model.stateless_call(
                trainable, fixed, x, training=True
            )
            return loss(y, outputs)

        trainable = [v.value for v in model.trainable_variables]
        return [array(g) for g in jax.jit(jax.grad(objective))(trainable)]
    model.zero_grad()
    loss(y, model(x, training=True)).backward()
    return [array(v.value.grad) for v in model.trainable_variables]


def moments(optimizer, variable):
    """The optimizer's slots of a variable: Adam's two moments, or SGD's momentum."""
    lists = [
        value
        for name, value in vars(optimizer).items()
        if name in ("_momentums", "_velocities", "momentums") and value
    ]
    index = optimizer._get_variable_index(variable)
    return [array(slots[index]) for slots in lists]


class Chain(keras.Model):
    """A model written as a class, which calls layers one after the other."""

    def __init__(self, *layers, **kwargs):
        super().__init__(**kwargs)
        self.parts = list(layers)

    def call(self, x):
        for layer in self.parts:
            x = layer(x)
        return x


def data(model, classes, count=32, seed=0):
    """Random inputs (a list, if the model has several) and integer labels."""
    rng = np.random.default_rng(seed)

    def values(tensor):
        shape = (count, *tensor.shape[1:])
        if "int" in tensor.dtype:
            return rng.integers(0, 11, shape).astype("int32")
        return rng.normal(size=shape).astype("float32")

    x = [values(tensor) for tensor in model.inputs]
    return x if len(x) > 1 else x[0], rng.integers(0, classes, count).astype(
        "int32"
    )


def classifier_loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)
