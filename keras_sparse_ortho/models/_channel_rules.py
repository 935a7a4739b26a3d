"""What one call of a layer does to channels: a rule for each layer that can be made smaller."""

import abc
import dataclasses
import functools
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._keras_internals import GraphCall
from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.layers import CircularPadding, is_elementwise

L = keras.layers

Mask = np.ndarray
Constants = np.ndarray
"""One float64 for each channel of a tensor: its value where that is the same for every input, at
every position, and NaN where it varies."""
Shape = tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class Shrunk:
    """A layer without the channels that go.

    Args:
        config: From which its class makes it.
        weights: What it is to hold, in the order of `layer.weights`.
    """

    config: dict[str, Any]
    weights: list[np.ndarray]


class ChannelRule(abc.ABC):
    """What a call of a layer does to the channels (the last axis) of its inputs and its output.

    Args:
        layer: The layer, whose weights are read here.
        inputs: Shapes of the tensors that it is called with.
        output: Shape of the tensor that it returns.
    """

    def __init__(self, layer: Any, inputs: Sequence[Shape], output: Shape) -> None:
        self.layer = layer
        self.inputs = [channels(shape) for shape in inputs]
        self.output = channels(output)

    @classmethod
    def fits(cls, layer: Any, inputs: Sequence[Shape], output: Shape) -> bool:
        """Whether the rule holds for this layer with its settings, and for these shapes."""
        return len(inputs) == 1 and channels_last(layer)

    @abc.abstractmethod
    def constants(self, inputs: list[Constants]) -> Constants:
        """The constant channels of the output, given those of the inputs."""

    @abc.abstractmethod
    def needed(
        self, constants: list[Constants], read: list[Mask], kept: Mask
    ) -> tuple[list[Mask], Mask]:
        """Which channels of the inputs and of the output must be there.

        Args:
            constants: The constant channels of the inputs.
            read: Which channels of the inputs must be there, as far as is known.
            kept: Which channels of the output must be there, as far as is known.

        Returns:
            The same two with what the layer adds to them, never less.
        """

    def shrunk(self, constants: list[Constants], read: list[Mask], kept: Mask) -> Shrunk | None:
        """The layer between smaller tensors, or `None` if it need not change."""
        return None


class Barrier(ChannelRule):
    """For unknown layers: they need all of their inputs, and all of their outputs vary and stay."""

    @classmethod
    def fits(cls, layer: Any, inputs: Sequence[Shape], output: Shape) -> bool:
        """Always."""
        return True

    def constants(self, inputs: list[Constants]) -> Constants:
        """All vary."""
        return np.full(self.output, np.nan)

    def needed(
        self, constants: list[Constants], read: list[Mask], kept: Mask
    ) -> tuple[list[Mask], Mask]:
        """All."""
        return [np.ones_like(mask) for mask in read], np.ones_like(kept)


class Heads(Barrier):
    """MultiHeadAttention: all channels stay, but heads go that add nothing to the output."""

    def shrunk(self, constants: list[Constants], read: list[Mask], kept: Mask) -> Shrunk | None:
        """The layer without heads whose values are 0, or whose outputs nothing reads."""
        layer = self.layer
        values = [value(v) for v in layer.value_dense.weights]
        given = np.logical_or.reduce([v.any(axis=(*range(v.ndim - 2), -1)) for v in values])
        output = value(layer.output_dense.kernel)
        live = given & output.any(axis=(*range(1, output.ndim),))
        if live.all():
            return None
        live[0] |= not live.any()
        axes = {id(v): v.ndim - 2 for d in self._projections() for v in d.weights}
        axes[id(layer.output_dense.kernel)] = 0
        arrays = [value(v) for v in layer.weights]
        arrays = [
            np.compress(live, array, axes[id(v)]) if id(v) in axes else array
            for v, array in zip(layer.weights, arrays, strict=True)
        ]
        return as_weights(layer, {"num_heads": int(np.count_nonzero(live))}, *arrays)

    def _projections(self) -> list[Any]:
        return [self.layer.query_dense, self.layer.key_dense, self.layer.value_dense]


def channels(shape: Shape) -> int:
    """Number of channels; 0 for a tensor without, or with a number that is not known."""
    return int(shape[-1] or 0) if len(shape) > 1 else 0


def channels_last(layer: Any) -> bool:
    """Whether channels are the last axis for a layer."""
    return getattr(layer, "data_format", None) in (None, "channels_last")


