"""Kernels as matrices: rows times matrices are the calls of layers."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho._backend import float64_operations
from keras_sparse_ortho.calibration._rows import as_matrices, from_matrices, linear_kernel
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
    "pointwise": (L.SeparableConv2D(5, 3, depth_multiplier=2, padding="same"), (6, 5, 3)),
    "pointwise 1D": (L.SeparableConv1D(5, 3, strides=2), (9, 3)),
    "heads": (L.EinsumDense("abc,cde->abde", (None, 2, 4)), (5, 6)),
    "from heads": (L.EinsumDense("abcd,cde->abe", (None, 6)), (5, 2, 4)),
    "ellipsis": (L.EinsumDense("...x,xy->...y", 5), (2, 6)),
    "many matrices": (L.EinsumDense("abc,bcd->abd", (5, 6)), (5, 4)),
    "summed": (L.EinsumDense("abc,cd->ad", (6,)), (5, 4)),
}


def last_kernel(layer, shape):
    model = keras.Sequential([keras.Input(shape), layer])
    weight = kso.prunable_weights(model)[-1]
    return linear_kernel(weight, weight.owner)


ON_TENSORS = {"strides", "groups", "pointwise", "from heads"}  # each compiles, on JAX


@pytest.mark.core
@pytest.mark.parametrize("name", LAYERS)
def test_rows_times_matrices_are_the_layers_call(name):
    layer, shape = LAYERS[name]
    kernel = last_kernel(layer, shape)
    x = np.random.default_rng(0).normal(size=(3, *shape)).astype("float32")
    value = kernel.weight.raw_value()
    matrices = as_matrices(value, kernel.weight.layout)
    again = from_matrices(matrices, value.shape, kernel.weight.layout)
    np.testing.assert_array_equal(again, value)
    # Arrays as on the host, tensors as on an accelerator.
    for inputs in (x, keras.ops.convert_to_tensor(x))[: 1 + (name in ON_TENSORS)]:
        with float64_operations():
            rows, gram = array(kernel.rows(inputs)), array(kernel.moments(inputs)[0])
        # Each matrix gives some of the outputs at every position.
        found = np.moveaxis(rows @ matrices, 0, 1)
        expected = array(layer(x))
        np.testing.assert_allclose(found.reshape(expected.shape), expected, atol=1e-5)
        rows = rows.astype("float64")
        assert gram.dtype == np.float64
        np.testing.assert_allclose(gram, np.swapaxes(rows, 1, 2) @ rows, atol=1e-9)


@pytest.mark.jax_only  # TensorFlow has no such convolution on the CPU
def test_channels_first():
    layer = L.Conv2D(4, 3, strides=2, padding="same", data_format="channels_first")
    kernel = last_kernel(layer, (3, 9, 8))
    x = np.random.default_rng(0).normal(size=(2, 3, 9, 8)).astype("float32")
    found = kernel.rows(x) @ as_matrices(kernel.weight.raw_value(), kernel.weight.layout)
    expected = np.moveaxis(array(layer(x)), 1, -1)
    np.testing.assert_allclose(found.reshape(expected.shape), expected, atol=1e-5)


def test_large_inputs_are_summed_in_pieces(monkeypatch):
    from keras_sparse_ortho.calibration import _rows

    x = np.random.default_rng(0).normal(size=(6, 9, 8, 3)).astype("float32")
    kernel = last_kernel(L.Conv2D(4, 3), (9, 8, 3))
    given = x + np.random.default_rng(1).normal(size=x.shape).astype("float32")
    rows, wanted = (array(kernel.rows(inputs)).astype("float64") for inputs in (x, given))
    monkeypatch.setattr(_rows, "_CHUNK", 1000)
    gram, across = kernel.moments(x, given)
    turned = np.swapaxes(rows, 1, 2)
    np.testing.assert_allclose(gram, turned @ rows, rtol=1e-12)
    np.testing.assert_allclose(across, turned @ (wanted - rows), atol=1e-9)
    # As before an embedding, from several matrices of rows.
    kernel = last_kernel(L.Dense(2), (8, 3))
    gram, across = kernel.moments(x[..., 0, :].repeat(8, 0), given[..., 0, :].repeat(8, 0))
    rows, wanted = (v[..., 0, :].repeat(8, 0).reshape(-1, 3).astype("f8") for v in (x, given))
    np.testing.assert_allclose(across[0], rows.T @ (wanted - rows), atol=1e-9)


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
        (L.EinsumDense("ab,bcd->ac", (3,)), (4,)),
    ],
    ids=["own call", "embedding", "recurrent", "transposed", "kernel summed alone"],
)
def test_kernels_whose_rows_are_not_known(layer, shape):
    if isinstance(layer, L.EinsumDense):  # Keras builds no such kernel; its equation may be set
        kernel = last_kernel(L.EinsumDense("ab,bc->ac", (3,)), shape)
        kernel.weight.owner.equation = layer.equation
        assert linear_kernel(kernel.weight, kernel.weight.owner) is None
        return
    assert last_kernel(layer, shape) is None
    assert last_kernel(Named(3), (4,)) is not None
