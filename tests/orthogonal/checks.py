"""What the tests of kernels share."""

import numpy as np

from keras_sparse_ortho.orthogonal import complete as complete
from keras_sparse_ortho.orthogonal import (
    covering_rotations as covering_rotations,
)
from keras_sparse_ortho.orthogonal import random_rotations as random_rotations
from keras_sparse_ortho.orthogonal import (
    rotations_for_density as rotations_for_density,
)
from keras_sparse_ortho.orthogonal import unite as unite


def assert_orthogonal(matrix, gain=1.0, atol=1e-6):
    """By the Gram matrix of its shorter side."""
    matrix = matrix.astype(np.float64)
    matrix = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
    expected = gain**2 * np.eye(matrix.shape[1])
    np.testing.assert_allclose(matrix.T @ matrix, expected, rtol=0, atol=atol)


def dead_inputs(kernel):
    """Of a kernel `(*spatial, in, out)` that is one matrix at each tap."""
    return int(
        (~kernel.any(axis=(*range(kernel.ndim - 2), kernel.ndim - 1))).sum()
    )
