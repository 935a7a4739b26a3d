"""`Palette`: a kernel of few shared values, learnt by clustering with gradients."""

import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._checks import check_integer
from keras_sparse_ortho._gathers import if_compiled_for_cpus
from keras_sparse_ortho._keras_internals import in_stateless_scope
from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.parametrizations._weight_quantizer import WeightQuantizer

_ROUNDS = 20  # of k-means
_LEVELS = 127
_MOST = 256  # what an index of eight bits can name
_ROW = 1024  # entries whose sums for all values stay in a core's cache


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class Palette(WeightQuantizer):
    """Each weight is the nearest of `k` values, one of which is 0 and the others are trained.

        q(w) = c_j with the least |w - c_j|;  dL/dw = dL/dq,  dL/dc_j = sum of dL/dq over those at j

    The values, one set for a kernel, start from k-means over its live entries. Weights move
    meanwhile and may change to another value, as in TFMOT's clustering; zeros stay 0, as in its
    sparsity-preserving one. A kernel needs `log2(k)` bits an entry before entropy coding.

    Args:
        size: `k`, with the zero, from 3 to 256.
        dtype: `"int8"`: values are multiples of `max|c| / 127`, so that an int8 file holds the
            same palette (TFMOT's PCQAT); or `None`.

    Raises:
        ValueError: Another `dtype`, a size that is not from 3 to 256.

    Limits: time and, in training, operations grow with `k`; with `k` above 32 use
    `FakeQuantization("int8")`. In compact storage and on live blocks live entries alone are
    compared; masked, a step of wide Dense layers takes up to 1.5 times as long. Files are smaller
    where what stores them codes entropy: zip, Vela.

    Example:

    >>> import keras, numpy as np
    >>> from keras_sparse_ortho import PrunableLayer
    >>> from keras_sparse_ortho.parametrizations import FixedMask
    >>> layer = PrunableLayer(keras.layers.Dense(64), FixedMask(0.5), quantizer=Palette(4))
    >>> layer.build((None, 64))
    >>> len(np.unique(layer.prunable_weights[0].value))
    4

    References:

    - Han, Mao and Dally, "Deep Compression" (ICLR 2016), arXiv 1510.00149
    """

    entry_by_entry = True

    def __init__(self, size: int = 16, dtype: str | None = None) -> None:
        self.size = check_integer("size", size)
        if not 3 <= self.size <= _MOST:
            raise ValueError(
                f"`size` must be 3 or more, the zero included, and at most {_MOST}. "
                f"Received: {size=}"
            )
        if dtype not in ("int8", None):
            raise ValueError(f"`dtype` must be 'int8' or None. Received: {dtype=}")
        self.dtype = dtype
        self.palette: Any = None

    def build(
        self,
        outputs: tuple[int, ...],
        add_weight: Callable[..., Any],
        value: Callable[[], np.ndarray],
    ) -> None:
        """Creates the values, clustered."""
        super().build(outputs, add_weight, value)

        def initial(shape: tuple[int, ...], dtype: Any = None) -> Any:
            if in_stateless_scope():  # only shapes are traced
                return keras.ops.zeros(shape, dtype=dtype)
            return keras.ops.convert_to_tensor(_clustered(value(), self.size - 1), dtype=dtype)

        self.palette = add_weight(
            name="palette", shape=(self.size - 1,), initializer=initial, trainable=True
        )

    @property
    def variables(self) -> list[Any]:
        """The values but for the zero."""
        return [self.palette]

    def __call__(self, value: Any) -> Any:
        """The nearest values."""
        ops = keras.ops

        @ops.custom_gradient
        def nearest(w: Any, palette: Any) -> tuple[Any, Any]:
            wide, own = ops.cast(w, "float32"), ops.cast(palette, "float32")
            if self.dtype is not None:
                scale = ops.max(ops.abs(own)) / _LEVELS
                scale = ops.where(scale > 0, scale, ops.ones_like(scale))
                own = ops.round(own / scale) * scale
            every = ops.concatenate([ops.zeros((1,), "float32"), own])
            order = ops.argsort(every)
            ordered = ops.take(every, order)
            middles = (ordered[1:] + ordered[:-1]) / 2
            result = ops.zeros_like(wide) + ordered[0]
            for k in range(self.size - 1):
                result = ops.where(wide > middles[k], ordered[k + 1], result)

            def gradient(*args: Any, upstream: Any = None) -> tuple[Any, Any]:
                if upstream is None:
                    (upstream,) = args
                # Of masked entries the values get nothing, as these are 0.
                g = ops.cast(upstream, "float32")
                above = if_compiled_for_cpus(_sums_above_by_row, _sums_above, wide, g, middles)
                total = ops.reshape(ops.sum(g), (1,))
                of_value = ops.concatenate([total, above]) - ops.pad(above, (0, 1))
                back = ops.argsort(order)
                return upstream, ops.cast(ops.take(of_value, back)[1:], palette.dtype)

            return ops.cast(result, w.dtype), gradient

        # TensorFlow takes a variable for one that the function captures.
        return nearest(ops.reshape(value, value.shape), ops.reshape(self.palette, (-1,)))

    def integers(
        self, value: np.ndarray, outputs: tuple[int, ...]
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Integers, and one scale for the kernel; `None` without `dtype`."""
        if self.dtype is None:
            return None
        scale = np.float32(np.abs(to_numpy(self.palette)).max()) / np.float32(_LEVELS)
        scale = scale if scale > 0 else np.float32(1)
        one = np.full([1] * value.ndim, scale, np.float32)
        return np.rint(np.asarray(value, np.float32) / one).astype(np.int8), one

    def get_config(self) -> dict[str, Any]:
        """The arguments."""
        return {"size": self.size, "dtype": self.dtype}


def _sums_above(w: Any, g: Any, bounds: Any) -> Any:
    """The sum of `g` where `w` is above each bound."""
    ops = keras.ops
    zero = ops.zeros_like(g)
    return ops.stack([ops.sum(ops.where(w > bounds[k], g, zero)) for k in range(bounds.shape[0])])


def _sums_above_by_row(w: Any, g: Any, bounds: Any) -> Any:
    """The same in one pass: XLA makes a pass for each sum, and adds its terms one by one."""
    ops, size = keras.ops, math.prod(w.shape)
    row = min(_ROW, size)
    rows = -(-size // row)
    missing = rows * row - size
    w, g = (
        ops.reshape(ops.pad(ops.reshape(one, (-1,)), (0, missing)), (rows, row)) for one in (w, g)
    )
    bounds, zero = ops.reshape(bounds, (-1, 1)), ops.zeros((), "float32")

    def add_row(k: Any, sums: Any) -> Any:
        return sums + ops.where(w[k] > bounds, g[k], zero)

    sums = ops.zeros((bounds.shape[0], row), "float32")
    return ops.sum(ops.fori_loop(0, rows, add_row, sums), axis=1)


def _clustered(value: np.ndarray, count: int) -> np.ndarray:
    """The centers of k-means over the entries that are not 0, from their quantiles on."""
    live = np.sort(value[value != 0].astype(np.float64), axis=None)
    if not live.size:
        return np.zeros(count)
    centers = np.quantile(live, (np.arange(count) + 0.5) / count)
    sums = np.concatenate([[0.0], np.cumsum(live)])
    for _ in range(_ROUNDS):
        ends = np.searchsorted(live, (centers[1:] + centers[:-1]) / 2)
        bounds = np.concatenate([[0], ends, [live.size]])
        counts = np.diff(bounds)
        means = np.diff(sums[bounds]) / np.maximum(counts, 1)
        centers = np.where(counts > 0, means, centers)
    return centers
