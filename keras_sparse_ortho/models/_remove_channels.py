"""`remove_channels`: a plain Keras model without the channels that do nothing."""

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._checks import other_keywords
from keras_sparse_ortho._keras_internals import (
    graph_ends,
    leave_graphs,
    warn_user,
)
from keras_sparse_ortho.models._channel_graph import (
    ChannelGraph,
    RuledCall,
    check_channels_known,
)
from keras_sparse_ortho.models._channel_rules import (
    Constants,
    Mask,
    SmallerLayer,
    SmallerOperation,
)
from keras_sparse_ortho.models._prunable_weights import prunable_weights
from keras_sparse_ortho.models._saved_layers import (
    is_clonable,
    is_made_from_layers,
)
from keras_sparse_ortho.models._strip import strip
from keras_sparse_ortho.orthogonal import dead_outputs

L = keras.layers

Changes = dict[int, SmallerLayer | SmallerOperation]
"""The layers and operations that change, by `id`."""


@other_keywords
def remove_channels(
    model: keras.Model,
    *,
    exact: bool = True,
) -> keras.Model:
    """Strips a model, and removes every channel that does nothing: smaller layers, same outputs.

    A channel whose kernel is 0 is a constant behind bias, normalization and activation,

        c = f(b),  or, normalized,  c = f(gamma (b - mean) / sqrt(variance + epsilon) + beta)

    The next layer multiplies it by its kernel and adds it up. The sum goes into the bias of that
    layer, `b' = b + sum_i c_i sum_taps K_i`, and the channel goes. So do channels that nothing
    reads or that are computed from constants only. Entries below 1e-9 of the largest in a kernel
    count as 0. `channel_groups` lists which channels go together.

    These layers shrink: Dense, Conv (also transposed, and whole groups of grouped ones),
    DepthwiseConv, SeparableConv, Embedding, SimpleRNN, GRU, LSTM and Bidirectional (a unit goes
    with its state), and MultiHeadAttention in its inputs and outputs, its heads, and their widths.
    Channels go through BatchNormalization, GroupNormalization (whole groups), LayerNormalization
    over positions, elementwise activations and PReLU, pooling, Dropout, padding, Flatten, Reshape,
    Permute, Concatenate, Add and its kin, and through operations: `x + y`, `x * 2.0`, slices as
    `x[..., :n]`, `keras.ops.gelu`, `concatenate`, `split`, `reshape`, `transpose`, `mean`. Where
    tensors are added, a channel goes if it can go in all of them. `register_channel_rule` adds
    layers of your own. All channels of the model's inputs and outputs stay, at least one of every
    layer, and all that any other class of layer (or a nested model, or a layer with weights that is
    called twice) reads or returns.

    The result is new, plain and not compiled, with equal outputs in inference, but for rounding,
    and the names of the layers. A model of a derived class keeps it if its constructor takes any
    layers; else the result is a functional or Sequential model.

    Args:
        model: Model, built, functional or Sequential, wrapped or plain.
        exact: bool. `False`: channels that are read by LayerNormalization alone, and behind it by
            nothing, go as well. It then has the statistics of the channels that stay, so outputs
            change, of which a UserWarning says where: train further, as with `distill`.

    Raises NotPrunableError for a model that is subclassed, has its own `call`, or is not built. A
    UserWarning lists channels that are dead or not read and stay, by layer and number, because a
    layer of another class reads, returns or holds them: a block written as a class, a nested model;
    LayerNormalization, whose statistics are those of all channels.

    Limits: a padded convolution adds zeros at the border, where a channel has its constant. One
    channel whose constant is not 0 stays then, with a kernel for all of them: `sum_i (c_i / c)
    K_i`. In front of padded DepthwiseConv and SeparableConv, of ZeroPadding, recurrent layers and
    attention, all of these stay. Further training moves the means of BatchNormalization, but no
    constants in biases.

    Examples:
        >>> import keras, numpy as np
        >>> layers = [keras.layers.Dense(6, activation="relu"), keras.layers.Dense(2)]
        >>> model = keras.Sequential([keras.Input((8,)), *layers])
        >>> kernel, bias = model.layers[0].get_weights()
        >>> kernel[:, :4], bias[:4] = 0, 1  # four channels are 1, whatever the input
        >>> model.layers[0].set_weights([kernel, bias])
        >>> [tuple(layer.kernel.shape) for layer in remove_channels(model).layers]
        [(8, 2), (2, 2)]

    Reference: Kusupati et al. (ICML 2020), arXiv 2002.03231, for thresholds on channels.
    """
    check_channels_known(model)
    stripped = _of_any_layers(strip(model))
    changes, staying = _channel_plan(stripped, exact)
    norms = [
        layer for layer in stripped.layers if type(layer) in _OF_ALL_CHANNELS
    ]
    changed = [layer.name for layer in norms if id(layer) in changes]
    if changed:
        warn_user(
            "LayerNormalization has the statistics of the channels that stay: outputs change, so "
            f"train further, for example with `distill`. Received: {changed}"
        )
    narrowed = _with_small_layers(stripped, changes)
    staying += _inside_unknown(narrowed)
    if staying:
        warn_user(
            "Dead channels stay where a layer is not known to do without them. "
            f"Received: {'; '.join(staying)}"
        )
    return narrowed


_OF_ALL_CHANNELS = (
    L.LayerNormalization,
    getattr(L, "RMSNormalization", L.LayerNormalization),
)


