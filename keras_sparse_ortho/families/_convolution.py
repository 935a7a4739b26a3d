"""Convolutions, also in groups, and transposed ones."""

import math

import keras
import numpy as np

from keras_sparse_ortho._types import Tensor
from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.families._register_layer import register_layer
from keras_sparse_ortho.kernels import KernelLayout, Layouts, Rows
from keras_sparse_ortho.layers import is_elementwise
from keras_sparse_ortho.models import (
    ChannelCall,
    ChannelRule,
    Constants,
    Grouped,
    Linear,
    Mask,
    SmallerLayer,
    Tracer,
    for_single_inputs,
    pixels,
)

L = keras.layers

_DIGIT = 256  # float32 holds such digits exactly
_DIGITS = 4
_PADDING = 0  # the number of an input that is a zero of the padding
_TRANSPOSED = (L.Conv1DTranspose, L.Conv2DTranspose, L.Conv3DTranspose)


class Transposed(Linear):
    """A transposed convolution, whose kernel is `(*taps, out, in)`."""

    def _set_taps(self) -> None:
        self.kernel = np.swapaxes(self.kernel, -1, -2)
        # Few taps reach the border, and strides leave gaps.
        self.has_borders = True
        super()._set_taps()

    def smaller(
        self,
        constants: Constants,
        read: Mask,
        live: Mask,
    ) -> SmallerLayer:
        config, [kernel, *bias] = super().smaller(constants, read, live)
        return SmallerLayer(config, [np.swapaxes(kernel, -1, -2), *bias])

    def trace(
        self,
        tracer: Tracer,
        inputs: np.ndarray,
    ) -> np.ndarray:
        tracer.hold(
            inputs,
            self.layer,
            "its kernel has no rows for each channel it reads",
        )
        return tracer.make(self.layer.name, self.kernel.shape[-1])

    def rescaled(
        self,
        inputs: np.ndarray,
        outputs: np.ndarray,
    ) -> list[np.ndarray]:
        [kernel, *bias] = super().rescaled(inputs, outputs)
        return [np.swapaxes(kernel, -1, -2), *bias]


