"""`remove_channels`: a plain Keras model without the channels that do nothing."""

import collections
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_sparse_ortho._checks import other_keywords
from keras_sparse_ortho._keras_internals import (
    computes_its_graph,
    graph_calls,
    graph_ends,
    leave_graphs,
    warn_user,
)
from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.layers import CircularPadding, is_elementwise
from keras_sparse_ortho.models._prunable_weights import check_built, prunable_weights
from keras_sparse_ortho.models._saved_layers import is_clonable, is_made_from_layers
from keras_sparse_ortho.models._strip import strip
from keras_sparse_ortho.orthogonal import dead_outputs

L = keras.layers

Mask = np.ndarray
Constants = np.ndarray
"""One float64 for each channel of a tensor: its value where that is the same for every input, at
every position, and NaN where it varies."""
Shape = tuple[int | None, ...]


@other_keywords
def remove_channels(model: keras.Model, *, exact: bool = True) -> keras.Model:
    """Strips a model, and removes every channel that does nothing: smaller layers, same outputs.

    A channel whose kernel is 0 is a constant behind bias, normalization and activation,

        c = f(b),  or, normalized,  c = f(gamma (b - mean) / sqrt(variance + epsilon) + beta)

    The next layer multiplies it by its kernel and adds it up. The sum goes into the bias of that
    layer, `b' = b + sum_i c_i sum_taps K_i`, and the channel goes. So do channels that nothing
    reads or that are computed from constants only, and heads of MultiHeadAttention whose values are
    0, or whose outputs nothing reads.

    Dense, Conv, DepthwiseConv and SeparableConv layers shrink, and what stands between:
    BatchNormalization, elementwise activations (also `keras.ops.gelu` and its like) and PReLU,
    pooling, Dropout, padding, Flatten, Reshape that leaves channels alone, Concatenate. Where
    tensors are added, a channel goes if it can go in all of them. All channels of the model's
    inputs and outputs stay, at least one of every layer, and all that any other class of layer (or
    a nested model, or a layer with weights that is called twice) reads or returns.

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
    layer of another class reads, returns or holds them: attention, a block written as a class, a
    nested model; LayerNormalization, whose statistics are those of all channels.

    Limits: a padded convolution adds zeros at the border, where a channel has its constant. One
    channel whose constant is not 0 stays then, with a kernel for all of them: `sum_i (c_i / c)
    K_i`. In front of padded DepthwiseConv and SeparableConv, and of ZeroPadding, all of these stay.
    Further training moves the means of BatchNormalization, but no constants in biases. Channels
    must be the last axis.

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
    plain = strip(model)
    if not is_clonable(plain) and not is_made_from_layers(plain):
        inputs, outputs = graph_ends(plain)
        if isinstance(plain, keras.Sequential):
            plain = keras.Sequential([inputs, *plain.layers], name=plain.name)
        else:
            plain = keras.Model(inputs, outputs, name=plain.name)
    plan, left = _channel_plan(plain, exact)
    norms = [layer for layer in plain.layers if type(layer) is L.LayerNormalization]
    changed = [layer.name for layer in norms if id(layer) in plan]
    if changed:
        warn_user(
            "LayerNormalization has the statistics of the channels that stay: outputs change, so "
            f"train further, for example with `distill`. Received: {changed}"
        )
    small = _with_small_layers(plain, plan)
    left += _inside_unknown(small)
    if left:
        warn_user(
            "Dead channels stay where a layer is not known to do without them. "
            f"Received: {'; '.join(left)}"
        )
    return small


def check_channels_known(model: Any) -> None:
    """Refuses a model without weights, and one of which the graph is not known."""
    check_built(model)
    if not computes_its_graph(model):
        raise NotPrunableError(
            "Channels can be removed where Keras knows which layer reads which: in functional "
            "models, and Sequential ones with an Input, without a `call` of their own. "
            f"Received: model={model.name!r} of type {type(model).__name__}"
        )


class Shrunk(NamedTuple):
    """A layer without the channels that go: its configuration, and its weights in their order."""

    config: dict[str, Any]
    weights: list[np.ndarray]


def _smaller(layer: Any, config: dict[str, Any], *arrays: np.ndarray | None) -> Shrunk:
    """A layer with some settings and weights changed, and without initializers of the old shape."""
    kernels = dict.fromkeys(("kernel", "depthwise", "pointwise"), "glorot_uniform")
    own, initializers = layer.get_config(), {**kernels, "bias": "zeros", "alpha": "zeros"}
    own |= {f"{k}_initializer": v for k, v in initializers.items() if f"{k}_initializer" in own}
    made = [np.asarray(array, np.float32) for array in arrays if array is not None]
    return Shrunk({**own, **config}, made)


def _value(variable: Any) -> np.ndarray:
    return np.asarray(to_numpy(variable), np.float64)


# A rule has three functions of the channels (the last axis) of all inputs, one after the other:
# `constants(inputs)`: the constant channels of the output; `needed(constants, read, kept)`: which
# channels of the inputs, and of the output, must be there, the layer's own included;
# `shrunk`: the layer between such tensors, or `None` if it need not change.


class Linear:
    """Dense, and convolutions: `(*taps, in, out)`; with a depthwise kernel before it, Separable."""

    # With padding, what constants add is no bias at the border. It is that of one channel with the
    # constant `c` and the kernel `sum_i (c_i / c) K_i`: one of them stays, and carries the others.

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        kernel = getattr(layer, "pointwise_kernel", None)
        self.depthwise = None if kernel is None else _value(layer.depthwise_kernel)
        self.kernel = _value(layer.kernel if kernel is None else kernel)
        self.taps = self.kernel.reshape(-1, *self.kernel.shape[-2:])
        self.bias = np.zeros(self.kernel.shape[-1]) + _bias(layer)
        self.mixes = not is_elementwise(layer.activation)

    def _between(self, inputs: Constants) -> Constants:
        """The inputs of the kernel, NaN where their share of the output is not one constant."""
        if self.depthwise is not None:
            return _each_by_itself(self.layer, self.depthwise, inputs)
        return np.where(inputs != 0, np.nan, inputs) if _has_borders(self.layer) else inputs

    def constants(self, inputs: Constants) -> Constants:
        between = self._between(inputs)
        varies = self.taps[:, np.isnan(between)].any(axis=(0, 1)) | self.mixes
        sums = np.nan_to_num(between) @ self.taps.sum(axis=0)
        return _activated(self.layer.activation, np.where(varies, np.nan, sums + self.bias))

    def needed(self, constants: Constants, read: Mask, kept: Mask) -> tuple[Mask, Mask]:
        """Varying channels that a kept one reads, and one to carry constants."""
        kept = kept | self.mixes
        used = self.taps[:, :, kept].any(axis=(0, 2))
        if self.depthwise is not None:
            used = used & np.isnan(self._between(constants))
            return read | used.reshape(len(read), -1).any(axis=1), kept
        read = read | (used & np.isnan(constants))
        if _has_borders(self.layer):
            size = np.abs(np.nan_to_num(constants))
            wanted = np.where(used, size, 0)
            # One that is much smaller than the others would make a large kernel.
            if wanted.any() and not (read & (size >= 0.1 * wanted.max())).any():
                read[np.argmax(wanted)] = True
        return read, kept

    def shrunk(self, constants: Constants, read: Mask, kept: Mask) -> Shrunk:
        """Rows and columns go; what the rows gave is in the bias, or in the row that stays."""
        rows = np.repeat(read, self.taps.shape[1] // len(read))
        gone = np.where(rows, 0, np.nan_to_num(self._between(constants)))
        bias = self.bias + gone @ self.taps.sum(axis=0)
        kernel = self.kernel[..., kept].copy()
        if self.depthwise is None and _has_borders(self.layer):
            size = np.where(read, np.abs(np.nan_to_num(constants)), 0)
            carrier = int(np.argmax(size))
            if size[carrier] > 0:  # else nothing that is kept reads constants
                shares = np.where(read, 0, np.nan_to_num(constants)) / constants[carrier]
                kernel[..., carrier, :] += np.einsum("i,...io->...o", shares, kernel)
        before = None if self.depthwise is None else self.depthwise[..., read, :]
        use_bias = bool(self.layer.use_bias or bias.any())
        name = "units" if hasattr(self.layer, "units") else "filters"
        config = {name: int(np.count_nonzero(kept)), "use_bias": use_bias}
        arrays = before, kernel[..., rows, :], bias[kept] if use_bias else None
        return _smaller(self.layer, config, *arrays)


class Tied:
    """A layer whose channels stay or go with the inputs' channels `sources[:, o]` of output `o`."""

    def __init__(self, layer: Any, sources: np.ndarray) -> None:
        self.layer = layer
        self.sources = sources

    def constants(self, inputs: Constants) -> Constants:
        layer, kind, rows = self.layer, type(self.layer), inputs[self.sources]
        if kind in _MERGES:
            return np.asarray(_MERGES[kind](rows))
        [known] = rows
        if kind is L.LayerNormalization:
            return np.full_like(known, np.nan)
        if kind in _PADDING:  # a constant that is not 0 ends at the border
            return np.where(known == 0, 0, np.nan)
        if kind is L.Activation or is_elementwise(layer):
            return _activated(layer, known)
        if kind is L.PReLU:  # at each position, or shared by them
            alpha = _value(layer.alpha).reshape(-1, len(known))
            negative = np.where((alpha == alpha[0]).all(axis=0), alpha[0] * known, np.nan)
            return np.where(known >= 0, known, negative)
        if kind in _DEPTHWISE:
            kernel = _value(layer.kernel)
            sums = _each_by_itself(layer, kernel, known[:: kernel.shape[-1]])
            return _activated(layer.activation, sums + _bias(layer))
        if kind is L.BatchNormalization:  # in inference
            gamma = _value(layer.gamma) if layer.scale else 1.0
            scale = gamma / np.sqrt(_value(layer.moving_variance) + layer.epsilon)
            shift = _value(layer.beta) if layer.center else 0.0
            shift = shift - _value(layer.moving_mean) * scale
            return np.where(scale == 0, shift, known * scale + shift)
        return known

    def needed(self, constants: Constants, read: Mask, kept: Mask) -> tuple[Mask, Mask]:
        read = read.copy()
        np.logical_or.at(read, self.sources, kept)
        return read, read[self.sources].any(axis=0)

    def shrunk(self, constants: Constants, read: Mask, kept: Mask) -> Shrunk | None:
        layer = self.layer
        if type(layer) is L.Reshape:
            target = (*layer.target_shape[:-1], int(np.count_nonzero(kept)))
            return _smaller(layer, {"target_shape": target})
        if not getattr(layer, "weights", None):  # as operations
            return None
        # A depthwise kernel `(*taps, channels, multiplier)`; vectors, PReLU's `alpha`.
        kernels = [_value(layer.kernel)[..., read, :]] if type(layer) in _DEPTHWISE else []
        others = [_value(variable) for variable in layer.weights[len(kernels) :]]
        return _smaller(layer, {}, *kernels, *[v[..., kept] for v in others])


