"""`remove_channels`: a plain Keras model without the channels that do nothing."""

import collections
import dataclasses
import warnings
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._keras_internals import (
    computes_its_graph,
    graph_calls,
    graph_ends,
    leave_graphs,
)
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.kernels import KernelLayout
from keras_sparse_ortho.models._channel_rules import (
    Barrier,
    ChannelRule,
    Constants,
    Heads,
    Kernel,
    Mask,
    Shrunk,
    channels,
    rule_for,
)
from keras_sparse_ortho.models._prunable_weights import check_built, prunable_weights
from keras_sparse_ortho.models._saved_layers import is_clonable, is_made_from_layers
from keras_sparse_ortho.models._strip import strip
from keras_sparse_ortho.orthogonal import dead_outputs


def remove_channels(model: keras.Model) -> keras.Model:
    """Strips a model, and takes out every channel that does nothing: smaller layers, same outputs.

    A channel whose kernel is 0 is not 0: behind bias, normalization and activation it is a
    constant,

        c = f(b),  or, normalized,  c = f(gamma (b - mean) / sqrt(variance + epsilon) + beta)

    which the next layer multiplies by its kernel and adds up. So the sum goes into the bias of the
    next layer, `b' = b + sum_i c_i sum_taps K_i`, and the channel goes. What goes as well is a
    channel that nothing reads, and one that is computed from constants only; zeros of whichever
    origin count, learnt by `parametrizations.ChannelSoftThreshold` or not.

    Heads of MultiHeadAttention go whose values are 0, or whose outputs nothing reads.

    Dense, Conv, DepthwiseConv and SeparableConv layers shrink, and with them what stands between:
    BatchNormalization, elementwise activations, pooling, Dropout, padding, Flatten, Reshape that
    leaves channels alone, Concatenate. Where tensors are added, a channel goes if it can go in all
    of them. All channels of the inputs and outputs of the model stay, at least one of every layer,
    and all that a layer of any other class (or a nested model, or a layer with weights that is
    called twice) reads or returns.

    Args:
        model: A built functional or Sequential model, wrapped or plain.

    Returns:
        A new, uncompiled, plain Keras model. Its outputs in inference are those of `model`, but
        for rounding; layers keep their names. A model of a derived class keeps it if its
        constructor takes any layers; if it makes them, in full size, the result is a plain
        functional or Sequential model, which can be saved and loaded.

    Raises:
        NotPrunableError: A subclassed model, one derived from `Functional` or `Sequential` with its
            own `call` included, or one that is not built.

    Warns:
        UserWarning: Dead channels that stay, by layer and number, because a layer of another class
            (attention, a block written as a class, a nested model) reads or holds them.

    Limits: a convolution with padding adds zeros at the border, where a channel has its constant;
    so constants that are not 0 cannot go into its bias. One of the channels stays then, with a
    kernel that stands for all of them: `sum_i (c_i / c) K_i`. In front of padded DepthwiseConv and
    SeparableConv, and of ZeroPadding, every channel with a constant that is not 0 stays. Constants
    are 0 where the dead convolution has no bias and no normalization behind it, or with `ReLU`
    where they are negative. In further training the means of BatchNormalization move, so
    constants in biases are those of now. Channels must be the last axis.

    Example:

    >>> import keras, numpy as np
    >>> model = keras.Sequential([
    ...     keras.Input((8,)), keras.layers.Dense(6, activation="relu"), keras.layers.Dense(2)])
    >>> kernel, bias = model.layers[0].get_weights()
    >>> kernel[:, :4], bias[:4] = 0, 1  # four channels are 1, whatever the input
    >>> model.layers[0].set_weights([kernel, bias])
    >>> small = remove_channels(model)
    >>> [tuple(layer.kernel.shape) for layer in small.layers]
    [(8, 2), (2, 2)]
    >>> x = np.random.default_rng(0).normal(size=(5, 8))
    >>> bool(np.allclose(small.predict(x, verbose=0), model.predict(x, verbose=0), atol=1e-5))
    True

    Reference:

    - Kusupati et al., "Soft Threshold Weight Reparameterization for Learnable Sparsity" (ICML
      2020), arXiv 2002.03231, for thresholds on channels
    """
    check_built(model)
    if not (isinstance(model, keras.Model) and computes_its_graph(model)):
        raise NotPrunableError(
            "Channels can be removed where Keras knows which layer reads which: from functional "
            "models, and Sequential ones with an Input, without a `call` of their own. "
            f"Received: model={model.name!r} of type {type(model).__name__}"
        )
    plain = strip(model)
    if not is_clonable(plain) and not is_made_from_layers(plain):
        plain = _as_plain_graph(plain)
    plan, left = _channel_plan(plain)
    small = _with_small_layers(plain, plan)
    left += _inside_barriers(small)
    if left:
        warnings.warn(
            "Dead channels stay where a layer is not known to do without them. "
            f"Received: {'; '.join(left)}",
            stacklevel=2,
        )
    return small