def value(variable: Any) -> np.ndarray:
    """A weight in float64."""
    return np.asarray(to_numpy(keras.ops.cast(variable, "float32")), np.float64)


def as_weights(layer: Any, config: dict[str, Any], *arrays: np.ndarray | None) -> Shrunk:
    """A shrunk layer with some settings changed, and these weights in its order.

    Its initializers, which have done their work and may be for the old shape alone, go.
    """
    plain = {
        key: "zeros" if key == "bias_initializer" else "glorot_uniform"
        for key in ("kernel", "depthwise", "pointwise", "bias")
        for key in (f"{key}_initializer",)
        if key in layer.get_config()
    }
    made = [np.asarray(array, np.float32) for array in arrays if array is not None]
    return Shrunk({**layer.get_config(), **plain, **config}, made)


# --- activations ----------------------------------------------------------------------------------


def activated(function: Any, constants: np.ndarray) -> np.ndarray:
    """The constants after an activation, as the backend computes it in float32."""
    if function is None or not constants.size:
        return constants
    tensor = keras.ops.convert_to_tensor(np.nan_to_num(constants)[None], dtype="float32")
    found = to_numpy(function(tensor))[0].astype(np.float64)
    return np.where(np.isnan(constants), np.nan, found)


# --- layers with kernels: channels end, begin, and constants become biases ------------------------


class Kernel(ChannelRule):
    """What layers with a kernel, a bias and an activation have in common.

    `blocked` channels of the input are those whose share of the output is not the same everywhere:
    those that vary, and, where padding makes borders, those that are constant but not 0.
    """

    def __init__(self, layer: Any, inputs: Sequence[Shape], output: Shape) -> None:
        super().__init__(layer, inputs, output)
        self.bias = value(layer.bias) if layer.use_bias else np.zeros(self.output)
        size = getattr(layer, "kernel_size", ())
        self.borders = getattr(layer, "padding", "valid") != "valid" and math.prod(size) > 1
        self.mixes = not is_elementwise(layer.activation)

    @classmethod
    def fits(cls, layer: Any, inputs: Sequence[Shape], output: Shape) -> bool:
        """One input, of known channels, and weights that are what they seem."""
        return (
            super().fits(layer, inputs, output)
            and channels(inputs[0]) > 0
            and getattr(layer, "groups", 1) == 1
            and getattr(layer, "quantization_mode", None) is None
            and not getattr(layer, "lora_enabled", False)
        )

    def blocked(self, constants: Constants) -> Mask:
        """See the class."""
        varying = np.isnan(constants)
        return varying | (np.nan_to_num(constants) != 0) if self.borders else varying

    def finish(self, sums: Constants) -> Constants:
        """The output for sums without bias, NaN where they vary."""
        if self.mixes:
            return np.full(self.output, np.nan)
        return activated(self.layer.activation, sums + self.bias)

    def resized(self, name: str, kept: Mask, fold: np.ndarray, *kernels: np.ndarray) -> Shrunk:
        """The layer with other kernels, and `fold` added to its bias."""
        bias = self.bias + fold
        use_bias = bool(self.layer.use_bias or bias.any())
        config = {name: int(np.count_nonzero(kept)), "use_bias": use_bias}
        return as_weights(self.layer, config, *kernels, bias[kept] if use_bias else None)


class Linear(Kernel):
    """Dense, and convolutions: `(*taps, in, out)`.

    Where padding makes borders, what constants add to the output is no bias. But it is the same as
    that of a single channel with the constant `c` and the kernel `sum_i (c_i / c) K_i`: one of the
    constant channels stays, and carries the others.
    """

    def __init__(self, layer: Any, inputs: Sequence[Shape], output: Shape) -> None:
        super().__init__(layer, inputs, output)
        self.kernel = value(layer.kernel)
        self.taps = self.kernel.reshape(-1, *self.kernel.shape[-2:])

    def constants(self, inputs: list[Constants]) -> Constants:
        """Channels that read no blocked one."""
        blocked = self.blocked(inputs[0])
        varies = self.taps[:, blocked].any(axis=(0, 1))
        sums = np.where(blocked, 0, inputs[0]) @ self.taps.sum(axis=0)
        return self.finish(np.where(varies, np.nan, sums))

    def needed(
        self, constants: list[Constants], read: list[Mask], kept: Mask
    ) -> tuple[list[Mask], Mask]:
        """Varying channels that a kept one reads, and one to carry constants."""
        kept = kept | self.mixes
        used = self.taps[:, :, kept].any(axis=(0, 2))
        needed = read[0] | (used & np.isnan(constants[0]))
        if self.borders:
            size = np.abs(np.nan_to_num(constants[0]))
            wanted = np.where(used, size, 0)
            # One that is much smaller than the others would make a large kernel.
            if wanted.any() and not (needed & (size >= 0.1 * wanted.max())).any():
                needed[np.argmax(wanted)] = True
        return [needed], kept

    def shrunk(self, constants: list[Constants], read: list[Mask], kept: Mask) -> Shrunk:
        """Rows and columns go; what the rows gave is in the bias, or in the row that stays."""
        known = np.where(read[0], 0, np.nan_to_num(constants[0]))  # of channels that go
        kernel = self.kernel[..., kept].copy()
        fold = np.zeros(self.output)
        if not self.borders:
            fold = known @ self.taps.sum(axis=0)
        elif (known != 0).any():
            size = np.where(read[0], np.abs(np.nan_to_num(constants[0])), 0)
            carrier = int(np.argmax(size))
            if size[carrier] > 0:  # else nothing that is kept reads them
                shares = known / constants[0][carrier]
                kernel[..., carrier, :] += np.einsum("i,...io->...o", shares, kernel)
        name = "units" if hasattr(self.layer, "units") else "filters"
        return self.resized(name, kept, fold, kernel[..., read[0], :])