def _bias(layer: Any) -> Any:
    return _value(layer.bias) if layer.use_bias else 0.0


def _activated(function: Any, constants: np.ndarray) -> np.ndarray:
    """The constants after an activation, as the backend computes it in float32."""
    if function is None:
        return constants
    tensor = keras.ops.convert_to_tensor(np.nan_to_num(constants)[None], dtype="float32")
    found = to_numpy(function(tensor))[0].astype(np.float64)
    return np.where(np.isnan(constants), np.nan, found)


def _has_borders(layer: Any) -> bool:
    size = getattr(layer, "kernel_size", ())
    return getattr(layer, "padding", "valid") != "valid" and math.prod(size) > 1


def _each_by_itself(layer: Any, kernel: np.ndarray, inputs: Constants) -> Constants:
    """The constants after a depthwise kernel `(*taps, channels, multiplier)`, without bias."""
    blocked = inputs != 0 if _has_borders(layer) else np.isnan(inputs)
    taps = kernel.reshape(-1, *kernel.shape[-2:])
    sums = np.where(blocked, 0, inputs)[:, None] * taps.sum(axis=0)
    return np.where(blocked[:, None] & taps.any(axis=0), np.nan, sums).ravel()


_BY_RANK = (
    *("SpatialDropout", "Cropping", "UpSampling", "ZeroPadding"),
    *("AveragePooling", "MaxPooling", "GlobalAveragePooling", "GlobalMaxPooling"),
)
_LINEAR = (L.Dense, L.Conv1D, L.Conv2D, L.Conv3D, L.SeparableConv1D, L.SeparableConv2D)
_DEPTHWISE = (L.DepthwiseConv1D, L.DepthwiseConv2D)
_PADDING = (L.ZeroPadding1D, L.ZeroPadding2D, L.ZeroPadding3D)
_MERGES: dict[type, Callable[[np.ndarray], Any]] = {
    L.Add: np.add.reduce,
    L.Subtract: np.subtract.reduce,
    L.Multiply: np.multiply.reduce,
    L.Average: functools.partial(np.mean, axis=0),
    L.Maximum: np.maximum.reduce,
    L.Minimum: np.minimum.reduce,
}
_TIED = {
    *(
        L.Activation,
        L.ActivityRegularization,
        L.AlphaDropout,
        L.Dropout,
        L.GaussianDropout,
        L.GaussianNoise,
    ),
    *(L.BatchNormalization, L.Concatenate, L.Flatten, L.Identity, L.PReLU, L.Reshape),
    *(CircularPadding, L.Activation),
    *(getattr(L, f"{name}{rank}D") for name in _BY_RANK for rank in (1, 2, 3)),
    *(*_MERGES, *_DEPTHWISE),
}


