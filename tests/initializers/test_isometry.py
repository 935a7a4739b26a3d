"""Exactly orthogonal in Keras' own terms: the layers themselves keep the norm of their input.

Nothing here asks a `KernelLayout` what the axes mean; what counts is what the layer computes.
"""

import keras
import numpy as np
import pytest

from keras_sparse_ortho import PrunableLayer
from keras_sparse_ortho.initializers import AttentionLayout, ExactOrthogonal, KernelLayout
from tests.helpers import array

L = keras.layers
pytestmark = pytest.mark.core

CONVOLUTIONS = {
    "conv1d": (L.Conv1D, (12, 3), {}, (9, 10)),
    "conv1d_even": (L.Conv1D, (12, 4), {}, (9, 10)),
    "conv2d": (L.Conv2D, (12, (3, 5)), {}, (6, 7, 10)),
    "conv2d_even": (L.Conv2D, (10, (2, 4)), {}, (6, 7, 10)),
    "conv3d": (L.Conv3D, (12, (3, 2, 1)), {}, (4, 3, 3, 10)),
    "groups": (L.Conv2D, (24, 3), {"groups": 4}, (6, 7, 16)),
    "depthwise1d": (L.DepthwiseConv1D, (3,), {"depth_multiplier": 2}, (9, 10)),
    "depthwise2d": (L.DepthwiseConv2D, ((3, 2),), {}, (6, 7, 10)),
    "transposed1d": (L.Conv1DTranspose, (12, 3), {}, (9, 10)),
    "transposed2d": (L.Conv2DTranspose, (12, (2, 3)), {}, (6, 7, 10)),
}


def circular(layer, x):
    """What a stride-1 layer makes of `x` with circular padding, up to a shift."""
    spatial = range(1, x.ndim - 1)
    if "Transpose" in type(layer).__name__:
        y = array(layer(x))  # `taps - 1` longer: what hangs over belongs to the other end
        for axis in spatial:
            keep, over = np.split(y, [x.shape[axis]], axis=axis)
            keep = keep.copy()
            np.moveaxis(keep, axis, 0)[: over.shape[axis]] += np.moveaxis(over, axis, 0)
            y = keep
        return y
    pads = [(0, taps - 1) for taps in layer.kernel_size]
    return array(layer(np.pad(x, [(0, 0), *pads, (0, 0)], mode="wrap")))


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_circular_stride_one_convolution_keeps_the_norm(name):
    make, args, options, shape = CONVOLUTIONS[name]
    which = "depthwise_initializer" if "depthwise" in name else "kernel_initializer"
    eoi = ExactOrthogonal(0.3, gain=1.5, seed=4)
    layer = make(*args, use_bias=False, **{which: eoi}, **options)
    wrapped = PrunableLayer(layer)
    wrapped.build((None, *shape))  # draws anew along the layer's true axes
    x = np.random.default_rng(0).normal(size=(2, *shape)).astype("float32")
    y = circular(layer, x)
    assert y.shape[:-1] == x.shape[:-1]
    ratio = np.linalg.norm(y.reshape(2, -1), axis=1) / np.linalg.norm(x.reshape(2, -1), axis=1)
    np.testing.assert_allclose(ratio, 1.5, rtol=1e-5)


MATRICES = {
    "dense": (lambda e: L.Dense(20, kernel_initializer=e), (16,)),
    "einsum": (lambda e: L.EinsumDense("abc,cde->abde", (5, 4, 6), kernel_initializer=e), (5, 16)),
    "einsum_two": (
        lambda e: L.EinsumDense("abde,dec->abc", (5, 24), kernel_initializer=e),
        (5, 4, 6),
    ),
    "einsum_batched": (
        lambda e: L.EinsumDense("abc,bcd->abd", (5, 20), kernel_initializer=e),
        (5, 16),
    ),
    "einsum_reversed": (
        lambda e: L.EinsumDense("abc,dc->abd", (5, 20), kernel_initializer=e),
        (5, 16),
    ),
    "simple_rnn": (
        lambda e: L.SimpleRNN(20, activation=None, kernel_initializer=e, recurrent_initializer=e),
        (1, 16),
    ),
}


@pytest.mark.parametrize("name", MATRICES)
def test_a_layer_with_more_outputs_than_inputs_keeps_the_norm(name):
    make, shape = MATRICES[name]
    layer = PrunableLayer(make(ExactOrthogonal(0.3, gain=1.5, seed=4)))
    x = np.random.default_rng(0).normal(size=(7, *shape)).astype("float32")
    y = array(layer(x))
    ratio = np.linalg.norm(y.reshape(7, -1), axis=1) / np.linalg.norm(x.reshape(7, -1), axis=1)
    np.testing.assert_allclose(ratio, 1.5, rtol=1e-5)


def gram_error(matrix, gain):
    """`max |K^T K - gain^2 I|` with the smaller Gram matrix, in float64."""
    matrix = array(matrix).astype("float64")
    matrix = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
    return np.abs(matrix.T @ matrix - gain**2 * np.eye(matrix.shape[1])).max()


