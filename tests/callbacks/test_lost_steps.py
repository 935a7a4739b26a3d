"""Runs whose optimizer has lost its steps; runs of a length that Keras does not know."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.callbacks import SET, RigL, TargetDensity, UpdateMasks
from keras_sparse_ortho.callbacks._step_callback import StepCallback
from keras_sparse_ortho.schedules import Cubic
from tests.helpers import array, jit_if_quicker, part_of_a_run, slow_on_jax

L = keras.layers
BATCH, BATCHES = 4, 4
RNG = np.random.default_rng(0)
X, Y = (RNG.normal(size=(BATCH * BATCHES, n)).astype("float32") for n in (12, 4))
IN_STEPS = Cubic(0.25, begin_step=0, end_step=12, frequency=2)
LOST = "steps of the optimizer, and these were lost.*optimizer.build.*Received: the optimizer at"


def network(parametrization=None, optimizer="adam"):
    layers = [L.Dense(16, name="hidden"), L.Dense(4, name="head")]
    dense = keras.Sequential([keras.Input((12,)), *layers])
    if parametrization is None:
        model = kso.sparsify(dense, 0.5, seed=0)
    else:
        model = kso.parametrize(dense, parametrization)
    model.compile(optimizer, "mse", jit_compile=jit_if_quicker())
    return model


CASES = {
    "masks": lambda: (network(kso.MagnitudeMask(IN_STEPS)), UpdateMasks()),
    "thresholds": lambda: (network(kso.SoftThreshold()), TargetDensity(0.25, IN_STEPS)),
    "SET": lambda: (network(), SET(frequency=2)),
}


def fit(model, callback, epochs, initial_epoch=0):
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0, "callbacks": [callback]}
    with part_of_a_run():
        return model.fit(X, Y, epochs=epochs, initial_epoch=initial_epoch, **options)


@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer:UserWarning")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param("masks", marks=pytest.mark.slow),
        pytest.param("thresholds", marks=pytest.mark.slow),
        "SET",
    ],
)
@slow_on_jax
def test_a_schedule_whose_steps_were_lost_is_refused_and_the_way_out_goes_on(case, tmp_path):
    model, callback = CASES[case]()
    fit(model, callback, 2)
    with part_of_a_run():
        model.save_weights(tmp_path / "w.weights.h5")
    fit(model, CASES[case]()[1], 4, 2)
    expected = [array(v) for v in model.variables]

    other, callback = CASES[case]()
    other.load_weights(tmp_path / "w.weights.h5")
    before = [array(v) for v in other.weights]
    with pytest.raises(ValueError, match=LOST):
        fit(other, callback, 4, 2)
    for a, b in zip(before, other.weights, strict=True):
        np.testing.assert_array_equal(a, array(b))

    right, callback = CASES[case]()
    right.optimizer.build(right.trainable_variables)
    right.load_weights(tmp_path / "w.weights.h5")
    fit(right, callback, 4, 2)
    for a, b in zip(expected, right.variables, strict=True):
        np.testing.assert_array_equal(a, array(b))


@pytest.mark.slow
def test_parts_of_a_run_go_on_where_it_stands_without_the_optimizers_steps():
    model = network(kso.MagnitudeMask(Cubic(0.25, 0.0, 0.75, frequency=2)))
    fit(model, UpdateMasks(), 4, 0)
    whole = kso.prunable_weights(model)[0].density
    model = network(kso.MagnitudeMask(Cubic(0.25, 0.0, 0.75, frequency=2)))
    seen = []

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = epoch == 1
            seen.append(logs["density"])

    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    with part_of_a_run():
        model.fit(X, Y, epochs=4, callbacks=[UpdateMasks(), Stop()], **options)
    model.compile("adam", "mse", jit_compile=jit_if_quicker())  # a new optimizer
    fit(model, UpdateMasks(), 4, 2)
    assert seen[-1] > 0.25
    assert kso.prunable_weights(model)[0].density == whole


@pytest.mark.tensorflow_only
def test_data_sets_with_an_end_that_nobody_knows_need_steps():
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH).filter(lambda *_: True)
    model = network(kso.SoftThreshold())
    with pytest.raises(ValueError, match="needs a `schedule`"):
        model.fit(data, epochs=2, shuffle=False, verbose=0, callbacks=[TargetDensity(0.25)])
    model = network()
    with pytest.raises(ValueError, match="`end_step` must be given"):
        model.fit(data, epochs=2, shuffle=False, verbose=0, callbacks=[RigL((X, Y), 4)])


class Began(StepCallback):
    """Notes where the run begins."""

    def on_run_begin(self, step, start, steps):
        self.at = step, start, steps


@pytest.mark.core
def test_a_run_that_goes_on_inside_an_epoch_counts_whole_ones():
    model, began = network(), Began()
    model.optimizer.build(model.trainable_variables)
    for seen, epoch, start in ((6, 1, 0), (6, 0, 4), (8, 2, 0), (8, 1, 4), (2, 1, -4)):
        model.optimizer.iterations.assign(seen)
        fit(model, began, 3, epoch)
        assert began.at == (seen, start, 12)
