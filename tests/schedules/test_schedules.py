"""Densities and update steps of every schedule."""

import itertools

import keras
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.schedules import (
    Constant,
    Cubic,
    Linear,
    OneShot,
    Polynomial,
    Ramp,
)

pytestmark = pytest.mark.numpy_only

ALL = [
    Constant(0.2, begin_step=3, end_step=40, frequency=7),
    Constant(0.2),
    Cubic(0.1, 10, 110, frequency=30),
    Linear(0.1, 0, 100, initial_density=0.5, frequency=10),
    OneShot(0.3, 25),
    Polynomial(0.05, 5, 95, 0.9, power=2.0, frequency=9),
]
IN_PARTS = [
    Constant(0.2, 0.1),
    Cubic(0.1),
    Linear(0.1, 0.2, 0.9),
    OneShot(0.3, 0.5),
]


def test_cubic_is_the_formula_of_gradual_pruning():
    schedule = Cubic(0.1, 100, 500, initial_density=0.8)
    for step in (100, 180, 333, 499):
        # Zhu and Gupta write it for sparsity: s_f + (s_i - s_f) (1 - (t - t_0) / (n dt)) ** 3.
        sparsity = 0.9 + (0.2 - 0.9) * (1 - (step - 100) / 400) ** 3
        assert schedule.at(step) == pytest.approx(1 - sparsity, abs=1e-12)
    assert schedule.at(99) == 1
    assert schedule.at(500) == schedule.at(10**6) == 0.1

    assert Linear(0.2, 0, 10, initial_density=0.6).at(5) == pytest.approx(0.4)


def test_updates_are_at_the_beginning_every_frequency_and_at_the_end():
    assert [t for t in range(100) if ALL[4].due(t)] == [25]
    assert (ALL[4].at(24), ALL[4].at(25)) == (1, 0.3)
    assert [t for t in range(200) if ALL[2].due(t)] == [10, 40, 70, 100, 110]
    assert [t for t in range(201) if ALL[1].due(t)] == [0, 100, 200]


