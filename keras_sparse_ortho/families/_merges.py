"""Sums, products and the like of several tensors, or of tensors and constants; Concatenate."""

import functools
import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.models import (
    ChannelCall,
    ChannelRule,
    ChannelTensor,
    Constants,
    Mask,
    Scales,
    SmallerLayer,
    SmallerOperation,
    Tied,
    Tracer,
    add_channel_rules,
)

L = keras.layers

Combine = Callable[[np.ndarray, np.ndarray], np.ndarray]


class Operand:
    """A tensor that goes into a sum or product, or a constant array.

    Args:
        channels: int array. Which input channel each output channel reads, of a tensor.
        array: array or `None`. The constant.
        axis: int. The axis of the channels in the outputs, counted from the last: -1, -2, ...
    """

    def __init__(
        self,
        channels: np.ndarray,
        array: Any = None,
        axis: int = -1,
    ) -> None:
        self.channels = channels
        self.array = array
        self.axis = axis

    @property
    def has_channels(self) -> bool:
        """Whether a constant array has one entry for each channel, not one for all."""
        return (
            -self.axis <= np.ndim(self.array)
            and np.shape(self.array)[self.axis] > 1
        )

    def constants(
        self,
        inputs: Constants,
        count: int,
    ) -> Constants:
        """The constant of each channel, NaN where it differs between positions."""
        if self.array is None:
            return inputs[self.channels]
        # All channels alike.
        array = np.asarray(self.array, np.float64)[..., None]
        if self.has_channels:
            array = np.moveaxis(array[..., 0], self.axis, -1)
        array = array.reshape(-1, array.shape[-1])
        alike = (array == array[0]).all(axis=0)
        return np.broadcast_to(np.where(alike, array[0], np.nan), (count,))


class Merge(Tied):
    """Combines tensors of equally many channels; a channel goes if it goes in all of them.

    Tensors of one channel for all others, and constant arrays, may be among them.
    """

    def __init__(
        self,
        layer: Any,
        combine: Combine,
        operands: list[Operand],
        axis: int,
    ) -> None:
        sources = []
        shared = []
        for operand in operands:
            if operand.array is None and _differ(operand.channels):
                sources.append(operand.channels)
            elif operand.array is None:
                shared.append(operand.channels[0])
        super().__init__(layer, np.stack(sources), axis)
        self.combine = combine
        self.operands = operands
        self.shared = np.array(shared, int)

    def constants(self, inputs: Constants) -> Constants:
        count = self.sources.shape[1]
        rows = [operand.constants(inputs, count) for operand in self.operands]
        with np.errstate(all="ignore"):
            constants = functools.reduce(self.combine, rows)
        if type(self.layer).__name__ == "Average":
            constants = constants / len(rows)
        return np.where(np.isfinite(constants), constants, np.nan)

    def needed(
        self,
        constants: Constants,
        read: Mask,
        live: Mask,
    ) -> tuple[Mask, Mask]:
        read, live = super().needed(constants, read, live)
        read[self.shared] |= live.any()
        return read, live

    def smaller(
        self, constants: Constants, read: Mask, live: Mask
    ) -> SmallerLayer | SmallerOperation | None:
        """The operation on arrays of the channels that stay; nothing else need change."""
        arrays: dict[int, Any] = {}
        for position, operand in enumerate(self.operands):
            if operand.array is not None and operand.has_channels:
                array = np.asarray(operand.array)
                arrays[position] = np.compress(live, array, axis=operand.axis)
        if not arrays:
            return None
        return SmallerOperation(
            functools.partial(_with_arrays, self.layer, arrays)
        )

    def trace(
        self,
        tracer: Tracer,
        inputs: np.ndarray,
    ) -> np.ndarray:
        tracer.hold(
            inputs[self.shared],
            self.layer,
            "all channels of another tensor share them",
        )
        return super().trace(tracer, inputs)

    def limit(self) -> float | None:
        has_arrays = any(operand.array is not None for operand in self.operands)
        if has_arrays or self.shared.size:
            return None
        return math.inf if type(self.layer).__name__ in _OF_SUMS else None

    def scale(
        self,
        scales: Scales,
        inputs: np.ndarray,
        outputs: int,
    ) -> np.ndarray:
        scales.hold(inputs[self.shared])
        return super().scale(scales, inputs, outputs)


