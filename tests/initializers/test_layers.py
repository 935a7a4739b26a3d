"""Initializers in Keras layers: along the true axes, so layers keep the norm of their input."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho import PrunableLayer, prunable_weights
from keras_sparse_ortho.analysis import orthogonality_error
from keras_sparse_ortho.initializers import (
    ExactOrthogonal,
    KernelLayout,
    kernel_layouts,
)
from tests.helpers import array
from tests.layers.kinds import DENSITY, KINDS, network

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
        # `taps - 1` longer: what hangs over belongs to the other end.
        y = array(layer(x))
        for axis in spatial:
            keep, over = np.split(y, [x.shape[axis]], axis=axis)
            keep = keep.copy()
            np.moveaxis(keep, axis, 0)[: over.shape[axis]] += np.moveaxis(
                over, axis, 0
            )
            y = keep
        return y
    pads = [(0, taps - 1) for taps in layer.kernel_size]
    return array(layer(np.pad(x, [(0, 0), *pads, (0, 0)], mode="wrap")))


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_circular_stride_one_convolution_keeps_the_norm(name):
    make, args, options, shape = CONVOLUTIONS[name]
    which = (
        "depthwise_initializer" if "depthwise" in name else "kernel_initializer"
    )
    eoi = ExactOrthogonal(0.3, gain=1.5, seed=4)
    layer = make(*args, use_bias=False, **{which: eoi}, **options)
    wrapped = PrunableLayer(layer)
    wrapped.build((None, *shape))  # draws anew along the layer's true axes
    x = np.random.default_rng(0).normal(size=(2, *shape)).astype("float32")
    y = circular(layer, x)
    assert y.shape[:-1] == x.shape[:-1]
    ratio = np.linalg.norm(y.reshape(2, -1), axis=1) / np.linalg.norm(
        x.reshape(2, -1), axis=1
    )
    np.testing.assert_allclose(ratio, 1.5, rtol=1e-5)


MATRICES = {
    "dense": (lambda e: L.Dense(20, kernel_initializer=e), (16,)),
    "einsum": (
        lambda e: L.EinsumDense(
            "abc,cde->abde", (5, 4, 6), kernel_initializer=e
        ),
        (5, 16),
    ),
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
        lambda e: L.SimpleRNN(
            20, activation=None, kernel_initializer=e, recurrent_initializer=e
        ),
        (1, 16),
    ),
}


@pytest.mark.parametrize("name", MATRICES)
def test_a_layer_with_more_outputs_than_inputs_keeps_the_norm(name):
    make, shape = MATRICES[name]
    layer = PrunableLayer(make(ExactOrthogonal(0.3, gain=1.5, seed=4)))
    x = np.random.default_rng(0).normal(size=(7, *shape)).astype("float32")
    y = array(layer(x))
    ratio = np.linalg.norm(y.reshape(7, -1), axis=1) / np.linalg.norm(
        x.reshape(7, -1), axis=1
    )
    np.testing.assert_allclose(ratio, 1.5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_wrapped_layers_are_orthogonal_along_their_true_axes(kind):
    model = network([kind], PrunableLayer)
    for weight in prunable_weights(model):
        if weight.parametrization is not None:
            assert weight.live == round(DENSITY * weight.size)
            assert (
                orthogonality_error(weight.value, weight.layout, gain=1.0)
                < 1e-6
            )


def test_layouts_of_custom_layers():
    class Plain(keras.layers.Layer):
        def build(self, input_shape):
            self.kernel = self.add_weight(
                shape=(input_shape[-1], 4), name="kernel"
            )
            self.gate = self.add_weight(
                shape=(input_shape[-1], 4), name="gate_kernel"
            )
            self.scale = self.add_weight(shape=(4, 4), name="scale")
            self.bias = self.add_weight(shape=(4,), name="kernel_bias")

    layer = Plain()
    layer.build((None, 8))
    assert kernel_layouts(layer) == {"kernel": None, "gate_kernel": None}

    class Special(L.Dense):
        pass

    assert kernel_layouts(Special(4))["kernel"] == KernelLayout.dense()
    kernel_layouts.register(
        Special, lambda layer: {"kernel": KernelLayout.recurrent(2)}
    )
    assert kernel_layouts(Special(4)) == {"kernel": KernelLayout.recurrent(2)}
    assert kernel_layouts(L.Dense(4))["kernel"] == KernelLayout.dense()


IMAGE, SEQUENCE, VECTOR = (None, 6, 6, 8), (None, 6, 8), (None, 8)
VOLUME, VIDEO = (None, 4, 4, 4, 3), (None, 3, 6, 8)
CONVOLUTION, TRANSPOSED = (
    KernelLayout.convolution(),
    KernelLayout.transposed_convolution(),
)
DEPTHWISE = KernelLayout.depthwise()
SEPARABLE = {"depthwise_kernel": DEPTHWISE, "pointwise_kernel": CONVOLUTION}


def gates(number):
    return dict.fromkeys(
        ("kernel", "recurrent_kernel"), KernelLayout.recurrent(number)
    )


LAYOUTS = [
    (L.Dense(4), VECTOR, {"kernel": KernelLayout.dense()}),
    (L.Embedding(9, 4), (None, 6), {"embeddings": KernelLayout.dense()}),
    (L.Conv1D(4, 3), SEQUENCE, {"kernel": CONVOLUTION}),
    (
        L.Conv2D(4, 3, groups=2),
        IMAGE,
        {"kernel": KernelLayout.convolution(groups=2)},
    ),
    (L.Conv3D(4, 2), VOLUME, {"kernel": CONVOLUTION}),
    (L.Conv1DTranspose(4, 3), SEQUENCE, {"kernel": TRANSPOSED}),
    (L.Conv2DTranspose(4, 3), IMAGE, {"kernel": TRANSPOSED}),
    (L.Conv3DTranspose(4, 2), VOLUME, {"kernel": TRANSPOSED}),
    (L.DepthwiseConv1D(3), SEQUENCE, {"kernel": DEPTHWISE}),
    (L.DepthwiseConv2D(3), IMAGE, {"kernel": DEPTHWISE}),
    (L.SeparableConv1D(4, 3), SEQUENCE, SEPARABLE),
    (L.SeparableConv2D(4, 3), IMAGE, SEPARABLE),
    (
        L.EinsumDense("abc,cde->abde", (6, 2, 3)),
        SEQUENCE,
        {"kernel": KernelLayout(inputs=(0,), outputs=(1, 2))},
    ),
    (L.SimpleRNN(4), SEQUENCE, gates(1)),
    (L.GRU(4), SEQUENCE, gates(3)),
    (L.LSTM(4), SEQUENCE, gates(4)),
    (L.ConvLSTM1D(4, 3), VIDEO, gates(4)),
    (L.BatchNormalization(), VECTOR, {}),
    (
        L.LayerNormalization(axis=(1, 2)),
        SEQUENCE,
        {},
    ),  # its scale is a matrix, but no kernel
    (L.PReLU(), SEQUENCE, {}),
]


@pytest.mark.parametrize(
    ("layer", "shape", "expected"),
    LAYOUTS,
    ids=[type(case[0]).__name__ for case in LAYOUTS],
)
def test_every_keras_layer(layer, shape, expected):
    twin = type(layer).from_config(layer.get_config())
    twin.build(shape)
    owner = getattr(twin, "cell", twin)
    weights = {v.name for v in owner.weights}
    found = {
        name: lay
        for name, lay in kernel_layouts(owner).items()
        if name in weights
    }
    assert found == expected


@pytest.mark.parametrize("kind", ["glorot_uniform", "he_normal"])
def test_random_sparse_draws_with_the_fans_that_keras_draws_einsum_dense_with(
    kind,
):
    dense = keras.initializers.get({"class_name": kind, "config": {"seed": 7}})
    for equation, out in (
        ("abc,cde->abde", (6, 2, 3)),
        ("abcd,cde->abe", (6, 5)),
    ):
        plain = L.EinsumDense(equation, out, kernel_initializer=dense)
        x = (None, 6, 8) if out[-1] == 3 else (None, 6, 4, 2)
        plain.build(x)
        random = kso.initializers.RandomSparse(1.0, dense, seed=0)
        sparse = kso.PrunableLayer(
            L.EinsumDense(equation, out, kernel_initializer=random)
        )
        sparse.build(x)
        np.testing.assert_array_equal(array(sparse.kernel), array(plain.kernel))
