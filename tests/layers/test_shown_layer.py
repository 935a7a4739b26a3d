"""What is read of a layer through its wrapper."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.parametrizations import FixedMask, SoftThreshold
from tests.helpers import array

L = keras.layers
ops = keras.ops
IDS = np.zeros((8, 4), "int32")


class Tied(keras.Model):
    """Projects by the embedding that it begins with."""

    def __init__(self):
        super().__init__()
        self.embedding = L.Embedding(50, 16)
        self.hidden = L.Dense(16)

    def call(self, ids):
        hidden = self.hidden(self.embedding(ids))
        return ops.matmul(hidden, ops.transpose(self.embedding.embeddings))


@pytest.mark.core
@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_a_weight_that_is_read_is_the_effective_one(storage):
    model = Tied()
    model(IDS)
    sparse = kso.sparsify(model, 0.2, seed=0, storage=storage)
    weight = kso.prunable_weights(sparse)[0]
    sparse.compile(keras.optimizers.SGD(1.0), "mse", jit_compile=False)
    sparse.train_on_batch(IDS, np.ones((8, 4, 50)))
    mask = weight.parametrization.mask_value()
    np.testing.assert_array_equal(array(sparse.embedding.embeddings) != 0, mask)
    assert not weight.raw_value()[~mask].any()
    expected = array(sparse(IDS))
    np.testing.assert_allclose(array(kso.strip(sparse)(IDS)), expected, atol=1e-6)


@pytest.mark.core
def test_attributes_and_methods_show_through():
    recurrent = kso.PrunableLayer(L.LSTM(6, stateful=True), FixedMask(0.5))
    recurrent(np.ones((2, 3, 4), "float32"))
    assert recurrent.units == 6
    assert array(recurrent.states[0]).any()
    recurrent.reset_states()
    assert not array(recurrent.states[0]).any()
    with pytest.raises(AttributeError, match="no attribute 'unit'"):
        recurrent.unit  # noqa: B018
    assert not hasattr(recurrent, "_private")


class Scorer(L.Layer):
    """Has a method and layers that compute with its kernels."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.parts = [L.Dense(4, use_bias=False, name="a"), L.Dense(4, use_bias=False, name="b")]

    def build(self, input_shape):
        for part in self.parts:
            part.build(input_shape)

    def call(self, x):
        return self.parts[0](x)

    def score(self, x):
        return ops.sum(self.parts[0](x))


@pytest.mark.core
def test_methods_and_layers_inside_compute_with_effective_weights():
    wrapped = kso.PrunableLayer(Scorer(), SoftThreshold(s_init=-1.0))
    x = np.eye(4, dtype="float32")
    outputs = array(wrapped(x))
    raw = wrapped.layer.parts[0].get_weights()[0]
    assert (outputs != raw).any()
    assert float(array(wrapped.score(x))) == pytest.approx(outputs.sum(), rel=1e-6)
    np.testing.assert_array_equal(array(wrapped.parts[0](x)), outputs)
    np.testing.assert_array_equal(array(wrapped.parts[0].kernel), outputs)
    assert wrapped.parts[1].units == 4
