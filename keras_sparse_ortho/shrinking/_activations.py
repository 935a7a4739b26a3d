"""`Activations`: the bytes of activations that a network needs at once, by its widths."""

from collections.abc import Mapping, Sequence

import keras
import numpy as np

from keras_sparse_ortho._keras_internals import GraphCall, graph_calls
from keras_sparse_ortho.models import ChannelGroup

L = keras.layers
# Layers that converters fold into the layer before them, or that run in place.
_IN_PLACE = (
    L.BatchNormalization,
    L.ReLU,
    L.Activation,
    L.Dropout,
    L.Flatten,
    L.Reshape,
)


class Activations:
    """The largest sum of activations that live together, in bytes of an int8 file.

    With the bytes `b_t` of tensor `t`, and calls `c` in their order,

        peak = max_c  sum of b_t  over  tensors t that are made by c, and read at c or later.

    LiteRT Micro plans its arena like that. It adds the records of tensors and operators, scratch
    memory of kernels, and gaps, so the peak says how widths change the arena, not what it is.

    Args:
        model: Model whose graph Keras knows, plain.
        groups: Its groups of channels.
    """

    def __init__(
        self, model: keras.Model, groups: Sequence[ChannelGroup]
    ) -> None:
        self._sizes: list[int] = []  # of each tensor, dense
        self._makers: list[tuple[ChannelGroup, ...]] = []
        self._places: dict[int, int] = {}  # the tensor of Keras' one, by `id`
        calls = graph_calls(model)
        births: list[int] = []  # the call that makes each tensor
        for number, call in enumerate(calls):
            self._add(call, groups)
            count = len(self._sizes) - len(births)
            births += [number] * count
        ends = list(births)  # the call that reads it for the last time
        for number, call in enumerate(calls):
            for tensor in call.inputs:
                place = self._places[id(tensor)]
                ends[place] = number
        for tensor in model.outputs:
            place = self._places[id(tensor)]
            ends[place] = len(calls)
        numbers = np.arange(len(calls))[:, None]
        is_made = np.array(births) <= numbers
        is_needed = numbers <= np.array(ends)
        self._lives = is_made & is_needed

    def _add(self, call: GraphCall, groups: Sequence[ChannelGroup]) -> None:
        """Notes the tensors that a call makes, or that it passes on in place."""
        if isinstance(call.operation, _IN_PLACE):
            place = self._places[id(call.inputs[0])]
            for tensor in call.outputs:
                self._places[id(tensor)] = place
            return
        name = call.operation.name
        makers = tuple(group for group in groups if name in group.makers)
        for tensor in call.outputs:
            self._places[id(tensor)] = len(self._sizes)
            self._sizes.append(_size_of(tensor))
            self._makers.append(makers or self._inherited(call, tensor))

    def _inherited(
        self, call: GraphCall, output: keras.KerasTensor
    ) -> tuple[ChannelGroup, ...]:
        """The groups of an input with as many channels, as of a depthwise convolution."""
        for tensor in call.inputs:
            makers = self._makers[self._places[id(tensor)]]
            if makers and tensor.shape[-1] == output.shape[-1]:
                return makers
        return ()

    def peak(self, widths: Mapping[str, int]) -> float:
        """The bytes of one row, by the widths of groups; others have their full width."""
        sizes = []
        for size, makers in zip(self._sizes, self._makers, strict=True):
            channels = 0
            channels_before = 0
            for group in makers:
                channels += widths.get(group.name, group.width)
                channels_before += group.width
            if makers:
                sizes.append(size * channels / channels_before)
            else:
                sizes.append(float(size))
        sums = self._lives @ np.array(sizes)
        return float(np.max(sums))


def _size_of(tensor: keras.KerasTensor) -> int:
    """Entries of one row; a dimension that is not known counts once."""
    size = 1
    for dimension in tensor.shape[1:]:
        size *= dimension or 1
    return size
