"""Second derivatives against differences of first ones, through every kind of layer."""

import threading

import keras
import numpy as np
import pytest

from keras_sparse_ortho import saliency
from keras_sparse_ortho.analysis import jacobian_singular_values
from keras_sparse_ortho.models import StatelessLoss
from tests.helpers import array, jit_if_quicker, second_derivatives, slow_case_on_jax

L = keras.layers
pytestmark = pytest.mark.core

LAYERS = {
    "batch": L.BatchNormalization,
    "layer": L.LayerNormalization,
    "layer over two axes": lambda: L.LayerNormalization(axis=(-2, -1)),
    "group": lambda: L.GroupNormalization(2),
    "attention": lambda: L.MultiHeadAttention(2, 4),
}


def network(kind, outputs=3):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((4, 5))
    x = L.Dense(8, "tanh", name="a")(inputs)
    x = LAYERS[kind]()(x, x) if kind == "attention" else LAYERS[kind]()(x)
    model = keras.Model(inputs, L.Dense(outputs, name="b")(L.Flatten()(x)))
    model.compile(loss="mse", jit_compile=jit_if_quicker())  # GraSP softens no such loss
    return model


def rows():
    # Not of mean zero: the mean of what a kernel gives has to depend on the kernel.
    x = np.random.default_rng(0).uniform(size=(12, 4, 5)).astype("float32")
    return x, np.eye(3)[np.arange(12) % 3]


ON_JAX = [slow_case_on_jax(kind) if kind == "attention" else kind for kind in LAYERS]


@pytest.mark.parametrize("kind", ON_JAX)
def test_grasp_is_a_difference_of_gradients(kind):
    model, (x, y) = network(kind), rows()
    variables = [v for v in model.trainable_variables if "kernel" in v.path]
    loss = StatelessLoss(model, variables)
    values = [array(v) for v in variables]

    def slopes(values):
        return [array(g) for g in loss.gradients(values, x, y)]

    slope = slopes(values)
    step = 0.02 / np.sqrt(sum(np.sum(g * g) for g in slope))
    ahead, back = (
        slopes([w + sign * step * g for w, g in zip(values, slope, strict=True)])
        for sign in (1, -1)
    )
    expected = [w * (a - b) / (2 * step) for w, a, b in zip(values, ahead, back, strict=True)]
    found = saliency.grasp(model, 0.5, (x, y), on_collapse="ignore").scores.values()
    largest = max(np.abs(score).max() for score in expected)
    for one, two in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, two, atol=0.01 * largest)


@pytest.mark.parametrize("kind", LAYERS)
def test_jacobians_of_more_outputs_than_inputs(kind):
    model, (x, _) = network(kind, outputs=24), rows()
    found = jacobian_singular_values(model, x[:1])
    moves = 0.01 * np.eye(20).reshape(20, 4, 5)
    slopes = (array(model(x[:1] + moves)) - array(model(x[:1] - moves))) / 0.02
    expected = np.linalg.svd(slopes, compute_uv=False)
    np.testing.assert_allclose(found[0], expected, atol=2e-3 * expected[0])


def replaced():
    """The function of the backend that has no whole second derivative."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.nn.moments
    if keras.backend.backend() == "jax":
        import jax

        return jax.nn.dot_product_attention
    import torch

    return torch.nn.functional.scaled_dot_product_attention


def test_replacements_end_with_the_last_scope_on_errors_too():
    before = replaced()
    inside, leave = threading.Event(), threading.Event()

    def other_thread():
        with second_derivatives():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other_thread)

    def fails():
        with second_derivatives():
            with second_derivatives():
                assert replaced() is not before
            assert replaced() is not before
            thread.start()
            inside.wait(10)
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        fails()
    assert replaced() is not before  # the other thread still takes derivatives
    leave.set()
    thread.join()
    assert replaced() is before


@pytest.mark.tensorflow_only
@pytest.mark.parametrize("keepdims", [False, True])
def test_moments_have_the_values_and_gradients_of_tensorflow(keepdims):
    import tensorflow as tf

    x = tf.constant(np.random.default_rng(0).normal(size=(5, 4, 3)) + 2, tf.float16)
    found = []
    for scope in (False, True):
        with tf.GradientTape() as tape:
            tape.watch(x)
            if scope:
                with second_derivatives():
                    moments = tf.nn.moments(x, [0, 1], keepdims=keepdims)
            else:
                moments = tf.nn.moments(x, [0, 1], keepdims=keepdims)
        found.append([*moments, tape.gradient(moments, x)])
    for one, two in zip(*found, strict=True):
        assert (one.shape, one.dtype) == (two.shape, two.dtype)
        np.testing.assert_allclose(one, two, rtol=2e-3)
