"""Layers that pass channels on: activations, dropout, pooling, padding, PReLU."""

import math
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho.layers import CircularPadding, is_elementwise
from keras_sparse_ortho.models import (
    ChannelCall,
    ChannelRule,
    Constants,
    Mask,
    SmallerLayer,
    Tied,
    add_channel_rules,
    elementwise,
    for_single_inputs,
    identity_sources,
    passes_channels,
    smaller_layer,
    value_of,
)
from keras_sparse_ortho.quantization import keeps_range

L = keras.layers


class Padding(Tied):
    """Zeros at the border, where a constant ends that is not 0."""

    def constant_outputs(self, constants: Constants) -> Constants:
        return np.where(constants == 0, 0.0, np.nan)


class Slopes(Tied):
    """PReLU: slopes at each position, or shared by positions."""

    def __init__(
        self,
        layer: Any,
        sources: np.ndarray,
        axis: int,
    ) -> None:
        super().__init__(layer, sources, axis)
        self.alpha = value_of(layer.alpha)

    def constant_outputs(self, constants: Constants) -> Constants:
        alpha = np.moveaxis(self.alpha, self.axis - 1, -1).reshape(
            -1, len(constants)
        )
        shared = (alpha == alpha[0]).all(axis=0)
        negative = np.where(shared, alpha[0] * constants, np.nan)
        return np.where(constants >= 0, constants, negative)

    def smaller(
        self,
        constants: Constants,
        read: Mask,
        live: Mask,
    ) -> SmallerLayer:
        alpha = np.compress(live, self.alpha, axis=self.axis - 1)
        return smaller_layer(self.layer, {}, [alpha])

    def limit(self) -> float | None:
        return math.inf

    def rescaled(
        self,
        inputs: np.ndarray,
        outputs: np.ndarray,
    ) -> list[np.ndarray]:
        return [self.alpha]


def _activation(call: ChannelCall) -> ChannelRule | str:
    if not is_elementwise(call.layer.activation):
        return "its activation mixes channels"
    return elementwise(call)


def _scaling(call: ChannelCall) -> ChannelRule | str:
    if np.ndim(call.layer.scale) or np.ndim(call.layer.offset):
        return "it scales entries by an array"
    return elementwise(call)


@for_single_inputs
def _padding(call: ChannelCall) -> ChannelRule | str:
    return Padding(call.layer, identity_sources(call), call.inputs[0].axis)


@for_single_inputs
def _slopes(call: ChannelCall) -> ChannelRule | str:
    [tensor] = call.inputs
    if call.layer.alpha.shape[tensor.axis - 1] != tensor.size:
        return "all channels share its slopes"
    return Slopes(call.layer, identity_sources(call), tensor.axis)


def _of_ranks(*names: str) -> list[type]:
    return [
        getattr(L, f"{name}{rank}D") for name in names for rank in (1, 2, 3)
    ]


_PASSING = (
    L.ActivityRegularization,
    L.AlphaDropout,
    CircularPadding,
    L.Dropout,
    L.GaussianDropout,
    L.GaussianNoise,
    L.Identity,
    L.RepeatVector,
)
_BY_POSITION = (
    *("SpatialDropout", "Cropping", "UpSampling"),
    *(
        "AveragePooling",
        "MaxPooling",
        "GlobalAveragePooling",
        "GlobalMaxPooling",
    ),
)
# Operations of Keras that are elementwise besides the activations, by name of their class.
_OPERATIONS = (
    *(
        "Absolute",
        "Negative",
        "Square",
        "Sqrt",
        "Rsqrt",
        "Exp",
        "Expm1",
        "Log",
        "Log1p",
    ),
    *(
        "Reciprocal",
        "Sign",
        "Sin",
        "Cos",
        "Arctan",
        "Erf",
        "Floor",
        "Ceil",
        "Round",
    ),
)
add_channel_rules(
    {
        **dict.fromkeys(_PASSING, passes_channels),
        **dict.fromkeys(_of_ranks(*_BY_POSITION), passes_channels),
        **dict.fromkeys(_of_ranks("ZeroPadding"), _padding),
        **dict.fromkeys(_OPERATIONS, elementwise),
        L.Activation: _activation,
        L.PReLU: _slopes,
        L.Rescaling: _scaling,
    }
)


def _keeps_range(layer: keras.layers.Layer) -> bool:
    return True


def _is_linear(layer: keras.layers.Layer) -> bool:
    return layer.activation is keras.activations.linear


_KEEPING = (
    L.AlphaDropout,
    L.Dropout,
    L.GaussianDropout,
    L.GaussianNoise,
    L.Identity,
    L.InputLayer,
    L.RepeatVector,
    *_of_ranks("SpatialDropout", "Cropping", "ZeroPadding"),
    *_of_ranks("MaxPooling", "GlobalMaxPooling"),
)
for _kind in _KEEPING:
    keeps_range.register(_kind, _keeps_range)
keeps_range.register(L.Activation, _is_linear)
