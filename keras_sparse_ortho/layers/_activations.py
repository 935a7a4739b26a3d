"""Which activations map each entry by itself."""

from typing import Any

import keras

# Not softmax, log_softmax, sparsemax and glu, which mix channels.
_NAMES = (
    *("celu", "elu", "exponential", "gelu", "hard_shrink", "hard_sigmoid", "hard_silu"),
    *("hard_swish", "hard_tanh", "leaky_relu", "linear", "log_sigmoid", "mish", "relu", "relu6"),
    *("selu", "sigmoid", "silu", "soft_shrink", "softplus", "softsign", "sparse_plus"),
    *("sparse_sigmoid", "squareplus", "swish", "tanh", "tanh_shrink", "threshold"),
)


def is_elementwise(activation: Any) -> bool:
    """Whether an activation is known to map each entry by itself, `None` included."""
    known = [getattr(keras.activations, name, None) for name in _NAMES]  # some are newer
    return any(activation is function for function in known) or activation is None
