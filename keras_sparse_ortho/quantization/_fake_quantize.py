"""`FakeQuantize`: activations rounded to 8 bits in a range that follows them; its users."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import keras
import numpy as np

from keras_sparse_ortho._checks import check_number
from keras_sparse_ortho._interception import with_settings
from keras_sparse_ortho._types import Tensor
from keras_sparse_ortho._values import assign, to_numpy
from keras_sparse_ortho.kernels import PrunableWeight, walk

ops = keras.ops
_LEAST_WIDTH = 1e-6  # of a range
_STEPS = 255  # of a range
_LOWEST_OF_SYMMETRIC = -128 / 127  # where the highest value is 1
Mark: TypeAlias = Callable[[Tensor, float, float], Tensor]
"""`mark(x, low, high)`: what stands for a rounded tensor where a file is made."""


class _FixedRange(NamedTuple):
    """A range that inference takes as it is, see `fixed_ranges`."""

    low: float
    high: float
    mark: Mark | None


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class FakeQuantize(keras.layers.Layer):
    """Rounds its input to 256 values between a moving minimum and maximum.

        low  <- m low  + (1 - m) min(min(x), 0)         in training, as batch normalization does;
        high <- m high + (1 - m) max(max(x), 0)         the first batch sets both
        y = s * round(clip(x, low, high) / s),  s = (high - low) / 255,  0 stays 0

    With `symmetric` the range is `[-128 s, 127 s]`, so that the integer of 0 is 0:

        high <- m high + (1 - m) max|x|,  low = -128 / 127 high

    The gradient is 1 inside of the range and 0 outside. Before its first training batch a layer
    passes its input on. `quantize_aware` places it; in a subclassed model place it yourself, at
    inputs and outputs of layers that will compute in int8.

    Args:
        momentum: float in [0, 1). `m`.
        symmetric: bool. Whether the range lies around 0.
        **kwargs: As for `keras.layers.Layer`.

    Examples:
        >>> import keras, numpy as np
        >>> layer = FakeQuantize()
        >>> _ = layer(np.array([[0.0, 0.3, 2.55]]), training=True)  # the range, in steps of 0.01
        >>> round(float(layer(np.array([[0.304]]))[0, 0]), 4)
        0.3
    """

    def __init__(
        self, momentum: float = 0.99, symmetric: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.symmetric = symmetric
        self.momentum = check_number("momentum", momentum)
        if not 0 <= self.momentum < 1:
            raise ValueError(
                f"`momentum` must be in [0, 1). Received: momentum={momentum!r}"
            )
        self.supports_masking = True
        self._fixed: _FixedRange | None = None

    def build(self, input_shape: object = None) -> None:
        self.low = self._number("low")
        self.high = self._number("high")
        self.seen = self._number("seen")
        self.built = True

    def _number(self, name: str) -> keras.Variable:
        return self.add_weight(
            name=name,
            shape=(),
            initializer="zeros",
            trainable=False,
            dtype="float32",
            autocast=False,
            aggregation="mean",
        )

    def call(self, inputs: Tensor, training: bool | None = None) -> Tensor:
        if training:
            self._follow(ops.cast(ops.stop_gradient(inputs), "float32"))
        fixed = self._fixed
        if fixed is not None and fixed.mark is not None:
            return fixed.mark(inputs, fixed.low, fixed.high)
        # Copies: torch needs them for the gradient, and another call of a shared layer moves the
        # range before.
        low = ops.copy(self.low)
        high = ops.copy(self.high)
        high = ops.maximum(high, low + _LEAST_WIDTH)
        # In half precision the last steps of a range would be lost.
        rounded = keras.quantizers.fake_quant_with_min_max_vars(
            ops.cast(inputs, "float32"),
            ops.stop_gradient(low),
            ops.stop_gradient(high),
        )
        rounded = ops.cast(rounded, inputs.dtype)
        if fixed is not None:
            return rounded
        return ops.where(self.seen > 0, rounded, inputs)

    def compute_output_spec(
        self, inputs: Tensor, training: bool | None = None
    ) -> Tensor:
        return keras.KerasTensor(inputs.shape, dtype=self.compute_dtype)

    def step(self) -> float:
        """The step between neighboring values in an integer file."""
        low, high = self._range()
        return (high - low) / _STEPS

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "momentum": self.momentum,
            "symmetric": self.symmetric,
        }

    def _range(self) -> tuple[float, float]:
        low = float(to_numpy(self.low))
        high = float(to_numpy(self.high))
        return low, max(high, low + _LEAST_WIDTH)

    def _follow(self, x: Tensor) -> None:
        """Moves the range towards that of a batch."""
        m = ops.where(self.seen > 0, self.momentum, 0.0)
        if self.symmetric:
            high = ops.max(ops.abs(x))
            low = high * _LOWEST_OF_SYMMETRIC
        else:
            low = ops.minimum(ops.min(x), 0.0)
            high = ops.maximum(ops.max(x), 0.0)
        assign(self.low, m * self.low + (1 - m) * low)
        assign(self.high, m * self.high + (1 - m) * high)
        assign(self.seen, ops.ones(()))


def integers_of(
    weight: PrunableWeight,
) -> tuple[np.ndarray, np.ndarray] | None:
    """Integers and scales of a weight, `None` without a quantizer."""
    if weight.storage is None or weight.storage.quantizer is None:
        return None
    quantizer = weight.storage.quantizer
    parts: tuple[np.ndarray, np.ndarray] = quantizer.integers(
        weight.value, weight.outputs_shape
    )
    return parts


def ranges_of(model: keras.Model) -> list[FakeQuantize]:
    """The layers of a model that round activations."""
    return [
        layer for layer, _ in walk(model, "") if isinstance(layer, FakeQuantize)
    ]


def has_trained_ranges(model: keras.Model) -> bool:
    """Whether the activations of a model have ranges; raises if training has not set one."""
    layers = ranges_of(model)
    unset = []
    for layer in layers:
        if not layer.built or not float(to_numpy(layer.seen)):
            unset.append(layer.path)
    if unset:
        raise ValueError(
            "The ranges of activations are set in training: train the model, or call it once on "
            f"real data with training=True. Received: no range of {unset[:5]}"
        )
    return bool(layers)


@contextlib.contextmanager
def fixed_ranges(
    model: keras.Model, mark: Mark | None = None
) -> Iterator[None]:
    """Inside, inference does not check whether ranges are set; `mark(x, low, high)` may round."""
    with contextlib.ExitStack() as stack:
        for layer in ranges_of(model):
            low, high = layer._range()
            fixed = _FixedRange(low, high, mark)
            stack.enter_context(with_settings(layer, _fixed=fixed))
        yield
