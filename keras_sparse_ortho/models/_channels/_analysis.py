"""From the calls of a model to the layers that can be smaller."""

import collections
import dataclasses
from typing import Any

import numpy as np

from keras_sparse_ortho._keras_internals import graph_calls
from keras_sparse_ortho.models._channels._registry import rule_for
from keras_sparse_ortho.models._channels._rule import (
    Barrier,
    ChannelRule,
    Constants,
    Mask,
    Shrunk,
    channels,
)


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call of a layer: keys of its tensors, and what it does to their channels."""

    layer: Any
    rule: ChannelRule
    inputs: list[int]
    outputs: list[int]


def channel_plan(model: Any) -> dict[int, Shrunk]:
    """What layers of a functional or Sequential model can shrink to, by `id(layer)`.

    Forward, a channel is constant if nothing that it is computed from varies. Backward, one is
    needed if the model returns it, or if something needed reads it and it is not a constant that
    the reader can put into its bias. What is not needed goes. At least one channel of every
    tensor stays, as Keras has no layers of size 0.
    """
    calls, sizes = _calls(model)
    constants = _constants(calls, sizes)
    ends = {id(tensor) for tensor in (*model.inputs, *model.outputs)}
    kept = {key: np.full(size, key in ends) for key, size in sizes.items()}
    while _spread(calls, constants, kept) or _fill(kept):
        pass
    plan = {}
    for call in calls:
        whole = [kept[key].all() for key in (*call.inputs, *call.outputs)]
        if all(whole) or isinstance(call.rule, Barrier):
            continue
        read = [kept[key] for key in call.inputs]
        known = [constants[key] for key in call.inputs]
        shrunk = call.rule.shrunk(known, read, kept[call.outputs[0]])
        if shrunk is not None:
            plan[id(call.layer)] = shrunk
    return plan


def _calls(model: Any) -> tuple[list[_Call], dict[int, int]]:
    """The calls in order, and the number of channels of every tensor."""
    found = graph_calls(model)
    times = collections.Counter(id(call.operation) for call in found)
    calls: list[_Call] = []
    sizes: dict[int, int] = {}
    for call in found:
        layer = call.operation
        inputs, outputs = [id(t) for t in call.inputs], [id(t) for t in call.outputs]
        calls.append(_Call(layer, rule_for(call, times[id(layer)]), inputs, outputs))
        sizes |= {id(t): channels(tuple(t.shape)) for t in (*call.inputs, *call.outputs)}
    return calls, sizes


def _constants(calls: list[_Call], sizes: dict[int, int]) -> dict[int, Constants]:
    known = {key: np.full(size, np.nan) for key, size in sizes.items()}
    for call in calls:
        if not isinstance(call.rule, Barrier):
            known[call.outputs[0]] = call.rule.constants([known[key] for key in call.inputs])
    return known


def _spread(calls: list[_Call], constants: dict[int, Constants], kept: dict[int, Mask]) -> bool:
    """Propagates what calls need, from the last to the first; returns whether anything changed."""
    before = sum(int(mask.sum()) for mask in kept.values())
    for call in reversed(calls):
        if isinstance(call.rule, Barrier):  # of any number of outputs
            for key in (*call.inputs, *call.outputs):
                kept[key] = np.ones_like(kept[key])
            continue
        known = [constants[key] for key in call.inputs]
        read = [kept[key] for key in call.inputs]
        read, kept[call.outputs[0]] = call.rule.needed(known, read, kept[call.outputs[0]])
        for key, mask in zip(call.inputs, read, strict=True):
            kept[key] = kept[key] | mask  # one tensor may be several inputs
    return sum(int(mask.sum()) for mask in kept.values()) > before


def _fill(kept: dict[int, Mask]) -> bool:
    """Keeps a channel of the first tensor that would have none; whether there was one."""
    for mask in kept.values():
        if mask.size and not mask.any():
            mask[0] = True
            return True
    return False
