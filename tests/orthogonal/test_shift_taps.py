"""`shift_taps`: the embedding of a matrix, and shifts that leave the window."""

import numpy as np
import pytest

from keras_sparse_ortho.orthogonal import exact_orthogonal, shift_taps

pytestmark = pytest.mark.numpy_only


def test_shifts_of_a_matrix():
    rng = np.random.default_rng(0)
    matrix, _ = exact_orthogonal((6, 10), 0.4, seed=0)
    inputs, outputs = rng.integers(0, 2, (2, 6)), rng.integers(0, 2, (2, 10))
    kernel = shift_taps(matrix, inputs, outputs, taps=(3, 3))
    for i, o in np.ndindex(6, 10):
        assert kernel[(*(inputs[:, i] + outputs[:, o]), i, o)] == matrix[i, o]
    np.testing.assert_array_equal(kernel.sum(axis=(0, 1)), matrix)
    # At shift w: sum over taps of K[u] K[u + w]^T. Padding makes all of them overlap somewhere.
    padded = np.pad(kernel.astype(np.float64), [(2, 2), (2, 2), (0, 0), (0, 0)])
    for w in np.ndindex(5, 5):
        moved = np.roll(padded, (w[0] - 2, w[1] - 2), axis=(0, 1))
        gram = np.einsum("uvio,uvjo->ij", padded, moved)
        np.testing.assert_allclose(gram, np.eye(6) if w == (2, 2) else 0.0 * gram, atol=1e-6)
    with pytest.raises(ValueError, match=r"in the window of \(3, 3\) taps. Received: tap \(3, 0\)"):
        shift_taps(np.eye(2), [[0, 1], [0, 0]], [[1, 2], [0, 0]], taps=(3, 3))
    with pytest.raises(ValueError, match=r"Received: tap \(-1,\) for input 1, output 1"):
        shift_taps(np.eye(2), [[0, -1]], [[0, 0]], taps=(3,))
    # A zero entry may leave it.
    shift_taps(np.eye(2), [[0, 2]], [[2, 0]], taps=(3,))
    for bad in ([[0, 1, 2]], [0, 1], [[0.0, 1.0]]):
        with pytest.raises(ValueError, match=r"`input_shifts` must be integers of shape \(1, 2\)"):
            shift_taps(np.eye(2), bad, [[0, 0]], taps=(3,))
