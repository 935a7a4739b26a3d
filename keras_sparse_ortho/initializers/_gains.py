"""Gains of kernels with which signals keep their size: `critical_gain` and `activation_gain`."""

import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import scipy.optimize

from keras_sparse_ortho._backend import float64_operations, value_and_gradients
from keras_sparse_ortho._checks import check_number
from keras_sparse_ortho._values import to_numpy

# Variances of pre-activations between which the fixed point is searched.
_VARIANCES = np.geomspace(1e-6, 1e3, 73)
# Largest r(q) / q - 1 at which an activation counts as homogeneous.
_HOMOGENEOUS = 1e-9
# Where activations are probed for being elementwise and odd.
_POINTS = np.array([0.1, 0.5, 1.0, 2.0, 5.0, -0.3, -1.5, -4.0], dtype=np.float32)

# Adaptive quadrature: beyond `_END` the normal density is below 1e-31; panels, and nodes in each;
# levels of halving; more panels than `_MOST_PANELS` are not halved, as functions that are rough
# everywhere (of lower precision inside) would need.
_END = 12.0
_PANELS = 48
_NODES = 16
_DEPTH = 40
_MOST_PANELS = 500
_TOLERANCE = 1e-13


def critical_gain(activation: Any, bias_std: float = 0.0) -> float:
    """The weight gain `sigma_w` at which `chi = sigma_w^2 E[phi'(sqrt(q) z)^2] = 1`.

    `z` is standard normal, and `q` the variance of pre-activations that layers keep,
    `q = sigma_w^2 E[phi(sqrt(q) z)^2] + sigma_b^2`. At this gain a perturbation neither shrinks nor
    grows with depth on average; with orthogonal weights `K^T K = sigma_w^2 I` the singular values
    of the Jacobian stay near 1, for smooth odd activations and small `bias_std`.

    Args:
        activation: Name of a Keras activation, or a function of tensors, or a Keras layer without
            weights; elementwise.
        bias_std: Standard deviation of the biases, not their variance.

    Returns:
        `sigma_w` (not its square): pass it as `ExactOrthogonal(density, gain=sigma_w)`.

    Raises:
        ValueError: A negative `bias_std`, or an activation without a critical point at it.

    Limits: mean-field theory holds for infinite width. If there are several critical points, this
    is the one with the least variance.

    Example:

    >>> round(critical_gain("tanh", bias_std=0.00448), 4)
    1.0247
    >>> round(critical_gain("relu"), 4)
    1.4142

    Reference:

    - Schoenholz et al., "Deep information propagation" (ICLR 2017), arXiv 1611.01232
    - Xiao et al., "Dynamical isometry and a mean field theory of CNNs" (ICML 2018),
      arXiv 1806.05393
    """
    if check_number("bias_std", bias_std) < 0:
        raise ValueError(
            f"`bias_std` must be a number of at least 0. Received: bias_std={bias_std!r}"
        )
    function = keras.activations.get(activation)
    if isinstance(function, keras.layers.Layer):  # a float32 layer would round its input
        function = type(function).from_config({**function.get_config(), "dtype": "float64"})

    def moments(q: Any) -> Any:
        """`E[phi(sqrt(q) z)^2]` and `E[phi'(sqrt(q) z)^2]` for one variance, or for an array."""
        root = np.sqrt(q)[..., None]
        return gaussian_means(lambda z: np.square(_with_slope(function, root * z)))

    def excess(q: Any) -> Any:
        square, slope = moments(q)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(slope > 0, (square / slope + bias_std**2) / q - 1, math.inf)

    found = excess(_VARIANCES)
    if bias_std == 0 and np.abs(found).max() < _HOMOGENEOUS:
        return float(moments(1.0)[1]) ** -0.5
    for low, high, a, b in zip(_VARIANCES, _VARIANCES[1:], found, found[1:], strict=False):
        if math.isfinite(a) and math.isfinite(b) and a > 0 >= b:
            q = float(scipy.optimize.brentq(excess, low, high, xtol=1e-14, rtol=1e-12))
            return float(moments(q)[1]) ** -0.5
    # An odd activation without biases has the fixed point 0.
    if bias_std == 0 and abs(excess(_VARIANCES[0] * 1e-6)) < 1e-6:
        return float(moments(_VARIANCES[0] * 1e-6)[1]) ** -0.5
    raise ValueError(
        "The activation has no critical point at this `bias_std`: at no variance of "
        "pre-activations are both chi = 1 and q a fixed point. (Homogeneous activations such as "
        "ReLU have one only without biases.) "
        f"Received: activation={activation!r}, bias_std={bias_std!r}"
    )


