"""`activation_gain`: the scale of orthogonal kernels where nothing normalizes."""

from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.initializers._critical_gain import critical_gain
from keras_sparse_ortho.initializers._gaussian_mean import gaussian_means

_PLACES = np.array([0.1, 0.5, 1.0, 2.0, 5.0, -0.3, -1.5, -4.0], dtype=np.float32)


def activation_gain(activation: Any, bias_std: float = 0.0) -> float:
    """The gain of orthogonal kernels with which signals keep their size through many layers.

    For an odd activation, as tanh is, `critical_gain(activation, bias_std)`, 1 for tanh without
    biases. For others that of He et al., here for orthogonal kernels,

        gain = E[phi(z)^2]^(-1/2),    z standard normal,

    so that pre-activations of variance 1 lead to such ones: sqrt(2) for ReLU, which is its
    critical gain, too, and 1 for linear layers. (For GELU and its kin the critical point is that of
    vanishing signals, at which those of size 1 explode.)

    Args:
        activation: Name of a Keras activation, a function of tensors, or a layer without weights.
        bias_std: Standard deviation of the biases, which odd activations take into account.

    Raises:
        ValueError: An activation that mixes the entries of its argument, as softmax does.

    Example:

    >>> [round(activation_gain(name), 4) for name in ("tanh", "relu", "linear", "gelu")]
    [1.0, 1.4142, 1.0, 1.5335]

    Reference:

    - He et al., "Delving deep into rectifiers" (ICCV 2015), arXiv 1502.01852
    """
    function = keras.activations.get(activation)

    def values(x: np.ndarray) -> np.ndarray:
        tensor = keras.ops.convert_to_tensor(x[None], dtype="float32")
        return to_numpy(function(tensor))[0]

    right, left = values(_PLACES), values(-_PLACES)
    alone = np.concatenate([values(_PLACES[:4]), values(_PLACES[4:])])
    if right.shape != alone.shape or not np.allclose(right, alone, rtol=1e-5):
        raise ValueError(
            "An activation must map each entry by itself to have a gain. "
            f"Received: activation={activation!r}"
        )
    if np.allclose(right, -left, rtol=1e-5) and not np.allclose(right, right[2] * _PLACES):
        return critical_gain(activation, bias_std)
    return float(gaussian_means(lambda z: values(z).astype(np.float64) ** 2)) ** -0.5