class Depthwise(Kernel):
    """DepthwiseConv: `(*taps, channels, multiplier)`, each channel of the input by itself."""

    def __init__(self, layer: Any, inputs: Sequence[Shape], output: Shape) -> None:
        super().__init__(layer, inputs, output)
        self.kernel = value(layer.kernel)

    def constants(self, inputs: list[Constants]) -> Constants:
        """Those of constant channels, and those whose kernel is 0."""
        return self.finish(each_by_itself(self.kernel, inputs[0], self.blocked(inputs[0])))

    def needed(
        self, constants: list[Constants], read: list[Mask], kept: Mask
    ) -> tuple[list[Mask], Mask]:
        """A channel of the input stays, or goes, with all channels that are made of it."""
        multiplier = self.kernel.shape[-1]
        both = read[0] | (kept | self.mixes).reshape(-1, multiplier).any(axis=1)
        return [both], np.repeat(both, multiplier)

    def shrunk(self, constants: list[Constants], read: list[Mask], kept: Mask) -> Shrunk:
        """The number of channels is that of the input."""
        bias = self.bias[kept] if self.layer.use_bias else None
        return as_weights(self.layer, {}, self.kernel[..., read[0], :], bias)


class Separable(Kernel):
    """SeparableConv: a depthwise kernel `(*taps, channels, multiplier)`, then a 1x1 one."""

    def __init__(self, layer: Any, inputs: Sequence[Shape], output: Shape) -> None:
        super().__init__(layer, inputs, output)
        self.depthwise = value(layer.depthwise_kernel)
        self.kernel = value(layer.pointwise_kernel)
        self.pointwise = self.kernel.reshape(self.kernel.shape[-2:])

    def _between(self, constants: Constants) -> Constants:
        return each_by_itself(self.depthwise, constants, self.blocked(constants))

    def constants(self, inputs: list[Constants]) -> Constants:
        """Channels that read no varying one of those in between."""
        between = self._between(inputs[0])
        varies = self.pointwise[np.isnan(between)].any(axis=0)
        return self.finish(np.where(varies, np.nan, np.nan_to_num(between) @ self.pointwise))

    def needed(
        self, constants: list[Constants], read: list[Mask], kept: Mask
    ) -> tuple[list[Mask], Mask]:
        """Channels of which one in between varies, and is read by a kept one."""
        kept = kept | self.mixes
        used = self.pointwise[:, kept].any(axis=1) & np.isnan(self._between(constants[0]))
        return [read[0] | used.reshape(-1, self.depthwise.shape[-1]).any(axis=1)], kept

    def shrunk(self, constants: list[Constants], read: list[Mask], kept: Mask) -> Shrunk:
        """As of `Linear`, for the channels in between."""
        rows = np.repeat(read[0], self.depthwise.shape[-1])
        fold = np.where(rows, 0, np.nan_to_num(self._between(constants[0]))) @ self.pointwise
        pointwise = self.kernel[..., rows, :][..., kept]
        return self.resized("filters", kept, fold, self.depthwise[..., read[0], :], pointwise)


