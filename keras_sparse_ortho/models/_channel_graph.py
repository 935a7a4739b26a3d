"""The calls of a model with the rules about their channels, and which channels are needed."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._keras_internals import (
    GraphCall,
    computes_its_graph,
    graph_calls,
)
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.models._channel_rules import (
    ChannelCall,
    ChannelRule,
    ChannelTensor,
    Constants,
    Mask,
    Tied,
    rule_of,
)
from keras_sparse_ortho.models._prunable_weights import check_built

L = keras.layers

GIVEN = "the model is given them"


def check_channels_known(model: Any) -> None:
    """Refuses a model without weights, and one whose graph is not known."""
    check_built(model)
    if not computes_its_graph(model):
        raise NotPrunableError(
            "Channels can be removed where Keras knows which layer reads which: in functional "
            "models, and Sequential ones with an Input, without a `call` of their own. "
            f"Received: model={model.name!r} of type {type(model).__name__}"
        )


@dataclasses.dataclass(frozen=True)
class RuledCall:
    """A call of a layer or an operation, with the rule for its channels.

    Args:
        layer: Layer or Operation.
        rule: ChannelRule or `None`. Without one all inputs are needed, and all outputs vary and
            stay.
        reason: str. Why there is no rule.
        inputs: list of int. Keys of the tensors whose channels the rule is about.
        outputs: list of int. Keys of the tensors.
        masks: list of int. Keys of Keras' masks that go in as well.
    """

    layer: Any
    rule: ChannelRule | None
    reason: str
    inputs: list[int]
    outputs: list[int]
    masks: list[int]

    def of_inputs(
        self,
        values: Mapping[int, np.ndarray],
    ) -> np.ndarray:
        return _side_by_side(self.inputs, values)

    def of_outputs(
        self,
        values: Mapping[int, np.ndarray],
    ) -> np.ndarray:
        return _side_by_side(self.outputs, values)


def _side_by_side(
    keys: Sequence[int],
    values: Mapping[int, np.ndarray],
) -> np.ndarray:
    return np.concatenate([np.zeros(0, bool), *[values[key] for key in keys]])


def _masks_of(call: GraphCall) -> list[int]:
    """Keys of the masks that Keras passes on beside the tensors of a call."""
    masks = keras.tree.flatten(call.kwargs.get("mask"))
    return [id(mask) for mask in masks if keras.utils.is_keras_tensor(mask)]


class ChannelGraph:
    """The calls of a model in order; its tensors with their channels, and their sizes, by `id`.

    Args:
        model: Model that `computes_its_graph`.
        exact: bool. Whether outputs must stay equal when channels go.
    """

    def __init__(
        self,
        model: Any,
        exact: bool = True,
    ) -> None:
        self.sizes: dict[int, int] = {}
        self.calls: list[RuledCall] = []
        self.tensors: dict[int, ChannelTensor] = {}
        calls = graph_calls(model)
        self._times = collections.Counter(id(call.operation) for call in calls)
        formats = [
            getattr(call.operation, "data_format", None) for call in calls
        ]
        self._second_axis = "channels_first" in formats
        for call in calls:
            self.calls.append(self._ruled(call, exact))

    def _ruled(
        self,
        call: GraphCall,
        exact: bool,
    ) -> RuledCall:
        """The call with its rule; notes the axes of the channels in all its tensors."""
        for tensor in call.inputs:
            self._note(tensor, self._usual_axis(tensor))
        masks = _masks_of(call)
        inputs = [tensor for tensor in call.inputs if id(tensor) not in masks]
        rule = self._rule(call, inputs, exact)
        for tensor in call.outputs:
            axis = (
                self._usual_axis(tensor) if isinstance(rule, str) else rule.axis
            )
            self._note(tensor, axis)
        return RuledCall(
            layer=call.operation,
            rule=None if isinstance(rule, str) else rule,
            reason=rule if isinstance(rule, str) else "",
            inputs=[id(tensor) for tensor in inputs],
            outputs=[id(tensor) for tensor in call.outputs],
            masks=masks,
        )

    def _usual_axis(self, tensor: Any) -> int:
        """The axis of the channels in a tensor of which no rule says it."""
        rank = len(tensor.shape)
        return 1 if self._second_axis and rank > 2 else rank - 1

    def _note(
        self,
        tensor: Any,
        axis: int,
    ) -> None:
        shape = tuple(tensor.shape)
        channels = ChannelTensor(shape, axis % max(len(shape), 1))
        self.tensors.setdefault(id(tensor), channels)
        self.sizes.setdefault(id(tensor), channels.size)

    def _rule(
        self,
        call: GraphCall,
        inputs: list[Any],
        exact: bool,
    ) -> ChannelRule | str:
        """The rule of a call, or the reason why its channels stay."""
        layer = call.operation
        if not inputs:
            return GIVEN
        # A layer that changes would have to shrink alike for all calls.
        changes = bool(getattr(layer, "weights", None)) or isinstance(
            layer, L.Reshape
        )
        if changes and self._times[id(layer)] > 1:
            return "it is called more than once"
        kwargs = {
            name: value for name, value in call.kwargs.items() if name != "mask"
        }
        tensors = tuple(self.tensors[id(tensor)] for tensor in inputs)
        shapes = tuple(tuple(tensor.shape) for tensor in call.outputs)
        return rule_of(
            ChannelCall(layer, tensors, shapes, call.args, kwargs, exact)
        )

    def constants(self) -> dict[int, Constants]:
        """The constant channels of each tensor, which are computed from constants only."""
        constants = {
            key: np.full(size, np.nan) for key, size in self.sizes.items()
        }
        for call in self.calls:
            if call.rule is not None:
                outputs = call.rule.constants(call.of_inputs(constants))
                constants.update(self.split(call.outputs, outputs))
        return constants

    def split(
        self,
        keys: Sequence[int],
        channels: np.ndarray,
    ) -> dict[int, np.ndarray]:
        """The channels of each tensor, out of those of all, one after the other."""
        ends = np.cumsum([self.sizes[key] for key in keys])
        return dict(zip(keys, np.split(channels, ends[:-1]), strict=True))

    def spread(
        self,
        constants: Mapping[int, Constants],
        live: dict[int, Mask],
        *,
        outputs: bool = True,
    ) -> bool:
        """Adds the channels that calls need, from the last to the first; whether there were any.

        Args:
            constants: mapping of int to array.
            live: dict of int to bool array. The channels that are needed, of each tensor.
            outputs: bool. Whether layers without a rule need their own outputs, too.
        """
        before = _count(live)
        for call in reversed(self.calls):
            if call.rule is None:
                keys = [*call.inputs, *call.outputs] if outputs else call.inputs
                live.update({key: np.ones_like(live[key]) for key in keys})
            else:
                self._spread_through(call, call.rule, constants, live)
            live.update({key: np.ones_like(live[key]) for key in call.masks})
        return _count(live) > before

    def _spread_through(
        self,
        call: RuledCall,
        rule: ChannelRule,
        constants: Mapping[int, Constants],
        live: dict[int, Mask],
    ) -> None:
        read, needed = rule.needed(
            call.of_inputs(constants),
            call.of_inputs(live),
            call.of_outputs(live),
        )
        live.update(self.split(call.outputs, needed))
        ends = np.cumsum([self.sizes[key] for key in call.inputs])
        for key, mask in zip(
            call.inputs, np.split(read, ends[:-1]), strict=True
        ):
            live[key] = live[key] | mask  # one tensor may be several inputs


def _count(live: Mapping[int, Mask]) -> int:
    return sum(int(mask.sum()) for mask in live.values())


def flattened(model: Any, weights: Sequence[PrunableWeight]) -> dict[str, int]:
    """How many inputs of a kernel behind Flatten are one channel, by path."""
    times_of_layers: dict[int, int] = {}
    times_of_tensors: dict[int, int] = {}
    graph = ChannelGraph(model) if computes_its_graph(model) else None
    for call in graph.calls if graph is not None else ():
        times = 1
        if len(call.inputs) == 1:
            times = times_of_tensors.get(call.inputs[0], 1)
        times_of_layers[id(call.layer)] = times
        if graph is not None and isinstance(call.rule, Tied):
            if type(call.layer) is L.Flatten:
                times = (
                    graph.sizes[call.outputs[0]] // graph.sizes[call.inputs[0]]
                )
            times_of_tensors[call.outputs[0]] = times
    return {
        weight.path: times_of_layers.get(id(weight.owner), 1)
        for weight in weights
    }
