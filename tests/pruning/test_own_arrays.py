"""A model that was made from another one shares no arrays with it.

On JAX a compiled training step takes over the arrays of its model. An array shared with a second
model is then gone ("Array has been deleted").
"""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from tests.helpers import array, jit
from tests.pruning.checks import assert_same

pytestmark = pytest.mark.core


def dense():
    layers = keras.layers
    first, last = layers.Dense(16, name="first"), layers.Dense(4, name="last")
    return keras.Sequential([keras.Input((8,)), first, layers.BatchNormalization(), last])


def train(model):
    model.compile("adam", "mse", jit_compile=jit())
    model.fit(np.ones((8, 8)), np.ones((8, 4)), epochs=2, verbose=0)


def trained():
    sparse = kso.sparsify(dense(), 0.5, seed=0)
    train(sparse)
    return sparse


@pytest.mark.parametrize(
    ("make_source", "make"),
    [
        (dense, lambda model: kso.sparsify(model, 0.5, seed=0)),
        (dense, lambda model: kso.prune(model, 0.5)),
        (trained, kso.strip),
    ],
    ids=["drawn", "kept", "stripped"],
)
def test_training_the_source_leaves_the_copy_alone(make_source, make):
    source = make_source()
    copy = make(source)
    before = [np.array(array(v)) for v in copy.variables]
    train(source)
    assert_same(before, copy.variables)
    train(copy)