def _rule_for(layer: Any, inputs: list[Shape], output: Shape, exact: bool) -> Linear | Tied | None:
    """The rule of a layer by its class itself, as a subclass may compute something else."""
    kind, sizes, size = type(layer), [_channels(shape) for shape in inputs], _channels(output)
    ranks = {len(shape) for shape in (*inputs, output)}
    several = kind is L.Concatenate or (kind in _MERGES and len(ranks) == 1)
    if (
        not (size and all(sizes) and (several or len(inputs) == 1))
        or getattr(layer, "data_format", None) not in (None, "channels_last")
        or getattr(layer, "axis", -1) not in (-1, [-1], len(output) - 1, [len(output) - 1])
        or getattr(layer, "groups", 1) != 1
        or getattr(layer, "quantization_mode", None) is not None
        or getattr(layer, "lora_enabled", False)
        or (kind is L.PReLU and layer.alpha.shape[-1] != size)
    ):
        return None
    if kind in _LINEAR:
        return Linear(layer)
    known = kind in _TIED or is_elementwise(layer) or (kind is L.LayerNormalization and not exact)
    if not known or not is_elementwise(getattr(layer, "activation", None)):
        return None
    sources = np.arange(size)[None]  # of Concatenate: each input has its own run of channels
    if kind is L.Flatten:
        sources = sources % sizes[0]  # a channel is as many features as there are positions
    elif kind in _DEPTHWISE:
        sources = sources // (size // sizes[0])  # a channel becomes as many as the multiplier
    elif kind is not L.Concatenate:
        if {*sizes} != {size}:
            return None
        sources = sources + size * np.arange(len(sizes))[:, None]
    return Tied(layer, sources)


