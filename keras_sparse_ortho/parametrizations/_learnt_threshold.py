"""`LearntThreshold`, the base of parametrizations with a trainable threshold, and its functions."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._checks import check_config, check_number
from keras_sparse_ortho._keras_internals import restored
from keras_sparse_ortho._values import assign, to_numpy
from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.parametrizations._parametrization import Parametrization


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
@dataclasses.dataclass(frozen=True)
class ThresholdFunction:
    """An increasing function `g` from the reals to thresholds `>= 0`, with its inverse.

    Args:
        forward: `g` on tensors of the backend, differentiable.
        inverse: `g^-1` on NumPy arrays of magnitudes `>= 0`: `-inf` for 0, and `inf` for magnitudes
            that no threshold reaches.

    Both are registered with Keras, for saved models.
    """

    forward: Callable[[Any], Any]
    inverse: Callable[[np.ndarray], np.ndarray]

    def get_config(self) -> dict[str, Any]:
        """The two functions, by their registered names."""
        serialize = keras.saving.serialize_keras_object
        return {"forward": serialize(self.forward), "inverse": serialize(self.inverse)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "ThresholdFunction":
        """The reverse of `get_config`."""
        check_config(cls.__name__, config, "forward", "inverse")
        return cls(restored(config["forward"]), restored(config["inverse"]))


def _logit(magnitude: np.ndarray) -> np.ndarray:
    inside = np.minimum(magnitude, 1)
    with np.errstate(divide="ignore"):
        return np.log(inside) - np.log1p(-inside)


def _log(magnitude: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(magnitude)


def _inverse_softplus(magnitude: np.ndarray) -> np.ndarray:
    # log(e^x - 1) = x + log(1 - e^-x), which does not overflow.
    with np.errstate(divide="ignore"):
        return magnitude + np.log(-np.expm1(-magnitude))


STEERED = "callbacks.TargetDensity(density) in `fit`; a threshold learns its density"
"""What to use in place of a threshold's `density`."""

_FUNCTIONS = {
    "sigmoid": ThresholdFunction(lambda s: keras.ops.sigmoid(s), _logit),
    "exp": ThresholdFunction(lambda s: keras.ops.exp(s), _log),
    "softplus": ThresholdFunction(lambda s: keras.ops.softplus(s), _inverse_softplus),
}


def threshold_function(g: "str | ThresholdFunction") -> ThresholdFunction:
    """The threshold function of a name, or the given one."""
    if isinstance(g, ThresholdFunction):
        return g
    if isinstance(g, str) and g in _FUNCTIONS:
        return _FUNCTIONS[g]
    raise ValueError(
        f"`g` must be one of {sorted(_FUNCTIONS)} or a ThresholdFunction. Received: g={g!r}"
    )


def critical_offsets(g: ThresholdFunction, scales: np.ndarray, s: np.ndarray) -> np.ndarray:
    """`g^-1(scale) - s` in float64; NaN where `s` is not finite."""
    s = np.where(np.isfinite(s), np.asarray(s, np.float64), np.nan)
    return np.asarray(g.inverse(scales.astype(np.float64)) - s)


def shrink(value: Any, threshold: Any) -> Any:
    """`sign(w) * relu(|w| - t)`: exactly 0 where `|w| <= t`, with its own gradients.

        dL/dw = dL/dw_e where w_e is not 0, else 0
        dL/dt = -sum(dL/dw_e * sign(w_e))

    Automatic differentiation keeps more arrays. `t` is a scalar, or of the rank of `w`.
    """
    ops = keras.ops
    scalar = len(threshold.shape) == 0
    axes = [k for k, size in enumerate(threshold.shape) if size != value.shape[k]]

    @ops.custom_gradient
    def shrunk(w: Any, t: Any) -> tuple[Any, Any]:
        # As a difference, which is 0 for w = t = 0: an entry frozen at 0 gets no gradient.
        effective = w - ops.clip(w, -t, t)

        def gradient(*args: Any, upstream: Any = None) -> tuple[Any, Any]:
            if upstream is None:
                (upstream,) = args
            live = ops.where(effective != 0, upstream, ops.zeros((), dtype=w.dtype))
            terms = upstream * ops.sign(effective)
            if not scalar:
                return live, -ops.sum(terms, axis=axes, keepdims=True)
            # In two steps: on CPUs XLA is slow to sum to a scalar, and makes one step of two sums.
            columns = ops.sum(ops.reshape(terms, (-1, terms.shape[-1])), axis=0)
            return live, -ops.dot(columns, ops.ones_like(columns))

        return effective, gradient

    # TensorFlow takes a variable for one that the function captures; a reshape makes a tensor of it
    # without a copy.
    return shrunk(ops.reshape(value, value.shape), ops.reshape(threshold, threshold.shape))


class _Sum(keras.regularizers.Regularizer):  # Keras 3.10 accepts no other callables
    """The sum of two regularizers."""

    def __init__(self, first: Any, second: Any) -> None:
        self._terms = (first, second)

    def __call__(self, value: Any) -> Any:
        return self._terms[0](value) + self._terms[1](value)


