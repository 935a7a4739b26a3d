"""Gains of kernels with which signals keep their size: `critical_gain` and `activation_gain`."""

import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import scipy.optimize

from keras_sparse_ortho._backend import float64_operations, value_and_gradients
from keras_sparse_ortho._checks import check_number, other_keywords
from keras_sparse_ortho._values import to_numpy

_VARIANCES = np.geomspace(1e-6, 1e3, 73)  # of pre-activations, between which a fixed point lies
_HOMOGENEOUS = 1e-9  # largest r(q) / q - 1 at which an activation counts as homogeneous
# Where activations are probed for being elementwise and odd.
_POINTS = np.array([0.1, 0.5, 1.0, 2.0, 5.0, -0.3, -1.5, -4.0], dtype=np.float32)
# Edges of the panels of Gauss-Legendre quadrature: fine near 0 for small variances, and with all
# multiples of 1/16 up to 16, as activations have kinks at such numbers.
_EDGES = np.concatenate(
    [2.0 ** np.arange(-30, -4), np.arange(1, 257) / 16, 2.0 ** np.arange(5, 10)]
)
_NODES = 16


@other_keywords
def critical_gain(activation: Any, bias_std: float = 0.0) -> float:
    """Returns the weight gain `sigma_w` at which `chi = sigma_w^2 E[phi'(sqrt(q) z)^2] = 1`.

    `z` is standard normal, and `q` the variance of pre-activations that layers keep, `q = sigma_w^2
    E[phi(sqrt(q) z)^2] + sigma_b^2`. At this gain a perturbation neither shrinks nor grows with
    depth on average; with orthogonal weights `K^T K = sigma_w^2 I` the singular values of the
    Jacobian stay near 1, for smooth odd activations and small `bias_std`. Pass it as
    `ExactOrthogonal(density, gain=sigma_w)`.

    Args:
        activation: str, function of tensors, or Keras layer without weights; elementwise.
        bias_std: float. Standard deviation of the biases, not their variance.

    Raises ValueError for a negative `bias_std`, or an activation without a critical point at it.

    Limits: mean-field theory holds for infinite width. Among several critical points, this is the
    one of least variance. Kinks at multiples of 1/16 are exact, others cost digits.

    Examples:
        >>> round(critical_gain("tanh", bias_std=0.00448), 4)
        1.0247
        >>> round(critical_gain("relu"), 4)
        1.4142

    References: Schoenholz et al. (ICLR 2017), arXiv 1611.01232; Xiao et al. (ICML 2018), arXiv
    1806.05393.
    """
    if check_number("bias_std", bias_std) < 0:
        raise ValueError(f"`bias_std` must be at least 0. Received: bias_std={bias_std!r}")
    square, slope = np.square(_with_slope(activation))

    def excess(q: float) -> float:
        """How far `q` is from a fixed point, relative to it, at the gain for which `chi = 1`."""
        squares, slopes = _mean(square, q), _mean(slope, q)
        return (squares / slopes + bias_std**2) / q - 1 if slopes > 0 else math.inf

    def gain_at(q: float) -> float:
        return _mean(slope, q) ** -0.5

    found = [excess(q) for q in _VARIANCES]
    if bias_std == 0 and np.abs(found).max() < _HOMOGENEOUS:
        return gain_at(1.0)
    for low, high, a, b in zip(_VARIANCES, _VARIANCES[1:], found, found[1:], strict=False):
        if math.isfinite(a) and math.isfinite(b) and a > 0 >= b:
            return gain_at(scipy.optimize.brentq(excess, low, high, xtol=1e-14, rtol=1e-12))
    # An odd activation without biases has the fixed point 0.
    if bias_std == 0 and abs(excess(_VARIANCES[0] * 1e-6)) < 1e-6:
        return gain_at(_VARIANCES[0] * 1e-6)
    raise ValueError(
        "The activation has no critical point at this `bias_std`: at no variance of "
        "pre-activations are both chi = 1 and q a fixed point. (Homogeneous activations such as "
        "ReLU have one only without biases.) "
        f"Received: activation={activation!r}, bias_std={bias_std!r}"
    )


def activation_gain(activation: Any, bias_std: float = 0.0) -> float:
    """Returns the gain of orthogonal kernels at which signals keep their size in deep networks."""
    # For an odd activation such as tanh that is the critical one. For others it is that of He et
    # al. (arXiv 1502.01852), `E[phi(z)^2]^(-1/2)` with `z` standard normal, which keeps a variance
    # of 1. (At the critical point of GELU such signals explode.)
    function = keras.activations.get(activation)

    def values(x: np.ndarray) -> np.ndarray:
        return to_numpy(function(keras.ops.convert_to_tensor(x[None], dtype="float32")))[0]

    right, left = values(_POINTS), values(-_POINTS)
    alone = np.concatenate([values(_POINTS[:4]), values(_POINTS[4:])])
    if right.shape != alone.shape or not np.allclose(right, alone, rtol=1e-5):
        raise ValueError(f"Only elementwise activations have a gain. Received: {activation=}")
    if np.allclose(right, -left, rtol=1e-5) and not np.allclose(right, right[2] * _POINTS):
        return critical_gain(activation, bias_std)
    return _mean(np.square(_with_slope(activation)[0]), 1.0) ** -0.5


def _quadrature() -> tuple[np.ndarray, np.ndarray]:
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    low = np.concatenate([[0.0], _EDGES[:-1]])[:, None]
    width = np.diff(_EDGES, prepend=0.0)[:, None]
    x, w = (low + width * (nodes + 1) / 2).ravel(), (width * weights / 2).ravel()
    return np.concatenate([-x, x]), np.concatenate([w, w])


_X, _W = _quadrature()


def _mean(values: np.ndarray, q: float) -> float:
    """`E[f(sqrt(q) z)]` for the standard normal `z`, of a function with `values` at the nodes."""
    density = np.exp(-(_X**2) / (2 * q)) / np.sqrt(2 * np.pi * q)
    return float((values * density) @ _W)


def _with_slope(activation: Any) -> np.ndarray:
    """An elementwise function and its derivative in float64 at the nodes, stacked."""
    function: Callable[[Any], Any] = keras.activations.get(activation)
    if isinstance(function, keras.layers.Layer):  # a float32 layer would round its input
        function = type(function).from_config({**function.get_config(), "dtype": "float64"})
    with float64_operations():
        tensor = keras.ops.convert_to_tensor(_X)
        _, [slope] = value_and_gradients(lambda v: keras.ops.sum(function(v[0])), [tensor])
        return np.stack([to_numpy(function(tensor)), to_numpy(slope)])
