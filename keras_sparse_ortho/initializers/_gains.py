"""Gains of kernels with which signals keep their size: `critical_gain` and `activation_gain`."""

import itertools
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import keras
import numpy as np
import scipy.optimize

from keras_sparse_ortho._backend import float64_operations, value_and_gradients
from keras_sparse_ortho._checks import check_number, other_keywords
from keras_sparse_ortho._values import to_numpy

# of pre-activations, between which a fixed point lies
_VARIANCES = np.geomspace(1e-6, 1e3, 73)
_TINY_VARIANCE = _VARIANCES[0] * 1e-6  # stands for 0
_TINY_EXCESS = 1e-6  # of the fixed point 0
_HOMOGENEOUS = (
    1e-9  # largest r(q) / q - 1 at which an activation counts as homogeneous
)
# Where activations are probed for being elementwise and odd.
_PROBES = np.array(
    [0.1, 0.5, 1.0, 2.0, 5.0, -0.3, -1.5, -4.0], dtype=np.float32
)
_UNIT_PROBE = 2  # the place of 1.0
# Edges of the panels of Gauss-Legendre quadrature: fine near 0 for small variances, and with all
# multiples of 1/16 up to 16, as activations have kinks at such numbers.
_EDGES = np.concatenate(
    [
        2.0 ** np.arange(-30, -4),
        np.arange(1, 257) / 16,
        2.0 ** np.arange(5, 10),
    ]
)
_NODES_OF_PANEL = 16

Activation: TypeAlias = str | Callable[[Any], Any] | keras.layers.Layer | None
"""An elementwise function of tensors, by name, as a function or as a layer without weights."""


@other_keywords
def critical_gain(activation: Activation, bias_std: float = 0.0) -> float:
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
        raise ValueError(
            f"`bias_std` must be at least 0. Received: bias_std={bias_std!r}"
        )
    square, squared_slope = np.square(_with_slope(activation))

    def excess(q: float) -> float:
        """How far `q` is from a fixed point, relative to it, at the gain for which `chi = 1`."""
        mean_slope = _mean(squared_slope, q)
        if mean_slope <= 0:
            return math.inf
        next_q = _mean(square, q) / mean_slope + bias_std**2
        return next_q / q - 1

    def gain_at(q: float) -> float:
        return _mean(squared_slope, q) ** -0.5

    excesses = [excess(q) for q in _VARIANCES]
    if bias_std == 0 and np.abs(excesses).max() < _HOMOGENEOUS:
        return gain_at(1.0)
    for k, (left, right) in enumerate(itertools.pairwise(excesses)):
        if math.isfinite(left) and math.isfinite(right) and left > 0 >= right:
            fixed_point = scipy.optimize.brentq(
                excess,
                _VARIANCES[k],
                _VARIANCES[k + 1],
                xtol=1e-14,
                rtol=1e-12,
            )
            return gain_at(fixed_point)
    # An odd activation without biases has the fixed point 0.
    if bias_std == 0 and abs(excess(_TINY_VARIANCE)) < _TINY_EXCESS:
        return gain_at(_TINY_VARIANCE)
    raise ValueError(
        "The activation has no critical point at this `bias_std`: at no variance of "
        "pre-activations are both chi = 1 and q a fixed point. (Homogeneous activations such as "
        "ReLU have one only without biases.) "
        f"Received: activation={activation!r}, bias_std={bias_std!r}"
    )


def mirrored_gain(
    activation: Activation,
    bias_std: float = 0.0,
) -> float:
    """The gain of mirrored kernels at which signals keep their size.

    Of `phi((u, -u))` the next mirrored kernel reads `phi(u) - phi(-u)`, an odd function, and both
    are divided by `sqrt(2)`. For ReLU, GELU and SiLU that is `u` itself, and the gain `sqrt(2)`.

    Args:
        activation: As in `critical_gain`.
        bias_std: float. Standard deviation of the biases.
    """
    function: Callable[[Any], Any] = keras.activations.get(activation)

    def pair(values: Any) -> Any:
        return function(values) - function(-values)

    return math.sqrt(2.0) * activation_gain(pair, bias_std)


def activation_gain(
    activation: Activation,
    bias_std: float = 0.0,
) -> float:
    """Returns the gain of orthogonal kernels at which signals keep their size in deep networks.

    For an odd activation such as tanh that is the critical one. For others it is that of He et al.
    (arXiv 1502.01852), `E[phi(z)^2]^(-1/2)` with `z` standard normal, which keeps a variance of 1.
    (At the critical point of GELU such signals explode.)

    Args:
        activation: As in `critical_gain`.
        bias_std: float. Standard deviation of the biases.

    Raises ValueError for an activation that is not elementwise.
    """
    function = keras.activations.get(activation)

    def outputs_of(inputs: np.ndarray) -> np.ndarray:
        tensor = keras.ops.convert_to_tensor(inputs[None], dtype="float32")
        return to_numpy(function(tensor))[0]

    half = len(_PROBES) // 2
    outputs = outputs_of(_PROBES)
    in_halves = np.concatenate(
        [
            outputs_of(_PROBES[:half]),
            outputs_of(_PROBES[half:]),
        ]
    )
    if outputs.shape != in_halves.shape or not np.allclose(
        outputs, in_halves, rtol=1e-5
    ):
        raise ValueError(
            f"Only elementwise activations have a gain. Received: {activation=}"
        )
    mirrored = -outputs_of(-_PROBES)
    is_odd = np.allclose(outputs, mirrored, rtol=1e-5)
    is_linear = np.allclose(outputs, outputs[_UNIT_PROBE] * _PROBES)
    if is_odd and not is_linear:
        return critical_gain(activation, bias_std)
    values, _ = _with_slope(activation)
    return _mean(np.square(values), 1.0) ** -0.5


def _quadrature() -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of Gauss-Legendre quadrature over all panels, on both sides of 0."""
    nodes, weights = np.polynomial.legendre.leggauss(_NODES_OF_PANEL)
    widths = np.diff(_EDGES, prepend=0.0)[:, None]
    begins = np.concatenate([[0.0], _EDGES[:-1]])[:, None]
    positive = begins + widths * (nodes + 1) / 2
    positive = positive.ravel()
    scaled = widths * weights / 2
    scaled = scaled.ravel()
    return np.concatenate([-positive, positive]), np.concatenate(
        [scaled, scaled]
    )


_NODES, _WEIGHTS = _quadrature()


def _mean(
    values: np.ndarray,
    q: float,
) -> float:
    """`E[f(sqrt(q) z)]` for the standard normal `z`, of a function with `values` at the nodes."""
    exponential = np.exp(-(_NODES**2) / (2 * q))
    density = exponential / np.sqrt(2 * np.pi * q)
    return float((values * density) @ _WEIGHTS)


def _with_slope(activation: Activation) -> np.ndarray:
    """An elementwise function and its derivative in float64 at the nodes, stacked."""
    function: Callable[[Any], Any] = keras.activations.get(activation)
    # A float32 layer would round its input.
    if isinstance(function, keras.layers.Layer):
        config = {**function.get_config(), "dtype": "float64"}
        function = type(function).from_config(config)
    with float64_operations():
        nodes = keras.ops.convert_to_tensor(_NODES)
        _, [slope] = value_and_gradients(
            lambda x: keras.ops.sum(function(x[0])), [nodes]
        )
        return np.stack([to_numpy(function(nodes)), to_numpy(slope)])
