"""`CircularPadding`: the other end of each spatial axis, as on a ring."""

from collections.abc import Sequence
from typing import Any

import keras

from keras_sparse_ortho._checks import is_integer


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class CircularPadding(keras.layers.Layer):
    """Pads sequences, images and volumes with their other end, along each spatial axis.

        y[p] = x[(p - before) mod size]    for 0 <= p < before + size + after

    Before a convolution with `padding="valid"` this makes it circular: each position of the output
    sees a whole window, and none a border of zeros.

    Args:
        padding: What a window of `k` taps needs is `k - 1` in all. An integer for both ends of all
            spatial axes, or a sequence of one entry for each spatial axis, an integer or a
            `(before, after)` pair.
        data_format: `"channels_last"` or `"channels_first"`; default:
            `keras.config.image_data_format()`.
        **kwargs: As for `keras.layers.Layer`.

    Raises:
        ValueError: A `padding` that is none, or is not one of as many axes as the input has; an
            axis that is shorter than its padding.

    Limits: the size of an axis must be a multiple of the convolution's stride. A plain model
    (`strip`) keeps this layer, so it needs this package to be loaded; exported files do not.

    Example:

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
        self.padding = _checked(padding)
        self.data_format = keras.config.image_data_format() if data_format is None else data_format
        if self.data_format not in ("channels_last", "channels_first"):
            raise ValueError(
                '`data_format` must be "channels_last" or "channels_first". '
                f"Received: data_format={data_format!r}"
            )

    def call(self, inputs: Any) -> Any:
        for axis, before, after in self._ends(tuple(inputs.shape)):
            size = inputs.shape[axis]
            size = keras.ops.shape(inputs)[axis] if size is None else size
            parts = [inputs]
            if before:
                parts.insert(0, inputs[(*[slice(None)] * axis, slice(size - before, size))])
            if after:
                parts.append(inputs[(*[slice(None)] * axis, slice(0, after))])
            if len(parts) > 1:
                inputs = keras.ops.concatenate(parts, axis=axis)
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
        """Axis, padding before and after, for each spatial axis."""
        count = len(shape) - 2
        given = (self.padding,) * count if isinstance(self.padding, int) else self.padding
        if count < 1 or len(given) != count:
            raise ValueError(
                f"The padding of '{self.name}' is not one of the spatial axes of its input. "
                f"Received: padding={self.padding!r}, input of shape {shape}"
            )
        first = 1 if self.data_format == "channels_last" else 2
        pairs = [(end, end) if isinstance(end, int) else end for end in given]
        ends = [(first + k, before, after) for k, (before, after) in enumerate(pairs)]
        for axis, before, after in ends:
            size = shape[axis]
            if size is not None and max(before, after) > size:
                raise ValueError(
                    f"The layer '{self.name}' cannot pad an axis by more than its size. "
                    f"Received: padding={self.padding!r}, input of shape {shape}"
                )
        return ends


def _checked(padding: Any) -> int | tuple[int | tuple[int, int], ...]:
    def is_end(value: Any) -> bool:
        return is_integer(value) and value >= 0

    def entry(value: Any) -> Any:
        if is_end(value):
            return int(value)
        if isinstance(value, list | tuple) and len(value) == 2 and all(map(is_end, value)):
            return tuple(int(end) for end in value)
        raise ValueError(
            "`padding` must be an integer of at least 0, or for each spatial axis such an integer "
            f"or a (before, after) pair. Received: padding={padding!r}"
        )

    if isinstance(padding, list | tuple) and padding:
        return tuple(entry(value) for value in padding)
    return entry(None if isinstance(padding, list | tuple) else padding)
