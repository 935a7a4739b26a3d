"""Gradients of every parametrization: against formulas and finite differences, on every backend."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho import PrunableLayer
from keras_sparse_ortho.parametrizations import (
    Feather,
    FixedMask,
    MagnitudeMask,
    SoftThreshold,
    StraightThroughTopK,
)
from tests.helpers import array, gradients, reloaded

pytestmark = pytest.mark.core
L = keras.layers

COEFFICIENTS = np.random.default_rng(3).normal(size=(6, 5)).astype("float32")
KERNEL = np.random.default_rng(4).normal(size=(6, 5)).astype("float32")


def built(parametrization):
    """A model whose output is the effective kernel, so that the loss is linear in it."""
    layer = PrunableLayer(
        keras.layers.Dense(5, use_bias=False, name="dense"), parametrization
    )
    model = keras.Sequential([keras.Input((6,)), layer])
    [made] = layer.parametrizations.values()
    made.weight.variable.assign(KERNEL)
    made.settle()
    return model, made


def effective_value(made):
    return array(
        made.effective(keras.ops.convert_to_tensor(made.weight.variable))
    )


def loss(coefficients, outputs):
    """`sum(c * w_e)`, whose gradient with respect to `w_e` is `c`."""
    return keras.ops.sum(outputs * keras.ops.convert_to_tensor(coefficients))


def differentiated(model):
    found = gradients(model, np.eye(6, dtype="float32"), COEFFICIENTS, loss)
    return {
        v.name: g for v, g in zip(model.trainable_variables, found, strict=True)
    }


def value_of(model):
    return float(array(loss(COEFFICIENTS, model(np.eye(6, dtype="float32")))))


def assert_finite_differences(model, variable, gradient, step=1e-2):
    """Central differences; exact, as the loss is piecewise linear, away from the thresholds."""
    start = array(variable)
    found = np.zeros(start.shape)
    for index in np.ndindex(start.shape):
        values = []
        for sign in (1, -1):
            moved = start.copy()
            moved[index] += sign * step
            variable.assign(moved)
            values.append(value_of(model))
        found[index] = (values[0] - values[1]) / (2 * step)
    variable.assign(start)
    np.testing.assert_allclose(gradient, found, atol=2e-3)


@pytest.mark.parametrize(
    "parametrization",
    [FixedMask(0.4), MagnitudeMask(0.4)],
    ids=["fixed", "magnitude"],
)
def test_masked_entries_have_no_gradient(parametrization):
    model, made = built(parametrization)
    if isinstance(made, MagnitudeMask):
        made.update(0)
    gradient = differentiated(model)["kernel"]
    np.testing.assert_array_equal(
        gradient, np.where(made.mask_value(), COEFFICIENTS, 0)
    )
    assert made.mask_value().sum() == 12
    assert_finite_differences(model, made.weight.variable, gradient)


def test_the_straight_through_gradient_is_dense():
    model, made = built(StraightThroughTopK(0.4))
    np.testing.assert_array_equal(differentiated(model)["kernel"], COEFFICIENTS)
    # It is an estimator: the function itself does not change with dead entries.
    np.testing.assert_array_equal(
        effective_value(made), np.where(made.mask_value(), KERNEL, 0)
    )
    assert made.mask_value().sum() == 12
    np.testing.assert_array_equal(made.weight.raw_value(), KERNEL)


def sigmoid(s):
    return 1 / (1 + np.exp(-s))


FUNCTIONS = {
    # g and its derivative, in float64
    "sigmoid": (sigmoid, lambda s: sigmoid(s) * (1 - sigmoid(s))),
    "exp": (np.exp, np.exp),
    "softplus": (lambda s: np.log1p(np.exp(s)), sigmoid),
}


@pytest.mark.parametrize("g", FUNCTIONS)
@pytest.mark.parametrize("granularity", ["layer", "channel"])
def test_gradients_of_the_soft_threshold_are_the_papers(granularity, g):
    model, made = built(SoftThreshold(granularity, g, s_init=-0.5))
    s = np.full((1, 5), -0.5) if granularity == "channel" else np.array(-0.5)
    if granularity == "channel":
        s = s + np.linspace(-0.4, 0.4, 5)
        made.s.assign(s)
    function, derivative = FUNCTIONS[g]
    w = KERNEL.astype("float64")
    effective = np.sign(w) * np.maximum(np.abs(w) - function(s), 0)
    np.testing.assert_allclose(effective_value(made), effective, atol=1e-6)
    found = differentiated(model)
    np.testing.assert_array_equal(
        found["kernel"], np.where(effective != 0, COEFFICIENTS, 0)
    )

    terms = -derivative(s) * COEFFICIENTS * np.sign(effective)
    expected = (
        terms.sum() if granularity == "layer" else terms.sum(0, keepdims=True)
    )
    np.testing.assert_allclose(
        found["kernel_s"], expected, rtol=2e-5, atol=1e-6
    )
    assert_finite_differences(
        model, made.weight.variable, found["kernel"], step=1e-3
    )
    # Only where no entry crosses the threshold on the way.
    assert_finite_differences(model, made.s, found["kernel_s"], step=1e-3)


@pytest.mark.parametrize("g", FUNCTIONS)
def test_an_offset_above_the_critical_one_kills_an_entry(g):
    _, made = built(SoftThreshold(g=g))
    ranked = np.sort(made.critical_offsets(), axis=None)
    magnitudes = np.sort(np.abs(KERNEL), axis=None)
    for dead in (1, 8, 15):  # a sigmoid reaches those under 1
        made.offset.assign(ranked[dead - 1 : dead + 1].mean())
        np.testing.assert_array_equal(
            made.mask_value(), np.abs(KERNEL) >= magnitudes[dead]
        )


def test_one_threshold_for_a_whole_model(tmp_path):
    inner = keras.Sequential(
        [keras.Input((6,)), L.Dense(5, name="a"), L.Dense(4, name="b")]
    )
    wrapper = PrunableLayer(
        inner, SoftThreshold("global", s_init=-1.0, weight_decay=0.1)
    )
    model = keras.Sequential([keras.Input((6,)), wrapper])
    first, second = wrapper.parametrizations.values()
    assert first.s is second.s
    assert [v.name for v in model.trainable_variables].count("s") == 1
    kernels = sum((w.raw_value() ** 2).sum() for w in wrapper.prunable_weights)
    decay = sum(float(array(value)) for value in model.losses)
    assert decay == pytest.approx(0.05 * (kernels + 1), rel=1e-5)

    model.compile("sgd", "mse")
    model.fit(np.ones((4, 6)), np.ones((4, 4)), verbose=0)
    loaded = reloaded(model, tmp_path)
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    for twin in (loaded, clone):
        a, b = twin.layers[0].parametrizations.values()
        assert a.s is b.s
        np.testing.assert_array_equal(array(a.s), array(first.s))
    plain = kso.strip(model)
    x = np.random.default_rng(0).normal(size=(3, 6))
    np.testing.assert_allclose(array(plain(x)), array(model(x)), atol=1e-6)
    with pytest.raises(
        ValueError,
        match=r"one wrapper around it.*Received: granularity='global'",
    ):
        kso.parametrize(inner, SoftThreshold("global"))


def test_a_threshold_that_underflows_still_moves_by_its_weight_decay():
    layer = PrunableLayer(
        keras.layers.Dense(5, use_bias=False),
        SoftThreshold(s_init=-3200.0, weight_decay=0.01),
    )
    model = keras.Sequential([keras.Input((6,)), layer])
    [made] = layer.parametrizations.values()
    made.weight.variable.assign(KERNEL)
    assert made.threshold_value() == 0
    np.testing.assert_array_equal(effective_value(made), KERNEL)
    x = np.zeros((4, 6), "float32")  # so that only the decay acts
    model.compile(keras.optimizers.SGD(0.5), "mse")
    model.fit(x, np.zeros((4, 5)), epochs=3, verbose=0)
    # s <- s (1 - lr * lambda), three times; the kernel by the same factor
    factor = (1 - 0.5 * 0.01) ** 3
    np.testing.assert_allclose(array(made.s), -3200 * factor, rtol=1e-6)
    np.testing.assert_allclose(
        made.weight.raw_value(), KERNEL * factor, rtol=1e-5
    )


def test_coupled_weight_decay_adds_to_the_regularizer_of_the_layer():
    inner = keras.layers.Dense(
        5, use_bias=False, kernel_regularizer=keras.regularizers.L1(0.1)
    )
    layer = PrunableLayer(inner, SoftThreshold(s_init=-2.0, weight_decay=0.3))
    model = keras.Sequential([keras.Input((6,)), layer])
    layer.layer.kernel.assign(KERNEL)
    expected = 0.1 * np.abs(KERNEL).sum() + 0.15 * (KERNEL**2).sum() + 0.15 * 4
    assert float(sum(array(value) for value in model.losses)) == pytest.approx(
        expected, rel=1e-5
    )


def test_a_frozen_threshold_passes_gradients_to_live_entries_only():
    model, made = built(SoftThreshold(s_init=-0.5))
    effective = effective_value(made)
    made.freeze(effective != 0)
    np.testing.assert_allclose(effective_value(made), effective, atol=1e-7)
    np.testing.assert_array_equal(
        made.weight.raw_value(), effective_value(made)
    )
    found = differentiated(model)
    np.testing.assert_array_equal(
        found["kernel"], np.where(effective != 0, COEFFICIENTS, 0)
    )
    assert found["kernel_s"] == 0
    assert made.threshold_value() == 0
    assert made.frozen


def test_live_entries_that_a_frozen_threshold_rounds_to_zero_keep_their_signs():
    _, made = built(SoftThreshold(s_init=10.0))
    below = effective_value(made) == 0
    assert (KERNEL[below] < 0).any()
    made.freeze(np.ones(KERNEL.shape, bool))
    np.testing.assert_array_equal(
        np.sign(made.weight.raw_value()), np.sign(KERNEL)
    )
    assert np.abs(made.weight.raw_value()[below]).max() < 1e-30


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"granularity": "filter"},
            "`granularity` must be .*Received: granularity='filter'",
        ),
        ({"g": "relu"}, "`g` must be one of .*Received: g='relu'"),
        ({"weight_decay": -1.0}, "Received: weight_decay=-1.0"),
        ({"s_init": float("nan")}, "Received: s_init=nan"),
    ],
)
def test_soft_threshold_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        SoftThreshold(**arguments)


def by_hand(w, live, power):
    order = np.argsort(-np.abs(w), axis=None, kind="stable")
    mask = np.zeros(w.size, bool)
    mask[order[:live]] = True
    mask = mask.reshape(w.shape)
    threshold = np.abs(w[~mask]).max()
    smooth = np.sign(w) * (np.abs(w) ** power - threshold**power).clip(0) ** (
        1 / power
    )
    return np.where(mask, smooth, 0), mask


@pytest.mark.parametrize("power", [1.0, 3.0])
def test_values_of_feather_are_those_of_the_paper(power):
    _, made = built(Feather(0.4, power=power))
    expected, mask = by_hand(KERNEL.astype("float64"), 12, power)
    found = made.value()
    np.testing.assert_array_equal(found != 0, mask)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("theta", [0.0, 0.3, 1.0])
def test_gradients_of_feather_pass_with_a_share_for_dead_entries(theta):
    model, made = built(Feather(0.4, theta=theta))
    expected = np.where(
        made.mask_value(), COEFFICIENTS, np.float32(theta) * COEFFICIENTS
    )
    np.testing.assert_allclose(
        differentiated(model)["kernel"], expected, rtol=1e-6
    )


def test_the_threshold_of_feather_follows_the_mask():
    _, made = built(Feather(0.4))
    made.assign_raw(10 * KERNEL[::-1])
    made.update(5, 0.2)
    expected, _ = by_hand(10.0 * KERNEL[::-1].astype("float64"), 6, 3.0)
    np.testing.assert_allclose(made.value(), expected, atol=1e-4)
    made.assign_mask(np.ones_like(KERNEL, bool))  # none is dead: no threshold
    np.testing.assert_array_equal(made.value(), 10 * KERNEL[::-1])


@pytest.mark.parametrize(
    "options", [{"power": 0}, {"theta": -0.1}, {"theta": 1.1}, {"power": "3"}]
)
def test_feather_refuses(options):
    (name,) = options
    with pytest.raises(
        ValueError, match=rf"`{name}` must be .*Received: {name}="
    ):
        Feather(0.5, **options)
    with pytest.raises(ValueError, match=r"holds .*`theta`.*Received: "):
        Feather.from_config({"schedule": None})
