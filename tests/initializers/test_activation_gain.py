"""`activation_gain` against closed forms."""

import keras
import numpy as np
import pytest

from keras_sparse_ortho.analysis import critical_gain
from keras_sparse_ortho.initializers import activation_gain

pytestmark = pytest.mark.core


def test_closed_forms():
    assert activation_gain("linear") == pytest.approx(1, rel=1e-6)
    assert activation_gain("relu") == pytest.approx(np.sqrt(2), rel=1e-6)
    leaky = keras.layers.LeakyReLU(negative_slope=0.5)
    assert activation_gain(leaky) == pytest.approx((0.5 * (1 + 0.25)) ** -0.5, rel=1e-6)
    assert activation_gain("selu") == pytest.approx(1, rel=1e-6)  # self-normalizing


def test_odd_activations_have_the_critical_gain():
    assert activation_gain("tanh") == pytest.approx(1, abs=1e-6)
    assert activation_gain("tanh", 0.00448) == critical_gain("tanh", 0.00448)
    assert activation_gain("tanh", 0.00448) == pytest.approx(1.0247, abs=1e-4)


@pytest.mark.parametrize("name", ["gelu", "silu", "elu", "sigmoid"])
def test_variance_1_stays_variance_1(name):
    z = np.random.default_rng(0).normal(size=1_000_000).astype("float32")
    values = keras.ops.convert_to_numpy(keras.activations.get(name)(z))
    assert activation_gain(name) ** 2 * np.mean(values**2) == pytest.approx(1, abs=0.01)


def test_activations_that_mix_are_refused():
    with pytest.raises(ValueError, match=r"must be elementwise.*Received: activation='softmax'"):
        activation_gain("softmax")
