"""`TargetDensity`: the density is reached, by the exact offset, and what it refuses."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.callbacks import TargetDensity
from keras_sparse_ortho.errors import DensityError, NotPrunableError
from keras_sparse_ortho.parametrizations import (
    ChannelSoftThreshold,
    LowRankSoftThreshold,
    SoftThreshold,
)
from keras_sparse_ortho.schedules import Constant, Cubic, Linear, OneShot
from tests.callbacks import runs
from tests.callbacks.runs import SIZE, Watch, live, weights
from tests.helpers import array

L = keras.layers


def network(parametrization=None, rate=0.05):
    return runs.network(
        parametrization or SoftThreshold(), keras.optimizers.SGD(rate, 0.9)
    )


def fit(model, *callbacks, epochs=4, **options):
    return runs.fit(model, *callbacks, epochs=epochs, **options)


def shrunk(parametrization, path="head/kernel"):
    """A network that is not trained, with small magnitudes in one weight, and that weight."""
    model = network(parametrization, 0.0)
    small = next(w for w in weights(model) if w.path == path)
    variable = small.parametrization.steered
    variable.assign(array(variable) * 1e-3)
    return model, small


@pytest.mark.core
@pytest.mark.parametrize(
    ("g", "density"),
    [("sigmoid", 0.5), ("sigmoid", 0.02), ("exp", 0.1), ("softplus", 0.1)],
)
def test_the_run_ends_at_the_density_asked_for(g, density):
    model = network(SoftThreshold(g=g))
    fit(model, TargetDensity(density, frequency=5))
    assert live(model) == round(density * SIZE)


def test_layers_keep_their_relative_thresholds():
    model = network()
    hidden, head = (w.parametrization for w in weights(model))
    hidden.s.assign(-7.0)
    head.s.assign(-9.0)
    fit(model, TargetDensity(0.5, Constant(None, frequency=4), freeze=False))
    assert live(model) == round(0.5 * SIZE)
    np.testing.assert_array_equal(array(hidden.offset), array(head.offset))
    # Both thresholds are g(s + offset), with s of their own: they were trained, but not far.
    logits = [
        np.log(p.threshold_value() / (1 - p.threshold_value()))
        for p in (hidden, head)
    ]
    np.testing.assert_allclose(
        logits[0] - logits[1], array(hidden.s) - array(head.s), rtol=1e-3
    )
    assert hidden.threshold_value() / head.threshold_value() > 3


def test_the_count_follows_the_schedule():
    schedule, watch = (
        Cubic(0.1, begin_step=4, end_step=20, frequency=4),
        Watch(steps=True),
    )
    fit(network(), TargetDensity(0.1, schedule), watch)
    for step in (4, 8, 12, 16, 20):
        # The watch comes after the steering, before the step: exact but for float32 ties.
        assert abs(watch.seen[step] - schedule.at(step) * SIZE) <= 1
    assert watch.seen[0] > 750
    assert set(watch.seen[20:]) == {77}


def test_training_on_after_the_end_keeps_the_entries():
    model = network()
    fit(model, TargetDensity(0.1, frequency=3))
    masks = [w.mask for w in weights(model)]
    fit(model, TargetDensity(0.1, Cubic(None, 0, 10)))  # all of it is over
    fit(model, TargetDensity(0.1, frequency=3))
    for weight, mask in zip(weights(model), masks, strict=True):
        np.testing.assert_array_equal(weight.mask, mask)


def test_weights_that_no_sigmoid_reaches():
    model = network(rate=1e-6)
    for weight in weights(model):
        weight.variable.assign(np.sign(weight.raw_value()) * 3.0)
    unreached = r"use g='exp'.*Received: 768 such entries, 77 to keep"
    with pytest.warns(UserWarning, match=unreached):
        fit(model, TargetDensity(0.1, OneShot(None, 2)), epochs=1)
    # Exact all the same: the largest are kept when they are fixed.
    assert live(model) == 77
    assert all(weight.live for weight in weights(model))


@pytest.mark.core
@pytest.mark.parametrize(
    ("floor", "least", "freeze"),
    [(0.3, 0.3, True), (1.0, 1.0, False), (1e-9, 0.0, True)],
)
def test_no_layer_falls_below_its_floor(floor, least, freeze):
    """A head of small magnitudes has its floor, the total is exact, and a run tells once."""
    model, small = shrunk(SoftThreshold())
    share = kso.budgets.erk(weights(model), 0.1, orthogonal=False).counts[
        small.path
    ]
    match = r"at their floor.*Received: \['head/kernel'\]"
    with pytest.warns(UserWarning, match=match) as caught:
        fit(model, TargetDensity(0.1, frequency=3, freeze=freeze, floor=floor))
    assert (
        sum("at their floor" in str(warning.message) for warning in caught) == 1
    )
    assert (small.live, live(model)) == (
        max(int(np.ceil(least * share)), 1),
        77,
    )
    assert small.parametrization.frozen == freeze


def test_floors_are_those_of_the_final_density_from_the_start():
    model, small = shrunk(SoftThreshold())
    share = kso.budgets.erk(weights(model), 0.2, orthogonal=False).counts[
        small.path
    ]
    watch = Watch(lambda model: weights(model)[1].live, steps=True)
    with pytest.warns(
        UserWarning, match=r"at their floor.*Received: \['head/kernel'\]"
    ):
        fit(
            model,
            TargetDensity(0.2, Linear(None, 0, 32, frequency=1), floor=1.0),
            watch,
        )
    # From a density of 0.7 on, where ERK would leave more; exact but for float32 ties.
    assert np.abs(np.subtract(watch.seen[12:], share)).max() <= 1


def test_a_weight_that_loses_all_entries_is_named_once():
    model, small = shrunk(SoftThreshold())
    with pytest.warns(
        UserWarning, match=r"without a live entry.*Received: \['head/kernel'\]"
    ):
        fit(model, TargetDensity(0.1, frequency=3, floor=0.0))
    assert (small.live, live(model)) == (0, 77)


def test_floors_of_channels_and_ranks():
    model, small = shrunk(ChannelSoftThreshold())
    with pytest.warns(UserWarning, match=r"at their floor.*'head/kernel'"):
        fit(model, TargetDensity(0.3, frequency=3, floor=1e-9))
    assert small.parametrization.live_channels().sum() == 1
    model, small = shrunk(LowRankSoftThreshold())
    with pytest.warns(UserWarning, match=r"at their floor.*'head/kernel'"):
        fit(model, TargetDensity(0.5, frequency=3, floor=0.5))
    assert [w.parametrization.live_rank for w in weights(model)] == [10, 2]


def test_refusals():
    with pytest.raises(
        ValueError, match=r"`floor` must be in \[0, 1\]. Received: floor=2"
    ):
        TargetDensity(0.1, floor=2)
    with pytest.raises(ValueError, match=r"`frequency`.*Received: frequency=0"):
        TargetDensity(0.5, frequency=0)
    with pytest.raises(DensityError, match=r"`density`.*Received: density=0"):
        TargetDensity(0)
    with pytest.raises(
        NotPrunableError, match=r"SoftThreshold.*Received: model='seq"
    ):
        fit(runs.network(), TargetDensity(0.1))
    with pytest.raises(
        ValueError,
        match=r"needs a `schedule`.*Received: schedule=None, steps=None",
    ):
        network().fit(
            (runs.xy() for _ in range(3)),
            shuffle=False,
            verbose=0,
            callbacks=[TargetDensity(0.1)],
        )
    first = kso.PrunableLayer(L.Dense(32), SoftThreshold())
    mixed = keras.Sequential([keras.Input((16,)), first])
    mixed.add(kso.PrunableLayer(L.Dense(8), LowRankSoftThreshold()))
    mixed.compile("sgd", "mse")
    with pytest.raises(
        NotPrunableError, match=r"Received: .*\['entries', 'ranks'\]"
    ):
        fit(mixed, TargetDensity(0.5))
    model = network(SoftThreshold("channel"))
    s = weights(model)[1].parametrization.s
    s.assign(np.where(np.arange(8) == 3, np.nan, array(s)))
    with pytest.raises(
        NotPrunableError, match=r"'head/kernel' is not finite, or its threshold"
    ):
        fit(model, TargetDensity(0.1))
    infinite = network()
    raw = weights(infinite)[1].parametrization.steered
    raw.assign(np.where(np.arange(raw.shape[1]) == 3, np.inf, array(raw)))
    with pytest.raises(
        NotPrunableError, match=r"'head/kernel' is not finite.*: 32 inf"
    ):
        fit(infinite, TargetDensity(0.1))
    ranks = network(LowRankSoftThreshold())
    left = weights(ranks)[0].parametrization.left
    left.assign(array(left) * np.nan)
    with pytest.raises(
        NotPrunableError,
        match=r"factors of the weight 'hidden/kernel'.*: 256 inf",
    ):
        fit(ranks, TargetDensity(0.1))


@pytest.mark.core
def test_entries_that_are_frozen_at_zero_lose_their_momentum():
    model = network(SoftThreshold())
    fit(model, TargetDensity(0.5))
    for weight in weights(model):
        steered = weight.parametrization.steered
        (momentum,) = [
            array(variable)
            for variable in model.optimizer.variables
            if variable.name.endswith("momentum")
            and variable.shape == steered.shape
        ]
        live = np.reshape(weight.mask, momentum.shape)
        assert momentum[live].any()
        assert not momentum[~live].any()