def _without_dead_heads(layer: Any) -> Shrunk | None:
    """MultiHeadAttention without heads whose values are 0, or whose outputs nothing reads."""
    values = [_value(v) for v in layer.value_dense.weights]
    given = np.logical_or.reduce([v.any(axis=(*range(v.ndim - 2), -1)) for v in values])
    output = _value(layer.output_dense.kernel)
    live = given & output.any(axis=(*range(1, output.ndim),))
    if live.all():
        return None
    live[0] |= not live.any()
    projections = (layer.query_dense, layer.key_dense, layer.value_dense)
    axes = {id(v): len(v.shape) - 2 for dense in projections for v in dense.weights}
    axes[id(layer.output_dense.kernel)] = 0
    arrays = [
        np.compress(live, _value(v), axes[id(v)]) if id(v) in axes else _value(v)
        for v in layer.weights
    ]
    return _smaller(layer, {"num_heads": int(np.count_nonzero(live))}, *arrays)


class _Call(NamedTuple):
    """A call of a layer: keys of its tensors, and what it does to their channels."""

    layer: Any
    rule: Linear | Tied | None  # without one, all inputs are needed, and all outputs vary and stay
    inputs: list[int]
    outputs: list[int]

    def read(self, known: Mapping[int, np.ndarray]) -> np.ndarray:
        return np.concatenate([known[key] for key in self.inputs])