def _differ(channels: np.ndarray) -> bool:
    """Whether outputs read channels of their own; else all read one channel."""
    return len(channels) == 1 or channels[0] != channels[1]


def _with_arrays(
    operation: Any,
    arrays: dict[int, Any],
    *args: Any,
) -> Any:
    """Calls an operation with other constant arrays at some positions."""
    smaller = type(operation)(name=operation.name)
    return smaller(
        *[arrays.get(position, value) for position, value in enumerate(args)]
    )


def _multiplied(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Products, where 0 times what varies is 0."""
    return np.where((first == 0) | (second == 0), 0.0, first * second)


# Where a common factor of all tensors is one of the result.
_OF_SUMS = ("Add", "Average", "Maximum", "Minimum", "Subtract")
_COMBINE: dict[str, Combine] = {
    "Add": np.add,
    "Average": np.add,
    "Divide": np.divide,
    "Maximum": np.maximum,
    "Minimum": np.minimum,
    "Multiply": _multiplied,
    "Power": np.power,
    "Subtract": np.subtract,
    "TrueDivide": np.divide,
}


def _merge(call: ChannelCall) -> ChannelRule | str:
    if call.kwargs:
        return f"it is called with {', '.join(call.kwargs)}"
    if not call.inputs:
        return "it reads no tensor"
    if not _have_one_axis(call):
        return "its inputs differ in their number of axes, or in the axis of their channels"
    axis = call.inputs[0].axis
    count = ChannelTensor(call.output_shape, axis).size
    if not count or any(
        tensor.size not in (1, count) for tensor in call.inputs
    ):
        return "its inputs differ in their number of channels"
    if not any(tensor.size == count for tensor in call.inputs):
        return "an array gives it more channels than its inputs have"
    operands = _operands(call, count, axis - len(call.output_shape))
    return Merge(
        call.layer, _COMBINE[type(call.layer).__name__], operands, axis
    )


def _have_one_axis(call: ChannelCall) -> bool:
    """Whether all inputs have as many axes as the output, and their channels on one axis."""
    expected = len(call.output_shape), call.inputs[0].axis
    return all(
        (len(tensor.shape), tensor.axis) == expected for tensor in call.inputs
    )


def _operands(
    call: ChannelCall,
    count: int,
    axis: int,
) -> list[Operand]:
    operands = []
    start = 0
    tensors = iter(call.inputs)
    for value in keras.tree.flatten(call.args):
        if not keras.utils.is_keras_tensor(value):
            operands.append(Operand(np.zeros(0, int), to_numpy(value), axis))
            continue
        size = next(tensors).size
        channels = np.arange(size) if size == count else np.zeros(count, int)
        operands.append(Operand(start + channels, axis=axis))
        start += size
    return operands


def _concatenation(call: ChannelCall) -> ChannelRule | str:
    """Channels side by side; or positions, where a channel goes if it goes in all tensors."""
    if not _have_one_axis(call):
        return "its inputs differ in their number of axes, or in the axis of their channels"
    sizes = [tensor.size for tensor in call.inputs]
    if not all(sizes):
        return "the number of channels of an input is not known"
    axis = call.inputs[0].axis
    channels = np.arange(sum(sizes))
    if call.layer.axis % len(call.output_shape) == axis:
        return Tied(call.layer, channels[None], axis)
    return Tied(call.layer, channels.reshape(len(sizes), -1), axis)


_LAYERS = ("Add", "Average", "Maximum", "Minimum", "Multiply", "Subtract")
add_channel_rules(
    {
        **{getattr(L, name): _merge for name in _LAYERS},
        **{name: _merge for name in _COMBINE if name != "Average"},
        L.Concatenate: _concatenation,
        "Concatenate": _concatenation,
    }
)
