"""Activations that map every channel by itself, so that a constant one stays constant."""

from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._values import to_numpy

# Not softmax, log_softmax, sparsemax and glu, which mix channels.
_NAMES = [
    "celu",
    "elu",
    "exponential",
    "gelu",
    "hard_shrink",
    "hard_sigmoid",
    "hard_silu",
    "hard_swish",
    "hard_tanh",
    "leaky_relu",
    "linear",
    "log_sigmoid",
    "mish",
    "relu",
    "relu6",
    "selu",
    "sigmoid",
    "silu",
    "soft_shrink",
    "softplus",
    "softsign",
    "sparse_plus",
    "sparse_sigmoid",
    "squareplus",
    "swish",
    "tanh",
    "tanh_shrink",
    "threshold",
]


def is_elementwise(activation: Any) -> bool:
    """Whether an activation is known to map each entry by itself, `None` included."""
    known = [getattr(keras.activations, name, None) for name in _NAMES]  # some are newer
    return any(activation is function for function in known) or activation is None


def activated(function: Any, constants: np.ndarray) -> np.ndarray:
    """The constants after an activation, as the backend computes it in float32."""
    if function is None or not constants.size:
        return constants
    tensor = keras.ops.convert_to_tensor(np.nan_to_num(constants)[None], dtype="float32")
    found = to_numpy(function(tensor))[0].astype(np.float64)
    return np.where(np.isnan(constants), np.nan, found)
