"""Layers that pass channels on: activations, dropout, pooling, padding, PReLU."""

from typing import Any

import keras
import numpy as np

from keras_sparse_ortho.layers import CircularPadding, is_elementwise
from keras_sparse_ortho.models._channel_rules._rule import (
    ChannelCall,
    ChannelRule,
    Constants,
    MakeRule,
    Mask,
    SmallerLayer,
    SmallerOperation,
    Tracer,
    activated,
    for_single_inputs,
    smaller_layer,
    value_of,
)

L = keras.layers


class Tied(ChannelRule):
    """Channels that stay or go with channels of the inputs.

    Args:
        layer: Layer or Operation.
        sources: int array `(n, outputs)`. Output `o` goes with the input channels `sources[:, o]`.
        axis: int. The axis of the channels in the outputs.
    """

    def __init__(
        self,
        layer: Any,
        sources: np.ndarray,
        axis: int = -1,
    ) -> None:
        super().__init__(layer, axis)
        self.sources = sources

    def constants(self, inputs: Constants) -> Constants:
        rows = inputs[self.sources]
        alike = (rows == rows[0]).all(axis=0)
        return self.constant_outputs(np.where(alike, rows[0], np.nan))

    def constant_outputs(self, constants: Constants) -> Constants:
        """The constants of the outputs, given the constant that each output reads."""
        return constants

    def needed(
        self,
        constants: Constants,
        read: Mask,
        live: Mask,
    ) -> tuple[Mask, Mask]:
        read = read.copy()
        np.logical_or.at(read, self.sources, live)
        return read, read[self.sources].any(axis=0)

    def smaller(
        self, constants: Constants, read: Mask, live: Mask
    ) -> SmallerLayer | SmallerOperation | None:
        variables = getattr(self.layer, "weights", None)
        if not variables:
            return None
        vectors = [value_of(variable)[..., live] for variable in variables]
        return smaller_layer(self.layer, {}, vectors)

    def trace(
        self,
        tracer: Tracer,
        inputs: np.ndarray,
    ) -> np.ndarray:
        columns = inputs[self.sources]
        tracer.join(columns)
        return columns[0]


class Elementwise(Tied):
    """An activation: each entry by itself."""

    def constant_outputs(self, constants: Constants) -> Constants:
        return activated(self.layer, constants)


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


def identity_sources(call: ChannelCall) -> np.ndarray:
    """Sources of a layer that passes the channels of its single input on, in order."""
    return np.arange(call.inputs[0].size)[None]


def _output_axis(call: ChannelCall) -> int:
    """The axis of the channels behind a layer that may drop or add axes of positions."""
    [tensor] = call.inputs
    if tensor.axis == len(tensor.shape) - 1:
        return len(call.output_shape) - 1
    return tensor.axis


@for_single_inputs
def passes_channels(call: ChannelCall) -> ChannelRule | str:
    """Makes the rule of a layer that passes each channel on, and keeps constants.

    Its weights, if it has some, have one entry for each channel on their last axis.

    Args:
        call: ChannelCall. A call of the layer.

    Returns a ChannelRule, or a str: the reason why the channels of this call must stay.
    """
    return Tied(call.layer, identity_sources(call), _output_axis(call))


@for_single_inputs
def elementwise(call: ChannelCall) -> ChannelRule | str:
    """Makes the rule of a layer or operation without weights that maps each entry by itself.

    Constants are computed by calling it on them, in inference.

    Args:
        call: ChannelCall. A call of the layer or operation.

    Returns a ChannelRule, or a str: the reason why the channels of this call must stay.
    """
    return Elementwise(call.layer, identity_sources(call), call.inputs[0].axis)


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
RULES: dict[type | str, MakeRule] = {
    **dict.fromkeys(_PASSING, passes_channels),
    **dict.fromkeys(_of_ranks(*_BY_POSITION), passes_channels),
    **dict.fromkeys(_of_ranks("ZeroPadding"), _padding),
    **dict.fromkeys(_OPERATIONS, elementwise),
    L.Activation: _activation,
    L.PReLU: _slopes,
    L.Rescaling: _scaling,
}