def _with_small_layers(model: Any, plan: dict[int, Shrunk]) -> Any:
    """The model on smaller layers, and on the given ones where these stay as they are."""

    def layer_for(layer: Any) -> Any:
        if id(layer) in plan:
            return type(layer).from_config(plan[id(layer)].config)
        if isinstance(layer, keras.Model):
            return _with_small_layers(layer, plan)
        leave_graphs(layer)
        return layer

    small = keras.models.clone_model(model, clone_function=layer_for)
    for old, new in zip(model.layers, small.layers, strict=True):
        if id(old) in plan:
            new.set_weights(plan[id(old)].weights)
    return small


def _as_plain_graph(model: keras.Model) -> keras.Model:
    """The same layers in a functional or Sequential model, which is saved with them."""
    inputs, outputs = graph_ends(model)
    if isinstance(model, keras.Sequential):
        return keras.Sequential([inputs, *model.layers], name=model.name)
    return keras.Model(inputs, outputs, name=model.name)


# --- from the calls of a model to the layers that can be smaller ----------------------------------


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call of a layer: keys of its tensors, and what it does to their channels."""

    layer: Any
    rule: ChannelRule
    inputs: list[int]
    outputs: list[int]


def _channel_plan(model: Any) -> tuple[dict[int, Shrunk], list[str]]:
    """What layers of a functional or Sequential model can shrink to, by `id(layer)`.

    And which dead channels cannot go, because of which layer.

    Forward, a channel is constant if nothing that it is computed from varies. Backward, one is
    needed if the model returns it, or if something needed reads it and it is not a constant that
    the reader can put into its bias. What is not needed goes. At least one channel of every
    tensor stays, as Keras has no layers of size 0.
    """
    calls, sizes = graph_channels(model)
    constants = _constants(calls, sizes)
    ends = {id(tensor) for tensor in (*model.inputs, *model.outputs)}
    kept = {key: np.full(size, key in ends) for key, size in sizes.items()}
    while _spread(calls, constants, kept) or _fill(kept):
        pass
    plan = {}
    for call in calls:
        whole = [kept[key].all() for key in (*call.inputs, *call.outputs)]
        if not isinstance(call.rule, Heads) and (all(whole) or isinstance(call.rule, Barrier)):
            continue
        read = [kept[key] for key in call.inputs]
        known = [constants[key] for key in call.inputs]
        shrunk = call.rule.shrunk(known, read, kept[call.outputs[0]])
        if shrunk is not None:
            plan[id(call.layer)] = shrunk
    left = []
    for call in calls:
        if isinstance(call.rule, Kernel):
            output = call.outputs[0]
            dead = int(np.count_nonzero(kept[output] & ~np.isnan(constants[output])))
            reader = _barrier_behind(output, calls) if dead else None
            if reader is not None:
                left.append(f"{dead} of '{call.layer.name}', which {_named(reader)} reads")
    return plan, left


def _barrier_behind(tensor: int, calls: list[_Call]) -> Any:
    """The first layer without a rule that reads the channels of a tensor, or `None`."""
    reached = {tensor}
    for call in calls:
        if reached & set(call.inputs):
            if isinstance(call.rule, Barrier):
                return call.layer
            if not isinstance(call.rule, Kernel):
                reached |= set(call.outputs)
    return None


def _inside_barriers(model: Any) -> list[str]:
    """Dead outputs of kernels that belong to layers without a rule, or lie inside such."""
    left = []
    for call in graph_channels(model)[0]:
        if isinstance(call.rule, Barrier) and getattr(call.layer, "weights", None):
            for weight in prunable_weights(call.layer):
                layout = weight.layout or KernelLayout.convolution()
                dead = dead_outputs(weight.value, layout) if layout.inputs else 0
                if dead:
                    where = f"{call.layer.name}/{weight.path}"
                    left.append(f"{dead} of '{where}' in {_named(call.layer)}")
    return list(dict.fromkeys(left))


def _named(layer: Any) -> str:
    return f"{layer.name!r} of class {type(layer).__name__}"


def graph_channels(model: Any) -> tuple[list[_Call], dict[int, int]]:
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
