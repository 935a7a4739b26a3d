"""A network of two layers, 768 weights, and short runs of it."""

import keras
import numpy as np

import keras_sparse_ortho as kso
from tests.helpers import array, jit

L = keras.layers
HERE = __file__  # where warnings of a `fit` point to
SIZE = 16 * 32 + 32 * 8


def dense():
    layers = [
        L.Dense(32, activation="relu", name="hidden"),
        L.Dense(8, name="head"),
    ]
    return keras.Sequential([keras.Input((16,)), *layers])


def network(parametrization=None, optimizer=None, **options):
    """Compiled, with a parametrization; or with masks of half of the entries."""
    if parametrization is None:
        model = kso.sparsify(dense(), 0.5, seed=0)
    else:
        model = kso.parametrize(dense(), parametrization)
    optimizer = optimizer or keras.optimizers.Adam(0.01)
    model.compile(optimizer, "mse", **({"jit_compile": jit()} | options))
    return model


def xy(count=64):
    rng = np.random.default_rng(0)
    return rng.normal(size=(count, 16)), rng.normal(size=(count, 8))


def fit(model, *callbacks, epochs=2, count=64, **options):
    """Eight steps an epoch, or an eighth of `count`."""
    options = {"batch_size": 8, "verbose": 0} | options
    return model.fit(
        *xy(count), epochs=epochs, callbacks=list(callbacks), **options
    )


def weights(model):
    return kso.prunable_weights(model)


def live(model):
    return sum(weight.live for weight in weights(model))


def state(model):
    return [array(v) for v in [*model.variables, *model.optimizer.variables]]


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


class Watch(keras.callbacks.Callback):
    """What there is to see before every step, or after every epoch."""

    def __init__(self, look=live, *, steps=False):
        super().__init__()
        self.look, self.steps, self.seen = look, steps, []

    def on_train_batch_begin(self, batch, logs=None):
        if self.steps:
            self._note()

    def on_epoch_end(self, epoch, logs=None):
        if not self.steps:
            self._note()

    def _note(self):
        if keras.backend.backend() == "jax":
            self.model.jax_state_sync()
        self.seen.append(self.look(self.model))
