"""Convolutions of each channel by itself: DepthwiseConv, and SeparableConv around it."""

from typing import Any

import keras
import numpy as np

from keras_sparse_ortho.layers import is_elementwise
from keras_sparse_ortho.models._channel_rules._linear import Linear
from keras_sparse_ortho.models._channel_rules._rule import (
    ChannelCall,
    ChannelRule,
    Constants,
    MakeRule,
    Mask,
    SmallerLayer,
    activated,
    bias_of,
    for_single_inputs,
    has_borders,
    smaller_layer,
    value_of,
    without_tiny,
)
from keras_sparse_ortho.models._channel_rules._tied import Tied

L = keras.layers


class Depthwise(Tied):
    """A channel becomes as many as the multiplier; all of them go with it."""

    has_kernel = True

    def __init__(
        self,
        layer: Any,
        axis: int = -1,
    ) -> None:
        self.kernel = value_of(layer.kernel)
        channels, multiplier = self.kernel.shape[-2:]
        super().__init__(
            layer, np.arange(channels * multiplier)[None] // multiplier, axis
        )
        self.bias = bias_of(layer, channels * multiplier)

    def constants(self, inputs: Constants) -> Constants:
        sums = _each_by_itself(self.layer, self.kernel, inputs)
        return activated(self.layer.activation, sums + self.bias)

    def smaller(
        self,
        constants: Constants,
        read: Mask,
        live: Mask,
    ) -> SmallerLayer:
        bias = self.bias[live] if self.layer.use_bias else None
        return smaller_layer(self.layer, {}, [self.kernel[..., read, :], bias])


class Separable(Linear):
    """A depthwise kernel in front of the kernel, which reads `multiplier` rows a channel."""

    def __init__(
        self,
        layer: Any,
        axis: int = -1,
    ) -> None:
        self.depthwise = value_of(layer.depthwise_kernel)
        super().__init__(layer, layer.pointwise_kernel, axis)

    def fixed_inputs(self, inputs: Constants) -> Constants:
        return _each_by_itself(self.layer, self.depthwise, inputs)

    def needed(
        self,
        constants: Constants,
        read: Mask,
        live: Mask,
    ) -> tuple[Mask, Mask]:
        live = live | self.mixes
        used = self.taps[:, :, live].any(axis=(0, 2))
        used = used & np.isnan(self.fixed_inputs(constants))
        return read | used.reshape(len(read), -1).any(axis=1), live

    def smaller(
        self,
        constants: Constants,
        read: Mask,
        live: Mask,
    ) -> SmallerLayer:
        rows = np.repeat(read, self.depthwise.shape[-1])
        bias = self._new_bias(constants, rows)
        settings = self._settings(bias, live)
        depthwise = self.depthwise[..., read, :]
        pointwise = self.kernel[..., rows, :][..., live]
        weights = [depthwise, pointwise, self._bias_of(settings, bias, live)]
        return smaller_layer(self.layer, settings, weights)


def _each_by_itself(
    layer: Any,
    kernel: np.ndarray,
    inputs: Constants,
) -> Constants:
    """The constants after a depthwise kernel `(*taps, channels, multiplier)`, without bias."""
    varies = inputs != 0 if has_borders(layer) else np.isnan(inputs)
    taps = without_tiny(kernel).reshape(-1, *kernel.shape[-2:])
    sums = np.where(varies, 0, inputs)[:, None] * taps.sum(axis=0)
    return np.where(varies[:, None] & taps.any(axis=0), np.nan, sums).ravel()


@for_single_inputs
def _depthwise(call: ChannelCall) -> ChannelRule | str:
    if not is_elementwise(call.layer.activation):
        return "its activation mixes channels"
    return Depthwise(call.layer, call.inputs[0].axis)


@for_single_inputs
def _separable(call: ChannelCall) -> ChannelRule | str:
    return Separable(call.layer, call.inputs[0].axis)


RULES: dict[type | str, MakeRule] = {
    **dict.fromkeys((L.DepthwiseConv1D, L.DepthwiseConv2D), _depthwise),
    **dict.fromkeys((L.SeparableConv1D, L.SeparableConv2D), _separable),
}