def _of_any_layers(stripped: Any) -> Any:
    """The model itself, or one on its layers where its class makes the layers."""
    if is_clonable(stripped) or is_made_from_layers(stripped):
        return stripped
    inputs, outputs = graph_ends(stripped)
    if isinstance(stripped, keras.Sequential):
        return keras.Sequential([inputs, *stripped.layers], name=stripped.name)
    return keras.Model(inputs, outputs, name=stripped.name)


def _channel_plan(model: Any, exact: bool) -> tuple[Changes, list[str]]:
    """The layers that shrink, and which dead channels stay because of which layer."""
    # Forward, a channel is constant if nothing that it is computed from varies. Backward, it is
    # needed if the model returns it, or something needed reads it and cannot put it into its bias.
    # At least one channel of every tensor stays, as Keras has no layers of size 0.
    graph = ChannelGraph(model, exact)
    constants = graph.constants()
    ends = {id(tensor) for tensor in (*model.inputs, *model.outputs)}
    live = {
        key: np.full(size, key in ends) for key, size in graph.sizes.items()
    }
    wanted = dict(live)
    graph.spread(constants, wanted, outputs=False)
    staying = _unread(graph, wanted)
    while graph.spread(constants, live) or _fill(live):
        pass
    changes: Changes = {}
    for call in graph.calls:
        if call.rule is not None:
            shrunk = _smaller(call, constants, live)
            if shrunk is not None:
                changes[id(call.layer)] = shrunk
            if call.rule.has_kernel:
                staying += _dead(call, graph, constants, live)
    return changes, staying


def _smaller(
    call: RuledCall,
    constants: Mapping[int, Constants],
    live: Mapping[int, Mask],
) -> SmallerLayer | SmallerOperation | None:
    rule = call.rule
    read, outputs = call.of_inputs(live), call.of_outputs(live)
    if rule is None or (
        read.all() and outputs.all() and not rule.shrinks_inside
    ):
        return None
    return rule.smaller(call.of_inputs(constants), read, outputs)


def _unread(
    graph: ChannelGraph,
    wanted: Mapping[int, Mask],
) -> list[str]:
    """Outputs of layers without a rule that nothing reads, though others of the tensor."""
    texts = []
    for call in graph.calls:
        for key in call.outputs:
            count = int(np.count_nonzero(~wanted[key]))
            if call.rule is None and 0 < count < graph.sizes[key]:
                texts.append(
                    f"{count} of {_named(call.layer)}, which nothing reads"
                )
    return texts


def _dead(
    call: RuledCall,
    graph: ChannelGraph,
    constants: Mapping[int, Constants],
    live: Mapping[int, Mask],
) -> list[str]:
    """Dead outputs of a kernel that stay because a layer without a rule reads them."""
    output = call.outputs[0]
    count = int(np.count_nonzero(live[output] & ~np.isnan(constants[output])))
    reader = _unknown_behind(output, graph.calls) if count else None
    if reader is None:
        return []
    return [f"{count} of {call.layer.name!r}, which {_named(reader)} reads"]


def _unknown_behind(tensor: int, calls: list[RuledCall]) -> Any:
    """The first layer without a rule that reads the channels of a tensor, or `None`."""
    reached = {tensor}
    for call in calls:
        if reached & set(call.inputs):
            if call.rule is None:
                return call.layer
            if not call.rule.has_kernel:
                reached |= set(call.outputs)
    return None


def _inside_unknown(model: Any) -> list[str]:
    """Dead outputs of kernels that belong to layers without a rule, or lie inside such."""
    texts = []
    unknown = {}
    for call in ChannelGraph(model).calls:
        if call.rule is None:
            unknown[id(call.layer)] = call.layer
            continue
        for path, count in call.rule.dead_inside().items():
            if count:
                texts.append(
                    f"{count} of '{call.layer.name}/{path}' in {_named(call.layer)}"
                )
    for layer in unknown.values():
        for weight in (
            prunable_weights(layer) if getattr(layer, "weights", None) else ()
        ):
            if weight.layout is not None and not weight.layout.inputs:
                continue  # depthwise
            dead = dead_outputs(weight.value, weight.layout)
            if dead:
                texts.append(
                    f"{dead} of '{layer.name}/{weight.path}' in {_named(layer)}"
                )
    return texts


def _named(layer: Any) -> str:
    return f"{layer.name!r} of class {type(layer).__name__}"


def _fill(live: Mapping[int, Mask]) -> bool:
    """Keeps a channel of the first tensor that would have none; whether there was one."""
    for mask in live.values():
        if mask.size and not mask.any():
            mask[0] = True
            return True
    return False


def _with_small_layers(model: Any, changes: Changes) -> Any:
    """The model on smaller layers, and on its own where these stay as they are."""

    def layer_for(layer: Any) -> Any:
        change = changes.get(id(layer))
        if isinstance(change, SmallerOperation):
            return change.call
        if isinstance(change, SmallerLayer):
            return type(layer).from_config(change.config)
        if isinstance(layer, keras.Model):
            return _with_small_layers(layer, changes)
        leave_graphs(layer)
        return layer

    narrowed = keras.models.clone_model(model, clone_function=layer_for)
    for before, after in zip(model.layers, narrowed.layers, strict=True):
        change = changes.get(id(before))
        if isinstance(change, SmallerLayer):
            after.set_weights(change.weights)
            _freeze_like(before, after)
    return narrowed


def _freeze_like(before: Any, after: Any) -> None:
    """Freezes the variables of a layer that have the names of frozen ones of another."""

    def name(variable: Any) -> tuple[str, ...]:
        # "query/kernel" in an attention.
        return tuple(variable.path.split("/")[-2:])

    frozen = {
        name(variable) for variable in before.weights if not variable.trainable
    }
    for variable in after.weights:
        if name(variable) in frozen:
            variable.trainable = False
