"""Learnt thresholds (STR): `SoftThreshold`, `ChannelSoftThreshold`, and `LearntThreshold`."""

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

import keras
import numpy as np

from keras_sparse_ortho._checks import check_number, other_keywords
from keras_sparse_ortho._gathers import with_gradient
from keras_sparse_ortho._values import assign, placed, to_numpy
from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.parametrizations._parametrization import Parametrization


def _logit(magnitude: np.ndarray) -> np.ndarray:
    inside = np.minimum(magnitude, 1)
    return np.log(inside) - np.log1p(-inside)


def _inverse_softplus(magnitude: np.ndarray) -> np.ndarray:
    # log(e^x - 1) = x + log(1 - e^-x), which does not overflow.
    return magnitude + np.log(-np.expm1(-magnitude))


# Increasing functions `g` from the reals to thresholds `>= 0`, with their inverses in NumPy: `-inf`
# for 0, and `inf` for magnitudes that no threshold reaches.
_FUNCTIONS: dict[str, tuple[Any, Callable[[np.ndarray], np.ndarray]]] = {
    "sigmoid": (keras.ops.sigmoid, _logit),
    "exp": (keras.ops.exp, np.log),
    "softplus": (keras.ops.softplus, _inverse_softplus),
}


def critical_offsets(g: str, scales: np.ndarray, s: np.ndarray) -> np.ndarray:
    """`g^-1(scale) - s` in float64; NaN where `s` is not finite."""
    s = np.where(np.isfinite(s), np.asarray(s, np.float64), np.nan)
    with np.errstate(divide="ignore"):
        return np.asarray(_FUNCTIONS[g][1](scales.astype(np.float64)) - s)


def shrink(value: Any, threshold: Any) -> Any:
    """`sign(w) * relu(|w| - t)`, `t` a scalar or of the rank of `w`."""
    # Its own gradients keep fewer arrays than automatic ones.
    ops = keras.ops
    axes = [k for k, size in enumerate(threshold.shape) if size != value.shape[k]]

    def shrunk(w: Any, t: Any) -> Any:
        # As a difference, which is 0 for w = t = 0: an entry frozen at 0 gets no gradient.
        return w - ops.clip(w, -t, t)

    def gradient(w: Any, t: Any, upstream: Any) -> tuple[Any, Any]:
        effective = shrunk(w, t)
        live = ops.where(effective != 0, upstream, ops.zeros((), dtype=w.dtype))
        terms = upstream * ops.sign(effective)
        if len(t.shape) > 0:
            return live, -ops.sum(terms, axis=axes, keepdims=True)
        # In two steps: on CPUs XLA is slow to sum to a scalar, and makes one step of two sums.
        columns = ops.sum(ops.reshape(terms, (-1, terms.shape[-1])), axis=0)
        return live, -ops.dot(columns, ops.ones_like(columns))

    return with_gradient(shrunk, gradient, [value, threshold], [])


class _Sum(keras.regularizers.Regularizer):  # Keras 3.11 accepts no other callables
    def __init__(self, first: Any, second: Any) -> None:
        self._terms = (first, second)

    def __call__(self, value: Any) -> Any:
        return self._terms[0](value) + self._terms[1](value)


def add_weight_decay(variable: Any, strength: float) -> None:
    """Adds `strength / 2 * sum(variable ** 2)` to the loss, beside another regularizer."""
    decay = keras.regularizers.L2(strength / 2)
    own = variable.regularizer
    variable.regularizer = decay if own is None else _Sum(own, decay)


