"""Networks that more than one file of these tests shrinks."""

import keras
import numpy as np


def uneven():
    """Channels of a hundredth of the others decide, and one scale of int8 holds both kinds.

    NumPy draws the weights: the same network on each backend.
    """
    inputs = keras.Input((16,))
    hidden = keras.layers.Dense(64, "relu", name="hidden")
    head = keras.layers.Dense(8, name="head")
    model = keras.Model(inputs, head(hidden(inputs)))
    draws = np.random.default_rng(0)
    scales = np.where(np.arange(64) < 60, 0.002, 1.0)
    hidden_kernel = draws.normal(0, 0.15, (16, 64)) * scales
    hidden.set_weights([hidden_kernel, np.zeros(64)])
    head_kernel = draws.normal(0, 0.15, (64, 8))
    head_kernel *= np.where(scales < 1, 1 / scales, 0.02)[:, None]
    head.set_weights([head_kernel, np.zeros(8)])
    return model
