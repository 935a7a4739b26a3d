"""Quantized weights in every storage: the grid, zeros, gradients, files, strip, XLA."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.parametrizations import (
    FakeQuantization,
    FixedMask,
    LowRankSoftThreshold,
    SoftThreshold,
)
from tests.helpers import array, assert_same, classifier_loss, data, jit

pytestmark = pytest.mark.core

STORAGES = ("masked", "compact", "blocks", "soft")
DTYPES = {"int8": 127, "int4": 7, "ternary": 1}


def network(storage, quantizer):
    """A network with kernels in a storage, all of them quantized."""
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Conv2D(16, 3, strides=2, name="conv", activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(32, activation="relu", name="hidden"),
        keras.layers.Dense(4, name="head", dtype="float32"),
    ]
    dense = keras.Sequential([keras.Input((9, 9, 8)), *layers])
    if storage == "soft":
        model = kso.parametrize(dense, SoftThreshold(s_init=-4.0))
    elif storage == "blocks":
        options = {
            "structure": kso.Block(4, 4),
            "storage": "blocks",
            "exclude": "head",
        }
        model = kso.sparsify(dense, 0.5, "uniform", seed=0, **options)
    else:
        model = kso.sparsify(dense, 0.2, storage=storage, seed=0)
    for layer in model.layers:
        if hasattr(layer, "set_quantizer"):
            layer.set_quantizer(quantizer)
    return model


def fitted(model):
    x, y = data(model, 4, count=64)
    model.compile(
        keras.optimizers.Adam(1e-3), classifier_loss(), jit_compile=jit()
    )
    model.fit(x, y, batch_size=32, epochs=2, shuffle=False, verbose=0)
    return model


def check_grid(model, dtype):
    quantized = [
        weight
        for weight in kso.prunable_weights(model)
        if weight.storage is not None
    ]
    assert len(quantized) >= 2
    for weight in quantized:
        value, levels = weight.value, DTYPES[dtype]
        matrix = value.reshape(-1, value.shape[-1])
        scale = np.abs(matrix).max(0)
        steps = matrix[:, scale > 0] * (levels / scale[scale > 0])
        np.testing.assert_allclose(steps, np.rint(steps), atol=2e-5 * levels)
        assert not value[~weight.mask].any()
        assert (weight.raw_value() != value).any()
        integers, scales = weight.storage.quantizer.integers(
            value, weight.outputs_shape
        )
        assert integers.shape == weight.shape
        assert np.abs(integers).max() == levels
        np.testing.assert_allclose(integers * scales, value, rtol=1e-5)


@pytest.mark.parametrize(
    ("storage", "dtype"),
    [
        ("masked", "int8"),
        ("masked", "ternary"),
        *((storage, "int4") for storage in STORAGES[1:]),
    ],
)
def test_effective_weights_are_on_the_grid_after_training(storage, dtype):
    model = fitted(network(storage, FakeQuantization(dtype)))
    check_grid(model, dtype)
    live = {weight.path: weight.live for weight in kso.prunable_weights(model)}
    x, _ = data(model, 4)
    before = array(model(x))
    plain = kso.strip(model)
    assert all(
        type(layer).__module__.startswith("keras.") for layer in plain.layers
    )
    np.testing.assert_allclose(array(plain(x)), before, atol=1e-5)
    for weight in kso.prunable_weights(plain):
        assert weight.live <= live[weight.path]


def test_scales_are_those_of_each_output():
    dense = keras.layers.Dense(2, use_bias=False)
    layer = kso.PrunableLayer(
        dense, FixedMask(1.0), quantizer=FakeQuantization("int4")
    )
    layer.build((None, 3))
    dense.kernel.assign([[0.0, 70.0], [0.9, 14.0], [-1.75, 26.0]])
    want = [[0.0, 70.0], [1.0, 10.0], [-1.75, 30.0]]
    np.testing.assert_array_equal(layer.prunable_weights[0].value, want)
    integers, scale = layer.parametrizations["kernel"].quantizer.integers(
        np.array(want), (1, 3)
    )
    np.testing.assert_array_equal(integers, [[0, 7], [4, 1], [-7, 3]])
    np.testing.assert_array_equal(scale, [[0.25, 10.0]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_are_those_of_each_gate(dtype):
    """A gate is rounded as a kernel of its own, whatever the sizes of the others."""
    rng = np.random.default_rng(0)
    gates = [
        size * rng.standard_normal((5, 3)).astype("float32")
        for size in (1, 10, 0, 0.1)  # one of zeros alone
    ]
    kernel = np.concatenate(gates, axis=1)
    by_gate = FakeQuantization(dtype, per="gate")
    alone = FakeQuantization(dtype, per="kernel")
    rounded = array(by_gate(keras.ops.convert_to_tensor(kernel), (1, 12)))
    for gate, part in zip(gates, np.split(rounded, 4, axis=1), strict=True):
        want = array(alone(keras.ops.convert_to_tensor(gate), (1, 3)))
        np.testing.assert_allclose(part, want, rtol=1e-6)
    integers, scales = by_gate.integers(rounded, (1, 12))
    assert integers.shape == kernel.shape
    assert len(np.unique(scales)) == 4
    np.testing.assert_allclose(integers * scales, rounded, rtol=1e-5)
    again = FakeQuantization.from_config(by_gate.get_config())
    assert again.per == "gate"


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_output_of_zeros_stays_zero_in_training(dtype):
    """Its largest magnitude is no scale: 0 / 0 would make the whole network NaN."""
    dense = keras.layers.Dense(2, use_bias=False)
    layer = kso.PrunableLayer(
        dense, FixedMask(1.0), quantizer=FakeQuantization(dtype)
    )
    model = keras.Sequential([keras.Input((3,)), layer])
    dense.kernel.assign([[0.0, 1.0], [0.0, -1.0], [0.0, 1.0]])
    outputs = array(model(np.ones((1, 3), "float32")))
    np.testing.assert_allclose(outputs, [[0.0, 1.0]], atol=1e-6)
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=jit())
    model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
    assert np.isfinite(array(dense.kernel)).all()
    assert array(dense.kernel)[:, 0].all()  # the gradient goes through to it


def test_ternary_weights_have_the_mean_of_what_is_above_the_threshold():
    dense = keras.layers.Dense(1, use_bias=False)
    mask = np.array([[True], [True], [True], [False]])
    layer = kso.PrunableLayer(
        dense, FixedMask(mask=mask), quantizer=FakeQuantization("ternary")
    )
    layer.build((None, 4))
    dense.kernel.assign([[3.0], [-5.0], [1.0], [0.0]])  # mean 3, threshold 2.1
    np.testing.assert_array_equal(
        layer.prunable_weights[0].value.ravel(), [4, -4, 0, 0]
    )


def test_the_gradient_goes_straight_through_to_live_weights():
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    mask = np.array([[True], [False], [True]])
    layer = kso.PrunableLayer(
        dense, FixedMask(mask=mask), quantizer=FakeQuantization("int4")
    )
    model = keras.Sequential([keras.Input((3,)), layer])
    dense.kernel.assign([[0.9], [0.0], [-1.75]])
    model.compile(keras.optimizers.SGD(1.0), "mse")
    x = np.array([[1.0, 5.0, 2.0]])
    model.train_on_batch(x, np.array([[0.0]]))  # y = 1 - 3.5, dL/dq = 2 y x
    np.testing.assert_allclose(
        array(dense.kernel).ravel(), [0.9 + 5, 0.0, -1.75 + 10], rtol=1e-6
    )


def test_another_storage_is_refused():
    model = network("masked", FakeQuantization("int8"))
    before = model.get_weights()
    with pytest.raises(NotPrunableError, match="convert it before"):
        kso.convert(model, "compact")
    assert_same(before, model.get_weights())


def test_unknown_settings_are_refused():
    with pytest.raises(ValueError, match="`dtype` must be one of"):
        FakeQuantization("int2")
    with pytest.raises(ValueError, match=r"`per` must be one of .*'rows'"):
        FakeQuantization(per="rows")
    with pytest.raises(ValueError, match=r"must have 4 gates.*\(3, 6\)"):
        FakeQuantization(per="gate").integers(np.ones((3, 6)), (1, 6))
    with pytest.raises(ValueError, match="must be a FakeQuantization"):
        kso.PrunableLayer(
            keras.layers.Dense(2), FixedMask(0.5), quantizer="int8"
        )
    own = LowRankSoftThreshold(rank=2)
    low_rank = kso.PrunableLayer(
        keras.layers.Dense(8), own, quantizer=FakeQuantization()
    )
    with pytest.raises(NotPrunableError, match="product of two factors"):
        low_rank.build((None, 8))
