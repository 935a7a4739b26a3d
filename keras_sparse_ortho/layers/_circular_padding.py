"""`CircularPadding`: the other end of each spatial axis, as on a ring."""

from collections.abc import Sequence
from typing import Any

import keras

from keras_sparse_ortho._checks import check_integer
from keras_sparse_ortho._types import Config, Tensor


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class CircularPadding(keras.layers.Layer):
    """Pads sequences, images and volumes with their other end, along each spatial axis.

        y[p] = x[(p - before) mod size]    for 0 <= p < before + size + after

    Before a convolution with `padding="valid"` this makes it circular: windows see no border.

    Args:
        padding: An integer for both ends of all spatial axes, or a sequence of an integer or a
            `(before, after)` pair for each. A window of `k` taps needs `k - 1` in all.
        data_format: As for convolutions.
        **kwargs: As for `keras.layers.Layer`.

    Limits: the size of an axis must be a multiple of the convolution's stride. A plain model
    (`strip`) keeps this layer and needs this package to be loaded; exported files do not.

    Examples:
        >>> import numpy as np
        >>> padded = CircularPadding([(1, 2)])(np.arange(4.0).reshape(1, 4, 1))
        >>> keras.ops.convert_to_numpy(padded)[0, :, 0].tolist()
        [3.0, 0.0, 1.0, 2.0, 3.0, 0.0, 1.0]
    """

    def __init__(
        self,
        padding: int | Sequence[int | Sequence[int]] = 1,
        data_format: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        for end in keras.tree.flatten(padding):
            check_integer("padding", end, least=0)
        self.padding = padding
        self.data_format = keras.layers.Conv1D(
            1, 1, data_format=data_format
        ).data_format

    def call(self, inputs: Tensor) -> Tensor:
        for axis, before, after in self._ends(tuple(inputs.shape)):
            size = keras.ops.shape(inputs)[axis]
            leading = (slice(None),) * axis
            end = inputs[(*leading, slice(size - before, size))]
            beginning = inputs[(*leading, slice(0, after))]
            inputs = keras.ops.concatenate([end, inputs, beginning], axis=axis)
        return inputs

    def compute_output_shape(
        self, input_shape: Sequence[int | None]
    ) -> tuple[int | None, ...]:
        shape = list(input_shape)
        for axis, before, after in self._ends(tuple(input_shape)):
            size = shape[axis]
            if size is not None:
                shape[axis] = size + before + after
        return tuple(shape)

    def compute_output_spec(
        self, inputs: keras.KerasTensor
    ) -> keras.KerasTensor:
        return keras.KerasTensor(
            self.compute_output_shape(inputs.shape), inputs.dtype
        )

    def get_config(self) -> Config:
        config = super().get_config()
        config["padding"] = self.padding
        config["data_format"] = self.data_format
        return config

    def _ends(
        self, shape: tuple[int | None, ...]
    ) -> list[tuple[int, int, int]]:
        """Each spatial axis with its padding before and after; ValueError if it does not fit."""
        axis_count = len(shape) - 2
        pairs = self._pairs(axis_count)
        is_pair = [len(pair) == 2 for pair in pairs]
        if axis_count < 1 or len(pairs) != axis_count or not all(is_pair):
            raise ValueError(
                f"The padding of {self.name!r} is not one of the spatial axes of its input. "
                f"Received: padding={self.padding!r}, input of shape {shape}"
            )
        axis_before = 0  # the axis in front of the spatial ones
        if self.data_format == "channels_first":
            axis_before = 1
        ends = []
        for axis, (before, after) in enumerate(pairs, axis_before + 1):
            size = shape[axis]
            if size is not None and max(before, after) > size:
                raise ValueError(
                    f"The layer {self.name!r} cannot pad an axis by more than its size. "
                    f"Received: padding={self.padding!r}, input of shape {shape}"
                )
            ends.append((axis, before, after))
        return ends

    def _pairs(self, axis_count: int) -> list[tuple[int, ...]]:
        """The padding of each spatial axis, before and after it."""
        if isinstance(self.padding, int):
            return [(self.padding, self.padding)] * axis_count
        pairs: list[tuple[int, ...]] = []
        for ends in self.padding:
            if isinstance(ends, int):
                pairs.append((ends, ends))
            else:
                pairs.append(tuple(ends))
        return pairs
