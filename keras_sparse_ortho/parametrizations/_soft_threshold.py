"""Learnt thresholds (STR) of entries and of channels: `SoftThreshold`, `ChannelSoftThreshold`."""

import math

import keras
import numpy as np

from keras_sparse_ortho._checks import other_keywords
from keras_sparse_ortho._types import AddWeight, Tensor
from keras_sparse_ortho._values import assign, to_numpy
from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.parametrizations._learnt_threshold import (
    LearntThreshold,
    add_weight_decay,
)


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class SoftThreshold(LearntThreshold):
    """Effective weight `w_e = sign(w) * relu(|w| - t)` with the learnt threshold `t = g(s)`.

    Soft threshold reparameterization (STR): `s` is trained with the weights, so each layer finds
    its own density. Gradients are

        dL/dw = dL/dw_e where w_e is not 0, else 0
        dL/ds = -g'(s) * sum(dL/dw_e * sign(w_e))

    L2 shrinks weights and, as `s` is negative, raises thresholds, until the loss pushes back. The
    final density depends on its strength and `s_init`, or is that of `callbacks.TargetDensity`.

    Args:
        granularity: `"layer"`: one `s` for the weight; `"channel"`: one for each output; or
            `"global"`: one for all weights of the wrapper. To share it in a whole model, wrap the
            model: `PrunableLayer(model, SoftThreshold("global"))` is a layer for another model.
        g: `"sigmoid"` (the paper's), `"exp"` or `"softplus"`.
        s_init: float. Initial `s`. The more negative, the later thresholds rise; the paper uses
            -3200 and less for ResNet-50, where `g` is 0 in float32 and L2 alone moves `s`.
        weight_decay: float. Strength `lambda` of the L2 that is added to the loss, `lambda / 2 *
            (sum(w ** 2) + sum(s ** 2))`: the paper's. An optimizer's decoupled weight decay must
            act on `s` as well.

    Raises NotPrunableError, when built, for a weight that is not finite.

    Limits: `g` must reach the magnitudes to be pruned: a sigmoid is below 1. Live weights are
    biased towards 0 by `t`.

    Examples:
        >>> import keras, numpy as np, keras_sparse_ortho as kso
        >>> dense = keras.layers.Dense(1, use_bias=False)
        >>> layer = kso.PrunableLayer(dense, SoftThreshold(s_init=0.0))
        >>> layer.build((None, 3))
        >>> _ = dense.kernel.assign([[0.25], [1.5], [-2.0]])
        >>> keras.ops.convert_to_numpy(layer(np.eye(3))).ravel().tolist()  # t = sigmoid(0) = 0.5
        [0.0, 1.0, -1.5]

    Reference: Kusupati et al. (ICML 2020), arXiv 2002.03231.
    """

    settings = ("granularity", *LearntThreshold.settings)

    @other_keywords
    def __init__(
        self,
        granularity: str = "layer",
        g: str = "sigmoid",
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

    def build(
        self,
        weight: PrunableWeight,
        add_weight: AddWeight,
    ) -> None:
        shape: tuple[int, ...] = ()
        if self.granularity == "channel":
            shape = weight.outputs_shape
        is_shared = self.granularity == "global"
        self._build_threshold(weight, add_weight, shape, shared=is_shared)
        self._build_mask(add_weight, weight.shape)
        if self.weight_decay:
            add_weight_decay(weight.variable, self.weight_decay)

    def effective(self, value: Tensor) -> Tensor:
        return self._shrunk(value)

    def mask_value(self) -> np.ndarray:
        raw = keras.ops.convert_to_tensor(self.weight.variable)
        return to_numpy(self._shrunk(raw) != 0)

    def scales(self) -> np.ndarray:
        magnitudes = np.abs(self.weight.finite_raw_value())
        return magnitudes * to_numpy(self.frozen_mask)


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class ChannelSoftThreshold(LearntThreshold):
    """Effective weight `w_e = w * relu(n_c - t) / n_c` for every output channel `c`; `t = g(s)`.

    Structured STR: the soft threshold acts on the scale of a channel, its root mean square `n_c =
    sqrt(mean(w[..., c] ** 2))`: a channel of scale `t` or less is 0, and others shrink by `t`. One
    `s` is trained for the weight. With `G = dL/dw_e`, and `m` entries in each channel,

        dL/dw = a G + t / (m n_c^3) * sum_c(G w) * w,  a = 1 - t / n_c,  where n_c > t, else 0
        dL/ds = -g'(s) * sum over live channels of sum_c(G w) / n_c

    `keras_sparse_ortho.remove_channels` removes the dead channels. Thresholds are comparable across
    layers of any size, and with `SoftThreshold`, whose arguments it has.

    Limits: exclude layers whose outputs are all needed, such as the last one. With
    `callbacks.TargetDensity` the density is met to within one channel; a small one can remove all
    channels of a layer. In a recurrent layer a channel is one gate of a unit.

    Examples:
        >>> import keras, numpy as np, keras_sparse_ortho as kso
        >>> dense = keras.layers.Dense(2, use_bias=False)
        >>> layer = kso.PrunableLayer(dense, ChannelSoftThreshold(s_init=0.0))
        >>> layer.build((None, 2))
        >>> _ = dense.kernel.assign([[0.3, 4.0], [0.3, 4.0]])
        >>> keras.ops.convert_to_numpy(layer(np.eye(2))).tolist()  # t = sigmoid(0) = 0.5
        [[0.0, 3.5], [0.0, 3.5]]

    References: Kusupati et al. (ICML 2020), arXiv 2002.03231, section 4.3, for structured STR; Yuan
    and Lin (Journal of the Royal Statistical Society B 68, 2006), for groups.
    """

    _summed_axes: tuple[int, ...] = ()

    def build(
        self,
        weight: PrunableWeight,
        add_weight: AddWeight,
    ) -> None:
        self._build_threshold(weight, add_weight)
        shape = weight.outputs_shape
        self._build_mask(add_weight, shape)
        self.dies_at_once = weight.size // math.prod(shape)
        sizes = zip(weight.shape, shape, strict=True)
        self._summed_axes = tuple(
            axis
            for axis, (size, channels) in enumerate(sizes)
            if size != channels
        )
        if self.weight_decay:
            add_weight_decay(weight.variable, self.weight_decay)

    def effective(self, value: Tensor) -> Tensor:
        scale, live = self._scales(value)
        t = keras.ops.cast(self._threshold(), value.dtype)
        zero = keras.ops.zeros((), dtype=value.dtype)
        factor = keras.ops.where(live, 1 - t / scale, zero)
        return value * factor

    def mask_value(self) -> np.ndarray:
        return np.broadcast_to(self._live(), self.weight.shape)

    def live_channels(self) -> np.ndarray:
        return np.ravel(self._live())

    def _live(self) -> np.ndarray:
        raw = keras.ops.convert_to_tensor(self.weight.variable)
        _, live = self._scales(raw)
        return to_numpy(live)

    def scales(self) -> np.ndarray:
        """`n_c`, the same for all entries of a channel."""
        raw = self.weight.finite_raw_value()
        mean_square = np.mean(raw**2, axis=self._summed_axes, keepdims=True)
        scale = np.sqrt(mean_square) * to_numpy(self.frozen_mask)
        return np.broadcast_to(scale, self.weight.shape)

    def freeze(self, mask: np.ndarray) -> np.ndarray:
        variable = self.weight.variable
        value = to_numpy(self.effective(keras.ops.convert_to_tensor(variable)))
        live = np.mean(mask, axis=self._summed_axes, keepdims=True) >= 0.5
        is_zero = ~value.any(axis=self._summed_axes, keepdims=True)
        rounded_to_zero = live & is_zero
        value = np.where(rounded_to_zero, 1e-6 * self.weight.raw_value(), value)
        live_value = np.where(live, value, 0)
        assign(variable, live_value.astype(value.dtype))
        self._set_frozen(live)
        return np.broadcast_to(live, self.weight.shape)

    def _scales(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """The root mean square of every channel, 1 where that is 0, and which channels are live."""
        ops = keras.ops
        mean_square = ops.mean(
            ops.square(value), axis=self._summed_axes, keepdims=True
        )
        is_positive = mean_square > 0
        # The root has no derivative at 0, and a NaN would get through `where`.
        one = ops.ones((), dtype=value.dtype)
        scale = ops.sqrt(ops.where(is_positive, mean_square, one))
        threshold = ops.cast(self._threshold(), value.dtype)
        live = is_positive & (scale > threshold)
        return scale, ops.logical_and(live, self.frozen_mask.value)
