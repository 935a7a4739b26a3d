"""`get_weights` of a wrapped layer begins with what the layer's own would begin with."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from tests.helpers import array, slow_on_jax

L = keras.layers
X = np.random.default_rng(0).normal(size=(4, 8)).astype("float32")


def masked(dense):
    return kso.sparsify(dense, 0.5, seed=0)


def learnt(dense):
    return kso.parametrize(dense, kso.SoftThreshold("channel"))


@pytest.mark.core
@pytest.mark.parametrize("verb", [masked, learnt])
def test_the_weights_of_the_layer_come_first(verb):
    model = verb(keras.Sequential([keras.Input((8,)), L.Dense(16, name="hidden")]))
    layer = model.layers[0]
    kernel, bias, *more = layer.get_weights()
    assert kernel.shape == (8, 16)
    assert kernel.dtype == np.float32
    assert bias.shape == (16,)
    assert len(more) == len(layer.weights) - 2 > 0
    expected = array(model(X))
    layer.set_weights([np.zeros_like(kernel), bias + 1.0, *more])
    np.testing.assert_array_equal(array(model(X)), np.ones((4, 16)))
    layer.set_weights([kernel, bias, *more])
    np.testing.assert_array_equal(array(model(X)), expected)
    for wrong in ([kernel], [kernel, bias, *more, bias]):
        with pytest.raises(ValueError, match="weights"):
            layer.set_weights(wrong)


@slow_on_jax
def test_optimizers_of_learnt_thresholds_are_saved_in_their_order(tmp_path):
    model = learnt(keras.Sequential([keras.Input((8,)), L.Dense(16, name="hidden")]))
    model.compile("adam", "mse", jit_compile=False)
    model.fit(X, np.zeros((4, 16)), verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    for ours, theirs in zip(model.optimizer.variables, loaded.optimizer.variables, strict=True):
        np.testing.assert_array_equal(array(ours), array(theirs))
