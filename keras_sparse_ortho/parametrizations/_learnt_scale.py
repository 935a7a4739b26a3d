"""`LearntScale`: integers whose scales are trained, one for each output."""

import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._keras_internals import in_stateless_scope
from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.parametrizations._weight_quantizer import LEVELS, WeightQuantizer, axes_of

_LEAST = 1e-8  # of a scale at the start, where a channel has no live entry
_SHARES = np.geomspace(1.0, 0.1, 25)  # of the largest magnitude, at which entries may be clipped


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class LearntScale(WeightQuantizer):
    """Symmetric integers for each output channel `c`, with scales that are trained.

        q(w)[..., c] = s_c * clip(round(w[..., c] / s_c), -L, L),  s_c = exp(t_c)

    with `L` = 127 for int8, 7 for int4 and 1 for ternary weights. `FakeQuantization` lets the
    largest entry of a channel set its scale; here few large entries may be clipped, so that the
    others have finer steps. Gradients go straight through where nothing is clipped, and are those
    of learned step sizes:

        dL/dw = dL/dq where |w / s| < L, else 0
        dL/dt_c = s_c / sqrt(n_c L) * sum dL/dq * (q / s - w / s where |w / s| < L, else q / s)

    with `n_c` live entries. Logarithms are trained, not the scales: one step of Adam changes each
    by the same share. A scale starts where the sum of `(q - w)^2` over its channel is least.

    Args:
        dtype: `"int8"`, `"int4"` or `"ternary"`.

    Raises:
        ValueError: Another `dtype`.

    Limits: with int8 hardly anything is clipped, and `FakeQuantization` is as good. In a few epochs
    from a trained network neither is always the better one (`benchmarks/results/quantized.md`).

    Example:

    >>> import numpy as np, keras
    >>> from keras_sparse_ortho import FixedMask, PrunableLayer
    >>> dense = keras.layers.Dense(1, use_bias=False)
    >>> layer = PrunableLayer(dense, FixedMask(1.0), quantizer=LearntScale("int4"))
    >>> layer.build((None, 3))
    >>> dense.kernel.assign([[0.0], [0.9], [-4.0]]) is not None
    True
    >>> layer.parametrizations["kernel"].quantizer.log_scale.assign([[np.log(0.25)]]) is not None
    True
    >>> keras.ops.convert_to_numpy(layer(np.eye(3))).ravel().tolist()  # -4 is clipped
    [0.0, 1.0, -1.75]

    References:

    - Esser et al., "Learned Step Size Quantization" (ICLR 2020), arXiv 1902.08153
    - Jain et al., "Trained Quantization Thresholds" (MLSys 2020), arXiv 1903.08066
    """

    def __init__(self, dtype: str = "int4") -> None:
        if dtype not in LEVELS:
            raise ValueError(f"`dtype` must be one of {sorted(LEVELS)}. Received: {dtype=}")
        self.dtype = dtype
        self.log_scale: Any = None

    def build(
        self,
        outputs: tuple[int, ...],
        add_weight: Callable[..., Any],
        value: Callable[[], np.ndarray],
    ) -> None:
        """Creates the scales."""
        super().build(outputs, add_weight, value)

        def initial(shape: tuple[int, ...], dtype: Any = None) -> Any:
            if in_stateless_scope():  # only shapes are traced
                return keras.ops.zeros(shape, dtype=dtype)
            scale = _nearest(value(), axes_of(outputs), LEVELS[self.dtype])
            return keras.ops.convert_to_tensor(np.log(scale), dtype=dtype)

        settings = {"dtype": "float32", "autocast": False, "trainable": True}
        self.log_scale = add_weight(
            name="log_scale", shape=outputs, initializer=initial, **settings
        )

    @property
    def variables(self) -> list[Any]:
        """The logarithms of the scales."""
        return [self.log_scale]

    def __call__(self, value: Any) -> Any:
        """`s * clip(round(w / s), -L, L)`."""
        ops, axes, most = keras.ops, axes_of(self._outputs), LEVELS[self.dtype]

        @ops.custom_gradient
        def quantized(w: Any, log_scale: Any) -> tuple[Any, Any]:
            scale = ops.exp(ops.cast(log_scale, "float32"))
            steps = ops.cast(w, "float32") / scale
            integers = ops.round(ops.clip(steps, -most, most))

            def gradient(*args: Any, upstream: Any = None) -> tuple[Any, Any]:
                if upstream is None:
                    (upstream,) = args
                g = ops.cast(upstream, "float32")
                inside = ops.abs(steps) < most
                live = ops.sum(ops.cast(steps != 0, "float32"), axis=axes, keepdims=True)
                of_scale = g * ops.where(inside, integers - steps, integers)
                of_scale = ops.sum(of_scale, axis=axes, keepdims=True)
                of_scale = of_scale * scale / ops.sqrt(ops.maximum(live, 1.0) * most)
                of_weight = ops.where(inside, g, ops.zeros_like(g))
                return ops.cast(of_weight, w.dtype), ops.cast(of_scale, log_scale.dtype)

            return ops.cast(integers * scale, w.dtype), gradient

        # TensorFlow takes a variable for one that the function captures.
        shape = self.log_scale.shape
        return quantized(ops.reshape(value, value.shape), ops.reshape(self.log_scale, shape))

    def integers(
        self, value: np.ndarray, outputs: tuple[int, ...]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Integers, and one scale for each output."""
        # Of live blocks there may be more outputs, for padding.
        count = math.prod(outputs)
        scale = np.exp(to_numpy(self.log_scale)).reshape(-1)[:count].reshape(outputs)
        return np.rint(np.asarray(value, np.float32) / scale).astype(np.int8), scale

    def get_config(self) -> dict[str, Any]:
        """The argument."""
        return {"dtype": self.dtype}


def _nearest(value: np.ndarray, axes: tuple[int, ...], most: int) -> np.ndarray:
    """The scales with which rounded values are nearest to values."""
    value = np.asarray(value, np.float32)
    largest = np.maximum(np.abs(value).max(axes, keepdims=True) / most, _LEAST)
    best, least = largest, np.full(largest.shape, np.inf)
    for share in _SHARES:
        scale = share * largest
        rounded = np.clip(np.rint(value / scale), -most, most) * scale
        error = np.square(rounded - value).sum(axes, keepdims=True)
        best, least = np.where(error < least, scale, best), np.minimum(error, least)
    return best
