"""Singular values of Jacobians, and critical gains."""

import keras
import numpy as np
import pytest
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.stats import norm

import keras_sparse_ortho as kso
from keras_sparse_ortho.analysis import critical_gain, jacobian_singular_values
from keras_sparse_ortho.errors import NotPrunableError
from tests.helpers import array, assert_same, slow_on_jax

L = keras.layers


@pytest.mark.core
@pytest.mark.parametrize(("inputs", "outputs"), [(7, 5), (4, 9)])
def test_of_a_tanh_layer_after_a_linear_one(inputs, outputs):
    model = keras.Sequential(
        [keras.Input((inputs,)), L.Dense(6), L.Dense(outputs, "tanh")]
    )
    x = np.random.default_rng(0).normal(size=(3, inputs)).astype("float32")
    first, second = (layer.get_weights()[0] for layer in model.layers)
    for sample, values in enumerate(jacobian_singular_values(model, x)):
        slope = 1 - np.tanh(x[sample] @ first @ second) ** 2
        expected = np.linalg.svd((first @ second * slope).T, compute_uv=False)
        np.testing.assert_allclose(values, expected, atol=2e-6)


@pytest.mark.core
def test_of_an_orthogonal_network_with_masks():
    layers = [L.Dense(32, use_bias=False) for _ in range(3)]
    dense = keras.Sequential([keras.Input((32,)), *layers])
    model = kso.sparsify(dense, 0.1, seed=0)
    found = jacobian_singular_values(
        model, np.random.default_rng(0).normal(size=(2, 32))
    )
    assert found.shape == (2, 32)
    np.testing.assert_allclose(found, 1, atol=2e-6)


def test_of_convolutions_with_normalization_and_dropout():
    layers = [
        L.Conv2D(3, 3, activation="relu"),
        L.BatchNormalization(),
        L.Dropout(0.5),
    ]
    model = keras.Sequential(
        [keras.Input((4, 4, 2)), *layers, L.MaxPooling2D()]
    )
    x = np.random.default_rng(0).normal(size=(2, 4, 4, 2)).astype("float32")
    before = [array(v) for v in model.variables]
    found = jacobian_singular_values(model, x)
    assert found.shape == (2, 3)
    # Differences along each input of the first sample.
    step = 1e-2 * np.eye(32).reshape(32, 4, 4, 2)
    slope = (array(model(x[0] + step)) - array(model(x[0] - step))).reshape(
        32, 3
    ) / 2e-2
    values = np.linalg.svd(slope, compute_uv=False)
    np.testing.assert_allclose(values, found[0], rtol=2e-3, atol=1e-4)
    assert_same(before, model.variables)


def test_jacobian_refusals():
    model = keras.Sequential([keras.Input((4,)), L.Dense(4)])
    inputs, x = keras.Input((4,)), np.ones((2, 4))
    twin = keras.Model(inputs, [L.Dense(2)(inputs), L.Dense(2)(inputs)])
    for wrong, data, error, message in (
        (model, x.astype("int64"), ValueError, r"float inputs.*int64"),
        (model, [x, x], NotPrunableError, "one input. Received: 2"),
        (twin, x, NotPrunableError, "one output. Received: 2"),
        (keras.Sequential([L.Dense(4)]), x, NotPrunableError, "must be built"),
    ):
        with pytest.raises(error, match=message):
            jacobian_singular_values(wrong, data)


@pytest.mark.core
def test_critical_gain_of_tanh_is_the_published_one():
    # Nowak et al. name the gain 1.0247 with 0.00448: the standard deviation of the biases.
    assert critical_gain("tanh", 0.00448) == pytest.approx(1.0247, abs=5e-5)
    gain = critical_gain("tanh", 0.00448)
    z, weights = np.polynomial.hermite_e.hermegauss(120)
    weights = weights / weights.sum()

    def excess(q):
        return gain**2 * weights @ np.tanh(np.sqrt(q) * z) ** 2 + 0.00448**2 - q

    value = np.tanh(np.sqrt(brentq(excess, 1e-4, 1.0, xtol=1e-14)) * z)
    assert gain**2 * weights @ (1 - value**2) ** 2 == pytest.approx(1, rel=1e-9)


def test_critical_gains_in_closed_form_and_where_there_is_none():
    assert critical_gain("linear") == pytest.approx(1, rel=1e-9)
    assert critical_gain("relu") == pytest.approx(np.sqrt(2), rel=1e-9)
    leaky = critical_gain(keras.layers.LeakyReLU(negative_slope=0.5))
    assert leaky == pytest.approx(np.sqrt(2 / (1 + 0.25)), rel=1e-9)
    assert critical_gain("tanh") == pytest.approx(1, abs=1e-6)
    with pytest.raises(
        ValueError, match=r"no critical point.*relu.*bias_std=0.1"
    ):
        critical_gain("relu", 0.1)
    with pytest.raises(ValueError, match=r"at least 0. Received: bias_std=-1"):
        critical_gain("tanh", -1)


def test_critical_gain_of_hard_tanh():
    gain = critical_gain("hard_tanh", 0.1)
    # E[phi'^2] = P(|sqrt(q) z| < 1), and end = 1 / sqrt(q).
    end = norm.isf((1 - gain**-2) / 2)
    square, _ = quad(
        lambda z: z**2 * norm.pdf(z) / end**2, -end, end, epsabs=1e-13
    )
    assert gain**2 * (square + 2 * norm.sf(end)) + 0.1**2 == pytest.approx(
        end**-2, rel=1e-8
    )


@slow_on_jax
@pytest.mark.slow
def test_critical_gain_of_a_function_of_lower_precision():
    def rounded(x):
        return keras.ops.tanh(keras.ops.cast(x, "float32"))

    assert critical_gain(rounded, 0.00448) == pytest.approx(1.0247, abs=1e-4)
    assert critical_gain(
        lambda x: keras.ops.cast(rounded(x), "float64"), 0.05
    ) == pytest.approx(critical_gain("tanh", 0.05), rel=1e-5)