def activation_gain(activation: Any, bias_std: float = 0.0) -> float:
    """The gain of orthogonal kernels with which signals keep their size through many layers.

    For an odd activation such as tanh this is `critical_gain(activation, bias_std)`, 1 for tanh
    without biases. For others it is that of He et al. (arXiv 1502.01852) for orthogonal kernels,
    `E[phi(z)^2]^(-1/2)` with `z` standard normal, which keeps pre-activations of variance 1:
    sqrt(2) for ReLU and 1 for linear layers. (At the critical point of GELU and similar
    activations signals of variance 1 explode.)

    >>> [round(activation_gain(name), 4) for name in ("tanh", "relu", "linear", "gelu")]
    [1.0, 1.4142, 1.0, 1.5335]
    """
    function = keras.activations.get(activation)

    def values(x: np.ndarray) -> np.ndarray:
        tensor = keras.ops.convert_to_tensor(x[None], dtype="float32")
        return to_numpy(function(tensor))[0]

    right, left = values(_POINTS), values(-_POINTS)
    alone = np.concatenate([values(_POINTS[:4]), values(_POINTS[4:])])
    if right.shape != alone.shape or not np.allclose(right, alone, rtol=1e-5):
        raise ValueError(
            f"An activation must be elementwise to have a gain. Received: activation={activation!r}"
        )
    if np.allclose(right, -left, rtol=1e-5) and not np.allclose(right, right[2] * _POINTS):
        return critical_gain(activation, bias_std)
    return float(gaussian_means(lambda z: values(z).astype(np.float64) ** 2)) ** -0.5


def gaussian_means(function: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """`E[f(z)]` for the standard normal `z`, of a function of nodes `(n,)` with values `(..., n)`.

    Adaptive Gauss-Legendre quadrature: where Gauss-Hermite errs by about 1 / nodes at a jump, as of
    the derivative of ReLU, halving panels leaves about 1e-13.
    """
    tolerance = _TOLERANCE
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    weights = weights / 2

    def panel_means(low: np.ndarray, high: np.ndarray) -> np.ndarray:
        nonlocal tolerance
        z = (low[:, None] + high[:, None]) / 2 + (high - low)[:, None] / 2 * nodes
        density = np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi)
        # In pieces of one size, as JAX compiles for each size.
        pieces = np.pad(z.reshape(-1), (0, -z.size % (_PANELS * _NODES)))
        pieces = pieces.reshape(-1, _PANELS * _NODES)
        values = np.concatenate([function(piece) for piece in pieces], axis=-1)[..., : z.size]
        tolerance = max(_TOLERANCE, 16 * float(np.finfo(values.dtype).eps))
        values = values * density.reshape(-1)
        return (values.reshape(*values.shape[:-1], *z.shape) @ weights) * (high - low)

    edges = np.linspace(-_END, _END, _PANELS + 1)
    low, high = edges[:-1], edges[1:]
    whole = panel_means(low, high)
    total = np.zeros(whole.shape[:-1])
    # The tolerance is relative to this, or rounding errors would halve panels without end.
    size = np.maximum(np.abs(whole).sum(axis=-1, keepdims=True), np.finfo(float).tiny)
    for _ in range(_DEPTH):
        middle = (low + high) / 2
        left, right = panel_means(low, middle), panel_means(middle, high)
        halves = left + right
        error = (np.abs(halves - whole) / size).reshape(-1, len(low)).max(axis=0)
        split = error > (tolerance if len(low) < _MOST_PANELS else np.inf)
        total = total + halves[..., ~split].sum(axis=-1)
        if not split.any():
            return total
        low, middle, high = low[split], middle[split], high[split]
        low, high = np.concatenate([low, middle]), np.concatenate([middle, high])
        whole = np.concatenate([left[..., split], right[..., split]], axis=-1)
    return total + whole.sum(axis=-1)


def _with_slope(function: Callable[..., Any], x: np.ndarray) -> np.ndarray:
    """An elementwise function and its derivative in float64, stacked."""
    with float64_operations():
        tensor = keras.ops.convert_to_tensor(x)
        value = function(tensor)
        _, [slope] = value_and_gradients(lambda v: keras.ops.sum(function(v[0])), [tensor])
        return np.stack([to_numpy(value), to_numpy(slope)])
