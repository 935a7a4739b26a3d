"""The functions `g` that turn a trainable `s` into a threshold, and their inverses."""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np


@dataclasses.dataclass(frozen=True)
class ThresholdFunction:
    """An increasing function `g` from the reals to thresholds `>= 0`, with its inverse.

    Args:
        forward: `g` on tensors of the backend, differentiable.
        inverse: `g^-1` on NumPy arrays of magnitudes `>= 0`: `-inf` for 0, and `inf` for
            magnitudes that no threshold reaches.
    """

    forward: Callable[[Any], Any]
    inverse: Callable[[np.ndarray], np.ndarray]


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
