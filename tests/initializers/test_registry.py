"""`kernel_layouts`: every Keras layer kind, and custom layers all the way into the wrapper."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.initializers import ExactOrthogonal, KernelLayout, kernel_layouts
from tests.helpers import array

L = keras.layers

IMAGE, SEQUENCE, VECTOR = (None, 6, 6, 8), (None, 6, 8), (None, 8)
CONVOLUTION, TRANSPOSED = KernelLayout.convolution(), KernelLayout.transposed_convolution()
DEPTHWISE = KernelLayout.depthwise()

KINDS = [
    (L.Dense(4), VECTOR, {"kernel": KernelLayout.dense()}),
    (L.Embedding(9, 4), (None, 6), {"embeddings": KernelLayout.dense()}),
    (L.Conv1D(4, 3), SEQUENCE, {"kernel": CONVOLUTION}),
    (L.Conv2D(4, 3, groups=2), IMAGE, {"kernel": KernelLayout.convolution(groups=2)}),
    (L.Conv3D(4, 2), (None, 4, 4, 4, 3), {"kernel": CONVOLUTION}),
    (L.Conv1DTranspose(4, 3), SEQUENCE, {"kernel": TRANSPOSED}),
    (L.Conv2DTranspose(4, 3), IMAGE, {"kernel": TRANSPOSED}),
    (L.Conv3DTranspose(4, 2), (None, 4, 4, 4, 3), {"kernel": TRANSPOSED}),
    (L.DepthwiseConv1D(3), SEQUENCE, {"kernel": DEPTHWISE}),
    (L.DepthwiseConv2D(3), IMAGE, {"kernel": DEPTHWISE}),
    (
        L.SeparableConv1D(4, 3),
        SEQUENCE,
        {"depthwise_kernel": DEPTHWISE, "pointwise_kernel": CONVOLUTION},
    ),
    (
        L.SeparableConv2D(4, 3),
        IMAGE,
        {"depthwise_kernel": DEPTHWISE, "pointwise_kernel": CONVOLUTION},
    ),
    (
        L.EinsumDense("abc,cde->abde", (6, 2, 3)),
        SEQUENCE,
        {"kernel": KernelLayout(inputs=(0,), outputs=(1, 2))},
    ),
    (
        L.SimpleRNN(4),
        SEQUENCE,
        dict.fromkeys(("kernel", "recurrent_kernel"), KernelLayout.recurrent(1)),
    ),
    (L.GRU(4), SEQUENCE, dict.fromkeys(("kernel", "recurrent_kernel"), KernelLayout.recurrent(3))),
    (L.LSTM(4), SEQUENCE, dict.fromkeys(("kernel", "recurrent_kernel"), KernelLayout.recurrent(4))),
    (
        L.ConvLSTM1D(4, 3),
        (None, 3, 6, 8),
        dict.fromkeys(("kernel", "recurrent_kernel"), KernelLayout.recurrent(4)),
    ),
    (L.BatchNormalization(), VECTOR, {}),
    (L.LayerNormalization(axis=(1, 2)), SEQUENCE, {}),  # its scale is a matrix, but no kernel
    (L.PReLU(), SEQUENCE, {}),
]


@pytest.mark.parametrize(
    ("layer", "shape", "expected"), KINDS, ids=[type(kind[0]).__name__ for kind in KINDS]
)
def test_every_keras_layer(layer, shape, expected):
    twin = type(layer).from_config(layer.get_config())
    twin.build(shape)
    owner = getattr(twin, "cell", twin)
    weights = {v.name for v in owner.weights}
    found = {name: lay for name, lay in kernel_layouts(owner).items() if name in weights}
    assert found == expected


@pytest.mark.core
def test_a_registered_custom_layer_is_orthogonal_along_its_axes_when_wrapped():
    class Turned(L.Layer):
        """Computes `x W^T` with `W` of shape `(out, in)`, and calls it `form`."""

        def __init__(self, units, form_initializer, **kwargs):
            super().__init__(**kwargs)
            self.units = units
            self.form_initializer = form_initializer

        def build(self, input_shape):
            self.form = self.add_weight(
                shape=(self.units * 2, input_shape[-1]),
                initializer=self.form_initializer,
                name="form",
            )

        def call(self, inputs):
            return keras.ops.matmul(inputs, keras.ops.transpose(self.form))

    def two_parts(layer):
        return {"form": KernelLayout(inputs=(1,), outputs=(0,), gates=2)}

    kernel_layouts.register(Turned, two_parts)
    eoi = ExactOrthogonal(0.25, seed=1)
    layer = kso.PrunableLayer(Turned(12, eoi))
    x = np.random.default_rng(0).normal(size=(5, 12)).astype("float32")
    # Two square orthogonal matrices, one above the other: each half keeps the norm.
    for half in np.split(array(layer(x)), 2, axis=1):
        np.testing.assert_allclose(
            np.linalg.norm(half, axis=1), np.linalg.norm(x, axis=1), rtol=1e-5
        )
    [weight] = layer.prunable_weights
    assert weight.live == round(0.25 * 24 * 12)
    # The bare initializer, which sees only the shape, drew one tall matrix instead.
    bare, _ = eoi.sample((24, 12))
    assert (bare != weight.value).any()


@pytest.mark.core
@pytest.mark.parametrize("kind", ["glorot_uniform", "he_normal"])
def test_random_sparse_draws_with_the_fans_that_keras_draws_einsum_dense_with(kind):
    dense = keras.initializers.get({"class_name": kind, "config": {"seed": 7}})
    for equation, out in (("abc,cde->abde", (6, 2, 3)), ("abcd,cde->abe", (6, 5))):
        plain = L.EinsumDense(equation, out, kernel_initializer=dense)
        x = (None, 6, 8) if out[-1] == 3 else (None, 6, 4, 2)
        plain.build(x)
        random = kso.initializers.RandomSparse(1.0, dense, seed=0)
        sparse = kso.PrunableLayer(L.EinsumDense(equation, out, kernel_initializer=random))
        sparse.build(x)
        np.testing.assert_array_equal(array(sparse.kernel), array(plain.kernel))
