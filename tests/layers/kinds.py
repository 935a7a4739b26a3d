"""Every kind of layer that the wrapper is tested with: how to make it, and its input shape."""

import dataclasses
from collections.abc import Callable

import keras
import pytest

from keras_sparse_ortho import PrunableLayer
from keras_sparse_ortho.initializers import ExactOrthogonal
from keras_sparse_ortho.parametrizations import CompactMask

L = keras.layers
DENSITY = 0.2


def compact(layer):
    """The layer in a wrapper that stores live entries only."""
    return PrunableLayer(layer, CompactMask())


# How the masks of initializers are held, by name.
STORAGES = {"masked": PrunableLayer, "compact": compact}


def eoi(seed=7):
    return ExactOrthogonal(DENSITY, seed=seed)


@dataclasses.dataclass(frozen=True)
class Kind:
    name: str
    make: Callable
    shape: tuple
    inputs: int = 1  # how often the layer gets its input
    integer: bool = False

    def classifier(self, wrap, classes=3):
        """A classifier around the layer, wrapped by `wrap`: its input and its outputs."""
        inputs = keras.Input(
            self.shape, dtype="int32" if self.integer else None
        )
        layer = wrap(self.make())
        x = layer(*[inputs] * self.inputs)
        return inputs, L.Dense(classes, name=f"{self.name}_head")(
            L.Flatten()(x)
        )


def network(kinds, wrap):
    """One classifier that adds up those around every kind of layer: traced and compiled once."""
    pairs = [kind.classifier(wrap) for kind in kinds]
    inputs, outputs = ([pair[k] for pair in pairs] for k in range(2))
    if len(pairs) == 1:
        return keras.Model(*pairs[0])
    return keras.Model(inputs, L.Add()(outputs))


def _block():
    return keras.Sequential(
        [
            L.Dense(16, kernel_initializer=eoi(1), activity_regularizer="l2"),
            L.BatchNormalization(),
            L.Dropout(0.1, seed=3),
            L.Dense(8, kernel_initializer=eoi(2)),
        ],
        name="block",
    )


def _recurrent(kind, **kwargs):
    return kind(
        12, kernel_initializer=eoi(1), recurrent_initializer=eoi(2), **kwargs
    )


KINDS = [
    Kind("dense", lambda: L.Dense(16, kernel_initializer=eoi()), (20,)),
    Kind("conv1d", lambda: L.Conv1D(8, 3, kernel_initializer=eoi()), (8, 4)),
    Kind(
        "conv2d_groups",
        lambda: L.Conv2D(8, 3, groups=2, kernel_initializer=eoi()),
        (6, 6, 4),
    ),
    Kind(
        "conv3d", lambda: L.Conv3D(6, 2, kernel_initializer=eoi()), (3, 3, 3, 4)
    ),
    Kind(
        "conv2d_transpose",
        lambda: L.Conv2DTranspose(8, 3, kernel_initializer=eoi()),
        (4, 4, 4),
    ),
    Kind(
        "depthwise",
        lambda: L.DepthwiseConv2D(3, depthwise_initializer=eoi()),
        (6, 6, 4),
    ),
    Kind(
        "separable",
        lambda: L.SeparableConv2D(
            8, 3, depthwise_initializer=eoi(1), pointwise_initializer=eoi(2)
        ),
        (6, 6, 6),
    ),
    Kind(
        "einsum_dense",
        lambda: L.EinsumDense("abc,cd->abd", (5, 16), kernel_initializer=eoi()),
        (5, 12),
    ),
    Kind(
        "embedding",
        lambda: L.Embedding(11, 16, embeddings_initializer=eoi()),
        (5,),
        integer=True,
    ),
    Kind("lstm", lambda: _recurrent(L.LSTM), (4, 10)),
    Kind("gru", lambda: _recurrent(L.GRU), (4, 10)),
    Kind("simple_rnn", lambda: _recurrent(L.SimpleRNN), (4, 10)),
    Kind("bidirectional", lambda: L.Bidirectional(_recurrent(L.GRU)), (4, 10)),
    Kind(
        "time_distributed",
        lambda: L.TimeDistributed(L.Dense(9, kernel_initializer=eoi())),
        (4, 10),
    ),
    Kind(
        "attention",
        lambda: L.MultiHeadAttention(4, 8, kernel_initializer=eoi()),
        (5, 32),
        2,
    ),
    Kind("block", _block, (12,)),
]

# All kinds in one network in every run; one by one, to see which it is, among the slow tests.
CASES = [
    pytest.param(KINDS, id="together"),
    *(
        pytest.param([kind], id=kind.name, marks=pytest.mark.slow)
        for kind in KINDS
    ),
]
