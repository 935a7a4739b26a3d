"""`ChannelSoftThreshold`: learnt thresholds for whole channels (structured STR)."""

import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._values import assign, to_numpy
from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.parametrizations._learnt_threshold import LearntThreshold
from keras_sparse_ortho.parametrizations._regularization import add_weight_decay
from keras_sparse_ortho.parametrizations._threshold_functions import ThresholdFunction


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class ChannelSoftThreshold(LearntThreshold):
    """Effective weight `w_e = w * relu(n_c - t) / n_c` for every output channel `c`; `t = g(s)`.

    Structured STR: the soft threshold acts on the scale of a channel, its root mean square

        n_c = sqrt(mean(w[..., c] ** 2))

    so that a channel of scale `t` or less is exactly 0 as a whole, and the others shrink by `t`.
    One `s` is trained for the weight. With `G = dL/dw_e`, and `m` entries in each channel,

        dL/dw = a G + t / (m n_c^3) * sum_c(G w) * w,  a = 1 - t / n_c,  where n_c > t, else 0
        dL/ds = -g'(s) * sum over live channels of sum_c(G w) / n_c

    `keras_sparse_ortho.remove_channels` then takes the dead channels out of the model. As the scale
    is a mean, thresholds of layers of any size compare, and with those of `SoftThreshold`.

    Args:
        g: `"sigmoid"`, `"exp"`, `"softplus"`, or a `ThresholdFunction`.
        s_init: What `s` starts from. The more negative, the later thresholds rise.
        weight_decay: Strength `lambda` of the L2 that is added to the loss,
            `lambda / 2 * (sum(w ** 2) + sum(s ** 2))`, as of `SoftThreshold`.

    Raises:
        ValueError: An unknown function, a negative strength.
        NotPrunableError: When built, if the weight is not finite.

    Limits: leave out layers whose outputs must all be there, such as the last one
    (`exclude="head"`). With `callbacks.TargetDensity` a channel counts with all its entries, and
    the density is met to within one channel; nothing keeps a small density from taking all
    channels of a layer. In a recurrent layer a channel is one gate of a unit.

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

    - Kusupati et al., "Soft Threshold Weight Reparameterization for Learnable Sparsity" (ICML
      2020), arXiv 2002.03231, section 4.3, for structured STR
    - Yuan and Lin, "Model selection and estimation in regression with grouped variables" (Journal
      of the Royal Statistical Society B 68, 2006), for the soft threshold of groups
    """

    def __init__(
        self,
        g: str | ThresholdFunction = "sigmoid",
        s_init: float = -8.0,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(g, s_init, weight_decay)
        self._summed: tuple[int, ...] = ()

    def build(self, weight: PrunableWeight, add_weight: Callable[..., Any]) -> None:
        """Creates `s`, and the offset and switch by which `TargetDensity` steers it."""
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
        """Which entries are in channels that live at the moment."""
        _, live = self._scales(keras.ops.convert_to_tensor(self.weight.variable))
        return np.broadcast_to(to_numpy(live), self.weight.shape)

    def live_channels(self) -> np.ndarray:
        """Which channels live at the moment, in order."""
        _, live = self._scales(keras.ops.convert_to_tensor(self.weight.variable))
        return np.ravel(to_numpy(live))

    @property
    def dies_at_once(self) -> int:
        """The entries of a channel."""
        return self.weight.size // math.prod(self.weight.outputs_shape)

    def critical_offsets(self) -> np.ndarray:
        """For every entry `g^-1(n_c) - s`, the same for all entries of a channel."""
        raw = self.weight.finite_raw_value()
        scale = np.sqrt(np.mean(raw**2, axis=self._summed, keepdims=True))
        offsets = self._function.inverse(scale) - to_numpy(self.s)
        return np.broadcast_to(offsets, self.weight.shape)

    def freeze(self, mask: np.ndarray) -> np.ndarray:
        """Fixes which channels are live: those with at least half of their entries in the mask."""
        raw = self.weight.variable
        value = to_numpy(self.effective(keras.ops.convert_to_tensor(raw)))
        live = np.mean(mask, axis=self._summed, keepdims=True) >= 0.5
        # Within rounding of the threshold a live channel may be 0: it stays, much smaller.
        faint = live & ~value.any(axis=self._summed, keepdims=True)
        value = np.where(faint, 1e-6 * self.weight.raw_value(), value)
        assign(raw, np.where(live, value, 0).astype(value.dtype))
        assign(self.active, 0.0)
        return np.broadcast_to(live, self.weight.shape)

    def _scales(self, value: Any) -> tuple[Any, Any]:
        """The root mean square of every channel, 1 where that is 0, and which channels live."""
        ops = keras.ops
        squares = ops.mean(ops.square(value), axis=self._summed, keepdims=True)
        # The root has no derivative at 0, and a NaN would get through `where`.
        scale = ops.sqrt(ops.where(squares > 0, squares, ops.ones((), dtype=value.dtype)))
        live = (squares > 0) & (scale > ops.cast(self._threshold(), value.dtype))
        return scale, live
