"""`ExactOrthogonal` inside Keras layers: its start, and taps beyond the center."""

import hashlib
import json

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.initializers import (
    ExactOrthogonal,
    KernelLayout,
    RandomSparse,
    kernel_layouts,
)
from keras_sparse_ortho.orthogonal import NByM, dead_outputs
from tests.helpers import array

L = keras.layers

OPTIONS = [
    {"start": "published"},
    {"taps": "shift"},
    {"taps": "shift", "start": "published", "gain": 1.5},
]


@pytest.mark.core
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_survive_serialization(options):
    initializer = ExactOrthogonal(0.3, seed=3, **options)
    config = json.loads(json.dumps(keras.saving.serialize_keras_object(initializer)))
    restored = keras.saving.deserialize_keras_object(config)
    assert restored.get_config() == initializer.get_config()
    assert {name: restored.get_config()[name] for name in options} == options
    for a, b in zip(initializer.sample((3, 3, 8, 24)), restored.sample((3, 3, 8, 24)), strict=True):
        np.testing.assert_array_equal(a, b)
    plain = ExactOrthogonal(0.3, seed=3)
    assert (plain.sample((3, 3, 8, 24))[0] != initializer.sample((3, 3, 8, 24))[0]).any()


PINNED = {"covering": "e82f827d883eae44", "published": "5ce81018758119e2"}


@pytest.mark.core
@pytest.mark.parametrize("start", PINNED)
def test_every_backend_and_dtype_has_the_same_kernels(start):
    state = hashlib.sha256()
    for dtype in ("float32", "float16", "bfloat16"):
        kernel = ExactOrthogonal(0.2, seed=3, start=start)((3, 3, 16, 40), dtype=dtype)
        state.update(array(keras.ops.cast(kernel, "float32")).tobytes())
    assert state.hexdigest()[:16] == PINNED[start]


def test_configurations_from_before_have_the_defaults():
    config = ExactOrthogonal(0.3, seed=3).get_config()
    for name in ("start", "taps"):
        del config[name]
    restored = ExactOrthogonal.from_config(config)
    assert (restored.start, restored.taps) == ("covering", "center")


def test_configurations_with_removed_options():
    config = ExactOrthogonal(0.3, seed=3).get_config()
    restored = ExactOrthogonal.from_config(
        {**config, "norms": None, "center_density": None, "rotations": None}
    )
    assert restored.get_config() == config
    with pytest.raises(ValueError, match=r"`norms` has been removed.*Received: norms="):
        ExactOrthogonal.from_config({**config, "norms": "equal"})
    with pytest.raises(ValueError, match=r"`center_density` has been removed.*Received: center"):
        ExactOrthogonal.from_config({**config, "center_density": "more_nonzeros"})
    with pytest.raises(ValueError, match=r"`rotations` has been removed.*Received: rotations="):
        ExactOrthogonal.from_config({**config, "rotations": [[0, 1, 0.5]]})


def test_unknown_options_are_refused_at_once():
    with pytest.raises(ValueError, match=r"`start` must be .*Received: start='cover'"):
        ExactOrthogonal(0.1, start="cover")
    with pytest.raises(ValueError, match=r"`taps` must be .*Received: taps='all'"):
        ExactOrthogonal(0.1, taps="all")
    with pytest.raises(ValueError, match=r'needs taps="center"'):
        ExactOrthogonal(0.1, taps="shift", structure=NByM(2, 4))


STRIDED = [
    (L.Conv1D(4, 3, strides=2), (None, 6, 8), "kernel", KernelLayout.convolution(1, 2)),
    (
        L.Conv2D(4, 3, strides=(2, 1)),
        (None, 6, 6, 8),
        "kernel",
        KernelLayout.convolution(1, (2, 1)),
    ),
    (
        L.Conv3D(4, 2, strides=2),
        (None, 4, 4, 4, 3),
        "kernel",
        KernelLayout.convolution(1, (2,) * 3),
    ),
    (
        L.Conv2DTranspose(4, 3, strides=2),
        (None, 6, 6, 8),
        "kernel",
        KernelLayout.transposed_convolution((2, 2)),
    ),
    (L.DepthwiseConv2D(3, strides=2), (None, 6, 6, 8), "kernel", KernelLayout.depthwise((2, 2))),
    (
        L.SeparableConv2D(4, 3, strides=2),
        (None, 6, 6, 8),
        "depthwise_kernel",
        KernelLayout.depthwise((2, 2)),
    ),
]


