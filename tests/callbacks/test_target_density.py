"""`TargetDensity`: the density is reached, by the exact offset, and what it refuses."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.callbacks import TargetDensity
from keras_sparse_ortho.errors import DensityError, NotPrunableError
from keras_sparse_ortho.parametrizations import SoftThreshold
from keras_sparse_ortho.schedules import Constant, Cubic, OneShot
from tests.helpers import array, jit

L = keras.layers


def network(g="sigmoid", initializer="glorot_uniform", **options):
    inputs = keras.Input((16,))
    x = L.Dense(32, activation="relu", kernel_initializer=initializer, name="hidden")(inputs)
    model = keras.Model(inputs, L.Dense(8, kernel_initializer=initializer, name="head")(x))
    model = kso.parametrize(model, SoftThreshold(g=g, **options))
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", jit_compile=jit())
    return model


def fit(model, callback, epochs=4, **options):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(64, 16)), rng.normal(size=(64, 8))
    options = {"batch_size": 8, "verbose": 0, **options}
    return model.fit(x, y, epochs=epochs, callbacks=[callback], **options)


def live(model):
    return sum(weight.live for weight in kso.prunable_weights(model))


@pytest.mark.core
@pytest.mark.parametrize(
    ("g", "density"), [("sigmoid", 0.5), ("sigmoid", 0.02), ("exp", 0.1), ("softplus", 0.1)]
)
def test_the_run_ends_at_the_density_asked_for(g, density):
    model = network(g)
    fit(model, TargetDensity(density, frequency=5))
    assert live(model) == round(density * 768)


def test_layers_keep_their_relative_thresholds():
    model = network()
    hidden, head = (w.parametrization for w in kso.prunable_weights(model))
    hidden.s.assign(-7.0)
    head.s.assign(-9.0)
    fit(model, TargetDensity(0.5, Constant(None, frequency=4), freeze=False))
    assert live(model) == round(0.5 * 768)
    np.testing.assert_array_equal(array(hidden.offset), array(head.offset))
    # Both thresholds are g(s + offset), with s of their own: they were trained, but not far.
    ratio = hidden.threshold_value() / head.threshold_value()
    logits = [np.log(p.threshold_value() / (1 - p.threshold_value())) for p in (hidden, head)]
    np.testing.assert_allclose(logits[0] - logits[1], array(hidden.s) - array(head.s), rtol=1e-3)
    assert ratio > 3


def test_the_count_follows_the_schedule():
    seen = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if keras.backend.backend() == "jax":
                self.model.jax_state_sync()
            seen.append(live(self.model))

    schedule = Cubic(0.1, begin_step=4, end_step=20, frequency=4)
    model = network()
    steering = TargetDensity(0.1, schedule)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(64, 16)), rng.normal(size=(64, 8))
    model.fit(x, y, batch_size=8, epochs=4, verbose=0, callbacks=[steering, Watch()])
    for step in (4, 8, 12, 16, 20):
        # The watch comes after the steering, before the step: exact but for float32 ties.
        assert abs(seen[step] - schedule.at(step) * 768) <= 1
    assert seen[0] > 750
    assert set(seen[20:]) == {77}


def test_training_on_after_the_end_keeps_the_entries():
    model = network()
    fit(model, TargetDensity(0.1, frequency=3))
    masks = [w.parametrization.mask_value() for w in kso.prunable_weights(model)]
    fit(model, TargetDensity(0.1, Cubic(None, 0, 10)))  # all of it is over
    fit(model, TargetDensity(0.1, frequency=3))
    for weight, mask in zip(kso.prunable_weights(model), masks, strict=True):
        np.testing.assert_array_equal(weight.parametrization.mask_value(), mask)


def test_weights_that_no_sigmoid_reaches():
    model = network()
    model.compile(keras.optimizers.SGD(1e-6), "mse")
    for weight in kso.prunable_weights(model):
        weight.variable.assign(np.sign(weight.raw_value()) * 3.0)
    unreached = r"use g='exp'.*Received: 768 such entries, 77 to keep"
    with pytest.warns(UserWarning, match=unreached):
        fit(model, TargetDensity(0.1, OneShot(None, 2)), epochs=1)
    assert live(model) == 77  # exact all the same: the largest are kept when they are fixed
    assert all(weight.live for weight in kso.prunable_weights(model))


@pytest.mark.core
@pytest.mark.parametrize(
    ("floor", "least", "freeze"), [(0.3, 0.3, True), (1.0, 1.0, False), (1e-9, 0.0, True)]
)
def test_no_layer_falls_below_its_floor(floor, least, freeze):
    """A head of small magnitudes has its floor, the total is exact, and a run tells once."""
    model = network()
    model.compile(keras.optimizers.SGD(0.0), "mse", jit_compile=jit())
    small = next(w for w in kso.prunable_weights(model) if "head" in w.path)
    small.variable.assign(small.raw_value() * 1e-3)
    share = kso.budgets.erk(kso.prunable_weights(model), 0.1, orthogonal=False).counts[small.path]
    match = r"at their floor.*Received: \['head/kernel'\]"
    steering = TargetDensity(0.1, frequency=3, freeze=freeze, floor=floor)
    with pytest.warns(UserWarning, match=match) as caught:
        fit(model, steering)
    assert sum("at their floor" in str(warning.message) for warning in caught) == 1
    assert (small.live, live(model)) == (max(int(np.ceil(least * share)), 1), 77)
    assert small.parametrization.frozen == freeze


def test_every_layer_keeps_a_channel():
    inputs = keras.Input((16,))
    x = L.Dense(32, activation="relu", name="wide")(inputs)
    x = L.Dense(20, activation="relu", name="small")(x)
    model = keras.Model(inputs, L.Dense(8, name="head")(x))
    model = kso.parametrize(model, kso.parametrizations.ChannelSoftThreshold(), exclude="head.*")
    model.compile(keras.optimizers.SGD(0.0), "mse", jit_compile=jit())
    small = next(w for w in kso.prunable_weights(model) if "small" in w.path)
    small.variable.assign(small.raw_value() * 1e-3)
    with pytest.warns(UserWarning, match=r"at their floor.*'small/kernel'"):
        fit(model, TargetDensity(0.3, frequency=3, floor=1e-9))
    assert small.parametrization.live_channels().sum() == 1


def test_ranks_have_a_floor():
    model = keras.Sequential([keras.Input((16,)), L.Dense(20, name="a"), L.Dense(8, name="b")])
    model = kso.parametrize(model, kso.parametrizations.LowRankSoftThreshold())
    model.compile(keras.optimizers.SGD(0.0), "mse", jit_compile=jit())
    _, small = (w.parametrization for w in kso.prunable_weights(model))
    small.values.assign(small.values * 1e-3)
    with pytest.warns(UserWarning, match=r"at their floor.*'b/kernel'"):
        fit(model, TargetDensity(0.5, frequency=3, floor=0.5))
    assert [w.parametrization.live_rank for w in kso.prunable_weights(model)] == [10, 2]


def test_refusals():
    with pytest.raises(ValueError, match=r"`floor` must be in \[0, 1\]. Received: floor=2"):
        TargetDensity(0.1, floor=2)
    plain = keras.Sequential([keras.Input((16,)), L.Dense(8)])
    plain.compile("sgd", "mse")
    with pytest.raises(NotPrunableError, match=r"SoftThreshold.*Received: model='seq"):
        fit(plain, TargetDensity(0.1))
    with pytest.raises(DensityError, match=r"`density`.*Received: density=0"):
        TargetDensity(0)

    def batches():
        for _ in range(3):
            yield np.ones((2, 16), "float32"), np.ones((2, 8), "float32")

    model = network()
    with pytest.raises(
        ValueError, match=r"needs a `schedule`.*Received: schedule=None, steps=None"
    ):
        model.fit(batches(), epochs=1, shuffle=False, verbose=0, callbacks=[TargetDensity(0.1)])
