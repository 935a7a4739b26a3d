"""Convolutions of each channel by itself: DepthwiseConv, and SeparableConv around it."""

from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.families._convolution import (
    ConvolutionRows,
    output_pixels,
)
from keras_sparse_ortho.families._register_layer import register_layer
from keras_sparse_ortho.kernels import KernelLayout, as_matrices
from keras_sparse_ortho.layers import is_elementwise
from keras_sparse_ortho.models import (
    ChannelCall,
    ChannelRule,
    Constants,
    Linear,
    Mask,
    Scales,
    SmallerLayer,
    Tied,
    activated,
    bias_of,
    for_single_inputs,
    has_borders,
    limit_of,
    smaller_layer,
    value_of,
    with_scaled_bias,
    without_tiny,
)

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

    def limit(self) -> float | None:
        return limit_of(self.layer.activation)

    def scale(
        self,
        scales: Scales,
        inputs: np.ndarray,
        outputs: int,
    ) -> np.ndarray:
        return scales.make(outputs)

    def rescaled(
        self,
        inputs: np.ndarray,
        outputs: np.ndarray,
    ) -> list[np.ndarray]:
        by_channel = outputs.reshape(len(inputs), -1) / inputs[:, None]
        kernel = self.kernel * by_channel
        return with_scaled_bias(self.layer, [kernel], outputs)


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

    def rescaled(
        self,
        inputs: np.ndarray,
        outputs: np.ndarray,
    ) -> list[np.ndarray]:
        kernels = [self.depthwise / inputs[:, None], self.kernel * outputs]
        return with_scaled_bias(self.layer, kernels, outputs)

    def inside(self, inputs: keras.KerasTensor) -> keras.KerasTensor | None:
        layer = self.layer
        is_plain = layer.padding in ("valid", "same")
        if not is_plain or layer.data_format != "channels_last":
            return None
        return keras.ops.depthwise_conv(
            inputs,
            layer.depthwise_kernel,
            strides=layer.strides,
            padding=layer.padding,
            dilation_rate=layer.dilation_rate,
        )

    def rescaled_inside(self, factors: np.ndarray) -> list[np.ndarray]:
        depthwise, pointwise, *bias = self.layer.get_weights()
        by_channel = factors.reshape(depthwise.shape[-2:])
        return [depthwise * by_channel, pointwise / factors[:, None], *bias]


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


class DepthwiseRows(ConvolutionRows):
    """The inputs of a depthwise kernel at each position, channel by channel."""

    def groups(self, channels: int) -> int:
        return channels


class PointwiseRows(DepthwiseRows):
    """The output of the depthwise part of a separable convolution at each position."""

    def __call__(
        self,
        x: np.ndarray,
        chosen: np.ndarray | None = None,
    ) -> np.ndarray:
        kernel = to_numpy(self._layer.depthwise_kernel).astype(x.dtype)
        matrices = as_matrices(kernel, KernelLayout.depthwise())
        patches = super().__call__(x, chosen)
        by_channel = patches @ matrices
        by_position = np.moveaxis(by_channel, 0, 1)
        return by_position.reshape(1, len(by_position), -1)


for _kind in (L.DepthwiseConv1D, L.DepthwiseConv2D):
    register_layer(
        _kind,
        {"kernel": KernelLayout.depthwise()},
        positions=output_pixels,
        rows={"kernel": DepthwiseRows},
        channels=_depthwise,
        rounding="by output",
        by_sample=True,
    )
for _kind in (L.SeparableConv1D, L.SeparableConv2D):
    register_layer(
        _kind,
        {
            "depthwise_kernel": KernelLayout.depthwise(),
            "pointwise_kernel": KernelLayout.convolution(),
        },
        positions=output_pixels,
        rows={
            "depthwise_kernel": DepthwiseRows,
            "pointwise_kernel": PointwiseRows,
        },
        channels=_separable,
        rounding="by output",
        by_sample=True,
    )
