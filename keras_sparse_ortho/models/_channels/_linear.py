"""Rules of the layers with kernels: where channels end, begin, and constants become biases."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_sparse_ortho.models._channels._activations import activated, is_elementwise
from keras_sparse_ortho.models._channels._rule import (
    ChannelRule,
    Constants,
    Mask,
    Shape,
    Shrunk,
    as_weights,
    channels,
    value,
)


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
