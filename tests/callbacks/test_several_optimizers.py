"""`keras.optimizers.MultiOptimizer`, and what grown entries start from in an optimizer."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho._keras_internals import optimizer_slots
from keras_sparse_ortho.callbacks import SET
from tests.helpers import array, jit_if_quicker

L = keras.layers
pytestmark = pytest.mark.core
X = np.random.default_rng(0).normal(size=(32, 16)).astype("float32")


def network(optimizer):
    layers = [L.Dense(24, activation="relu", name="a"), L.Dense(4, name="head")]
    model = kso.sparsify(keras.Sequential([keras.Input((16,)), *layers]), 0.25, seed=0)
    model.compile(optimizer, "mse", jit_compile=jit_if_quicker())
    return model


def fit(model, *callbacks):
    options = {"batch_size": 4, "shuffle": False, "verbose": 0, "callbacks": list(callbacks)}
    return model.fit(X, X[:, :4], **options)


def two_optimizers(pattern):
    """Adam for the first layer, SGD for the rest; plain Adam where Keras has no MultiOptimizer."""
    adam = keras.optimizers.Adam(0.01)
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        return adam
    others = keras.optimizers.SGD(0.1, momentum=0.9)
    chosen = keras.optimizers.OptimizerMap(others, {pattern: adam})
    return keras.optimizers.MultiOptimizer(chosen)


def test_moments_of_dropped_entries_in_several_optimizers():
    model = network(two_optimizers(".*a/.*"))
    fit(model, SET(frequency=2, end_step=99))
    found = []
    for weight in kso.prunable_weights(model):
        live = weight.storage.mask_value()
        slots = optimizer_slots(model.optimizer, weight.variable)
        found.append(len(slots))
        for slot in slots:
            assert not array(slot.tensor)[~live].any()
            assert array(slot.tensor)[live].any()
    assert found == ([2, 1] if hasattr(keras.optimizers, "MultiOptimizer") else [2, 2])


def test_a_model_is_converted_with_its_optimizers():
    model = network(two_optimizers(".*a/.*"))
    fit(model)
    compact = kso.convert(model, "compact")
    fit(model), fit(compact)
    for a, b in zip(kso.prunable_weights(model), kso.prunable_weights(compact), strict=True):
        np.testing.assert_allclose(a.value, b.value, atol=1e-6)
    if hasattr(keras.optimizers, "MultiOptimizer"):
        model = network(two_optimizers(".*a/kernel"))
        fit(model)
        with pytest.raises(ValueError, match=r"must match the path.*a/kernel, then .*values"):
            kso.convert(model, "compact")