def _channel_plan(model: Any, exact: bool) -> tuple[dict[int, Shrunk], list[str]]:
    """The layers that shrink, by `id(layer)`; which dead channels stay because of which layer."""
    # Forward, a channel is constant if nothing that it is computed from varies. Backward, one is
    # needed if the model returns it, or something needed reads it and cannot put it into its bias.
    # At least one channel of every tensor stays, as Keras has no layers of size 0.
    calls, sizes = graph_channels(model, exact)
    constants = {key: np.full(size, np.nan) for key, size in sizes.items()}
    for call in calls:
        if call.rule is not None:
            constants[call.outputs[0]] = call.rule.constants(call.read(constants))
    ends = {id(tensor) for tensor in (*model.inputs, *model.outputs)}
    kept = {key: np.full(size, key in ends) for key, size in sizes.items()}
    readers = [call if call.rule else call._replace(outputs=[]) for call in calls]
    _spread(readers, constants, wanted := dict(kept))
    left = [
        f"{unread} of {_named(call.layer)}, which nothing reads"
        for call in calls
        for key in call.outputs
        if call.rule is None and 0 < (unread := np.count_nonzero(~wanted[key])) < sizes[key]
    ]
    while _spread(calls, constants, kept) or _fill(kept):
        pass
    plan = {}
    for call in calls:
        shrunk = None
        if call.rule is None:
            # Where it is called twice, heads may be read in one of the calls.
            once = sum(other.layer is call.layer for other in calls) == 1
            if once and type(call.layer) is L.MultiHeadAttention:
                shrunk = _without_dead_heads(call.layer)
        elif not all(kept[key].all() for key in (*call.inputs, *call.outputs)):
            known = call.read(constants), call.read(kept), kept[call.outputs[0]]
            shrunk = call.rule.shrunk(*known)
        if shrunk is not None:
            plan[id(call.layer)] = shrunk
        if _has_kernel(call):
            output = call.outputs[0]
            dead = int(np.count_nonzero(kept[output] & ~np.isnan(constants[output])))
            reader = _unknown_behind(output, calls) if dead else None
            if reader is not None:
                left.append(f"{dead} of {call.layer.name!r}, which {_named(reader)} reads")
    return plan, left


def _has_kernel(call: _Call) -> bool:
    return isinstance(call.rule, Linear) or isinstance(call.layer, _DEPTHWISE)


def _unknown_behind(tensor: int, calls: list[_Call]) -> Any:
    """The first layer without a rule that reads the channels of a tensor, or `None`."""
    reached = {tensor}
    for call in calls:
        if reached & set(call.inputs):
            if call.rule is None:
                return call.layer
            if not _has_kernel(call):
                reached |= set(call.outputs)
    return None


def _inside_unknown(model: Any) -> list[str]:
    """Dead outputs of kernels that belong to layers without a rule, or lie inside such."""
    calls, _ = graph_channels(model)
    unknown = {id(call.layer): call.layer for call in calls if call.rule is None}
    return [
        f"{dead} of '{layer.name}/{weight.path}' in {_named(layer)}"
        for layer in unknown.values()
        for weight in (prunable_weights(layer) if getattr(layer, "weights", None) else ())
        if (weight.layout is None or weight.layout.inputs)
        and (dead := dead_outputs(weight.value, weight.layout))
    ]


