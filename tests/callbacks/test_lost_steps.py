"""Runs whose optimizer has lost its steps, and where a run begins."""

import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.callbacks import SET, TargetDensity, UpdateMasks
from keras_sparse_ortho.schedules import Cubic
from tests.callbacks import runs
from tests.helpers import (
    StepCallback,
    jit_if_quicker,
    part_of_a_run,
    slow_on_jax,
)

X, Y = (part[:16] for part in runs.xy())
IN_STEPS = Cubic(0.25, begin_step=0, end_step=12, frequency=2)
LOST = "steps of the optimizer, and these were lost.*optimizer.build.*Received: the optimizer at"


def network(parametrization=None):
    return runs.network(parametrization, jit_compile=jit_if_quicker())


CASES = {
    "masks": lambda: (network(kso.MagnitudeMask(IN_STEPS)), UpdateMasks()),
    "thresholds": lambda: (
        network(kso.SoftThreshold()),
        TargetDensity(0.25, IN_STEPS),
    ),
    "SET": lambda: (network(), SET(frequency=2)),
}


def fit(model, *callbacks, epochs, initial_epoch=0):
    """Four steps an epoch."""
    options = {
        "batch_size": 4,
        "shuffle": False,
        "initial_epoch": initial_epoch,
    }
    with part_of_a_run():
        return runs.fit(model, *callbacks, count=16, epochs=epochs, **options)


@pytest.mark.filterwarnings(
    "ignore:Skipping variable loading for optimizer:UserWarning"
)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param("masks", marks=pytest.mark.slow),
        pytest.param("thresholds", marks=pytest.mark.slow),
        "SET",
    ],
)
@slow_on_jax
def test_a_schedule_whose_steps_were_lost_is_refused_and_the_way_out_goes_on(
    case, tmp_path
):
    model, callback = CASES[case]()
    fit(model, callback, epochs=2)
    with part_of_a_run():
        model.save_weights(tmp_path / "w.weights.h5")
    fit(model, CASES[case]()[1], epochs=4, initial_epoch=2)
    expected = runs.state(model)

    other, callback = CASES[case]()
    other.load_weights(tmp_path / "w.weights.h5")
    before = other.get_weights()
    with pytest.raises(ValueError, match=LOST):
        fit(other, callback, epochs=4, initial_epoch=2)
    assert runs.same(before, other.get_weights())

    right, callback = CASES[case]()
    right.optimizer.build(right.trainable_variables)
    right.load_weights(tmp_path / "w.weights.h5")
    fit(right, callback, epochs=4, initial_epoch=2)
    assert runs.same(expected, runs.state(right))


@pytest.mark.slow
def test_parts_of_a_run_go_on_where_it_stands_without_the_optimizers_steps():
    made = kso.MagnitudeMask(Cubic(0.25, 0.0, 0.75, frequency=2))
    model = network(made.clone())
    fit(model, UpdateMasks(), epochs=4)
    whole = runs.live(model)
    model = network(made)

    def look(model):
        model.stop_training = len(watch.seen) == 1
        return runs.live(model)

    watch = runs.Watch(look)
    fit(model, UpdateMasks(), watch, epochs=4)
    assert watch.seen[0] > watch.seen[1] > whole
    # A new optimizer.
    model.compile("adam", "mse", jit_compile=jit_if_quicker())
    fit(model, UpdateMasks(), epochs=4, initial_epoch=2)
    assert runs.live(model) == whole


class Began(StepCallback):
    """Notes where the run begins."""

    def on_run_begin(self, step, start, steps):
        self.at = step, start, steps


@pytest.mark.core
def test_a_run_that_goes_on_inside_an_epoch_counts_whole_ones():
    model, began = network(), Began()
    model.optimizer.build(model.trainable_variables)
    for seen, epoch, start in (
        (6, 1, 0),
        (6, 0, 4),
        (8, 2, 0),
        (8, 1, 4),
        (2, 1, -4),
    ):
        model.optimizer.iterations.assign(seen)
        fit(model, began, epochs=3, initial_epoch=epoch)
        assert began.at == (seen, start, 12)
