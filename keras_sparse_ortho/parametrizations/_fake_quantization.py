"""`FakeQuantization`: effective weights rounded to integers, with a straight-through gradient."""

from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._checks import other_keywords
from keras_sparse_ortho._gathers import with_gradient
from keras_sparse_ortho._keras_internals import restored
from keras_sparse_ortho._types import Config

LEVELS = {"int8": 127, "int4": 7, "ternary": 1}
_TERNARY_THRESHOLD = 0.7  # smaller entries become 0


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class FakeQuantization:
    """Symmetric integers for each output channel `c`, in the range of the largest magnitude.

        q(w)[..., c] = s_c * round(w[..., c] / s_c),  s_c = max|w[..., c]| / L,  dL/dw = dL/dq

    with `L` = 127 for int8 and 7 for int4, as in LiteRT: zero point 0, so zeros stay zero. For
    `"ternary"` values are `-s_c`, 0 and `s_c`:

        q(w) = s_c * sign(w) where |w| > t_c, else 0;  t_c = 0.7 mean|w|, s_c = mean|w| above t_c

    with means over the live entries. `w` is the effective weight of any storage. Folding a batch
    normalization into the layer changes scales `s_c`, and integers by a sign at most.

    Args:
        dtype: `"int8"`, `"int4"` or `"ternary"`.

    Limits: ranges are not learnt. The gradient ignores rounding: few bits need a smaller learning
    rate than floats.

    Examples:
        >>> import numpy as np, keras
        >>> from keras_sparse_ortho import FixedMask, PrunableLayer
        >>> dense = keras.layers.Dense(1, use_bias=False)
        >>> layer = PrunableLayer(dense, FixedMask(1.0), quantizer=FakeQuantization("int4"))
        >>> layer.build((None, 3))
        >>> _ = dense.kernel.assign([[0.0], [0.9], [-1.75]])
        >>> keras.ops.convert_to_numpy(layer(np.eye(3))).ravel().tolist()  # s = 1.75 / 7 = 0.25
        [0.0, 1.0, -1.75]

    References: Jacob et al. (CVPR 2018), arXiv 1712.05877; Li et al. (2016), arXiv 1605.04711.
    """

    @other_keywords
    def __init__(self, dtype: str = "int8") -> None:
        if dtype not in LEVELS:
            raise ValueError(f"`dtype` must be one of {sorted(LEVELS)}. Received: {dtype=}")
        self.dtype = dtype

    def __call__(self, value: Any, outputs: tuple[int, ...]) -> Any:
        """The quantized weight; `outputs` is the shape of one number for each output."""
        ops, axes = keras.ops, _axes(outputs)

        def quantized(w: Any) -> Any:
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
            return ops.cast(result, w.dtype)

        return with_gradient(quantized, lambda _, upstream: (upstream,), [value], [])

    def integers(
        self, value: np.ndarray, outputs: tuple[int, ...]
    ) -> tuple[np.ndarray, np.ndarray]:
        value = np.asarray(value, np.float32)
        scale = np.abs(value).max(axis=_axes(outputs), keepdims=True) / LEVELS[self.dtype]
        scale = np.where(scale > 0, scale, 1).astype(np.float32)
        return np.rint(value / scale).astype(np.int8), scale

    def get_config(self) -> Config:
        return {"dtype": self.dtype}

    @classmethod
    def from_config(cls, config: Config) -> "FakeQuantization":
        return cls(**config)


def _axes(outputs: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(k for k, size in enumerate(outputs) if size == 1)


def _mean(value: Any, of: Any, axes: tuple[int, ...]) -> Any:
    ops = keras.ops
    count = ops.maximum(ops.sum(of, axis=axes, keepdims=True), 1.0)
    return ops.sum(value * of, axis=axes, keepdims=True) / count


def checked_quantizer(quantizer: Any) -> FakeQuantization:
    found = restored(quantizer) if isinstance(quantizer, dict) else quantizer
    if isinstance(found, FakeQuantization):
        return found
    raise ValueError(
        "`quantizer` must be a FakeQuantization, such as FakeQuantization('int8'), or None. "
        f"Received: {quantizer=}"
    )