def each_by_itself(kernel: np.ndarray, constants: Constants, blocked: Mask) -> Constants:
    """The constants after a depthwise kernel, channel by channel."""
    taps = kernel.reshape(-1, *kernel.shape[-2:])
    sums = np.where(blocked, 0, constants)[:, None] * taps.sum(axis=0)
    return np.where(blocked[:, None] & taps.any(axis=0), np.nan, sums).ravel()


# --- layers whose output channels are those of their inputs, one by one ---------------------------


class Tied(ChannelRule):
    """Dropout, pooling, cropping, upsampling: a channel stays, or goes, with its output.

    A constant stays the same constant.
    """

    @classmethod
    def fits(cls, layer: Any, inputs: Sequence[Shape], output: Shape) -> bool:
        """As many channels in as out."""
        return super().fits(layer, inputs, output) and channels(inputs[0]) == channels(output) > 0

    def constants(self, inputs: list[Constants]) -> Constants:
        """Those of the input."""
        return inputs[0]

    def needed(
        self, constants: list[Constants], read: list[Mask], kept: Mask
    ) -> tuple[list[Mask], Mask]:
        """What is needed anywhere is needed everywhere."""
        everywhere = np.logical_or.reduce([*read, kept])
        return [everywhere] * len(read), everywhere


class Padding(Tied):
    """ZeroPadding: a constant that is not 0 ends at the border."""

    def constants(self, inputs: list[Constants]) -> Constants:
        """Those that are 0."""
        return np.where(inputs[0] == 0, 0, np.nan)


class Elementwise(Tied):
    """ReLU, LeakyReLU, ELU: constants are what the layer makes of them."""

    def constants(self, inputs: list[Constants]) -> Constants:
        """The layer's outputs for those of the input."""
        return activated(self.layer, inputs[0])


class Activation(Elementwise):
    """Activation, if its function maps every channel by itself."""

    @classmethod
    def fits(cls, layer: Any, inputs: Sequence[Shape], output: Shape) -> bool:
        """Not for softmax and functions that are not known."""
        return super().fits(layer, inputs, output) and is_elementwise(layer.activation)


class Normalization(Tied):
    """BatchNormalization in inference: `gamma (x - mean) / sqrt(variance + epsilon) + beta`."""

    def __init__(self, layer: Any, inputs: Sequence[Shape], output: Shape) -> None:
        super().__init__(layer, inputs, output)
        gamma = value(layer.gamma) if layer.scale else np.ones(self.output)
        self.scale = gamma / np.sqrt(value(layer.moving_variance) + layer.epsilon)
        beta = value(layer.beta) if layer.center else 0.0
        self.shift = beta - value(layer.moving_mean) * self.scale

    @classmethod
    def fits(cls, layer: Any, inputs: Sequence[Shape], output: Shape) -> bool:
        """Statistics of the last axis."""
        return super().fits(layer, inputs, output) and layer.axis in (-1, len(output) - 1)

    def constants(self, inputs: list[Constants]) -> Constants:
        """Those of constant channels, and those with `gamma` 0."""
        return np.where(self.scale == 0, self.shift, inputs[0] * self.scale + self.shift)

    def shrunk(self, constants: list[Constants], read: list[Mask], kept: Mask) -> Shrunk:
        """All its weights are vectors of the channels."""
        return as_weights(self.layer, {}, *[value(v)[kept] for v in self.layer.weights])


class Reshape(Tied):
    """Reshape that leaves the last axis as it is, as behind global pooling."""

    def shrunk(self, constants: list[Constants], read: list[Mask], kept: Mask) -> Shrunk:
        """The new number of channels is in the target shape."""
        size = int(np.count_nonzero(kept))
        target = (*self.layer.target_shape[:-1], size)
        return as_weights(self.layer, {"target_shape": target})


