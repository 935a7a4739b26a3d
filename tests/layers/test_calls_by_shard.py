"""Under data parallel on JAX compact layers are called for each device's samples by itself."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.layers import _wrapped_layer
from tests.helpers import array

pytestmark = [pytest.mark.jax_only, pytest.mark.slow]

L = keras.layers


def network():
    """An embedding, convolutions and dense layers, all in compact storage."""
    keras.utils.set_random_seed(0)
    tokens = keras.Input((6,), dtype="int32")
    x = L.Embedding(11, 8, name="words")(tokens)
    x = L.Conv1D(8, 3, padding="same", activation="relu", name="near")(x)
    x = L.SeparableConv1D(8, 3, padding="same", name="apart")(x)
    x = L.Dense(12, "tanh", kernel_regularizer="l2", name="each")(x)
    x = L.LayerNormalization()(x)
    model = keras.Model(tokens, L.Dense(3, name="head")(L.Flatten()(x)))
    model = kso.sparsify(model, 0.4, seed=0, storage="compact")
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


def trained(distribution):
    keras.distribution.set_distribution(distribution)
    try:
        model = network()
        rng = np.random.default_rng(0)
        x, y = rng.integers(0, 11, (16, 6)), rng.normal(size=(16, 3)).astype("float32")
        model.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0)
        outputs = model.predict(x[:6], batch_size=6, verbose=0)
        return [*(array(v) for v in model.weights), outputs]
    finally:
        keras.distribution.set_distribution(None)


def test_training_is_that_of_one_device(monkeypatch):
    split = []
    can = _wrapped_layer._can_be_split
    monkeypatch.setattr(
        _wrapped_layer,
        "_can_be_split",
        lambda layer, *args: split.append((layer.name, can(layer, *args))) or split[-1][1],
    )
    alone = trained(None)
    assert not split
    together = trained(keras.distribution.DataParallel())
    assert {name for name, was in split if was} == {"words", "near", "apart", "each", "head"}
    for a, b in zip(alone, together, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