@pytest.mark.parametrize("by_layout", [True, False], ids=["layout", "wrapped"])
@pytest.mark.parametrize(("kind", "gates"), [(L.LSTM, 4), (L.GRU, 3), (L.SimpleRNN, 1)])
def test_recurrent_kernels_are_orthogonal_gate_by_gate(kind, gates, by_layout):
    layout = KernelLayout.recurrent(gates) if by_layout else None
    layer = kind(
        12,
        kernel_initializer=ExactOrthogonal(0.3, gain=0.5, seed=1, layout=layout),
        recurrent_initializer=ExactOrthogonal(0.3, seed=2, layout=layout),
    )
    (layer if by_layout else PrunableLayer(layer)).build((None, 5, 20))
    for kernel, gain in ((layer.cell.kernel, 0.5), (layer.cell.recurrent_kernel, 1.0)):
        parts = np.split(array(kernel), gates, axis=1)
        assert len(parts) == gates
        assert all(gram_error(part, gain) <= 1e-6 for part in parts)
        # Each gate has a matrix of its own.
        assert len({part.tobytes() for part in parts}) == gates


def test_a_convolutional_lstm_is_orthogonal_gate_by_gate():
    def eoi(seed):
        return ExactOrthogonal(0.3, seed=seed, layout=KernelLayout.recurrent(4))

    layer = L.ConvLSTM2D(8, 3, kernel_initializer=eoi(1), recurrent_initializer=eoi(2))
    layer.build((None, 4, 6, 6, 5))
    for kernel in (layer.cell.kernel, layer.cell.recurrent_kernel):
        kernel = array(kernel)
        assert np.count_nonzero(kernel) == np.count_nonzero(kernel[1, 1])
        for part in np.split(kernel[1, 1], 4, axis=1):
            assert gram_error(part, 1.0) <= 1e-6


@pytest.mark.parametrize("by_layout", [True, False], ids=["layout", "wrapped"])
def test_attention_projections_are_orthogonal_along_their_true_axes(by_layout):
    layout = AttentionLayout(4, 6) if by_layout else None
    layer = L.MultiHeadAttention(
        4, 6, kernel_initializer=ExactOrthogonal(0.2, seed=1, layout=layout)
    )
    query, value = np.zeros((1, 5, 32), "float32"), np.zeros((1, 7, 20), "float32")
    (layer if by_layout else PrunableLayer(layer))(query, value)
    kernels = {w.path.split("/")[-2]: array(w) for w in layer.weights if w.name == "kernel"}
    matrices = {name: kernel.reshape(len(kernel), -1) for name, kernel in kernels.items()}
    matrices["attention_output"] = kernels["attention_output"].reshape(24, 32)
    assert {name: matrix.shape for name, matrix in matrices.items()} == {
        "query": (32, 24),
        "key": (20, 24),
        "value": (20, 24),
        "attention_output": (24, 32),
    }
    for matrix in matrices.values():
        assert gram_error(matrix, 1.0) <= 1e-6


@pytest.mark.parametrize("value_dim", [3, 9])
def test_attention_with_values_of_another_size(value_dim):
    eoi = ExactOrthogonal(0.2, seed=1, layout=AttentionLayout(4, 6, value_dim))
    layer = L.MultiHeadAttention(4, 6, value_dim, kernel_initializer=eoi)
    layer.build((None, 5, 32), (None, 7, 20))
    kernels = {w.path.split("/")[-2]: array(w) for w in layer.weights if w.name == "kernel"}
    assert kernels["attention_output"].shape == (4, value_dim, 32)
    assert gram_error(kernels["attention_output"].reshape(4 * value_dim, 32), 1.0) <= 1e-6
    assert gram_error(kernels["value"].reshape(20, 4 * value_dim), 1.0) <= 1e-6
    assert gram_error(kernels["query"].reshape(32, 24), 1.0) <= 1e-6


def test_separable_convolutions_and_embeddings():
    layer = L.SeparableConv2D(
        24,
        3,
        depth_multiplier=2,
        depthwise_initializer=ExactOrthogonal(0.3, seed=1),
        pointwise_initializer=ExactOrthogonal(0.3, seed=2),
    )
    PrunableLayer(layer).build((None, 6, 6, 8))
    depthwise, pointwise = array(layer.depthwise_kernel), array(layer.pointwise_kernel)
    assert np.count_nonzero(depthwise) == np.count_nonzero(depthwise[1, 1])
    for channel in depthwise[1, 1]:
        assert abs(np.linalg.norm(channel) - 1.0) <= 1e-6
    assert gram_error(pointwise[0, 0], 1.0) <= 1e-6
    embedding = L.Embedding(30, 12, embeddings_initializer=ExactOrthogonal(0.1, seed=1))
    embedding.build()
    assert gram_error(embedding.embeddings, 1.0) <= 1e-6
    assert np.count_nonzero(array(embedding.embeddings)) <= 36