@pytest.mark.parametrize(
    ("layer", "shape", "name", "expected"),
    STRIDED,
    ids=[type(case[0]).__name__ for case in STRIDED],
)
def test_layouts_know_the_strides(layer, shape, name, expected):
    layer = type(layer).from_config(layer.get_config())
    layer.build(shape)
    assert kernel_layouts(layer)[name] == expected
    assert expected.strides == expected.tap_strides(getattr(layer, name).shape)


def test_the_input_of_a_conv_lstm_has_its_strides():
    layer = L.ConvLSTM2D(4, 3, strides=2)
    layer.build((None, 3, 6, 6, 8))
    layouts = kernel_layouts(layer.cell)
    assert layouts["kernel"] == KernelLayout(inputs=(-2,), outputs=(-1,), gates=4, strides=(2, 2))
    assert layouts["recurrent_kernel"] == KernelLayout.recurrent(4)


def circular(x, before, after):
    pads = [(0, 0), (before, after), (before, after), (0, 0)]
    return np.pad(x, pads, mode="wrap")


@pytest.mark.core
@pytest.mark.parametrize(("strides", "filters"), [(1, 12), (2, 40)])
def test_a_wrapped_convolution_keeps_the_norm_under_circular_padding(strides, filters):
    eoi = ExactOrthogonal(0.15, seed=1, taps="shift")
    layer = L.Conv2D(filters, 3, strides, padding="valid", kernel_initializer=eoi, use_bias=False)
    wrapped = kso.PrunableLayer(layer)
    x = np.random.default_rng(0).normal(size=(2, 8, 8, 10)).astype("float32")
    y = array(wrapped(circular(x, 1, 1) if strides == 1 else circular(x, 0, 1)))
    np.testing.assert_allclose(
        np.linalg.norm(y.reshape(2, -1), axis=1),
        np.linalg.norm(x.reshape(2, -1), axis=1),
        rtol=1e-5,
    )
    [weight] = wrapped.prunable_weights
    assert weight.live == round(0.15 * weight.size)
    assert dead_outputs(weight.value) == 0


def test_a_wrapped_transposed_convolution_keeps_the_norm():
    eoi = ExactOrthogonal(0.2, seed=1, taps="shift")
    layer = L.Conv2DTranspose(5, 2, strides=2, kernel_initializer=eoi, use_bias=False)
    x = np.random.default_rng(0).normal(size=(2, 6, 6, 16)).astype("float32")
    # With as many taps as the stride nothing overlaps, and no padding is needed.
    y = array(kso.PrunableLayer(layer)(x))
    np.testing.assert_allclose(
        np.linalg.norm(y.reshape(2, -1), axis=1),
        np.linalg.norm(x.reshape(2, -1), axis=1),
        rtol=1e-5,
    )


@pytest.mark.core
def test_no_output_of_a_sparsified_model_is_dead():
    model = keras.Sequential(
        [
            keras.Input((12, 12, 1)),
            L.Conv2D(24, 3, padding="same", name="stem"),
            L.Conv2D(48, 3, strides=2, padding="same", name="widens"),
            L.Flatten(),
            L.Dense(10, name="head"),
        ]
    )
    sparse = kso.sparsify(model, 0.05, seed=0)
    for weight in kso.prunable_weights(sparse, flops=False):
        assert dead_outputs(weight.value, weight.layout) == max(
            0, weight.shape[-1] - weight.live
        ), weight.path


@pytest.mark.parametrize("kind", [ExactOrthogonal, RandomSparse])
def test_seeds_are_checked_at_once(kind):
    with pytest.raises(ValueError, match="non-negative integer or None"):
        kind(0.5, seed=-1)
