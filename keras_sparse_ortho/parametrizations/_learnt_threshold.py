"""`LearntThreshold`: a trainable threshold that `TargetDensity` can steer and freeze."""

import abc
import dataclasses
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import keras
import numpy as np

from keras_sparse_ortho._checks import check_number, other_keywords
from keras_sparse_ortho._gathers import with_gradient
from keras_sparse_ortho._types import AddWeight, Config, Tensor, TensorLike
from keras_sparse_ortho._values import assign, placed, to_numpy
from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.parametrizations._parametrization import Parametrization


def _logit(magnitude: np.ndarray) -> np.ndarray:
    inside = np.minimum(magnitude, 1)
    return np.log(inside) - np.log1p(-inside)


def _inverse_softplus(magnitude: np.ndarray) -> np.ndarray:
    # log(e^x - 1) = x + log(1 - e^-x), which does not overflow.
    return magnitude + np.log(-np.expm1(-magnitude))


class _Function(NamedTuple):
    """An increasing function from the reals to thresholds `>= 0`.

    Its inverse is in NumPy: `-inf` for 0, and `inf` for magnitudes that no threshold reaches.
    """

    g: Callable[[Tensor], Tensor]
    inverse: Callable[[np.ndarray], np.ndarray]


_FUNCTIONS = {
    "sigmoid": _Function(keras.ops.sigmoid, _logit),
    "exp": _Function(keras.ops.exp, np.log),
    "softplus": _Function(keras.ops.softplus, _inverse_softplus),
}


def critical_offsets(
    g: str,
    scales: np.ndarray,
    s: np.ndarray,
) -> np.ndarray:
    """`g^-1(scale) - s` in float64; NaN where `s` is not finite."""
    finite_s = np.where(np.isfinite(s), np.asarray(s, np.float64), np.nan)
    with np.errstate(divide="ignore"):
        positions = _FUNCTIONS[g].inverse(scales.astype(np.float64))
        return np.asarray(positions - finite_s)


def shrink(value: Tensor, threshold: Tensor) -> Tensor:
    """`sign(w) * relu(|w| - t)`, `t` a scalar or of the rank of `w`.

    Its own gradients keep fewer arrays than automatic ones.
    """
    ops = keras.ops
    sizes = zip(threshold.shape, value.shape, strict=False)
    axes = [
        axis
        for axis, (size, size_of_value) in enumerate(sizes)
        if size != size_of_value
    ]

    def shrunk(w: Tensor, t: Tensor) -> Tensor:
        # As a difference, which is 0 for w = t = 0: an entry frozen at 0 gets no gradient.
        return w - ops.clip(w, -t, t)

    def gradient(
        w: Tensor,
        t: Tensor,
        upstream: Tensor,
    ) -> tuple[Tensor, Tensor]:
        effective = shrunk(w, t)
        live = ops.where(effective != 0, upstream, ops.zeros((), dtype=w.dtype))
        terms = upstream * ops.sign(effective)
        if len(t.shape) > 0:
            return live, -ops.sum(terms, axis=axes, keepdims=True)
        # In two steps: on CPUs XLA is slow to sum to a scalar, and makes one step of two sums.
        rows = ops.reshape(terms, (-1, terms.shape[-1]))
        columns = ops.sum(rows, axis=0)
        return live, -ops.dot(columns, ops.ones_like(columns))

    return with_gradient(shrunk, gradient, [value, threshold], [])


class _SumOfTwo(keras.regularizers.Regularizer):
    """Two regularizers together. Keras 3.11 accepts no other callables."""

    def __init__(
        self,
        regularizer: keras.regularizers.Regularizer,
        decay: keras.regularizers.Regularizer,
    ) -> None:
        self._regularizer = regularizer
        self._decay = decay

    def __call__(self, value: Tensor) -> Tensor:
        return self._regularizer(value) + self._decay(value)


def add_weight_decay(variable: keras.Variable, strength: float) -> None:
    """Adds `strength / 2 * sum(variable ** 2)` to the loss, beside another regularizer."""
    decay = keras.regularizers.L2(strength / 2)
    if variable.regularizer is None:
        variable.regularizer = decay
    else:
        variable.regularizer = _SumOfTwo(variable.regularizer, decay)


