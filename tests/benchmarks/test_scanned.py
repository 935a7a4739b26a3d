"""`ScannedStack` of the benchmarks: its layers in a row, each with a mask of its own."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from tests.helpers import array

pytestmark = pytest.mark.core


def test_a_sparse_stack_is_its_layers_in_a_row(networks):
    stack = networks.ScannedStack(keras.layers.Dense(8, activation="tanh"), 3, name="stack")
    model = kso.sparsify(keras.Sequential([keras.Input((8,)), stack]), 0.5, seed=0)
    (weight,) = kso.prunable_weights(model)
    assert (weight.shape, weight.live) == ((3, 8, 8), 96)
    assert kso.report(model).rows[0].orthogonality_error < 1e-6
    x = np.random.default_rng(0).normal(size=(4, 8)).astype("float32")
    expected = x
    for kernel in weight.value:
        expected = np.tanh(expected @ kernel)
    np.testing.assert_allclose(array(model(x)), expected, atol=1e-6)
    np.testing.assert_allclose(array(kso.strip(model)(x)), expected, atol=1e-6)
