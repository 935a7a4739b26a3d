"""`WeightQuantizer`: effective weights rounded to few values, with a straight-through gradient."""

import abc
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._values import to_numpy

LEVELS = {"int8": 127, "int4": 7, "ternary": 1}
# Ternary weight networks (Li et al. 2016): smaller entries become 0.
_TERNARY_THRESHOLD = 0.7


class WeightQuantizer(abc.ABC):
    """Maps the effective weight `w` of any parametrization to `q(w)`, exactly 0 where `w` is.

    A quantizer comes after the parametrization: masks, thresholds, compact storage and live blocks
    stay what they are. `PrunableLayer(layer, parametrization, quantizer=...)` and
    `quantize_aware` use it; gradients go straight through to `w`.

    Attributes:
        entry_by_entry: Whether what an entry becomes depends on its value alone, not on its place
            or on other entries: compact storage then gives it the live values and no zeros.
    """

    entry_by_entry = False

    def build(
        self,
        outputs: tuple[int, ...],
        add_weight: Callable[..., Any],
        value: Callable[[], np.ndarray],
    ) -> None:
        """Notes the axes of the weight, and creates variables, if it has some.

        Args:
            outputs: The shape of one number for each output, which broadcasts to the weight's.
            add_weight: Creates variables of the layer.
            value: Gives the effective weight before it is quantized.
        """
        self._outputs = outputs

    @property
    def variables(self) -> list[Any]:
        """What is trained or stored for it."""
        return []

    @abc.abstractmethod
    def __call__(self, value: Any) -> Any:
        """The quantized weight, a tensor of the same shape and dtype."""

    @abc.abstractmethod
    def integers(
        self, value: np.ndarray, outputs: tuple[int, ...]
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Integers and scales for the value `integers * scales` of a quantized dense weight.

        `outputs` is the shape of one number for each of its outputs. `None` where its values are no
        multiples of a scale.
        """

    @abc.abstractmethod
    def get_config(self) -> dict[str, Any]:
        """JSON values from which `from_config` makes an unbuilt clone."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "WeightQuantizer":
        """The reverse of `get_config`."""
        return cls(**config)

    def clone(self) -> "WeightQuantizer":
        """An unbuilt one with the same settings, for another weight."""
        return type(self).from_config(self.get_config())


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class FakeQuantization(WeightQuantizer):
    """Symmetric integers for each output channel `c`, in the range of the largest magnitude.

        q(w)[..., c] = s_c * round(w[..., c] / s_c),  s_c = max|w[..., c]| / L,  dL/dw = dL/dq

    with `L` = 127 for int8 and 7 for int4, the convention of LiteRT for weights: zero point 0, so
    that zeros stay zero. For `"ternary"` values are `-s_c`, 0 and `s_c`:

        q(w) = s_c * sign(w) where |w| > t_c, else 0;  t_c = 0.7 mean|w|, s_c = mean|w| above t_c

    with means over the live entries. A batch normalization behind the layer scales channels, so
    that folding it into the weight changes scales `s_c`, and integers by a sign at most.

    Args:
        dtype: `"int8"`, `"int4"` or `"ternary"`.

    Raises:
        ValueError: Another `dtype`.

    Limits: ranges follow the weights and are not learnt. The gradient does not know of rounding, so
    that few bits want a smaller learning rate than floats.

    Example:

    >>> import numpy as np, keras
    >>> from keras_sparse_ortho import FixedMask, PrunableLayer
    >>> dense = keras.layers.Dense(1, use_bias=False)
    >>> layer = PrunableLayer(dense, FixedMask(1.0), quantizer=FakeQuantization("int4"))
    >>> layer.build((None, 3))
    >>> dense.kernel.assign([[0.0], [0.9], [-1.75]]) is not None
    True
    >>> keras.ops.convert_to_numpy(layer(np.eye(3))).ravel().tolist()  # s = 1.75 / 7 = 0.25
    [0.0, 1.0, -1.75]

    References:

    - Jacob et al., "Quantization and Training of Neural Networks for Efficient
      Integer-Arithmetic-Only Inference" (CVPR 2018), arXiv 1712.05877
    - Li et al., "Ternary Weight Networks" (2016), arXiv 1605.04711
    """

    def __init__(self, dtype: str = "int8") -> None:
        if dtype not in LEVELS:
            raise ValueError(f"`dtype` must be one of {sorted(LEVELS)}. Received: {dtype=}")
        self.dtype = dtype

    def __call__(self, value: Any) -> Any:
        """`s * round(w / s)`."""
        ops, axes = keras.ops, axes_of(self._outputs)

        @ops.custom_gradient
        def quantized(w: Any) -> tuple[Any, Any]:
            wide = ops.cast(w, "float32")
            magnitude = ops.abs(wide)
            if self.dtype == "ternary":
                live = ops.cast(magnitude > 0, "float32")
                mean = _mean(magnitude, live, axes)
                kept = ops.cast(magnitude > _TERNARY_THRESHOLD * mean, "float32")
                result = ops.sign(wide) * kept * _mean(magnitude, kept, axes)
            else:
                scale = ops.max(magnitude, axis=axes, keepdims=True) / LEVELS[self.dtype]
                scale = ops.where(scale > 0, scale, ops.ones_like(scale))
                result = ops.round(wide / scale) * scale

            def gradient(*args: Any, upstream: Any = None) -> Any:
                return args[0] if upstream is None else upstream

            return ops.cast(result, w.dtype), gradient

        # TensorFlow takes a variable for one that the function captures.
        return quantized(ops.reshape(value, value.shape))

    def integers(
        self, value: np.ndarray, outputs: tuple[int, ...]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Integers, and one scale for each output."""
        value = np.asarray(value, np.float32)
        scale = np.abs(value).max(axis=axes_of(outputs), keepdims=True) / LEVELS[self.dtype]
        scale = np.where(scale > 0, scale, 1).astype(np.float32)
        return np.rint(value / scale).astype(np.int8), scale

    def get_config(self) -> dict[str, Any]:
        """The argument."""
        return {"dtype": self.dtype}


def axes_of(outputs: tuple[int, ...]) -> tuple[int, ...]:
    """The axes that are not of outputs."""
    return tuple(k for k, size in enumerate(outputs) if size == 1)


def _mean(value: Any, of: Any, axes: tuple[int, ...]) -> Any:
    """The mean over axes of the entries where `of` is 1, 0 where there are none."""
    ops = keras.ops
    count = ops.maximum(ops.sum(of, axis=axes, keepdims=True), 1.0)
    return ops.sum(value * of, axis=axes, keepdims=True) / count


def quantized_value(quantizer: WeightQuantizer | None, value: np.ndarray) -> np.ndarray:
    """An effective weight in NumPy as its quantizer, if there is one, gives it."""
    if quantizer is None:
        return value
    return to_numpy(quantizer(keras.ops.convert_to_tensor(value)))
