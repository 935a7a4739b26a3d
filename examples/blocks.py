"""Dense layers whose kernels are exactly orthogonal in blocks of 16 x 1 (in x out)."""

from __future__ import annotations

import keras
import numpy as np
from keras import layers

import keras_sparse_ortho as kso
from keras_sparse_ortho.orthogonal import exact_orthogonal

BLOCK = 16


def random_rotation(size: int, rng: np.random.Generator) -> np.ndarray:
    """A uniformly distributed orthogonal matrix."""
    q, r = np.linalg.qr(rng.standard_normal((size, size)))
    return q * np.sign(np.diag(r))


def block_kernel(
    inputs: int, outputs: int, density: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """A kernel `(inputs, outputs)` that is exactly orthogonal in 16 x 16 blocks, and its mask.

    S is a sparse orthogonal matrix of a 16th of the size; the block (i, j) of the kernel is
    `S_ij A_i B_j`, with random rotations A_i and B_j. So K = diag(A) (S x I) diag(B) is as
    orthogonal as S, and each block of 16 inputs of an output is live or dead as a whole.
    """
    if inputs % BLOCK or outputs % BLOCK:
        raise ValueError(
            f"Inputs and outputs must be divisible by {BLOCK}. Received: {inputs} x {outputs}"
        )
    rows, columns = inputs // BLOCK, outputs // BLOCK
    small, mask = exact_orthogonal((rows, columns), density, seed=seed)
    rng = np.random.default_rng(seed)
    left = np.stack([random_rotation(BLOCK, rng) for _ in range(rows)])
    right = np.stack([random_rotation(BLOCK, rng) for _ in range(columns)])
    kernel = np.einsum("rc,rab,cbd->racd", small, left, right)
    whole = np.kron(mask, np.ones((BLOCK, BLOCK), bool)).astype(bool)
    return kernel.reshape(inputs, outputs).astype("float32") * whole, whole


def block_dense(
    inputs: int, outputs: int, density: float, seed: int, gain: float = 2**0.5, **arguments
) -> keras.Layer:
    """A Dense layer with such a kernel, times `gain`, held by a fixed mask.

    The default gain keeps the variance through a ReLU. `arguments` are those of `Dense`.
    """
    kernel, mask = block_kernel(inputs, outputs, density, seed)
    layer = layers.Dense(outputs, **arguments)
    wrapped = kso.PrunableLayer(layer, kso.parametrizations.FixedMask(mask=mask))
    wrapped.build((None, inputs))
    layer.kernel.assign(gain * kernel)
    return wrapped
