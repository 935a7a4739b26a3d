"""Layers and operations that give entries another place: Flatten, Reshape, Permute and so on."""

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho.models import (
    ChannelCall,
    ChannelRule,
    Constants,
    Mask,
    Shape,
    SmallerLayer,
    SmallerOperation,
    Tied,
    add_channel_rules,
    count_of,
    for_single_inputs,
    identity_sources,
    smaller_layer,
)
from keras_sparse_ortho.quantization import keeps_range

L = keras.layers

_ANY = 2  # stands for a length that is not known


class Reshaping(Tied):
    """Entries in another shape; its size along the axis of the channels is that of the outputs."""

    def smaller(
        self, constants: Constants, read: Mask, live: Mask
    ) -> SmallerLayer | SmallerOperation | None:
        layer = self.layer
        if not hasattr(layer, "target_shape"):
            return None
        shape = list(layer.target_shape)
        shape[self.axis - 1] = count_of(live)
        return smaller_layer(layer, {"target_shape": tuple(shape)}, [])


class ReshapeOperation(Reshaping):
    """`keras.ops.reshape`, which names the length of the batch, too."""

    def smaller(
        self,
        constants: Constants,
        read: Mask,
        live: Mask,
    ) -> SmallerOperation:
        shape = list(self.layer.newshape)
        shape[self.axis] = count_of(live)
        return SmallerOperation(
            type(self.layer)(tuple(shape), name=self.layer.name)
        )


def _places(call: ChannelCall) -> np.ndarray:
    """The channel of each entry of a sample, in the shape of the input."""
    [tensor] = call.inputs
    shape = [_ANY if size is None else size for size in tensor.shape[1:]]
    channels = np.arange(tensor.size)
    behind = (1,) * (len(shape) - tensor.axis)
    return np.broadcast_to(channels.reshape(-1, *behind), shape)


def _tied_by_places(
    call: ChannelCall, places: np.ndarray, rule: type[Reshaping] = Reshaping
) -> ChannelRule | str:
    """A rule for outputs whose entries come from the channels in `places`.

    The last axis is tried first. Along an axis of channels each output channel has the entries of
    one input channel, or all entries of several.
    """
    for axis in range(places.ndim, 0, -1):
        by_channel = np.moveaxis(places, axis - 1, 0).reshape(
            places.shape[axis - 1], -1
        )
        # The usual case, of many outputs.
        if (by_channel == by_channel[:, :1]).all():
            return rule(call.layer, by_channel[:, :1].T, axis)
        sources = [np.unique(line) for line in by_channel]
        count = len(sources[0])
        if any(len(line) != count for line in sources):
            continue
        columns = np.stack(sources, axis=1)
        if len(np.unique(columns)) == columns.size:
            return rule(call.layer, columns, axis)
    return "no axis of its outputs is one of channels"


def _reshaped(places: np.ndarray, shape: Shape) -> np.ndarray | None:
    """Places in the shape of the outputs, of which one length may be unknown."""
    lengths = [-1 if size is None else size for size in shape[1:]]
    if lengths.count(-1) > 1:
        return None
    if -1 not in lengths and math.prod(lengths) != places.size:
        return None
    return places.reshape(lengths)


@for_single_inputs
def _reshape(call: ChannelCall) -> ChannelRule | str:
    places = _reshaped(_places(call), call.output_shape)
    if places is None:
        return "more than one of its lengths is not known"
    return _tied_by_places(call, places)


@for_single_inputs
def _reshape_operation(call: ChannelCall) -> ChannelRule | str:
    places = _reshaped(_places(call), call.output_shape)
    if places is None or None in (
        *call.inputs[0].shape[1:],
        *call.output_shape[1:],
    ):
        return "it may move entries from one sample to another"
    return _tied_by_places(call, places, ReshapeOperation)


def _flatten(call: ChannelCall) -> ChannelRule | str:
    """Flatten puts the second axis last where its `data_format` says that it has the channels."""
    if len(call.inputs) != 1 or not call.inputs[0].size:
        return "the number of its channels is not known"
    places = _places(call)
    if call.layer.data_format == "channels_first":
        places = np.moveaxis(places, 0, -1)
    return _tied_by_places(call, places.reshape(-1))


def _moved_to(call: ChannelCall, order: Sequence[int]) -> ChannelRule | str:
    """A rule for outputs whose axis `k` is the axis `order[k]` of the input."""
    if order[0] != 0:
        return "it moves the axis of the batch"
    return Tied(
        call.layer,
        identity_sources(call),
        list(order).index(call.inputs[0].axis),
    )


@for_single_inputs
def _permute(call: ChannelCall) -> ChannelRule | str:
    return _moved_to(call, (0, *call.layer.dims))


@for_single_inputs
def _transpose(call: ChannelCall) -> ChannelRule | str:
    rank = len(call.output_shape)
    axes: Any = call.layer.axes
    if axes is None:
        axes = range(rank)[::-1]
    return _moved_to(call, [axis % rank for axis in axes])


add_channel_rules(
    {
        L.Flatten: _flatten,
        L.Permute: _permute,
        L.Reshape: _reshape,
        "ExpandDims": _reshape,
        "Reshape": _reshape_operation,
        "Squeeze": _reshape,
        "Transpose": _transpose,
    }
)
for _kind in (L.Flatten, L.Permute, L.Reshape):
    keeps_range.register(_kind, lambda layer: True)
