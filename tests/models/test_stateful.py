"""Stateful recurrent models: what calls them with rows of its own leaves their states alone."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.analysis import jacobian_singular_values
from tests.helpers import array, assert_same, jit_if_quicker

L = keras.layers
pytestmark = pytest.mark.core

LAYERS = {
    "lstm": lambda: L.LSTM(6, stateful=True),
    "both directions": lambda: L.Bidirectional(L.GRU(4, stateful=True)),
    "cells": lambda: L.RNN([L.LSTMCell(4), L.GRUCell(4)], stateful=True),
    "unrolled": lambda: L.SimpleRNN(6, stateful=True, unroll=True),
}


def network(kind):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input(batch_shape=(4, 5, 3)), LAYERS[kind](), L.Dense(2)]
    )
    model.compile("sgd", "mse", jit_compile=jit_if_quicker())
    return model


def stateless(model):
    """The same model without states."""
    for layer in model._flatten_layers():
        if isinstance(layer, L.RNN):
            layer.stateful = False
    return model


def rows():
    return np.random.default_rng(0).normal(size=(32, 5, 3)).astype("float32")


@pytest.mark.filterwarnings("ignore:It is not known how these kernels")
@pytest.mark.parametrize("kind", LAYERS)
def test_reports_and_layerwise_pruning(kind):
    model, twin, x = network(kind), stateless(network(kind)), rows()
    model(x[:4])  # states that are not zero
    before = [array(v) for v in model.variables]
    found, expected = (
        [row.flops for row in kso.report(m).rows] for m in (model, twin)
    )
    assert found == expected
    assert all(found)
    pruned = kso.prune(model, 0.5, score="obs", data=x)
    other = kso.prune(twin, 0.5, score="obs", data=x)
    for one, two in zip(
        kso.prunable_weights(pruned), kso.prunable_weights(other), strict=True
    ):
        np.testing.assert_array_equal(one.value, two.value)
    assert kso.report(pruned).sparse_density == pytest.approx(0.5, abs=0.01)
    assert_same(before, model.variables)
    assert all(
        x.stateful for x in model._flatten_layers() if isinstance(x, L.RNN)
    )


def test_derivatives_of_any_number_of_rows():
    model, x = network("unrolled"), rows()
    model(x[:4])
    before = [array(v) for v in model.variables]
    data = x, np.zeros((32, 2), "float32")
    for score in ("snip", "grasp"):
        found = getattr(kso.saliency, score)(model, 0.9, data)
        twin = stateless(network("unrolled"))
        expected = getattr(kso.saliency, score)(twin, 0.9, data)
        for one, two in zip(
            found.scores.values(), expected.scores.values(), strict=True
        ):
            np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-7)
    assert jacobian_singular_values(model, x[:3]).shape == (3, 2)
    assert kso.saliency.synflow(model, 0.9, rounds=2).density == 0.9
    assert_same(before, model.variables)