class ConvolutionRows(Rows):
    """The inputs of the kernel at each position: `(groups, positions, taps * channels)`."""

    def __init__(self, layer: keras.layers.Layer) -> None:
        self._layer = layer
        self._inputs_by_sizes: dict[tuple[int, ...], np.ndarray] = {}

    def __call__(
        self,
        x: np.ndarray,
        chosen: np.ndarray | None = None,
    ) -> np.ndarray:
        """The patches of the inputs, a matrix for each group, at chosen positions."""
        x = self._channels_last(x)
        samples, channels = len(x), x.shape[-1]
        groups = self.groups(channels)
        inputs = self._inputs_of_taps(x)
        inputs_of_samples = inputs[None] if chosen is None else inputs[chosen]
        size = math.prod(x.shape[1:-1])
        firsts = size * np.arange(samples)[:, None, None] - 1
        places = (inputs_of_samples + firsts).ravel()
        by_pixel = x.reshape(samples * size, channels)
        pixels = np.take(by_pixel, places, axis=0, mode="clip")
        if inputs.min() == _PADDING:
            is_padding = np.broadcast_to(
                inputs_of_samples == _PADDING,
                (samples, *inputs_of_samples.shape[1:]),
            )
            pixels[is_padding.ravel()] = 0
        taps = inputs.shape[-1]
        if groups == 1:
            return pixels.reshape(1, -1, taps * channels)
        by_group = pixels.reshape(-1, taps, groups, channels // groups)
        rows = np.ascontiguousarray(np.moveaxis(by_group, 2, 0))
        return rows.reshape(groups, len(by_group), -1)

    def positions(self, x: np.ndarray) -> int | None:
        return len(self._inputs_of_taps(self._channels_last(x[:1])))

    def growth(self) -> int:
        taps = math.prod(self._layer.kernel_size)
        if isinstance(self._layer, _TRANSPOSED):
            return taps * math.prod(self._layer.strides)
        return taps

    def groups(self, channels: int) -> int:
        """How many matrices there are, each with its part of the channels."""
        return getattr(self._layer, "groups", 1)

    def _channels_last(self, x: np.ndarray) -> np.ndarray:
        """The inputs with channels last, and the padding that the convolution itself lacks."""
        if self._layer.data_format == "channels_first":
            x = np.moveaxis(x, 1, -1)
        if self._layer.padding == "causal":
            span = self._layer.dilation_rate[0] * (
                self._layer.kernel_size[0] - 1
            )
            x = np.pad(x, ((0, 0), (span, 0), (0, 0)))
        return x

    def _inputs_of_taps(self, x: np.ndarray) -> np.ndarray:
        """Which input each tap meets at each position, from 1; 0 for none. `(positions, taps)`."""
        sizes = x.shape[1:-1]
        if sizes not in self._inputs_by_sizes:
            self._inputs_by_sizes[sizes] = _inputs_of_taps(self._layer, sizes)
        return self._inputs_by_sizes[sizes]


def _inputs_of_taps(
    layer: keras.layers.Layer,
    sizes: tuple[int, ...],
) -> np.ndarray:
    """The numbers of inputs, moved by a convolution with a channel for each tap."""
    numbers = np.arange(1, math.prod(sizes) + 1)
    digits = [numbers // _DIGIT**power % _DIGIT for power in range(_DIGITS)]
    images = np.stack(digits).reshape(_DIGITS, *sizes, 1).astype("float32")
    taps = math.prod(layer.kernel_size)
    each_tap = np.eye(taps, dtype="float32")
    settings = {
        "strides": layer.strides,
        "dilation_rate": layer.dilation_rate,
        "padding": "valid" if layer.padding == "causal" else layer.padding,
        "data_format": "channels_last",
    }
    if isinstance(layer, _TRANSPOSED):
        kernel = each_tap.reshape(*layer.kernel_size, taps, 1)
        settings["output_padding"] = layer.output_padding
        moved = keras.ops.conv_transpose(images, kernel, **settings)
    else:
        kernel = each_tap.reshape(*layer.kernel_size, 1, taps)
        moved = keras.ops.conv(images, kernel, **settings)
    moved_digits = np.rint(to_numpy(moved)).astype(np.int64)
    powers = _DIGIT ** np.arange(_DIGITS)
    return np.tensordot(powers, moved_digits.reshape(_DIGITS, -1, taps), 1)


def _layouts(layer: keras.layers.Layer) -> Layouts:
    return {"kernel": KernelLayout.convolution(layer.groups)}


def _input_pixels(
    layer: keras.layers.Layer,
    inputs: Tensor,
    outputs: Tensor,
) -> int:
    return pixels(layer, inputs.shape)


def output_pixels(
    layer: keras.layers.Layer,
    inputs: Tensor,
    outputs: Tensor,
) -> int:
    return pixels(layer, outputs.shape)


@for_single_inputs
def _convolution(call: ChannelCall) -> ChannelRule | str:
    axis = call.inputs[0].axis
    if call.layer.groups == 1:
        return Linear(call.layer, call.layer.kernel, axis)
    if not is_elementwise(call.layer.activation):
        return "its activation mixes the channels of all groups"
    layout = KernelLayout.convolution(call.layer.groups)
    return Grouped(call.layer, call.layer.kernel, layout, axis)


@for_single_inputs
def _transposed(call: ChannelCall) -> ChannelRule | str:
    return Transposed(call.layer, call.layer.kernel, call.inputs[0].axis)


for _kind in (L.Conv1D, L.Conv2D, L.Conv3D):
    register_layer(
        _kind,
        _layouts,
        positions=output_pixels,
        rows={"kernel": ConvolutionRows},
        channels=_convolution,
        rounding="by output",
        by_sample=True,
    )
for _kind in _TRANSPOSED:
    register_layer(
        _kind,
        {"kernel": KernelLayout.transposed_convolution()},
        positions=_input_pixels,
        rows={"kernel": ConvolutionRows},
        channels=_transposed,
        rounding="by output",
        by_sample=True,
    )
