"""`SoftThreshold` and `ChannelSoftThreshold`: learnt thresholds of entries and channels (STR)."""

import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._other_names import other_keywords
from keras_sparse_ortho._values import assign, placed, to_numpy
from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.parametrizations._learnt_threshold import (
    STEERED,
    LearntThreshold,
    ThresholdFunction,
    add_weight_decay,
    shrink,
)


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class SoftThreshold(LearntThreshold):
    """Effective weight `w_e = sign(w) * relu(|w| - t)` with the learnt threshold `t = g(s)`.

    Soft threshold reparameterization (STR): `s` is trained with the weights, so each layer finds
    its own density. Gradients are

        dL/dw = dL/dw_e where w_e is not 0, else 0
        dL/ds = -g'(s) * sum(dL/dw_e * sign(w_e))

    As in the paper, L2 of the same strength acts on `w` and `s`: it shrinks weights and, as `s` is
    negative, raises thresholds, until the loss pushes back. On its own, the final density depends
    on the strength and `s_init`; `callbacks.TargetDensity` ends at a given density.

    Args:
        granularity: `"layer"`: one `s` for the weight; `"channel"`: one for each output; or
            `"global"`: one for all weights of the wrapper. To share it in a whole model, wrap the
            model: `PrunableLayer(model, SoftThreshold("global"))` is a layer for another model.
        g: `"sigmoid"` (the paper's), `"exp"` or `"softplus"`.
        s_init: Initial value of `s`. The more negative, the later thresholds rise; the paper uses
            -3200 and less for ResNet-50, where `g` is 0 in float32 and L2 alone moves `s`.
        weight_decay: Strength `lambda` of the L2 that is added to the loss, `lambda / 2 * (sum(w **
            2) + sum(s ** 2))`: the paper's coupled weight decay. Decoupled weight decay of the
            optimizer must act on `s` as well as on `w`.

    Raises:
        ValueError: An unknown granularity or function, a negative strength.
        NotPrunableError: When built, if the weight is not finite.

    Limits: `g` must reach the magnitudes to be pruned: a sigmoid is below 1. The live weights are
    biased towards 0 by `t`; the network learns to compensate.

    Example:

    >>> import keras, numpy as np
    >>> from keras_sparse_ortho import PrunableLayer
    >>> layer = PrunableLayer(keras.layers.Dense(1, use_bias=False), SoftThreshold(s_init=0.0))
    >>> layer.build((None, 3))
    >>> layer.layer.kernel.assign([[0.25], [1.5], [-2.0]]) is not None
    True
    >>> keras.ops.convert_to_numpy(layer(np.eye(3))).ravel().tolist()  # t = sigmoid(0) = 0.5
    [0.0, 1.0, -1.5]

    Reference:

    - Kusupati et al., "Soft Threshold Weight Reparameterization for Learnable Sparsity" (ICML
      2020), arXiv 2002.03231
    """

    @other_keywords(density=STEERED, sparsity=STEERED)
    def __init__(
        self,
        granularity: str = "layer",
        g: str | ThresholdFunction = "sigmoid",
        s_init: float = -8.0,
        weight_decay: float = 0.0,
    ) -> None:
        if granularity not in ("layer", "channel", "global"):
            raise ValueError(
                "`granularity` must be 'layer', 'channel' or 'global'. "
                f"Received: granularity={granularity!r}"
            )
        super().__init__(g, s_init, weight_decay)
        self.granularity = granularity

    def build(self, weight: PrunableWeight, add_weight: Callable[..., Any]) -> None:
        shape = weight.outputs_shape if self.granularity == "channel" else ()
        self._build_threshold(weight, add_weight, shape, shared=self.granularity == "global")
        if self.weight_decay:
            add_weight_decay(weight.variable, self.weight_decay)

    def effective(self, value: Any) -> Any:
        """`sign(w) * relu(|w| - t)`, exactly 0 where `|w| <= t`."""
        return shrink(value, keras.ops.cast(self._threshold(), value.dtype))

    def mask_value(self) -> np.ndarray:
        value = self.effective(keras.ops.convert_to_tensor(self.weight.variable))
        return to_numpy(value != 0)

    def arguments(self) -> dict[str, Any]:
        return {"granularity": self.granularity, **super().arguments()}

    def scales(self) -> np.ndarray:
        return np.abs(self.weight.finite_raw_value())

    def freeze(self, mask: np.ndarray) -> np.ndarray:
        """`w` becomes `w_e` on the mask and 0 elsewhere, `t` 0; from here on `w_e = w`."""
        ops, raw = keras.ops, keras.ops.convert_to_tensor(self.weight.variable)
        live, effective = placed(mask, self.weight.variable), self.effective(raw)
        dtype = keras.backend.standardize_dtype(raw.dtype)
        # By rounding, an entry of the mask may be 0: the smallest number keeps it live.
        tiny = np.finfo(np.float16 if dtype == "float16" else np.float32).tiny
        least = ops.sign(raw) * ops.cast(float(tiny), dtype)
        kept = ops.where(effective == 0, least, effective)
        assign(self.weight.variable, ops.where(live, kept, ops.zeros((), dtype=dtype)))
        assign(self.active, 0.0)
        return mask


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class ChannelSoftThreshold(LearntThreshold):
    """Effective weight `w_e = w * relu(n_c - t) / n_c` for every output channel `c`; `t = g(s)`.

    Structured STR: the soft threshold acts on the scale of a channel, its root mean square

        n_c = sqrt(mean(w[..., c] ** 2))

    so a channel of scale `t` or less is exactly 0 as a whole, and the others shrink by `t`. One `s`
    is trained for the weight. With `G = dL/dw_e`, and `m` entries in each channel,

        dL/dw = a G + t / (m n_c^3) * sum_c(G w) * w,  a = 1 - t / n_c,  where n_c > t, else 0
        dL/ds = -g'(s) * sum over live channels of sum_c(G w) / n_c

    `keras_sparse_ortho.remove_channels` then removes the dead channels from the model. Thresholds
    are comparable across layers of any size, and with `SoftThreshold`, whose arguments it has.

    Limits: exclude layers whose outputs are all needed, such as the last one. With
    `callbacks.TargetDensity` a channel counts with all its entries, and the density is met to
    within one channel; a small density can remove all channels of a layer. In a recurrent layer a
    channel is one gate of a unit.

    Example:

    >>> import keras, numpy as np
    >>> from keras_sparse_ortho import PrunableLayer
    >>> dense = keras.layers.Dense(2, use_bias=False)
    >>> layer = PrunableLayer(dense, ChannelSoftThreshold(s_init=0.0))
    >>> layer.build((None, 2))
    >>> dense.kernel.assign([[0.3, 4.0], [0.3, 4.0]]) is not None
    True
    >>> keras.ops.convert_to_numpy(layer(np.eye(2))).tolist()  # t = sigmoid(0) = 0.5
    [[0.0, 3.5], [0.0, 3.5]]

    References:

    - Kusupati et al. (ICML 2020), arXiv 2002.03231, section 4.3, for structured STR
    - Yuan and Lin (Journal of the Royal Statistical Society B 68, 2006), for groups
    """

    @other_keywords(density=STEERED, sparsity=STEERED)
    def __init__(
        self,
        g: str | ThresholdFunction = "sigmoid",
        s_init: float = -8.0,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(g, s_init, weight_decay)
        self._summed: tuple[int, ...] = ()

    def build(self, weight: PrunableWeight, add_weight: Callable[..., Any]) -> None:
        self._build_threshold(weight, add_weight)
        one = weight.outputs_shape
        self._summed = tuple(k for k, size in enumerate(weight.shape) if size != one[k])
        if self.weight_decay:
            add_weight_decay(weight.variable, self.weight_decay)

    def effective(self, value: Any) -> Any:
        """`w * relu(n_c - t) / n_c`, exactly 0 in channels with `n_c <= t`."""
        scale, live = self._scales(value)
        t = keras.ops.cast(self._threshold(), value.dtype)
        shrunk = keras.ops.where(live, 1 - t / scale, keras.ops.zeros((), dtype=value.dtype))
        return value * shrunk

    def mask_value(self) -> np.ndarray:
        _, live = self._scales(keras.ops.convert_to_tensor(self.weight.variable))
        return np.broadcast_to(to_numpy(live), self.weight.shape)

    def live_channels(self) -> np.ndarray:
        """Which channels are live now, in order."""
        _, live = self._scales(keras.ops.convert_to_tensor(self.weight.variable))
        return np.ravel(to_numpy(live))

    @property
    def dies_at_once(self) -> int:
        return self.weight.size // math.prod(self.weight.outputs_shape)

    def scales(self) -> np.ndarray:
        """`n_c`, the same for all entries of a channel."""
        raw = self.weight.finite_raw_value()
        scale = np.sqrt(np.mean(raw**2, axis=self._summed, keepdims=True))
        return np.broadcast_to(scale, self.weight.shape)

    def freeze(self, mask: np.ndarray) -> np.ndarray:
        """Fixes which channels are live: those with at least half of their entries in the mask."""
        raw = self.weight.variable
        value = to_numpy(self.effective(keras.ops.convert_to_tensor(raw)))
        live = np.mean(mask, axis=self._summed, keepdims=True) >= 0.5
        # By rounding, a live channel may be 0: it stays, much smaller.
        faint = live & ~value.any(axis=self._summed, keepdims=True)
        value = np.where(faint, 1e-6 * self.weight.raw_value(), value)
        assign(raw, np.where(live, value, 0).astype(value.dtype))
        assign(self.active, 0.0)
        return np.broadcast_to(live, self.weight.shape)

    def _scales(self, value: Any) -> tuple[Any, Any]:
        """The root mean square of every channel, 1 where that is 0, and which channels are live."""
        ops = keras.ops
        squares = ops.mean(ops.square(value), axis=self._summed, keepdims=True)
        # The root has no derivative at 0, and a NaN would get through `where`.
        scale = ops.sqrt(ops.where(squares > 0, squares, ops.ones((), dtype=value.dtype)))
        live = (squares > 0) & (scale > ops.cast(self._threshold(), value.dtype))
        return scale, live
