"""Rules of the layers whose output channels are those of their inputs, one by one."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

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

    combine: ClassVar[Callable[..., Any]]

    @classmethod
    def fits(cls, layer: Any, inputs: Sequence[Shape], output: Shape) -> bool:
        """Inputs of one rank, and as many channels in each."""
        sizes = {channels(shape) for shape in (*inputs, output)}
        ranks = {len(shape) for shape in (*inputs, output)}
        return len(sizes) == len(ranks) == 1 and sizes != {0}

    def constants(self, inputs: list[Constants]) -> Constants:
        """Where all inputs are constant."""
        return type(self).combine(inputs)


class Sum(Merge):
    """Add."""

    combine = staticmethod(np.add.reduce)


class Difference(Merge):
    """Subtract."""

    combine = staticmethod(np.subtract.reduce)


class Product(Merge):
    """Multiply."""

    combine = staticmethod(np.multiply.reduce)


class Mean(Merge):
    """Average."""

    combine = staticmethod(functools.partial(np.mean, axis=0))


class Largest(Merge):
    """Maximum."""

    combine = staticmethod(np.maximum.reduce)


class Least(Merge):
    """Minimum."""

    combine = staticmethod(np.minimum.reduce)
