"""Dense layers whose kernels are exactly orthogonal in blocks of 16 x 1 (in x out)."""

from __future__ import annotations

from keras import layers

import keras_sparse_ortho as kso
from keras_sparse_ortho.initializers import ExactOrthogonal
from keras_sparse_ortho.orthogonal import Block

BLOCK = 16


def block_dense(
    outputs: int, density: float, seed: int, gain: float = 2**0.5, **arguments
) -> kso.PrunableLayer:
    """A Dense layer with such a kernel, times `gain`, that keeps its mask in training.

    The default gain keeps the variance through a ReLU. `arguments` are those of `Dense`. The
    inputs must be divisible by 16.
    """
    kernel = ExactOrthogonal(density, gain=gain, seed=seed, structure=Block(BLOCK, 1))
    return kso.PrunableLayer(layers.Dense(outputs, kernel_initializer=kernel, **arguments))
