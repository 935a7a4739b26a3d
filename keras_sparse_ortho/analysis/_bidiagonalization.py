"""Golub-Kahan bidiagonalization of many operators at once."""

from collections.abc import Callable

import numpy as np

Product = Callable[[np.ndarray], np.ndarray]

# Relative to the largest entry: products come in float32.
_EXHAUSTED = 1e-6


def bidiagonalize(
    forward: Product, backward: Product, start: np.ndarray, rows: int, steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """Ritz singular values and the weights of their Gauss quadrature.

    With `A V = U B`, `A^T U = V B^T + ...`, `B` upper bidiagonal, `V` from `start`, and
    `B = P diag(s) Q^T`: the values are `s`, and the weights `w_i = Q[0, i]^2`. So
    `sum_i w_i f(s_i)` is the estimate of `v^T f(sqrt(A^T A)) v` for `v = start / |start|`, exact
    for polynomials in `s^2` of degree `2 steps - 1`.

    Args:
        forward: `A v` for vectors `(operators, columns)`.
        backward: `A^T u` for vectors `(operators, rows)`.
        start: Vectors `(operators, columns)`.
        rows: Rows of `A`.
        steps: Steps, at most the number of columns.

    Returns:
        Values, descending, and weights, both `(operators, steps)`.
    """
    operators, columns = start.shape
    v = np.zeros((operators, steps, columns))
    u = np.zeros((operators, steps, rows))
    matrix = np.zeros((operators, steps, steps))
    scale = np.zeros(operators)
    direction = start / np.linalg.norm(start, axis=1, keepdims=True)
    for k in range(steps):
        v[:, k] = direction
        left = _without(forward(direction), u[:, :k])
        left, matrix[:, k, k] = _normalized(left, scale)
        scale = np.maximum(scale, matrix[:, k, k])
        u[:, k] = left
        if k + 1 < steps:
            right = _without(backward(left), v[:, : k + 1])
            direction, matrix[:, k, k + 1] = _normalized(right, scale)
            scale = np.maximum(scale, matrix[:, k, k + 1])
    _, values, q = np.linalg.svd(matrix)
    return values, q[:, :, 0] ** 2


def _without(vectors: np.ndarray, basis: np.ndarray) -> np.ndarray:
    """The vectors without their parts along an orthonormal basis; twice, which is enough."""
    for _ in range(2):
        along = np.einsum("skn,sn->sk", basis, vectors)
        vectors = vectors - np.einsum("skn,sk->sn", basis, along)
    return vectors


def _normalized(vectors: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors and norms; zeros where the space is exhausted and only rounding is left."""
    norms = np.linalg.norm(vectors, axis=1)
    norms = np.where(norms > _EXHAUSTED * scale, norms, 0.0)
    safe = np.where(norms > 0, norms, 1.0)
    return np.where(norms[:, None] > 0, vectors / safe[:, None], 0.0), norms
