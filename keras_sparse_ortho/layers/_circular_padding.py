"""`CircularPadding`: the other end of each spatial axis, as on a ring."""

from collections.abc import Sequence
from typing import Any

import keras

from keras_sparse_ortho._checks import check_integer


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
        self.data_format = keras.layers.Conv1D(1, 1, data_format=data_format).data_format

    def call(self, inputs: Any) -> Any:
        for axis, before, after in self._ends(tuple(inputs.shape)):
            size, every = keras.ops.shape(inputs)[axis], [slice(None)] * axis
            first = inputs[(*every, slice(size - before, size))]
            last = inputs[(*every, slice(0, after))]
            inputs = keras.ops.concatenate([first, inputs, last], axis=axis)
        return inputs

    def compute_output_shape(self, input_shape: Sequence[int | None]) -> tuple[int | None, ...]:
        shape = list(input_shape)
        for axis, before, after in self._ends(tuple(input_shape)):
            size = shape[axis]
            shape[axis] = None if size is None else size + before + after
        return tuple(shape)

    def compute_output_spec(self, inputs: Any) -> Any:
        return keras.KerasTensor(self.compute_output_shape(inputs.shape), inputs.dtype)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "padding": self.padding, "data_format": self.data_format}

    def _ends(self, shape: tuple[int | None, ...]) -> list[tuple[int, int, int]]:
        first, count = 1 if self.data_format == "channels_last" else 2, len(shape) - 2
        given = [self.padding] * count if isinstance(self.padding, int) else list(self.padding)
        pairs = [(end, end) if isinstance(end, int) else tuple(end) for end in given]
        sizes = shape[first : first + count]
        rule = None
        if count < 1 or len(pairs) != count or any(len(pair) != 2 for pair in pairs):
            rule = f"The padding of {self.name!r} is not one of the spatial axes of its input"
        elif any(s is not None and max(pair) > s for s, pair in zip(sizes, pairs, strict=True)):
            rule = f"The layer {self.name!r} cannot pad an axis by more than its size"
        if rule is not None:
            raise ValueError(f"{rule}. Received: padding={self.padding!r}, input of shape {shape}")
        return [(first + k, pair[0], pair[1]) for k, pair in enumerate(pairs)]
