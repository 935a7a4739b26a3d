"""Subclassed models: copied object by object, or changed in place where they say so."""

import functools
import threading

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import NotPrunableError
from tests.helpers import array, reloaded
from tests.models.test_whole_way import whole_way

L = keras.layers
X = np.random.default_rng(0).normal(size=(16, 12)).astype("float32")
Y = np.zeros((16, 3), "float32")


class Net(keras.Model):
    """Two layers, and what else a user may keep in a model."""

    def __init__(self, extra=lambda model: None):
        super().__init__()
        self.hidden = L.Dense(16, activation="relu", name="hidden")
        self.head = L.Dense(3, name="head")
        extra(self)

    def call(self, x):
        return self.head(self.hidden(x))


class Holder:
    def __init__(self, layer):
        self.layer = layer


class Slots:
    __slots__ = ("layer",)

    def __init__(self, layer):
        self.layer = layer


EXTRAS = {
    "a metric": lambda m: setattr(m, "mean", keras.metrics.Mean()),
    "an optimizer": lambda m: setattr(m, "second", keras.optimizers.Adam()),
    "a lock": lambda m: setattr(m, "lock", threading.Lock()),
    "a generator": lambda m: setattr(m, "rows", (row for row in range(3))),
    "an object": lambda m: setattr(m, "holder", Holder(m.hidden)),
    "slots": lambda m: setattr(m, "holder", Slots(m.hidden)),
    "bound methods": lambda m: setattr(m, "partial", functools.partial(m.call)),
    "keys": lambda m: setattr(m, "table", {m.hidden: 1}),
}


def built(extra=lambda model: None):
    model = Net(extra)
    model.compile("sgd", "mse")
    model.train_on_batch(X, Y)
    return model


@pytest.mark.parametrize("name", EXTRAS)
def test_a_copy_shares_no_weight_whatever_the_model_keeps(name):
    model = Net(EXTRAS[name])
    model(X)
    _, plain = whole_way(model, X)
    if hasattr(plain, "holder"):
        assert plain.holder.layer is plain.hidden
    model.train_on_batch(X, Y)


def uncopyable(model):
    """A compiled function of the backend, which has the layers in it."""
    function = lambda x: model.head(model.hidden(x))  # noqa: E731
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        model.compiled_call = tf.function(function)
    else:
        import jax

        model.compiled_call = jax.jit(function)


@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_a_model_that_cannot_be_copied(storage):
    model = built(uncopyable)
    expected = array(model(X))
    with pytest.raises(
        NotPrunableError,
        match=r"sparsify\.in_place.* Received: Net.compiled_call",
    ):
        kso.prune(model, 0.3, storage=storage)
    np.testing.assert_array_equal(array(model(X)), expected)
    assert kso.prune.in_place(model, 0.3, storage=storage) is model


@pytest.mark.tensorflow_only
def test_variables_of_tensorflow_are_copied():
    import tensorflow as tf

    model = built(lambda m: setattr(m, "factor", tf.Variable(2.0)))
    sparse = kso.prune(model, 0.3)
    sparse.factor.assign(3.0)
    assert float(model.factor) == 2.0


@pytest.mark.core
def test_masks_that_were_given_to_a_layer_of_a_sparse_initializer_are_loaded(
    tmp_path,
):
    model = keras.Sequential([keras.Input((12,))])
    model.add(
        L.Dense(
            16,
            kernel_initializer=kso.initializers.ExactOrthogonal(0.5),
            name="a",
        )
    )
    model.add(L.Dense(3, name="b"))
    for storage in ("masked", "compact"):
        pruned = kso.prune(model, 0.2, storage=storage)
        loaded = reloaded(pruned, tmp_path)
        np.testing.assert_array_equal(array(loaded(X)), array(pruned(X)))
        assert kso.prunable_weights(loaded)[0].parametrization.drawn_by is None
