"""`FakeQuantization`: effective weights rounded to integers, with a straight-through gradient."""

from collections.abc import Sequence

import keras
import numpy as np

from keras_sparse_ortho._checks import other_keywords
from keras_sparse_ortho._gathers import with_gradient
from keras_sparse_ortho._keras_internals import restored
from keras_sparse_ortho._types import Config, Tensor

LEVELS = {"int8": 127, "int4": 7, "ternary": 1}
_TERNARY_THRESHOLD = 0.7  # smaller entries become 0
_GATES = 4  # of an LSTM, side by side on the last axis of its kernels
_SCALES = ("output", "kernel", "gate")


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
        per: `"output"` for a scale of each channel, `"kernel"` for one scale, or `"gate"` for one
            of each of an LSTM's four gates, which lie side by side on the last axis.

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
    def __init__(self, dtype: str = "int8", per: str = "output") -> None:
        if dtype not in LEVELS:
            dtypes = sorted(LEVELS)
            raise ValueError(
                f"`dtype` must be one of {dtypes}. Received: {dtype=}"
            )
        if per not in _SCALES:
            raise ValueError(
                f"`per` must be one of {list(_SCALES)}. Received: {per=}"
            )
        self.dtype = dtype
        self.per = per

    def __call__(self, value: Tensor, outputs: tuple[int, ...]) -> Tensor:
        """The quantized weight; `outputs` is the shape of one number for each output."""
        axes = self._axes(outputs)

        def rounded(w: Tensor) -> Tensor:
            shape = self._gated_shape(w.shape)
            weight = keras.ops.cast(w, "float32")
            weight = keras.ops.reshape(weight, shape)
            if self.dtype == "ternary":
                quantized = _ternary(weight, axes)
            else:
                quantized = self._integers(weight, axes)
            quantized = keras.ops.reshape(quantized, w.shape)
            return keras.ops.cast(quantized, w.dtype)

        def gradient(_: Tensor, upstream: Tensor) -> tuple[Tensor]:
            return (upstream,)

        return with_gradient(rounded, gradient, [value], [])

    def _integers(self, value: Tensor, axes: tuple[int, ...]) -> Tensor:
        """A float32 weight on the integers of each channel."""
        ops = keras.ops
        largest = ops.max(ops.abs(value), axis=axes, keepdims=True)
        scale = largest / LEVELS[self.dtype]
        scale = ops.where(scale > 0, scale, ops.ones_like(scale))
        integers = ops.round(value / scale)
        return integers * scale

    def integers(
        self, value: np.ndarray, outputs: tuple[int, ...]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The int8 integers of a weight in NumPy, and the scales, which broadcast to it."""
        value = np.asarray(value, np.float32)
        shape = self._gated_shape(value.shape)
        gated = value.reshape(shape)
        axes = self._axes(outputs)
        largest = np.max(np.abs(gated), axis=axes, keepdims=True)
        scale = largest / LEVELS[self.dtype]
        scale = np.where(scale > 0, scale, 1)
        scale = scale.astype(np.float32)
        integers = np.rint(gated / scale)
        integers = integers.reshape(value.shape)
        if self.per == "gate":
            units = shape[-1]
            scale = scale.reshape(1, _GATES)
            scale = np.repeat(scale, units, axis=-1)
        return integers.astype(np.int8), scale

    def _gated_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of a weight whose axes `_axes` counts: gates have an axis of their own."""
        if self.per != "gate":
            return tuple(shape)
        columns = shape[-1]
        if columns % _GATES:
            raise ValueError(
                f"A weight with per='gate' must have {_GATES} gates of equal size on its last "
                f"axis. Received: shape {tuple(shape)}"
            )
        units = columns // _GATES
        return (*shape[:-1], _GATES, units)

    def _axes(self, outputs: tuple[int, ...]) -> tuple[int, ...]:
        """The axes of a weight whose entries have one scale, in `_gated_shape`."""
        if self.per == "gate":
            return (*range(len(outputs) - 1), len(outputs))
        axes = []
        for axis, size in enumerate(outputs):
            if size == 1 or self.per == "kernel":
                axes.append(axis)
        return tuple(axes)

    def get_config(self) -> Config:
        return {"dtype": self.dtype, "per": self.per}

    @classmethod
    def from_config(cls, config: Config) -> "FakeQuantization":
        return cls(**config)


def _ternary(value: Tensor, axes: tuple[int, ...]) -> Tensor:
    """A float32 weight on three values in each channel."""
    ops = keras.ops
    magnitude = ops.abs(value)
    live = ops.cast(magnitude > 0, "float32")
    threshold = _TERNARY_THRESHOLD * _mean(magnitude, live, axes)
    is_above = ops.cast(magnitude > threshold, "float32")
    scale = _mean(magnitude, is_above, axes)
    return ops.sign(value) * is_above * scale


def _mean(value: Tensor, mask: Tensor, axes: tuple[int, ...]) -> Tensor:
    """The mean of the entries in a mask of ones and zeros, 0 where there are none."""
    ops = keras.ops
    count = ops.sum(mask, axis=axes, keepdims=True)
    total = ops.sum(value * mask, axis=axes, keepdims=True)
    divisor = ops.maximum(count, 1.0)
    return total / divisor


def checked_quantizer(quantizer: object) -> FakeQuantization:
    """A quantizer from itself or its configuration; raises ValueError for another value."""
    checked = quantizer
    if isinstance(quantizer, dict):
        checked = restored(quantizer)
    if isinstance(checked, FakeQuantization):
        return checked
    raise ValueError(
        "`quantizer` must be a FakeQuantization, such as FakeQuantization('int8'), or None. "
        f"Received: {quantizer=}"
    )