class LearntThreshold(Parametrization):
    """A threshold `t = g(s)` with a trainable `s`, which `callbacks.TargetDensity` can steer.

    While steered `t = g(s + offset)`, and 0 once frozen. From then on a mask keeps dead entries at
    0: optimizers that the callback does not know still have moments for these. Subclasses define
    `effective`, `scales`, `freeze` and what counts (`counted`). The arguments are those of
    `SoftThreshold`.
    """

    counted = "entries"

    dies_at_once = 1
    """How many entries die together."""

    steered: keras.Variable = None
    """The variable whose entries are compared with the threshold."""

    settings: ClassVar[tuple[str, ...]] = ("g", "s_init", "weight_decay")

    @other_keywords
    def __init__(
        self,
        g: str = "sigmoid",
        s_init: float = -8.0,
        weight_decay: float = 0.0,
    ) -> None:
        self.g = g
        self.s_init = check_number("s_init", s_init)
        self.weight_decay = check_number("weight_decay", weight_decay)
        if self.weight_decay < 0:
            raise ValueError(
                f"`weight_decay` must not be negative. Received: {weight_decay=}"
            )
        if not isinstance(g, str) or g not in _FUNCTIONS:
            raise ValueError(
                f"`g` must be one of {sorted(_FUNCTIONS)}. Received: g={g!r}"
            )

    def _build_threshold(
        self,
        weight: PrunableWeight,
        add_weight: AddWeight,
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
        self.offset = add_weight(
            name="s_offset", shape=(), initializer="zeros", trainable=False
        )
        self.active = add_weight(
            name="s_active", shape=(), initializer="ones", trainable=False
        )
        # The density of TargetDensity, 0 without one; and 1 if it freezes the live entries.
        self._target = add_weight(
            name="s_target", shape=(2,), initializer="zeros", trainable=False
        )
        # A shared one decays once.
        if self.weight_decay and self.s.regularizer is None:
            add_weight_decay(self.s, self.weight_decay)

    def _build_mask(
        self,
        add_weight: AddWeight,
        shape: tuple[int, ...],
    ) -> None:
        """Creates the mask of live entries once frozen; its shape broadcasts to `steered`."""
        self.frozen_mask = add_weight(
            name="s_mask",
            shape=shape,
            dtype="bool",
            initializer="ones",
            trainable=False,
        )

    def _where_live(self, value: Tensor) -> Tensor:
        """`value` with the entries at 0 that were dead when the threshold was frozen."""
        zero = keras.ops.zeros((), dtype=value.dtype)
        return keras.ops.where(self.frozen_mask.value, value, zero)

    def _set_frozen(self, mask: TensorLike) -> None:
        assign(self.frozen_mask, mask)
        assign(self.active, 0.0)

    def support(self) -> list[keras.Variable]:
        return [self.frozen_mask]

    def clear_dead(self) -> None:
        assign(self.steered, self._where_live(self.steered.value))

    def _threshold(self) -> Tensor:
        function = _FUNCTIONS[self.g]
        t = function.g(self.s.value + self.offset.value)
        zero = keras.ops.zeros((), dtype=t.dtype)
        # Unlike a product: 0 for an inactive threshold even where g overflows.
        return keras.ops.where(self.active.value > 0, t, zero)

    def threshold_value(self) -> np.ndarray:
        return np.ravel(to_numpy(self._threshold()))

    @property
    def is_trained(self) -> bool:
        is_moved = to_numpy(self.s) != np.float32(self.s_init)
        return bool(is_moved.any())

    @property
    def frozen(self) -> bool:
        return not float(to_numpy(self.active))

    def aim(
        self,
        density: float,
        freeze: bool,
    ) -> None:
        """Stores the density of `TargetDensity`, and whether live entries will be fixed there."""
        assign(self._target, np.array([density, freeze], np.float32))

    @property
    def target_density(self) -> float | None:
        """The density asked for, of all steered weights together; `None` without one."""
        density = to_numpy(self._target)[0]
        if density == 0:
            return None
        return float(f"{density:.7g}")  # 0.1, not float32's 0.100000001

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
        ops = keras.ops
        raw = ops.convert_to_tensor(self.steered)
        live = placed(mask, self.steered)
        effective = self._shrunk(raw)
        dtype = keras.backend.standardize_dtype(raw.dtype)
        tiny = float(np.finfo(np.float32).tiny)
        if dtype == "float16":
            tiny = float(np.finfo(np.float16).tiny)
        # For entries that are rounded to 0.
        smallest = ops.sign(raw) * ops.cast(tiny, dtype)
        live_values = ops.where(effective == 0, smallest, effective)
        values = ops.where(live, live_values, ops.zeros((), dtype=dtype))
        assign(self.steered, values)
        self._set_frozen(live)
        return mask

    def _shrunk(self, value: Tensor) -> Tensor:
        threshold = keras.ops.cast(self._threshold(), value.dtype)
        return self._where_live(shrink(value, threshold))

    def get_config(self) -> Config:
        return {name: getattr(self, name) for name in self.settings}
