"""Functions in layers, which their configurations do not give again."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from tests.helpers import array

L = keras.layers
FACTOR = 3.0


def times(x):
    return FACTOR * x


def network(function):
    inputs = keras.Input((8,))
    x = L.Lambda(function, output_shape=(8,), arguments={})(L.Dense(8, activation=function)(inputs))
    return keras.Model(inputs, L.Dense(3, name="out")(L.Activation(function)(x)))


@pytest.mark.core
@pytest.mark.parametrize("function", [times, lambda x: FACTOR * x], ids=["named", "lambda"])
def test_they_are_those_of_the_given_model(function):
    model = network(function)
    x = np.random.default_rng(0).normal(size=(4, 8)).astype("float32")
    pruned = kso.apply_masks(model, {"out/kernel": np.ones((8, 3), bool)})
    np.testing.assert_array_equal(array(pruned(x)), array(model(x)))
    np.testing.assert_array_equal(array(kso.strip(pruned)(x)), array(model(x)))
    assert pruned.layers[2].function is function
