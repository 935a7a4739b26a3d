"""Small dense orthogonal matrices, many at a time, without BLAS (the same bits everywhere)."""

import numpy as np

from keras_sparse_ortho.orthogonal._rotations import AngleLaw, cos_sin


def random_orthogonal(
    count: int, size: int, rng: np.random.Generator, angles: AngleLaw = None
) -> np.ndarray:
    """`count` dense orthogonal `size x size` matrices, each a rotation of every pair of rows.

    The pairs are played in the rounds of a tournament, so that a round is one vectorized step.
    The rows get random signs. The law is not Haar's, but no entry is zero.
    """
    signs = np.where(rng.random((count, size)) < 0.5, -1.0, 1.0)
    matrices = np.zeros((count, size, size))
    matrices[:, np.arange(size), np.arange(size)] = signs
    players = size + size % 2
    circle = np.arange(1, players)
    for _ in range(players - 1 if size > 1 else 0):
        seats = np.concatenate([[0], circle])
        first, second = seats[: players // 2], seats[: players // 2 - 1 : -1]
        plays = (first < size) & (second < size)  # an odd size leaves one out in each round
        first, second = first[plays], second[plays]
        cos, sin = (v.reshape(count, -1, 1) for v in cos_sin(angles, count * len(first), rng))
        x, y = matrices[:, first], matrices[:, second]
        matrices[:, first], matrices[:, second] = cos * x + sin * y, cos * y - sin * x
        circle = np.roll(circle, 1)
    return matrices
