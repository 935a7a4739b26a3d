"""What one call of a layer does to channels: the base of rules, and the one that allows nothing."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._values import to_numpy

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
    """Of a layer that is not understood: it reads all, nothing it returns is known or can go."""

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
