"""Which entries of a kernel stay, and their values: least squares on the inputs of its layer.

Everything here is on `M` matrices at once: kernels `W` of shape `(M, k, outputs)`, and the Gram
matrices `G = X^T X` of the layer's inputs, `(M, k, k)` in float64: NumPy arrays, or tensors of an
accelerator, on which all is computed then.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._backend import float64_operations
from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.calibration._patterns import Pattern
from keras_sparse_ortho.orthogonal import live_count

DAMPING = 0.01
AIM = 0.5
ROUNDS = 8
EXCHANGES = 12
TOLERANCE = 1e-9
_BETWEEN_ROUNDS = 1e-3  # where the next round only ranks the weights
_CHECK_EVERY = 8


def namespace(array: Any) -> Any:
    """`numpy`, or `keras.ops` for a tensor; what is used here is the same in both."""
    return np if isinstance(array, np.ndarray) else keras.ops


def as_float64(array: Any) -> Any:
    if isinstance(array, np.ndarray):
        return array.astype(np.float64)
    return keras.ops.cast(array, "float64")


def diagonal(matrices: Any) -> Any:
    return namespace(matrices).diagonal(matrices, axis1=-2, axis2=-1)


def damped(gram: Any) -> Any:
    """`G + 0.01 mean(diag G) I`: what rows that are fewer than inputs do not determine stays."""
    xp = namespace(gram)
    mean = xp.mean(diagonal(gram), axis=-1)
    shift = xp.where(mean > 0, DAMPING * mean, xp.ones_like(mean))
    return gram + shift[:, None, None] * xp.eye(gram.shape[-1], dtype="float64")


def refit(kernel: np.ndarray, mask: np.ndarray, gram: Any) -> np.ndarray:
    """The live entries anew: `argmin tr (V - W)^T H (V - W)` over `V` that are zero off the mask.

    `H` is the damped Gram matrix. Conjugate gradients from the masked kernel, for all columns at
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


def aimed(kernel: np.ndarray, gram: Any, across: Any) -> np.ndarray:
    """The kernel whose outputs come nearest to those halfway between two models.

    `W + H^-1 X^T (Y - X) W / 2`, where the rows are `X` in the pruned model and `Y` in the given
    one. All the way to `Y` follows the few rows too closely.
    """
    with float64_operations():
        xp, full = namespace(gram), _like(gram, kernel)
        return _numpy(full + AIM * xp.linalg.solve(damped(gram), xp.matmul(across, full)))


def obs(
    kernel: np.ndarray, count: int, gram: Any, pattern: Pattern
) -> tuple[np.ndarray, np.ndarray]:
    """Values and mask by optimal brain surgeon, in eight rounds from dense to `count` entries.

    Live fractions fall geometrically. Then entries are exchanged while that lowers the error.
    """
    density = count / kernel.size
    counts = [live_count(density ** (k / ROUNDS), kernel.size) for k in range(1, ROUNDS)]
    full, normal, precision = _prepared(kernel, gram, pattern)
    *_, (found, mask) = _rounds(full, normal, precision, [*counts, count], pattern)
    found, mask = _exchanged(full, normal, precision, found, mask, pattern)
    return _numpy(found), mask


def obs_rounds(
    kernel: np.ndarray, counts: Sequence[int], gram: Any, pattern: Pattern
) -> Iterator[tuple[Any, np.ndarray]]:
    """Values and mask with each of these numbers of live entries, which fall.

    Each round drops what costs least if the other entries of its columns make up for it, single
    entries `w^2 / (H^-1)_ii`, and refits the rest.
    """
    return _rounds(*_prepared(kernel, gram, pattern), counts, pattern)


def _prepared(kernel: np.ndarray, gram: Any, pattern: Pattern) -> tuple[Any, Any, np.ndarray]:
    """Kernel and damped Gram matrix where that lies, and what costs need of its inverse."""
    with float64_operations():
        full, normal = _like(gram, kernel), damped(gram)
        return full, normal, pattern.precision(_numpy(namespace(gram).linalg.inv(normal)))


def _rounds(
    full: Any, normal: Any, precision: np.ndarray, counts: Sequence[int], pattern: Pattern
) -> Iterator[tuple[Any, np.ndarray]]:
    found, mask = full, np.ones(full.shape, bool)
    for round_, count in enumerate(counts, 1):
        last = round_ == len(counts)
        costs = pattern.costs(_numpy(found), precision)
        before, mask = mask, pattern.largest(costs, count, mask, last=last)
        if mask is not before or last:
            with float64_operations():
                live, tolerance = _like(normal, mask), TOLERANCE if last else _BETWEEN_ROUNDS
                found = _refit(full, live, normal, found, tolerance)
        yield found, mask


def _exchanged(
    full: Any, normal: Any, precision: np.ndarray, found: Any, mask: np.ndarray, pattern: Pattern
) -> tuple[Any, np.ndarray]:
    """Exchanges live entries for dead ones, as many, while the error falls.

    A dead entry gains `(H (W - V))_i^2 / H_ii` alone. Exchanged together they can gain less than
    the live ones cost; then these count twice as much in the next round.
    """
    count, weight = int(np.count_nonzero(mask)), 2.0
    whole = np.ones(mask.shape, bool)
    with float64_operations():
        xp = namespace(normal)
        ahead = pattern.precision(_numpy(normal))
        lowered = xp.matmul(normal, full - found)
        error = float(xp.sum((full - found) * lowered))
        best = found, mask
        for _ in range(EXCHANGES):
            costs = weight * pattern.costs(_numpy(found), precision)
            gains = pattern.costs(_numpy(lowered), ahead)
            moved = pattern.largest(np.where(mask, costs, gains), count, whole)
            if np.array_equal(moved, mask):
                break
            tried = _refit(full, _like(normal, moved), normal, found, _BETWEEN_ROUNDS)
            left = xp.matmul(normal, full - tried)
            reached = float(xp.sum((full - tried) * left))
            if reached < error:
                found, mask, lowered, error = tried, moved, left, reached
            else:
                weight *= 2
        if mask is best[1]:
            return best
        return _refit(full, _like(normal, mask), normal, found, TOLERANCE), mask


def wanda(kernel: np.ndarray, gram: Any) -> np.ndarray:
    """Scores `|w_ij| * norm of input i`."""
    with float64_operations():
        squares = _numpy(diagonal(gram))
    return np.abs(kernel) * np.sqrt(squares)[..., None]


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
