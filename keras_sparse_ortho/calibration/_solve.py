"""Which entries of a kernel stay, and their values: least squares on the inputs of its layer.

Everything here is on `M` matrices at once: kernels `W` of shape `(M, k, outputs)`, and the Gram
matrices `G = X^T X` of the layer's inputs, `(M, k, k)` in float64: NumPy arrays, or tensors of an
accelerator, on which all is computed then.
"""

import math
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._backend import float64_operations
from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.orthogonal import NByM, largest_mask, live_count

DAMPING = 0.01
ROUNDS = 8
TOLERANCE = 1e-9
_BETWEEN_ROUNDS = 1e-3  # where the next round only ranks the weights
_CHECK_EVERY = 8


def namespace(array: Any) -> Any:
    """`numpy`, or `keras.ops` for a tensor; what is used here is the same in both."""
    return np if isinstance(array, np.ndarray) else keras.ops


def as_float64(array: Any) -> Any:
    """An array or tensor in float64."""
    if isinstance(array, np.ndarray):
        return array.astype(np.float64)
    return keras.ops.cast(array, "float64")


def diagonal(matrices: Any) -> Any:
    """The diagonals, `(M, k)`."""
    return namespace(matrices).diagonal(matrices, axis1=-2, axis2=-1)


def damped(gram: Any) -> Any:
    """`G + 0.01 mean(diag G) I`: what rows that are fewer than inputs do not determine stays."""
    xp = namespace(gram)
    mean = xp.mean(diagonal(gram), axis=-1)
    shift = xp.where(mean > 0, DAMPING * mean, xp.ones_like(mean))
    return gram + shift[:, None, None] * xp.eye(gram.shape[-1], dtype="float64")


def refit(kernel: np.ndarray, mask: np.ndarray, gram: Any) -> np.ndarray:
    """The live entries anew: `argmin tr (V - W)^T H (V - W)` over `V` that are zero off the mask.

    `H` is the damped Gram matrix, so this is the least squared error of the layer's outputs.
    Conjugate gradients from the masked kernel, which never raise the error, for all columns at
    once, until the preconditioned residual is 1e-9 of that of zero.
    """
    with float64_operations():
        full, live = _like(gram, kernel), _like(gram, mask)
        return _numpy(_refit(full, live, damped(gram), full, TOLERANCE))


def _refit(full: Any, live: Any, normal: Any, start: Any, tolerance: float) -> Any:
    xp = namespace(normal)
    scale = 1.0 / diagonal(normal)[..., None]
    target = live * xp.matmul(normal, full)
    goal = tolerance**2 * xp.sum(target * scale * target, axis=-2, keepdims=True)
    found = start * live
    residual = target - live * xp.matmul(normal, found)
    step = scale * residual
    power = xp.sum(residual * step, axis=-2, keepdims=True)
    for number in range(2 * int(full.shape[-2]) + 100):
        if number % _CHECK_EVERY == 0 and bool(xp.all(power <= goal)):
            break
        image = live * xp.matmul(normal, step)
        length = _ratio(power, xp.sum(step * image, axis=-2, keepdims=True))
        found = found + length * step
        residual = residual - length * image
        ahead = scale * residual
        next_power = xp.sum(residual * ahead, axis=-2, keepdims=True)
        step = ahead + _ratio(next_power, power) * step
        power = next_power
    return found


def _ratio(above: Any, below: Any) -> Any:
    """`above / below`, and 0 where nothing is left to do."""
    xp = namespace(below)
    positive = below > 0
    return xp.where(positive, above / xp.where(positive, below, 1.0), 0.0)


def obs(
    kernel: np.ndarray, count: int, gram: Any, structure: NByM | None
) -> tuple[np.ndarray, np.ndarray]:
    """Optimal brain surgeon in eight rounds, from dense to `count` live entries.

    Each round drops the entries of least `w^2 / (H^-1)_ii`, the error that an entry costs if the
    others of its column make up for it, and refits the rest; live fractions fall geometrically.
    """
    with float64_operations():
        full, normal = _like(gram, kernel), damped(gram)
        inverse = diagonal(namespace(gram).linalg.inv(normal))
        found, mask = full, np.ones(kernel.shape, bool)
        for round_ in range(1, ROUNDS + 1):
            last = round_ == ROUNDS
            density = float(count / kernel.size) ** (round_ / ROUNDS)
            kept = count if last else live_count(density, kernel.size)
            costs = _numpy(found * found / inverse[..., None])
            mask = largest(np.where(mask, costs, -1.0), kept, structure, 0.0 if last else density)
            live = _like(gram, mask)
            found = _refit(full, live, normal, found, TOLERANCE if last else _BETWEEN_ROUNDS)
        return _numpy(found), mask


def wanda(kernel: np.ndarray, gram: Any) -> np.ndarray:
    """Scores `|w_ij| * norm of input i`."""
    with float64_operations():
        squares = _numpy(diagonal(gram))
    return np.abs(kernel) * np.sqrt(squares)[..., None]


def largest(
    scores: np.ndarray, count: int, structure: NByM | None, density: float = 0.0
) -> np.ndarray:
    """The mask of the `count` highest scores, at most `n` among every `m` consecutive inputs.

    More than `n` where a `density` needs them, in rounds before the last.
    """
    if structure is not None:
        most = max(structure.n, math.ceil(density * structure.m))
        matrices, k, outputs = scores.shape
        groups = scores.reshape(matrices, k // structure.m, structure.m, outputs)
        ranks = np.argsort(np.argsort(-groups, axis=2, kind="stable"), axis=2, kind="stable")
        scores = np.where(ranks < most, groups, -2.0).reshape(scores.shape)
    return largest_mask(scores, count)


def relative_error(found: np.ndarray, kernel: np.ndarray, gram: Any) -> float:
    """`tr (V - W)^T H (V - W) / tr W^T H W`: the damped squared error of the layer's outputs."""
    with float64_operations():
        xp, normal, full = namespace(gram), damped(gram), _like(gram, kernel)
        left = full - _like(gram, found)
        error, whole = (float(xp.sum(w * xp.matmul(normal, w))) for w in (left, full))
    return error / whole if whole > 0 else 0.0


def _like(gram: Any, array: np.ndarray) -> Any:
    """An array in float64, where the Gram matrix lies."""
    array = np.asarray(array, np.float64)
    if isinstance(gram, np.ndarray):
        return array
    return keras.ops.convert_to_tensor(array, dtype="float64")


def _numpy(array: Any) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else to_numpy(array)