class LearntThreshold(Parametrization):
    """A threshold `t = g(s)` with a trainable `s`, which `callbacks.TargetDensity` can steer.

    While steered `t = g(s + offset)`, and 0 once frozen. From then on a mask keeps dead entries at
    0: optimizers that the callback does not know still have moments for these. Subclasses define
    `effective`, `scales`, `freeze` and what counts (`counted`). The arguments are those of
    `SoftThreshold`.
    """

    counted = "entries"
    dies_at_once = 1  # entries that die together
    steered: Any = None  # the variable whose entries are compared with the threshold
    settings: ClassVar[tuple[str, ...]] = ("g", "s_init", "weight_decay")

    @other_keywords
    def __init__(self, g: str = "sigmoid", s_init: float = -8.0, weight_decay: float = 0.0) -> None:
        self.g = g
        self.s_init = check_number("s_init", s_init)
        self.weight_decay = check_number("weight_decay", weight_decay)
        if self.weight_decay < 0:
            raise ValueError(f"`weight_decay` must not be negative. Received: {weight_decay=}")
        if not isinstance(g, str) or g not in _FUNCTIONS:
            raise ValueError(f"`g` must be one of {sorted(_FUNCTIONS)}. Received: g={g!r}")

    def _build_threshold(
        self,
        weight: PrunableWeight,
        add_weight: Callable[..., Any],
        shape: tuple[int, ...] = (),
        shared: bool = False,
    ) -> None:
        """Creates `s`, and the offset and switch by which `TargetDensity` steers it.

        Args:
            weight: PrunableWeight.
            add_weight: callable. That of the wrapper.
            shape: tuple of int. That of `s`.
            shared: bool. Whether all weights of the wrapper have one `s`.
        """
        weight.finite_raw_value()
        self._weight = dataclasses.replace(weight, drawn_mask=None)
        self.steered = weight.variable
        self.s = add_weight(
            name="s",
            shared=shared,
            shape=shape,
            initializer=keras.initializers.Constant(self.s_init),
            trainable=True,
        )
        if not shared:
            # The threshold of a frozen kernel would change what its layer computes.
            self.s.trainable = weight.variable.trainable
        self.offset = add_weight(name="s_offset", shape=(), initializer="zeros", trainable=False)
        self.active = add_weight(name="s_active", shape=(), initializer="ones", trainable=False)
        # The density of TargetDensity, 0 without one; and 1 if it freezes the live entries.
        self._target = add_weight(name="s_target", shape=(2,), initializer="zeros", trainable=False)
        if self.weight_decay and self.s.regularizer is None:  # a shared one decays once
            add_weight_decay(self.s, self.weight_decay)

    def _build_mask(self, add_weight: Callable[..., Any], shape: tuple[int, ...]) -> None:
        """Creates the mask of live entries once frozen; its shape broadcasts to `steered`."""
        self.frozen_mask = add_weight(
            name="s_mask", shape=shape, dtype="bool", initializer="ones", trainable=False
        )

    def _where_live(self, value: Any) -> Any:
        """`value` with the entries at 0 that were dead when the threshold was frozen."""
        zero = keras.ops.zeros((), dtype=value.dtype)
        return keras.ops.where(self.frozen_mask.value, value, zero)

    def _set_frozen(self, mask: Any) -> None:
        assign(self.frozen_mask, mask)
        assign(self.active, 0.0)

    def support(self) -> list[Any]:
        return [self.frozen_mask]

    def clear_dead(self) -> None:
        assign(self.steered, self._where_live(self.steered.value))

    def _threshold(self) -> Any:
        t = _FUNCTIONS[self.g][0](self.s.value + self.offset.value)
        # Unlike a product: 0 for an inactive threshold even where g overflows.
        return keras.ops.where(self.active.value > 0, t, keras.ops.zeros((), dtype=t.dtype))

    def threshold_value(self) -> np.ndarray:
        return np.ravel(to_numpy(self._threshold()))

    @property
    def is_trained(self) -> bool:
        return bool((to_numpy(self.s) != np.float32(self.s_init)).any())

    @property
    def frozen(self) -> bool:
        return not float(to_numpy(self.active))

    def aim(self, density: float, freeze: bool) -> None:
        """Stores the density of `TargetDensity`, and whether live entries will be fixed there."""
        assign(self._target, np.array([density, freeze], np.float32))

    @property
    def target_density(self) -> float | None:
        """The density asked for, of all steered weights together; `None` without one."""
        density = to_numpy(self._target)[0]
        return float(f"{density:.7g}") if density else None  # 0.1, not float32's 0.100000001

    @property
    def target_is_frozen(self) -> bool:
        return bool(to_numpy(self._target)[1])

    def counts(self) -> tuple[int, int]:
        """How many entries (or ranks) are live now, and how many there are."""
        mask = self.mask_value()
        return int(np.count_nonzero(mask)), mask.size

    @abc.abstractmethod
    def scales(self) -> np.ndarray:
        """The magnitude compared with the threshold, for every entry of `steered`, in NumPy."""

    def critical_offsets(self) -> np.ndarray:
        """For every entry of `steered` the offset from which on it is dead."""
        return critical_offsets(self.g, self.scales(), to_numpy(self.s))

    def freeze(self, mask: np.ndarray) -> np.ndarray:
        """Fixes the live entries of `steered` and returns them; the threshold becomes 0."""
        ops, raw = keras.ops, keras.ops.convert_to_tensor(self.steered)
        live, effective = placed(mask, self.steered), self._shrunk(raw)
        dtype = keras.backend.standardize_dtype(raw.dtype)
        tiny = np.finfo(np.float16 if dtype == "float16" else np.float32).tiny
        least = ops.sign(raw) * ops.cast(float(tiny), dtype)  # for entries that are rounded to 0
        kept = ops.where(effective == 0, least, effective)
        assign(self.steered, ops.where(live, kept, ops.zeros((), dtype=dtype)))
        self._set_frozen(live)
        return mask

    def _shrunk(self, value: Any) -> Any:
        threshold = keras.ops.cast(self._threshold(), value.dtype)
        return self._where_live(shrink(value, threshold))

    def get_config(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.settings}


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

    def build(self, weight: PrunableWeight, add_weight: Callable[..., Any]) -> None:
        shape = weight.outputs_shape if self.granularity == "channel" else ()
        self._build_threshold(weight, add_weight, shape, shared=self.granularity == "global")
        self._build_mask(add_weight, weight.shape)
        if self.weight_decay:
            add_weight_decay(weight.variable, self.weight_decay)

    def effective(self, value: Any) -> Any:
        return self._shrunk(value)

    def mask_value(self) -> np.ndarray:
        return to_numpy(self._shrunk(keras.ops.convert_to_tensor(self.weight.variable)) != 0)

    def scales(self) -> np.ndarray:
        return np.abs(self.weight.finite_raw_value()) * to_numpy(self.frozen_mask)


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

    _summed: tuple[int, ...] = ()

    def build(self, weight: PrunableWeight, add_weight: Callable[..., Any]) -> None:
        self._build_threshold(weight, add_weight)
        one = weight.outputs_shape
        self._build_mask(add_weight, one)
        self.dies_at_once = weight.size // math.prod(one)
        self._summed = tuple(k for k, size in enumerate(weight.shape) if size != one[k])
        if self.weight_decay:
            add_weight_decay(weight.variable, self.weight_decay)

    def effective(self, value: Any) -> Any:
        scale, live = self._scales(value)
        t = keras.ops.cast(self._threshold(), value.dtype)
        shrunk = keras.ops.where(live, 1 - t / scale, keras.ops.zeros((), dtype=value.dtype))
        return value * shrunk

    def mask_value(self) -> np.ndarray:
        return np.broadcast_to(self._live(), self.weight.shape)

    def live_channels(self) -> np.ndarray:
        return np.ravel(self._live())

    def _live(self) -> np.ndarray:
        return to_numpy(self._scales(keras.ops.convert_to_tensor(self.weight.variable))[1])

    def scales(self) -> np.ndarray:
        """`n_c`, the same for all entries of a channel."""
        raw = self.weight.finite_raw_value()
        scale = np.sqrt(np.mean(raw**2, axis=self._summed, keepdims=True))
        return np.broadcast_to(scale * to_numpy(self.frozen_mask), self.weight.shape)

    def freeze(self, mask: np.ndarray) -> np.ndarray:
        raw = self.weight.variable
        value = to_numpy(self.effective(keras.ops.convert_to_tensor(raw)))
        live = np.mean(mask, axis=self._summed, keepdims=True) >= 0.5
        faint = live & ~value.any(axis=self._summed, keepdims=True)  # rounded to 0
        value = np.where(faint, 1e-6 * self.weight.raw_value(), value)
        assign(raw, np.where(live, value, 0).astype(value.dtype))
        self._set_frozen(live)
        return np.broadcast_to(live, self.weight.shape)

    def _scales(self, value: Any) -> tuple[Any, Any]:
        """The root mean square of every channel, 1 where that is 0, and which channels are live."""
        ops = keras.ops
        squares = ops.mean(ops.square(value), axis=self._summed, keepdims=True)
        # The root has no derivative at 0, and a NaN would get through `where`.
        scale = ops.sqrt(ops.where(squares > 0, squares, ops.ones((), dtype=value.dtype)))
        live = (squares > 0) & (scale > ops.cast(self._threshold(), value.dtype))
        return scale, ops.logical_and(live, self.frozen_mask.value)
