"""BatchNormalization, and normalizations whose statistics are those of several channels."""

import math
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho.models import (
    ChannelCall,
    ChannelRule,
    Constants,
    Mask,
    Scales,
    SmallerLayer,
    SmallerOperation,
    Tied,
    Tracer,
    add_channel_rules,
    count_of,
    for_single_inputs,
    identity_sources,
    smaller_layer,
    value_of,
)

L = keras.layers


class BatchStatistics(Tied):
    """BatchNormalization in inference: a scale and a shift for each channel."""

    def constant_outputs(self, constants: Constants) -> Constants:
        layer = self.layer
        gamma = value_of(layer.gamma) if layer.scale else 1.0
        scale = gamma / np.sqrt(value_of(layer.moving_variance) + layer.epsilon)
        shift = value_of(layer.beta) if layer.center else 0.0
        shift = shift - value_of(layer.moving_mean) * scale
        return np.where(scale == 0, shift, constants * scale + shift)

    def limit(self) -> float | None:
        return math.inf

    def scale(
        self,
        scales: Scales,
        inputs: np.ndarray,
        outputs: int,
    ) -> np.ndarray:
        if self.layer.scale:
            return scales.make(outputs)
        return super().scale(scales, inputs, outputs)

    def rescaled(
        self,
        inputs: np.ndarray,
        outputs: np.ndarray,
    ) -> list[np.ndarray]:
        """Statistics of the scaled inputs; without gamma their variance stays, as outputs scale."""
        layer = self.layer
        variance = value_of(layer.moving_variance)
        weights = []
        if layer.scale:
            deviation = np.sqrt(variance + layer.epsilon)
            variance = inputs**2 * variance
            new_deviation = np.sqrt(variance + layer.epsilon)
            factors = outputs * new_deviation / (inputs * deviation)
            weights.append(value_of(layer.gamma) * factors)
        if layer.center:
            weights.append(value_of(layer.beta) * outputs)
        return [*weights, value_of(layer.moving_mean) * inputs, variance]


class LayerStatistics(Tied):
    """Statistics of each sample: nothing behind them is a constant.

    Args:
        of_channels: bool. Whether the statistics are those of all channels, and weights have one
            entry for each. Else they are those of positions.
    """

    def __init__(
        self,
        layer: Any,
        sources: np.ndarray,
        axis: int,
        of_channels: bool,
    ) -> None:
        super().__init__(layer, sources, axis)
        self.of_channels = of_channels

    def constant_outputs(self, constants: Constants) -> Constants:
        return np.full_like(constants, np.nan)

    def limit(self) -> float | None:
        return None

    def smaller(
        self, constants: Constants, read: Mask, live: Mask
    ) -> SmallerLayer | SmallerOperation | None:
        return (
            super().smaller(constants, read, live) if self.of_channels else None
        )


class GroupStatistics(LayerStatistics):
    """GroupNormalization: each group of channels has its own statistics, and goes as a whole."""

    def _by_group(self, channels: np.ndarray) -> np.ndarray:
        return channels.reshape(self.layer.groups, -1)

    def constants(self, inputs: Constants) -> Constants:
        """Where all channels of a group are one constant, only the shift is left of it."""
        groups = self._by_group(inputs)
        alike = (groups == groups[:, :1]).all(axis=1)
        shift = (
            value_of(self.layer.beta)
            if self.layer.center
            else np.zeros(len(inputs))
        )
        return np.where(np.repeat(alike, groups.shape[1]), shift, np.nan)

    def needed(
        self,
        constants: Constants,
        read: Mask,
        live: Mask,
    ) -> tuple[Mask, Mask]:
        groups = self._by_group(read | live)
        stays = np.repeat(groups.any(axis=1), groups.shape[1])
        return stays, stays

    def smaller(
        self,
        constants: Constants,
        read: Mask,
        live: Mask,
    ) -> SmallerLayer:
        vectors = [value_of(variable)[live] for variable in self.layer.weights]
        groups = count_of(live) // self._by_group(live).shape[1]
        return smaller_layer(self.layer, {"groups": groups}, vectors)

    def trace(
        self,
        tracer: Tracer,
        inputs: np.ndarray,
    ) -> np.ndarray:
        tracer.join(self._by_group(inputs).T)
        return inputs


def _axes(call: ChannelCall) -> list[int]:
    """The axes of a normalization, counted from the first."""
    axes = call.layer.axis
    if not isinstance(axes, list | tuple):
        axes = [axes]
    return [int(axis) % len(call.output_shape) for axis in axes]


@for_single_inputs
def _batch(call: ChannelCall) -> ChannelRule | str:
    axis = call.inputs[0].axis
    if _axes(call) != [axis]:
        return f"it normalizes another axis than {axis}, where the channels are"
    return BatchStatistics(call.layer, identity_sources(call), axis)


@for_single_inputs
def _layer(call: ChannelCall) -> ChannelRule | str:
    axis = call.inputs[0].axis
    axes = _axes(call)
    if axis not in axes:
        return LayerStatistics(
            call.layer, identity_sources(call), axis, of_channels=False
        )
    if axes != [axis]:
        return "its statistics are those of channels and positions together"
    if call.exact:
        return "its statistics are those of all channels (exact=False lets them change)"
    return LayerStatistics(
        call.layer, identity_sources(call), axis, of_channels=True
    )


@for_single_inputs
def _group(call: ChannelCall) -> ChannelRule | str:
    axis = call.inputs[0].axis
    if _axes(call) != [axis]:
        return f"it normalizes another axis than {axis}, where the channels are"
    if call.layer.groups == 1 and call.inputs[0].size > 1:
        return "it has one group, of all channels"
    return GroupStatistics(
        call.layer, identity_sources(call), axis, of_channels=True
    )


add_channel_rules(
    {
        L.BatchNormalization: _batch,
        L.LayerNormalization: _layer,
        L.GroupNormalization: _group,
    }
)
if hasattr(L, "RMSNormalization"):  # newer than the oldest Keras
    add_channel_rules({L.RMSNormalization: _layer})