def add_weight_decay(variable: Any, strength: float) -> None:
    """Adds `strength / 2 * sum(variable ** 2)` to the loss of every model with the variable.

    A regularizer that the variable has stays.
    """
    decay = keras.regularizers.L2(strength / 2)
    own = variable.regularizer
    variable.regularizer = decay if own is None else _Sum(own, decay)


class LearntThreshold(Parametrization):
    """A threshold `t = g(s)` with a trainable `s`, which `callbacks.TargetDensity` can steer.

    While it is steered `t = g(s + offset)`, and 0 once it is frozen. Subclasses define what the
    threshold is compared with, in `effective`, `scales` and `freeze`, and what `TargetDensity`
    counts (`counted`).

    Args:
        g: `"sigmoid"`, `"exp"` or `"softplus"`.
        s_init: Initial value of `s`.
        weight_decay: Strength `lambda` of the L2 that is added to the loss for the trained
            variables, `lambda / 2 * sum(v ** 2)` each.
    """

    counted = "entries"

    def __init__(self, g: str | ThresholdFunction, s_init: float, weight_decay: float) -> None:
        if isinstance(g, dict):  # from a configuration
            g = restored(g)
        self.g = g
        self.s_init = check_number("s_init", s_init)
        self.weight_decay = check_number("weight_decay", weight_decay)
        if self.weight_decay < 0:
            raise ValueError(
                f"`weight_decay` must not be negative. Received: weight_decay={weight_decay!r}"
            )
        self._function = threshold_function(g)
        self.s: Any = None
        self.offset: Any = None
        self.active: Any = None
        self._target: Any = None

    def _build_threshold(
        self,
        weight: PrunableWeight,
        add_weight: Callable[..., Any],
        shape: tuple[int, ...] = (),
        shared: bool = False,
    ) -> None:
        """Creates `s`, and the offset and switch by which `TargetDensity` steers it."""
        weight.finite_raw_value()
        self._weight = dataclasses.replace(weight, drawn_mask=None)
        self.s = add_weight(
            name="s",
            shared=shared,
            shape=shape,
            initializer=keras.initializers.Constant(self.s_init),
            trainable=True,
        )
        # Non-trainable: t = g(s + offset) while active, and 0 once frozen.
        self.offset = add_weight(name="s_offset", shape=(), initializer="zeros", trainable=False)
        self.active = add_weight(name="s_active", shape=(), initializer="ones", trainable=False)
        # The density of TargetDensity, 0 without one; and 1 if it freezes the live entries.
        self._target = add_weight(name="s_target", shape=(2,), initializer="zeros", trainable=False)
        if self.weight_decay and self.s.regularizer is None:  # a shared one decays once
            add_weight_decay(self.s, self.weight_decay)

    def _threshold(self) -> Any:
        t = self._function.forward(self.s.value + self.offset.value)
        # Not a product: an inactive threshold is 0 even where g overflows.
        return keras.ops.where(self.active.value > 0, t, keras.ops.zeros((), dtype=t.dtype))

    def threshold_value(self) -> np.ndarray:
        """The threshold `t`: one value, or one for each output."""
        return np.ravel(to_numpy(self._threshold()))

    @property
    def is_trained(self) -> bool:
        """Whether `s` has left its initial value."""
        return bool((to_numpy(self.s) != np.float32(self.s_init)).any())

    @property
    def frozen(self) -> bool:
        """Whether the live entries are fixed, and the threshold stays 0."""
        return not float(to_numpy(self.active))

    @property
    def steered(self) -> Any:
        """The variable whose entries are compared with the threshold."""
        return self.weight.variable

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
        """Whether the live entries will be fixed at that density."""
        return bool(to_numpy(self._target)[1])

    def counts(self) -> tuple[int, int]:
        """How many entries (or ranks, see `counted`) are live now, and how many there are."""
        mask = self.mask_value()
        return int(np.count_nonzero(mask)), mask.size

    @property
    def dies_at_once(self) -> int:
        """How many entries die together."""
        return 1

    @abc.abstractmethod
    def scales(self) -> np.ndarray:
        """What the threshold is compared with, for every entry of `steered`, as a NumPy array."""

    def critical_offsets(self) -> np.ndarray:
        """For every entry of `steered` the offset from which on it is dead: `g^-1(scale) - s`."""
        return critical_offsets(self._function, self.scales(), to_numpy(self.s))

    @abc.abstractmethod
    def freeze(self, mask: np.ndarray) -> np.ndarray:
        """Fixes which entries of `steered` are live: the threshold becomes 0, dead entries stay 0.

        Returns the mask of those that are.
        """

    def arguments(self) -> dict[str, Any]:
        """The arguments of the constructor."""
        return {"g": self.g, "s_init": self.s_init, "weight_decay": self.weight_decay}

    def get_config(self) -> dict[str, Any]:
        g = self.g if isinstance(self.g, str) else keras.saving.serialize_keras_object(self.g)
        return {**self.arguments(), "g": g}

    def clone(self) -> "LearntThreshold":
        """An unbuilt one with the same settings, for another weight."""
        return type(self)(**self.arguments())