class Flatten(ChannelRule):
    """Flatten: a channel is as many features as there are positions."""

    @classmethod
    def fits(cls, layer: Any, inputs: Sequence[Shape], output: Shape) -> bool:
        """Shapes that are known."""
        known = len(inputs) == 1 and channels(inputs[0]) > 0 and channels(output) > 0
        return known and super().fits(layer, inputs, output)

    def constants(self, inputs: list[Constants]) -> Constants:
        """Those of the channels, again and again."""
        return np.tile(inputs[0], self.output // self.inputs[0])

    def needed(
        self, constants: list[Constants], read: list[Mask], kept: Mask
    ) -> tuple[list[Mask], Mask]:
        """A channel is needed if one of its features is, and then all of them stay."""
        everywhere = read[0] | kept.reshape(-1, self.inputs[0]).any(axis=0)
        return [everywhere], np.tile(everywhere, self.output // self.inputs[0])


class Concatenation(ChannelRule):
    """Concatenate along the channels: each input has its own run of them."""

    @classmethod
    def fits(cls, layer: Any, inputs: Sequence[Shape], output: Shape) -> bool:
        """Along the last axis, of known sizes."""
        sizes = [channels(shape) for shape in inputs]
        return layer.axis in (-1, len(output) - 1) and all(sizes) and sum(sizes) == channels(output)

    def constants(self, inputs: list[Constants]) -> Constants:
        """Those of the inputs."""
        return np.concatenate(inputs)

    def needed(
        self, constants: list[Constants], read: list[Mask], kept: Mask
    ) -> tuple[list[Mask], Mask]:
        """What is needed on one side is needed on the other."""
        everywhere = np.concatenate(read) | kept
        return np.split(everywhere, np.cumsum(self.inputs)[:-1]), everywhere


class Merge(Tied):
    """Add and its kin: a channel goes only if it goes in all inputs."""

    @classmethod
    def fits(cls, layer: Any, inputs: Sequence[Shape], output: Shape) -> bool:
        """Inputs of one rank, and as many channels in each."""
        sizes = {channels(shape) for shape in (*inputs, output)}
        ranks = {len(shape) for shape in (*inputs, output)}
        return len(sizes) == len(ranks) == 1 and sizes != {0}

    def constants(self, inputs: list[Constants]) -> Constants:
        """Where all inputs are constant."""
        return _MERGES[type(self.layer)](inputs)


_MERGES: Mapping[type, Callable[..., Any]] = types.MappingProxyType(
    {
        L.Add: np.add.reduce,
        L.Subtract: np.subtract.reduce,
        L.Multiply: np.multiply.reduce,
        L.Average: functools.partial(np.mean, axis=0),
        L.Maximum: np.maximum.reduce,
        L.Minimum: np.minimum.reduce,
    }
)


# --- which rule is that of which layer ------------------------------------------------------------

_BY_RANK = (
    *("SpatialDropout", "Cropping", "UpSampling"),
    *("AveragePooling", "MaxPooling", "GlobalAveragePooling", "GlobalMaxPooling"),
)
_TIED = [
    *("ActivityRegularization", "AlphaDropout", "Dropout", "GaussianDropout", "GaussianNoise"),
    *("Identity", *(f"{name}{rank}D" for name in _BY_RANK for rank in (1, 2, 3))),
]

_RULES: Mapping[type, type[ChannelRule]] = types.MappingProxyType(
    {
        **{getattr(L, name): Tied for name in _TIED},
        **dict.fromkeys((L.Dense, L.Conv1D, L.Conv2D, L.Conv3D), Linear),
        **dict.fromkeys((L.DepthwiseConv1D, L.DepthwiseConv2D), Depthwise),
        **dict.fromkeys((L.SeparableConv1D, L.SeparableConv2D), Separable),
        **dict.fromkeys((L.ZeroPadding1D, L.ZeroPadding2D, L.ZeroPadding3D), Padding),
        **dict.fromkeys((L.ReLU, L.LeakyReLU, L.ELU), Elementwise),
        CircularPadding: Tied,
        L.Activation: Activation,
        L.BatchNormalization: Normalization,
        L.Reshape: Reshape,
        L.Flatten: Flatten,
        L.Concatenate: Concatenation,
        **dict.fromkeys(_MERGES, Merge),
    }
)


def rule_for(call: GraphCall, calls: int) -> ChannelRule:
    """The rule of a call; a `Barrier` for layers that are not known.

    By the class itself, as a subclass may compute something else.

    Args:
        call: The call.
        calls: How often its layer is called in the model. One that changes would have to shrink
            alike for all calls: it is left alone.
    """
    layer = call.operation
    inputs = [tuple(tensor.shape) for tensor in call.inputs]
    output = tuple(call.outputs[0].shape) if call.outputs else ()
    rule = _RULES.get(type(layer), Barrier)
    changes = bool(getattr(layer, "weights", None)) or rule is Reshape
    # Such as `training=True`, with which BatchNormalization and Dropout are something else.
    configured = any(setting is not None and setting is not False for setting in call.settings)
    alone = len(call.outputs) == 1 and call.inputs and (calls == 1 or not changes)
    if configured or not alone or not rule.fits(layer, inputs, output):
        rule = Barrier
    if type(layer) is L.MultiHeadAttention and calls == 1:  # whatever else it is called with
        rule = Heads
    return rule(layer, inputs, output)
