"""A model that was made from another one shares no arrays with it.

On JAX a compiled training step takes over the arrays of its model. An array shared with a second
model is then gone ("Array has been deleted").
"""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from tests.helpers import array, jit

pytestmark = pytest.mark.core


def dense():
    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, name="first"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(4, name="last"),
        ]
    )


def train(model):
    model.compile("adam", "mse", jit_compile=jit())
    model.fit(np.ones((8, 8)), np.ones((8, 4)), epochs=2, verbose=0)


@pytest.mark.parametrize(
    "make",
    [
        lambda model: kso.sparsify(model, 0.5, seed=0),
        lambda model: kso.prune(model, 0.5),
        lambda model: kso.strip(kso.sparsify(model, 0.5, seed=0, include="first")),
    ],
    ids=["drawn", "kept", "stripped"],
)
def test_training_the_source_leaves_the_copy_alone(make):
    source = dense()
    copy = make(source)
    before = [np.array(array(v)) for v in copy.variables]
    train(source)
    for old, variable in zip(before, copy.variables, strict=True):
        np.testing.assert_array_equal(array(variable), old)
    train(copy)


def test_training_goes_on_after_strip():
    sparse = kso.sparsify(dense(), 0.5, seed=0)
    train(sparse)
    plain = kso.strip(sparse)
    x = np.ones((2, 8), "float32")
    before = plain.predict(x, verbose=0)
    train(sparse)
    np.testing.assert_array_equal(plain.predict(x, verbose=0), before)
