"""Structured STR: thresholds of channels, and of the values between two thin factors."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho import PrunableLayer
from keras_sparse_ortho.callbacks import TargetDensity
from keras_sparse_ortho.parametrizations import ChannelSoftThreshold
from keras_sparse_ortho.schedules import Cubic
from tests.helpers import array, classifier_loss
from tests.parametrizations.test_gradients import (
    COEFFICIENTS,
    FUNCTIONS,
    KERNEL,
    assert_finite_differences,
    built,
    differentiated,
    effective_value,
)

L = keras.layers
# Scales of 0, below, at, and above the thresholds that the tests have.
SCALED = KERNEL / np.sqrt(np.mean(KERNEL**2, axis=0)) * np.array([0, 0.2, 0.7, 1.1, 2], "float32")


@pytest.mark.core
@pytest.mark.parametrize("g", FUNCTIONS)
def test_gradients_of_channels_are_those_of_the_formula(g):
    model, made = built(ChannelSoftThreshold(g, s_init=-0.5))
    made.weight.variable.assign(SCALED)
    function, derivative = FUNCTIONS[g]
    t = function(-0.5)
    w = SCALED.astype("float64")
    n = np.sqrt(np.mean(w**2, axis=0))
    live = n > t
    assert list(live[[0, 1, 4]]) == [False, False, True]
    safe = np.where(live, n, 1)
    np.testing.assert_allclose(
        effective_value(made), np.where(live, w * (1 - t / safe), 0), atol=1e-6
    )
    assert not effective_value(made)[:, ~live].any()
    np.testing.assert_array_equal(made.live_channels(), live)

    inner = (COEFFICIENTS * w).sum(axis=0)
    own = (1 - t / safe) * COEFFICIENTS + t / (6 * safe**3) * inner * w
    found = differentiated(model)
    np.testing.assert_allclose(found["kernel"], np.where(live, own, 0), rtol=2e-5, atol=1e-5)
    expected = -derivative(-0.5) * np.sum(np.where(live, inner / safe, 0))
    np.testing.assert_allclose(found["kernel_s"], expected, rtol=2e-5, atol=1e-6)
    assert_finite_differences(model, made.weight.variable, found["kernel"], step=2e-3)
    assert_finite_differences(model, made.s, found["kernel_s"], step=1e-2)


@pytest.mark.core
def test_channels_of_zeros_have_no_gradient_even_without_a_threshold():
    model, made = built(ChannelSoftThreshold("exp", s_init=-200.0))  # t is 0 in float32
    made.weight.variable.assign(SCALED)
    found = differentiated(model)
    np.testing.assert_allclose(found["kernel"][:, 1:], COEFFICIENTS[:, 1:], rtol=1e-6)
    assert not found["kernel"][:, 0].any()
    assert np.isfinite(found["kernel_s"])


@pytest.mark.core
def test_frozen_channels():
    model, made = built(ChannelSoftThreshold(s_init=-0.5))
    made.weight.variable.assign(SCALED)
    effective = effective_value(made)
    mask = np.repeat([[False, True, False, True, True]], 6, axis=0)
    mask[0, 2] = True  # less than half of a channel: it goes
    live = made.freeze(mask)
    np.testing.assert_array_equal(live[0], [False, True, False, True, True])
    np.testing.assert_array_equal(made.mask_value(), live)
    # The third lived by its scale, the second did not: it stays, much smaller.
    np.testing.assert_allclose(effective_value(made)[:, 3:], effective[:, 3:], atol=1e-7)
    np.testing.assert_allclose(effective_value(made)[:, 1], 1e-6 * SCALED[:, 1], rtol=1e-5)
    found = differentiated(model)
    np.testing.assert_allclose(found["kernel"], np.where(live, COEFFICIENTS, 0), rtol=1e-5)
    assert found["kernel_s"] == 0
    assert made.frozen


KINDS = {
    "dense": (L.Dense(6), (4,), (4, 6), 6),
    "convolution": (L.Conv2D(5, 3), (6, 6, 2), (3, 3, 2, 5), 5),
    "depthwise": (L.DepthwiseConv2D(3, depth_multiplier=2), (6, 6, 3), (3, 3, 3, 2), 6),
    "transposed": (L.Conv2DTranspose(5, 3), (6, 6, 2), (3, 3, 5, 2), 5),
    "einsum": (L.EinsumDense("abc,cde->abde", (None, 2, 3)), (4, 5), (5, 2, 3), 6),
}


@pytest.mark.core
@pytest.mark.parametrize("kind", KINDS)
def test_channels_are_the_outputs_of_the_layer(kind):
    layer, inputs, shape, count = KINDS[kind]
    layer = PrunableLayer(type(layer).from_config(layer.get_config()), ChannelSoftThreshold())
    layer.build((None, *inputs))
    [made] = layer.parametrizations.values()
    assert made.weight.shape == shape
    assert made.live_channels().shape == (count,)
    x = np.random.default_rng(0).normal(size=(2, *inputs)).astype("float32")
    # A threshold between the two smallest scales takes one output of the layer.
    offsets = np.unique(np.round(made.critical_offsets(), 5))
    assert len(offsets) == count
    made.offset.assign(offsets[:2].mean())
    y = array(layer(x))
    y = y.reshape(-1, count) if kind == "einsum" else y.reshape(-1, y.shape[-1])
    assert np.count_nonzero(~y.any(axis=0)) == 1
    assert made.live_channels().sum() == count - 1


def network():
    inputs = keras.Input((6, 6, 2))
    x = L.Conv2D(16, 3, use_bias=False, name="conv")(inputs)
    x = L.ReLU()(L.BatchNormalization()(x))
    x = L.Dense(24, activation="relu", name="hidden")(L.Flatten()(x))
    return keras.Model(inputs, L.Dense(3, name="head")(x))


def fitted(model, *callbacks, epochs=3):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(32, 6, 6, 2)).astype("float32")
    y = rng.integers(0, 3, 32)
    if not model.compiled:
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        model.compile(optimizer, classifier_loss(), jit_compile=False)
    model.fit(x, y, batch_size=8, shuffle=False, epochs=epochs, verbose=0, callbacks=[*callbacks])
    return x


@pytest.mark.core
@pytest.mark.parametrize("freeze", [True, False])
def test_target_density_counts_channels_with_their_entries(freeze, tmp_path):
    model = kso.parametrize(network(), ChannelSoftThreshold(s_init=-3.0), exclude="head")
    ramp = Cubic(0.4, 0, 8, frequency=4)
    x = fitted(model, TargetDensity(0.4, ramp, freeze=freeze))
    weights = [w for w in kso.prunable_weights(model, flops=False) if w.parametrization]
    assert [w.path for w in weights] == ["conv/kernel", "hidden/kernel"]
    largest = max(w.size // w.shape[-1] for w in weights)
    live, size = sum(w.live for w in weights), sum(w.size for w in weights)
    assert abs(live - 0.4 * size) <= largest
    for weight in weights:
        assert weight.parametrization.frozen == freeze
        mask = weight.parametrization.mask_value()
        assert (mask.all(axis=tuple(range(mask.ndim - 1))) | ~mask.any(axis=0)).all()
        assert not weight.value()[~mask].any()
        if freeze:
            assert not weight.raw_value()[~mask].any()
    expected = model.predict(x, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded.predict(x, verbose=0), expected, atol=1e-6)
    assert [w.live for w in kso.prunable_weights(loaded, flops=False)][:2] == [
        w.live for w in weights
    ]
    np.testing.assert_allclose(kso.strip(model).predict(x, verbose=0), expected, atol=1e-6)


@pytest.mark.core
def test_weight_decay_alone_lets_channels_die():
    model = kso.parametrize(
        network(), ChannelSoftThreshold(s_init=-3.0, weight_decay=0.1), exclude="head"
    )
    layer = model.get_layer("conv")
    [made] = layer.parametrizations.values()
    kernel = made.weight.raw_value() * np.linspace(0.05, 1, 16, dtype="float32")
    made.weight.variable.assign(kernel)
    decay = sum(float(array(value)) for value in layer.losses)
    assert decay == pytest.approx(0.05 * ((kernel**2).sum() + 9), rel=1e-5)
    before = made.live_channels().sum()
    fitted(model, epochs=4)
    assert made.live_channels().sum() < before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"g": "relu"}, "`g` must be one of .*Received: g='relu'"),
        ({"weight_decay": -1.0}, "Received: weight_decay=-1.0"),
        ({"s_init": float("inf")}, "Received: s_init=inf"),
    ],
)
def test_channel_soft_threshold_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        ChannelSoftThreshold(**arguments)
