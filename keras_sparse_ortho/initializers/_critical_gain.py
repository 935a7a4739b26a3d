"""`critical_gain`: the scale of orthogonal weights at which signals neither die nor explode."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import scipy.optimize

from keras_sparse_ortho._backend import float64_operations
from keras_sparse_ortho.initializers._gaussian_mean import gaussian_means

# Variances of pre-activations among which the fixed point is looked for.
_VARIANCES = np.geomspace(1e-6, 1e3, 73)
# Of r(q) / q - 1, for activations that are homogeneous.
_HOMOGENEOUS = 1e-9


@dataclasses.dataclass(frozen=True)
class CriticalPoint:
    """A point of the order-to-chaos line of an activation.

    Args:
        gain: Scale `sigma_w` of the weights.
        bias_std: Standard deviation `sigma_b` of the biases.
        q: Fixed point of the variance of pre-activations; `None` where every one is.
    """

    gain: float
    bias_std: float
    q: float | None


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

    Limits: mean-field theory is that of infinite width. Where there are several critical points,
    the one of least variance is given; `critical_point` says which.

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
    return critical_point(activation, bias_std).gain


def critical_point(activation: Any, bias_std: float = 0.0) -> CriticalPoint:
    """The critical gain with the variance `q` of pre-activations; see `critical_gain`."""
    if isinstance(bias_std, bool) or not math.isfinite(bias_std) or bias_std < 0:
        raise ValueError(
            f"`bias_std` must be a number of at least 0. Received: bias_std={bias_std!r}"
        )
    function = keras.activations.get(activation)
    if isinstance(function, keras.layers.Layer):  # one of float32 would round its input
        function = type(function).from_config({**function.get_config(), "dtype": "float64"})
    moments = _moments(function)

    def excess(q: float) -> float:
        square, slope = moments(q)
        return (square / slope + bias_std**2) / q - 1 if slope > 0 else math.inf

    found = np.array([excess(q) for q in _VARIANCES])
    if bias_std == 0 and np.abs(found).max() < _HOMOGENEOUS:
        return CriticalPoint(moments(1.0)[1] ** -0.5, 0.0, None)
    for low, high, a, b in zip(_VARIANCES, _VARIANCES[1:], found, found[1:], strict=False):
        if math.isfinite(a) and math.isfinite(b) and a > 0 >= b:
            q = float(scipy.optimize.brentq(excess, low, high, xtol=1e-14, rtol=1e-12))
            return CriticalPoint(moments(q)[1] ** -0.5, float(bias_std), q)
    # An odd activation without biases: the fixed point is 0 itself.
    square, slope = moments(_VARIANCES[0] * 1e-6)
    if bias_std == 0 and slope > 0 and abs(square / slope / (_VARIANCES[0] * 1e-6) - 1) < 1e-6:
        return CriticalPoint(slope**-0.5, 0.0, 0.0)
    raise ValueError(
        "The activation has no critical point at this `bias_std`: at no variance of "
        "pre-activations are both chi = 1 and q a fixed point. (Activations that are homogeneous, "
        "as ReLU, have one without biases only.) "
        f"Received: activation={activation!r}, bias_std={bias_std!r}"
    )


def _moments(function: Callable[..., Any]) -> Callable[[float], tuple[float, float]]:
    """`q -> E[phi(sqrt(q) z)^2], E[phi'(sqrt(q) z)^2]`."""

    def of(q: float) -> tuple[float, float]:
        root = math.sqrt(q)

        def squares(z: np.ndarray) -> np.ndarray:
            value, slope = _with_slope(function, root * z)
            return np.stack([value**2, slope**2])

        square, slope = gaussian_means(squares)
        return float(square), float(slope)

    return of


def _with_slope(function: Callable[..., Any], x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """An elementwise function and its derivative by automatic differentiation, in float64."""
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        with float64_operations():
            value, slope = jax.jvp(function, (jax.numpy.asarray(x),), (jax.numpy.ones(x.shape),))
            return np.asarray(value), np.asarray(slope)
    if backend == "tensorflow":
        import tensorflow as tf

        tensor = tf.constant(x)
        with tf.GradientTape() as tape:
            tape.watch(tensor)
            value = function(tensor)
        slope = tape.gradient(value, tensor, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        return value.numpy(), slope.numpy()
    import torch

    tensor = torch.tensor(x, requires_grad=True)
    with float64_operations():
        value = function(tensor)
    (slope,) = torch.autograd.grad(value.sum(), tensor)
    return value.detach().numpy(), slope.numpy()
