"""The list of all that public functions return: every storage in every kind of model.

`RETURNED["blocks of attention"]()` makes a small built model, with other weights and masks at each
call. Tests of what holds for all of them (parameters, checkpoints) take `CASES`: the quick run has
each storage and each kind at least once, the slow tests have all pairs.
"""

import functools

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.calibration import Channels
from keras_sparse_ortho.initializers import ExactOrthogonal
from keras_sparse_ortho.parametrizations import (
    ChannelSoftThreshold,
    Feather,
    LowRankSoftThreshold,
    SoftThreshold,
)
from keras_sparse_ortho.schedules import Cubic
from tests.models.networks import Block, Written

L = keras.layers
# Of the input and of the outputs of every kind of model.
SHAPE, CLASSES = (
    (4, 16),
    8,
)
x = np.random.default_rng(0).normal(size=(8, *SHAPE)).astype("float32")


# --- kinds of models: dense, built, of one input -------------------------------------------------


def _head():
    """The last layer, with an initializer of ours for `apply_masks`."""
    return L.Dense(
        CLASSES, kernel_initializer=ExactOrthogonal(0.5), name="head"
    )


def sequential():
    return keras.Sequential(
        [
            keras.Input(SHAPE),
            L.Conv1D(16, 3, activation="relu", name="conv"),
            L.BatchNormalization(),
            L.Flatten(),
            L.Dense(16, activation="relu", name="hidden"),
            _head(),
        ]
    )


def functional():
    """With a branch, an operation that is no layer, a nested model and a layer that is shared."""
    shared = L.Dense(16, activation="tanh", name="shared")
    inner = keras.Sequential([L.Dense(16), L.Dense(16)], name="inner")
    inputs = keras.Input(SHAPE)
    x = inner(shared(L.Dense(16, name="lift")(inputs))) * 2.0
    x = L.Flatten()(L.Add()([x, shared(x)]))
    return keras.Model(inputs, _head()(x))


def custom_layer():
    inputs = keras.Input(SHAPE)
    x = L.Flatten()(Block(16, name="block")(inputs))
    return keras.Model(inputs, _head()(x))


@keras.saving.register_keras_serializable(package="tests")
class Subclassed(Written):
    units, head = 16, staticmethod(_head)


def subclassed():
    model = Subclassed()
    model(keras.ops.zeros((1, *SHAPE)))
    return model


def recurrent():
    inputs = keras.Input(SHAPE)
    x = L.GRU(16)(L.LSTM(16, return_sequences=True)(inputs))
    return keras.Model(inputs, _head()(x))


def attention():
    inputs = keras.Input(SHAPE)
    x = L.MultiHeadAttention(2, 8, name="attention")(inputs, inputs)
    x = L.Flatten()(L.LayerNormalization()(inputs + x))
    return keras.Model(inputs, _head()(x))


KINDS = {
    kind.__name__: kind
    for kind in (
        sequential,
        functional,
        subclassed,
        custom_layer,
        recurrent,
        attention,
    )
}


# --- storages: what a public function makes of a dense model -------------------------------------

REGULAR = kso.Block(4, 4, regular=True)


def masked(model):
    return kso.sparsify(model, 0.5)


def compact(model):
    return kso.sparsify(model, 0.5, storage="compact")


def blocks(model):
    return kso.prune(
        model, 0.5, budget="uniform", storage="blocks", structure=REGULAR
    )


def low_rank(model):
    matrices = [
        weight.path
        for weight in kso.prunable_weights(model)
        if len(weight.shape) == 2
    ]
    return kso.parametrize(model, LowRankSoftThreshold(), include=matrices)


def _parametrized(template):
    return lambda model: kso.parametrize(model, template())


def _quantized(storage, *settings):
    return lambda model: kso.quantize_aware(storage(model), *settings)


def _scheduled(kind):
    return lambda: kind(Cubic(0.5, begin_step=0, end_step=4, frequency=1))


STORAGES = {
    "masked": masked,
    "compact": compact,
    "blocks": blocks,
    "pruned": lambda model: kso.prune(model, 0.5),
    "pruned, compact": lambda model: kso.prune(
        model, 0.5, budget="erk", storage="compact"
    ),
    "pruned, n by m": lambda model: kso.prune(
        model, 0.5, structure=kso.NByM(2, 4)
    ),
    "channels": lambda model: kso.prune(
        model, 0.5, structure=Channels(), include="head"
    ),
    "adopted": kso.apply_masks,
    "adopted, compact": lambda model: kso.apply_masks(model, storage="compact"),
    "to_compact": lambda model: kso.convert(masked(model), "compact"),
    "to_masked": lambda model: kso.convert(blocks(model), "masked"),
    "to_blocks": lambda model: kso.convert(
        kso.convert(blocks(model), "masked"), "blocks"
    ),
    "soft threshold": _parametrized(SoftThreshold),
    "soft threshold by channel": _parametrized(ChannelSoftThreshold),
    "low rank": low_rank,
    "magnitude": _parametrized(_scheduled(kso.MagnitudeMask)),
    "straight through": _parametrized(
        _scheduled(kso.parametrizations.StraightThroughTopK)
    ),
    "feather": _parametrized(_scheduled(Feather)),
    "quantized": _quantized(masked, "int4", None),
    "quantized, compact": _quantized(compact, "int4", None),
    "quantized, blocks": _quantized(blocks, "int8", None),
    "quantized activations": _quantized(masked),
    "stripped": lambda model: kso.strip(masked(model)),
    "stripped, compact": lambda model: kso.strip(compact(model)),
    "stripped, blocks": lambda model: kso.strip(blocks(model)),
    "stripped, low rank": lambda model: kso.strip(low_rank(model)),
}

REFUSED = [
    (
        "quantized activations",
        "subclassed",
    ),  # it rounds activations at unknown places
]
RETURNED = {
    f"{storage} of {kind}": functools.partial(
        lambda store, make: store(make()), store, make
    )
    for storage, store in STORAGES.items()
    for kind, make in KINDS.items()
    if (storage, kind) not in REFUSED
}


def _in_quick_run(storage, kind):
    """The plainest three storages of all kinds, and the others of one kind each, in turn."""
    at, kinds = list(STORAGES).index(storage), list(KINDS)
    return at < 3 or kinds[(at + 1) % len(kinds)] == kind


CASES = [
    pytest.param(
        name,
        marks=[] if _in_quick_run(*name.split(" of ")) else [pytest.mark.slow],
    )
    for name in RETURNED
]
