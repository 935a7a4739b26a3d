"""Kernels as matrices: rows times matrices are the calls of layers."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.calibration import _layerwise
from keras_sparse_ortho.calibration._layerwise import GramStop, as_matrices, rows_of
from tests.helpers import array

L = keras.layers

LAYERS = {
    "dense": (L.Dense(7), (5, 6)),
    "strides": (L.Conv2D(4, 3, strides=2, padding="same"), (9, 8, 3)),
    "even taps": (L.Conv2D(4, (4, 2), strides=(3, 1), padding="same"), (9, 8, 3)),
    "dilation": (L.Conv2D(4, (3, 2), dilation_rate=2), (9, 8, 3)),
    "same dilation": (L.Conv2D(4, 3, dilation_rate=(2, 1), padding="same"), (9, 8, 3)),
    "causal": (L.Conv1D(4, 3, padding="causal", dilation_rate=2), (9, 3)),
    "groups": (L.Conv1D(4, 4, strides=3, padding="same", groups=2), (11, 6)),
    "three axes": (L.Conv3D(4, (2, 3, 1), strides=(1, 2, 1), padding="same"), (4, 5, 3, 2)),
    "depthwise": (L.DepthwiseConv2D(3, depth_multiplier=2, padding="same"), (6, 5, 3)),
    "depthwise strides": (L.DepthwiseConv1D(3, strides=2), (7, 3)),
    "heads": (L.EinsumDense("abc,cde->abde", (None, 2, 4)), (5, 6)),
    "from heads": (L.EinsumDense("abcd,cde->abe", (None, 6)), (5, 2, 4)),
    "ellipsis": (L.EinsumDense("...x,xy->...y", 5), (2, 6)),
    "many matrices": (L.EinsumDense("abc,bcd->abd", (5, 6)), (5, 4)),
    "summed": (L.EinsumDense("abc,cd->ad", (6,)), (5, 4)),
}


def last_kernel(layer, shape):
    model = keras.Sequential([keras.Input(shape), layer])
    return kso.prunable_weights(model)[-1]


def moments(weight, *inputs):
    found = []
    stop = GramStop(weight, rows_of(weight), lambda *sums: found.extend(sums))
    stop.add(*(keras.ops.convert_to_tensor(x) for x in inputs))
    stop.finish()
    return found[:2]


@pytest.mark.core
@pytest.mark.parametrize("name", LAYERS)
def test_rows_times_matrices_are_the_layers_call(name):
    layer, shape = LAYERS[name]
    weight = last_kernel(layer, shape)
    x = np.random.default_rng(0).normal(size=(3, *shape)).astype("float32")
    matrices, rows = (
        as_matrices(weight.raw_value(), weight.layout),
        rows_of(weight)(x.astype("float64")),
    )
    # Each matrix gives some of the outputs at every position.
    found = np.moveaxis(rows @ matrices, 0, 1)
    expected = array(layer(x))
    np.testing.assert_allclose(found.reshape(expected.shape), expected, atol=1e-5)
    gram, _ = moments(weight, x)
    np.testing.assert_allclose(gram, np.swapaxes(rows, 1, 2) @ rows, atol=1e-9)


@pytest.mark.jax_only  # TensorFlow has no such convolution on the CPU
def test_channels_first():
    layer = L.Conv2D(4, 3, strides=2, padding="same", data_format="channels_first")
    weight = last_kernel(layer, (3, 9, 8))
    x = np.random.default_rng(0).normal(size=(2, 3, 9, 8)).astype("float32")
    found = rows_of(weight)(x) @ as_matrices(weight.raw_value(), weight.layout)
    expected = np.moveaxis(array(layer(x)), 1, -1)
    np.testing.assert_allclose(found.reshape(expected.shape), expected, atol=1e-5)


def test_large_inputs_are_summed_in_pieces(monkeypatch):
    monkeypatch.setattr(_layerwise, "_CHUNK", 1000)
    x = np.random.default_rng(0).normal(size=(6, 9, 8, 3)).astype("float32")
    given = x + np.random.default_rng(1).normal(size=x.shape).astype("float32")
    for weight in (last_kernel(L.Conv2D(4, 3), (9, 8, 3)), last_kernel(L.Dense(2), (9, 8, 3))):
        rows, wanted = (rows_of(weight)(inputs.astype("float64")) for inputs in (x, given))
        gram, across = moments(weight, x, given)
        turned = np.swapaxes(rows, 1, 2)
        np.testing.assert_allclose(gram, turned @ rows, rtol=1e-12)
        np.testing.assert_allclose(across, turned @ (wanted - rows), atol=1e-9)


class Doubled(L.Dense):
    def call(self, inputs):
        return super().call(2.0 * inputs)


class Named(L.Dense):
    pass


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (Doubled(3), (4,)),
        (L.Embedding(5, 3), (4,)),
        (L.LSTM(3), (4, 2)),
        (L.Conv1DTranspose(3, 2), (4, 2)),
        (L.SeparableConv1D(5, 3), (9, 3)),
        (L.EinsumDense("ab,bcd->ac", (3,)), (4,)),
    ],
    ids=["own call", "embedding", "recurrent", "transposed", "separable", "kernel summed alone"],
)
def test_kernels_whose_rows_are_not_known(layer, shape):
    if isinstance(layer, L.EinsumDense):  # Keras builds no such kernel; its equation may be set
        weight = last_kernel(L.EinsumDense("ab,bc->ac", (3,)), shape)
        weight.owner.equation = layer.equation
    else:
        weight = last_kernel(layer, shape)
    assert rows_of(weight) is None
    assert rows_of(last_kernel(Named(3), (4,))) is not None
