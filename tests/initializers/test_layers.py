"""Our initializers in Keras layers: along the true axes, in bare and in wrapped layers."""

import keras
import numpy as np
import pytest

from keras_sparse_ortho import PrunableLayer, prunable_weights
from keras_sparse_ortho.analysis import orthogonality_error
from keras_sparse_ortho.initializers import (
    AttentionLayout,
    ExactOrthogonal,
    KernelLayout,
    RandomSparse,
    kernel_layouts,
)
from tests.helpers import array
from tests.layers.kinds import DENSITY, KINDS, network

L = keras.layers
pytestmark = pytest.mark.core

BARE = {
    "dense": (L.Dense, {}, None, (20,)),
    "conv2d": (L.Conv2D, {"kernel_size": 3}, None, (6, 6, 8)),
    "conv2d_groups": (
        L.Conv2D,
        {"kernel_size": 3, "groups": 2},
        KernelLayout.convolution(groups=2),
        (6, 6, 8),
    ),
    "conv1d_transpose": (
        L.Conv1DTranspose,
        {"kernel_size": 3},
        KernelLayout.transposed_convolution(),
        (6, 8),
    ),
    "simple_rnn": (L.SimpleRNN, {}, None, (4, 10)),
    "lstm": (L.LSTM, {}, KernelLayout.recurrent(4), (4, 10)),
    "gru": (L.GRU, {}, KernelLayout.recurrent(3), (4, 10)),
    "conv_lstm": (L.ConvLSTM1D, {"kernel_size": 3}, KernelLayout.recurrent(4), (4, 6, 8)),
}


@pytest.mark.parametrize("name", BARE)
def test_in_bare_layers(name):
    make, options, layout, shape = BARE[name]
    eoi = ExactOrthogonal(0.4, gain=1.2, seed=1, layout=layout)
    model = keras.Sequential([keras.Input(shape), make(16, kernel_initializer=eoi, **options)])
    weight = prunable_weights(model)[0]
    assert weight.layout == (layout or KernelLayout.dense()) or layout is None
    assert orthogonality_error(weight.value, weight.layout, gain=1.2) < 1e-6
    assert weight.live <= round(0.4 * weight.size)


def test_attention_projections_along_their_true_axes():
    eoi = ExactOrthogonal(0.2, seed=1, layout=AttentionLayout(4, 8))
    layer = L.MultiHeadAttention(4, 8, kernel_initializer=eoi)
    x = keras.Input((5, 32))
    model = keras.Model(x, layer(x, x))
    found = prunable_weights(model)
    assert len(found) == 4
    for weight in found:
        assert orthogonality_error(weight.value, weight.layout, gain=1.0) < 1e-6


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_wrapped_layers_are_orthogonal_along_their_true_axes(kind):
    model = network([kind], PrunableLayer)
    for weight in prunable_weights(model):
        if weight.parametrization is not None:
            assert weight.live == round(DENSITY * weight.size)
            assert orthogonality_error(weight.value, weight.layout, gain=1.0) < 1e-6


def test_a_saved_model_with_initializers_of_ours(tmp_path):
    model = keras.Sequential(
        [
            keras.Input((8,)),
            L.Dense(16, kernel_initializer=ExactOrthogonal(0.3)),
            L.Dense(16, kernel_initializer=RandomSparse(0.3, "he_normal", rescale=True)),
        ]
    )
    x = np.random.default_rng(0).normal(size=(3, 8)).astype("float32")
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(array(loaded(x)), array(model(x)))
    assert isinstance(loaded.layers[0].kernel_initializer, ExactOrthogonal)


def test_layouts_of_custom_layers():
    class Plain(keras.layers.Layer):
        def build(self, input_shape):
            self.kernel = self.add_weight(shape=(input_shape[-1], 4), name="kernel")
            self.gate = self.add_weight(shape=(input_shape[-1], 4), name="gate_kernel")
            self.scale = self.add_weight(shape=(4, 4), name="scale")
            self.bias = self.add_weight(shape=(4,), name="kernel_bias")

    layer = Plain()
    layer.build((None, 8))
    assert kernel_layouts(layer) == {"kernel": None, "gate_kernel": None}

    class Special(L.Dense):
        pass

    assert kernel_layouts(Special(4))["kernel"] == KernelLayout.dense()
    kernel_layouts.register(Special, lambda layer: {"kernel": KernelLayout.recurrent(2)})
    assert kernel_layouts(Special(4)) == {"kernel": KernelLayout.recurrent(2)}
    assert kernel_layouts(L.Dense(4))["kernel"] == KernelLayout.dense()