def _named(layer: Any) -> str:
    return f"{layer.name!r} of class {type(layer).__name__}"


def graph_channels(model: Any, exact: bool = True) -> tuple[list[_Call], dict[int, int]]:
    """The calls in order, and the number of channels of every tensor, by `id`."""
    found = graph_calls(model)
    times = collections.Counter(id(call.operation) for call in found)
    calls: list[_Call] = []
    sizes: dict[int, int] = {}
    for call in found:
        layer = call.operation
        sizes |= {id(t): _channels(tuple(t.shape)) for t in (*call.inputs, *call.outputs)}
        # A layer that changes would have to shrink alike for all calls.
        changes = bool(getattr(layer, "weights", None)) or type(layer) is L.Reshape
        # `training=True`, for one, changes what BatchNormalization and Dropout compute.
        configured = any(setting is not None and setting is not False for setting in call.settings)
        rule = None
        if len(call.outputs) == 1 and not (configured or (changes and times[id(layer)] > 1)):
            shapes = [tuple(tensor.shape) for tensor in call.inputs]
            rule = _rule_for(layer, shapes, tuple(call.outputs[0].shape), exact)
        calls.append(_Call(layer, rule, *([*map(id, ts)] for ts in (call.inputs, call.outputs))))
    return calls, sizes


def flattened(model: Any, weights: Sequence[PrunableWeight]) -> dict[str, int]:
    """How many inputs of a kernel behind Flatten are one channel, by path."""
    found: dict[int, int] = {}  # by layer
    behind: dict[int, int] = {}  # by tensor
    calls, sizes = graph_channels(model) if computes_its_graph(model) else ([], {})
    for call in calls:
        times = behind.get(call.inputs[0], 1) if len(call.inputs) == 1 else 1
        found[id(call.layer)] = times
        if isinstance(call.rule, Tied):
            if type(call.layer) is L.Flatten:
                times = sizes[call.outputs[0]] // sizes[call.inputs[0]]
            behind[call.outputs[0]] = times
    return {weight.path: found.get(id(weight.owner), 1) for weight in weights}


def _channels(shape: Shape) -> int:
    """Number of channels; 0 for a tensor without, or with a number that is not known."""
    return int(shape[-1] or 0) if len(shape) > 1 else 0


def _spread(calls: list[_Call], constants: dict[int, Constants], kept: dict[int, Mask]) -> bool:
    """Propagates what calls need, from the last to the first; returns whether anything changed."""
    before = sum(int(mask.sum()) for mask in kept.values())
    for call in reversed(calls):
        if call.rule is None:  # of any number of outputs
            kept |= {key: np.ones_like(kept[key]) for key in (*call.inputs, *call.outputs)}
            continue
        output = call.outputs[0]
        read, kept[output] = call.rule.needed(call.read(constants), call.read(kept), kept[output])
        ends = np.cumsum([len(kept[key]) for key in call.inputs])
        for key, mask in zip(call.inputs, np.split(read, ends[:-1]), strict=True):
            kept[key] = kept[key] | mask  # one tensor may be several inputs
    return sum(int(mask.sum()) for mask in kept.values()) > before


def _fill(kept: dict[int, Mask]) -> bool:
    """Keeps a channel of the first tensor that would have none; whether there was one."""
    for mask in kept.values():
        if mask.size and not mask.any():
            mask[0] = True
            return True
    return False


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
            _freeze_like(old, new)
    return small


def _freeze_like(old: Any, new: Any) -> None:
    """Freezes the variables of a layer that have the names of frozen ones of another."""

    def name(variable: Any) -> tuple[str, ...]:
        return tuple(variable.path.split("/")[-2:])  # "query/kernel" in an attention

    frozen = {name(variable) for variable in old.weights if not variable.trainable}
    for variable in new.weights:
        if name(variable) in frozen:
            variable.trainable = False
