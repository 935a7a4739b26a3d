"""The rules of layers that pass channels on, as they are or entry by entry."""

import math
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho.models._channel_rules._rule import (
    ChannelCall,
    ChannelRule,
    Constants,
    Mask,
    Scales,
    SmallerLayer,
    SmallerOperation,
    Tracer,
    activated,
    for_single_inputs,
    limit_of,
    smaller_layer,
    value_of,
)

L = keras.layers

_KNOWN = ("keras.", "keras_sparse_ortho.")  # modules


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

    def limit(self) -> float | None:
        """Nowhere for layers of users, of which it is not known, and for weights."""
        is_known = type(self.layer).__module__.startswith(_KNOWN)
        if not is_known or getattr(self.layer, "weights", None):
            return None
        return math.inf

    def scale(
        self,
        scales: Scales,
        inputs: np.ndarray,
        outputs: int,
    ) -> np.ndarray:
        columns = inputs[self.sources]
        scales.join(columns)
        return columns[0]


class Elementwise(Tied):
    """An activation: each entry by itself."""

    def constant_outputs(self, constants: Constants) -> Constants:
        return activated(self.layer, constants)

    def limit(self) -> float | None:
        return limit_of(self.layer)


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
