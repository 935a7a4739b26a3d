"""The recipe of docs/trained_networks.md: pruned gradually while the dense network teaches."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from tests.helpers import array, jit_if_quicker
from tests.pruning.checks import assert_same

L = keras.layers


@pytest.mark.core
@pytest.mark.parametrize("structure", [None, "2:4"])
def test_a_student_follows_its_teacher_while_it_is_pruned(structure):
    keras.utils.set_random_seed(0)
    hidden = [L.Dense(32, activation="relu", name="a"), L.Dense(16, activation="tanh", name="b")]
    trained = keras.Sequential([keras.Input((8,)), *hidden, L.Dense(4, name="head")])
    x = np.random.default_rng(0).normal(size=(256, 8)).astype("float32")
    before, head = trained.get_weights(), trained.get_layer("head")
    both = keras.Model(trained.inputs[0], {"features": head.input, "outputs": head.output})
    targets = {name: array(value) for name, value in both(x).items()}
    template = kso.MagnitudeMask(kso.schedules.Cubic(None, 0.0, 0.7), structure=structure)
    student = kso.parametrize(both, template, 0.5, "uniform", exclude="head")
    at_once = kso.prune(trained, 0.5, budget="uniform", structure=structure, exclude="head")
    weights = {name: 1 / float(value.var()) for name, value in targets.items()}
    losses, updates = dict.fromkeys(targets, "mse"), kso.callbacks.UpdateMasks()
    student.compile("adam", losses, loss_weights=weights, jit_compile=jit_if_quicker())
    student.fit(x, targets, batch_size=32, epochs=4, verbose=0, callbacks=[updates])
    sparse = keras.Model(student.input, student.output["outputs"])
    assert [w.live for w in kso.prunable_weights(sparse)] == [128, 256, 64]
    assert_same(before, trained.get_weights())
    lost = [np.mean((array(m(x)) - targets["outputs"]) ** 2) for m in (sparse, at_once)]
    assert lost[0] < 0.7 * lost[1]
