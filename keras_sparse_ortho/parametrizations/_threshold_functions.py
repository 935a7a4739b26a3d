"""The functions `g` that turn a trainable `s` into a threshold, and their inverses."""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
@dataclasses.dataclass(frozen=True)
class ThresholdFunction:
    """An increasing function `g` from the reals to thresholds `>= 0`, with its inverse.

    Args:
        forward: `g` on tensors of the backend, differentiable.
        inverse: `g^-1` on NumPy arrays of magnitudes `>= 0`: `-inf` for 0, and `inf` for
            magnitudes that no threshold reaches.

    To save a model, both functions are registered with
    `keras.saving.register_keras_serializable`.
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
        restore = keras.saving.deserialize_keras_object
        return cls(restore(config["forward"]), restore(config["inverse"]))


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


_FUNCTIONS = {
    "sigmoid": ThresholdFunction(lambda s: keras.ops.sigmoid(s), _logit),
    "exp": ThresholdFunction(lambda s: keras.ops.exp(s), _log),
    "softplus": ThresholdFunction(lambda s: keras.ops.softplus(s), _inverse_softplus),
}


def threshold_function(g: "str | ThresholdFunction") -> ThresholdFunction:
    """The threshold function of a name, or the given one.

    Raises:
        ValueError: A name that is not known, or anything else.
    """
    if isinstance(g, ThresholdFunction):
        return g
    if isinstance(g, str) and g in _FUNCTIONS:
        return _FUNCTIONS[g]
    raise ValueError(
        f"`g` must be one of {sorted(_FUNCTIONS)} or a ThresholdFunction. Received: g={g!r}"
    )