@pytest.mark.parametrize("schedule", ALL, ids=repr)
@pytest.mark.parametrize("executed", [1, 2, 7, 64])
def test_no_update_is_lost_with_several_steps_per_execution(schedule, executed):
    exact = [t for t in range(0, 641) if schedule.due(t)]
    asked = [t for t in range(0, 641, executed) if schedule.due(t, executed)]
    # Each is made at the first step asked for that does not come before it, and no other.
    assert asked == sorted({-(-t // executed) * executed for t in exact})


@pytest.mark.parametrize("schedule", [*ALL, *IN_PARTS], ids=repr)
def test_configuration_round_trip_and_another_final_density(schedule):
    config = keras.saving.serialize_keras_object(schedule)
    assert repr(keras.saving.deserialize_keras_object(config)) == repr(schedule)
    other = schedule.with_density(0.07)
    assert other.frequency == schedule.frequency
    plans = schedule.resolved(100), other.resolved(100)
    assert plans[1].at(10**6) == pytest.approx(0.07)
    assert all(0 < plans[0].at(t) <= 1 for t in range(200))


def test_parts_of_a_run_become_steps_of_it():
    cubic = Cubic(0.1).resolved(200)  # by default over 70% of it
    assert (cubic.begin_step, cubic.end_step, cubic.frequency) == (0, 140, 1)
    later = Linear(0.1, 0.25, 0.29).resolved(100, start=1000)
    assert (later.begin_step, later.end_step) == (1025, 1029)
    assert later.at(1027) == pytest.approx(0.55)
    mixed = Polynomial(0.1, 4, 0.5, frequency=3).resolved(40)
    assert [t for t in range(30) if mixed.due(t)] == [4, 7, 10, 13, 16, 19, 20]
    half = OneShot(0.3, 0.5).resolved(9)
    assert [t for t in range(9) if half.due(t)] == [4]
    assert Cubic(0.1).resolved(1).end_step == 1  # and not 0, where it begins
    # What was trained before without being counted: the rest of the way.
    assert Linear(0.1, 0.0, 1.0).resolved(100, start=-50).at(
        0
    ) == pytest.approx(0.55)
    assert [
        s.at_start() for s in (Cubic(0.1), Cubic(0.1, initial_density=0.4))
    ] == [1.0, 0.4]
    assert [s.at_start() for s in (Constant(0.1), Constant(0.1, 0.01))] == [
        0.1,
        1.0,
    ]


@pytest.mark.parametrize("steps", [16 * 3, 16 * 20, 10_000])
@pytest.mark.parametrize(("make", "power"), [(Cubic, 3), (Linear, 1)])
def test_the_ramp_is_smooth_in_runs_of_any_length(make, power, steps):
    schedule = make(0.1).resolved(steps)
    densities = [schedule.at(t) for t in range(0, steps + 1) if schedule.due(t)]
    falls = [a - b for a, b in itertools.pairwise(densities)]
    assert densities[-1] == 0.1
    # In one update no more than the formula falls in one step, or in a hundredth of the way.
    assert max(falls) <= power * 0.9 * max(1 / schedule.end_step, 0.01) + 1e-9
    assert schedule.frequency == min(max(schedule.end_step // 100, 1), 100)


def test_what_is_not_resolved():
    schedule = Cubic(0.1, 0.1, 0.5)
    for ask in (schedule.at, schedule.due):
        with pytest.raises(
            ValueError, match=r"`resolved\(steps\)`.*Received: schedule=Cubic\("
        ):
            ask(3)
    with pytest.raises(
        ValueError, match=r"known before training.*Received: .*steps=None"
    ):
        schedule.resolved(None)
    with pytest.raises(
        ValueError, match=r"before `begin_step` in this run.*steps=10"
    ):
        Cubic(0.1, 8, 0.5).resolved(10)
    assert Constant(0.1).resolved(None).frequency == 100
    assert Constant(0.1).resolved(320).frequency == 3
    # Of a run that goes on: of its own steps.
    assert Cubic(0.1, 0.0, 0.7).resolved(2000, start=5000).frequency == 14
    assert (
        Constant(0.1, begin_step=0.0).resolved(320, start=1000).frequency == 3
    )
    assert Linear(0.25, end_step=100).resolved(10, start=50).at(
        50
    ) == pytest.approx(0.625)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Cubic(0.0, 0, 10),
            r"`density` must be in \(0, 1\]\. Received: density=0.0",
        ),
        (
            lambda: Cubic(0.1, 0, 10, initial_density=1.2),
            "Received: density=1.2",
        ),
        (
            lambda: Cubic(0.1, 10, 10),
            "must come after `begin_step`.*Received: begin_step=10",
        ),
        (
            lambda: Cubic(0.1, -1, 10),
            "`begin_step`.*at least 0.*Received: begin_step=-1",
        ),
        (lambda: Linear(0.1, 0, 10, frequency=0), "Received: frequency=0"),
        (
            lambda: Polynomial(0.1, 0, 10, power=0),
            "`power` must be positive.*Received: power=0",
        ),
        (
            lambda: OneShot(0.1, 2.5),
            r"float in \[0, 1\]\. Received: begin_step=2.5",
        ),
        (
            lambda: Cubic(0.1, 0.8, 0.2),
            "must not come before.*Received: begin_step=0.8, end_step",
        ),
        (
            lambda: Constant(0.1, 5, 4),
            "must not come before.*begin_step=5, end_step=4",
        ),
        (
            lambda: kso.MagnitudeMask("cubic"),
            "must be in .*Received: density='cubic'",
        ),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "name", ["PruningSummaries", "tests>Other", ["system"], None]
)
def test_a_configuration_cannot_call_anything_but_schedules(name):
    inner = {"module": "os", "name": name, "config": {"log_dir": "made"}}
    with pytest.raises(
        ValueError, match=r"PolynomialDecay and ConstantSparsity.*Received: "
    ):
        kso.schedules.TfmotSchedule.from_config({"schedule": inner})
    saved = keras.saving.serialize_keras_object(keras.layers.ReLU())
    with pytest.raises(
        ValueError,
        match=r"of a MagnitudeMask holds a Schedule. Received: .*ReLU",
    ):
        kso.MagnitudeMask.from_config({"schedule": saved})


class OfTfmot:
    """As TFMOT's schedules, which say what they are in `get_config`."""

    def __init__(self, **settings):
        self.settings = settings

    def get_config(self):
        return {"class_name": type(self).__name__, "config": self.settings}


class ConstantSparsity(OfTfmot):
    pass


class PolynomialDecay(OfTfmot):
    pass


@pytest.mark.parametrize(("of_tfmot", "ours"), [(-1, None), (0, 0), (200, 200)])
def test_the_end_of_a_constant_schedule_of_tfmot(of_tfmot, ours):
    settings = {"begin_step": 0, "end_step": of_tfmot, "frequency": 50}
    schedule = kso.MagnitudeMask(
        ConstantSparsity(target_sparsity=0.75, **settings)
    ).schedule
    assert schedule.get_config() == Constant(0.25, 0, ours, 50).get_config()


def test_a_polynomial_schedule_of_tfmot_begins_at_its_own_sparsity():
    steps = {"begin_step": 2, "end_step": 6, "frequency": 2}
    decay = PolynomialDecay(
        initial_sparsity=0.25, final_sparsity=0.75, power=2, **steps
    )
    schedule = kso.MagnitudeMask(decay).schedule
    assert (
        schedule.get_config()
        == Polynomial(0.25, 2, 6, 0.75, 2.0, 2).get_config()
    )


@keras.saving.register_keras_serializable(package="tests")
class Straight(Ramp):
    """A schedule of a user, with all arguments of a `Ramp`."""

    def between(self, initial, final, progress):
        return initial + (final - initial) * progress


def test_a_ramp_of_a_user():
    straight = Straight(0.1, 10, 110, initial_density=0.7)
    linear = Linear(0.1, 10, 110, initial_density=0.7)
    for step in (0, 9, 10, 63, 110, 200):
        assert straight.at(step) == pytest.approx(linear.at(step))
        assert straight.due(step) == linear.due(step)
    config = keras.saving.serialize_keras_object(straight)
    restored = keras.saving.deserialize_keras_object(config)
    assert repr(restored) == repr(straight)
    with pytest.raises(ValueError, match=r"after `begin_step`\. Received"):
        Straight(0.1, 10, 10)
    with pytest.raises(TypeError, match="abstract"):
        Ramp(0.1)
