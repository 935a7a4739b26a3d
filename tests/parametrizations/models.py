"""A small network with every parametrization, and its training, for several tests."""

import keras

import keras_sparse_ortho as kso
from keras_sparse_ortho.callbacks import TargetDensity, UpdateMasks
from keras_sparse_ortho.parametrizations import (
    Feather,
    MagnitudeMask,
    SoftThreshold,
    StraightThroughTopK,
)
from keras_sparse_ortho.schedules import Cubic
from tests.helpers import classifier_loss, data, jit

L = keras.layers

RAMP = Cubic(0.2, begin_step=2, end_step=10, frequency=3)

# Template and the callback that it needs, by name.
METHODS = {
    "magnitude": (lambda: MagnitudeMask(RAMP), lambda: UpdateMasks()),
    "feather": (lambda: Feather(RAMP, theta=0.5), lambda: UpdateMasks()),
    "top_k": (lambda: StraightThroughTopK(0.2, frequency=3), lambda: UpdateMasks()),
    "soft": (
        lambda: SoftThreshold(s_init=-3.0, weight_decay=1e-3),
        lambda: TargetDensity(0.2, RAMP),
    ),
    "soft_channel": (
        lambda: SoftThreshold("channel", s_init=-3.0),
        lambda: TargetDensity(0.2, Cubic(0.2, 0, 10, frequency=4), freeze=False),
    ),
}


def network(method):
    """A convolution, normalization and dense layers, parametrized."""
    inputs = keras.Input((6, 6, 2))
    x = L.Conv2D(6, 3, use_bias=False, name="conv")(inputs)
    x = L.ReLU()(L.BatchNormalization(name="norm")(x))
    x = L.Dense(12, activation="relu", name="hidden")(L.Flatten()(x))
    model = keras.Model(inputs, L.Dense(3, name="head")(x))
    return kso.parametrize(model, METHODS[method][0]())


def compiled(method, optimizer="adamw", **options):
    """The network with fixed seeds, ready for `fit`, by default under XLA."""
    options.setdefault("jit_compile", jit())
    keras.utils.clear_session()
    keras.utils.set_random_seed(5)
    model = network(method)
    algorithm = {
        "adamw": lambda: keras.optimizers.AdamW(1e-2, weight_decay=0.05),
        "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    }[optimizer]()
    model.compile(algorithm, classifier_loss(), **options)
    return model


def fit(model, method, epochs, **options):
    """Trains four steps an epoch."""
    x, y = data(model, 3)
    callbacks = [METHODS[method][1](), *options.pop("callbacks", [])]
    options = {"batch_size": 8, "shuffle": False, "verbose": 0, **options}
    return model.fit(x, y, epochs=epochs, callbacks=callbacks, **options)
