"""Operations on tensors that are not layers: slices, parts, means over positions."""

import functools
from typing import Any

import numpy as np

from keras_sparse_ortho.models import (
    ChannelCall,
    ChannelRule,
    ChannelTensor,
    Constants,
    Mask,
    SmallerOperation,
    Tied,
    add_channel_rules,
    count_of,
    for_single_inputs,
    identity_sources,
)


class Sum(Tied):
    """A sum over positions, whose constants are as many times larger; 0 stays 0."""

    def constant_outputs(self, constants: Constants) -> Constants:
        return np.where(constants == 0, 0.0, np.nan)


class Slice(Tied):
    """`x[..., start:stop]`: a run of channels.

    Args:
        call: ChannelCall.
        key: tuple. The key, with one entry for each axis of the input, and `None` for new axes.
        place: int. Index of the entry for the channels.
        axis: int. The axis of the channels in the outputs.
    """

    def __init__(
        self,
        call: ChannelCall,
        key: tuple[Any, ...],
        place: int,
        axis: int,
    ) -> None:
        self.run = range(call.inputs[0].size)[key[place]]
        super().__init__(call.layer, np.array([self.run], int), axis)
        self.key = key
        self.place = place

    def smaller(
        self,
        constants: Constants,
        read: Mask,
        live: Mask,
    ) -> SmallerOperation | None:
        if len(self.run) == len(read):
            return None
        start = count_of(read[: self.run.start])
        stop = start + count_of(read[self.run.start : self.run.stop])
        key = list(self.key)
        key[self.place] = slice(start, stop)
        return SmallerOperation(functools.partial(_sliced, tuple(key)))


def _sliced(
    key: tuple[Any, ...],
    x: Any,
    _: Any,
) -> Any:
    return x[key]


class Parts(Tied):
    """`keras.ops.split` along the channels: runs of them, as several outputs."""

    def __init__(self, call: ChannelCall) -> None:
        super().__init__(
            call.layer, identity_sources(call), call.inputs[0].axis
        )
        sizes = [
            ChannelTensor(shape, self.axis).size for shape in call.output_shapes
        ]
        self.ends = np.cumsum(sizes)[:-1]

    def smaller(
        self,
        constants: Constants,
        read: Mask,
        live: Mask,
    ) -> SmallerOperation:
        ends = [count_of(live[:end]) for end in self.ends]
        operation = type(self.layer)(
            ends, axis=self.layer.axis, name=self.layer.name
        )
        return SmallerOperation(operation)


@for_single_inputs
def _item(call: ChannelCall) -> ChannelRule | str:
    key = _whole_key(call.args[1], len(call.inputs[0].shape))
    if key is None:
        return "its key is no tuple of slices and numbers"
    of_axes = [place for place, entry in enumerate(key) if entry is not None]
    if key[of_axes[0]] != slice(None):
        return "it takes a part of the batch"
    place = of_axes[call.inputs[0].axis]
    if not isinstance(key[place], slice) or key[place].step not in (None, 1):
        return "it takes one channel, or not each channel of a run"
    axis = sum(not isinstance(entry, int) for entry in key[:place])
    return Slice(call, key, place, axis)


def _whole_key(key: Any, rank: int) -> tuple[Any, ...] | None:
    """A key of a slice with an entry for each axis, or `None` for one that is not understood."""
    entries = list(key) if isinstance(key, list | tuple) else [key]
    if not all(_is_understood(entry) for entry in entries):
        return None
    of_axes = [entry for entry in entries if isinstance(entry, int | slice)]
    whole = [slice(None)] * (rank - len(of_axes))
    place = entries.index(Ellipsis) if Ellipsis in entries else len(entries)
    entries[place : place + 1] = whole
    return tuple(entries)


def _is_understood(entry: Any) -> bool:
    return entry is None or entry is Ellipsis or isinstance(entry, int | slice)


@for_single_inputs
def _split(call: ChannelCall) -> ChannelRule | str:
    axis = call.inputs[0].axis
    if call.layer.axis % len(call.output_shape) == axis:
        return Parts(call)
    sources = np.tile(identity_sources(call), len(call.output_shapes))
    return Tied(call.layer, sources, axis)


@for_single_inputs
def _reduction(call: ChannelCall) -> ChannelRule | str:
    """A mean, a maximum or a sum over axes of positions."""
    [tensor] = call.inputs
    rank = len(tensor.shape)
    axes = call.layer.axis
    if axes is None:
        axes = range(rank)
    elif isinstance(axes, int):
        axes = [axes]
    reduced = {axis % rank for axis in axes}
    if reduced & {0, tensor.axis}:
        return "it reduces the batch, or the channels"
    axis = tensor.axis
    if not call.layer.keepdims:
        axis -= len(reduced & set(range(axis)))
    rule = Sum if type(call.layer).__name__ == "Sum" else Tied
    return rule(call.layer, identity_sources(call), axis)


add_channel_rules(
    {
        "GetItem": _item,
        "Split": _split,
        **dict.fromkeys(
            ("Amax", "Amin", "Max", "Mean", "Min", "Sum"), _reduction
        ),
    }
)
