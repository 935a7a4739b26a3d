"""Masks of the largest entries, of one array or of several together."""

from collections.abc import Sequence

import numpy as np


def largest_mask(scores: np.ndarray, count: int) -> np.ndarray:
    """A bool mask of the `count` largest entries, ties to the lower flat index.

    Example:

    >>> largest_mask(np.array([0.1, 3.0, 3.0, 2.0]), 1).tolist()
    [False, True, False, False]
    """
    return largest_masks([scores], count)[0]


def largest_masks(scores: Sequence[np.ndarray], count: int) -> list[np.ndarray]:
    """Masks of the `count` largest entries of all arrays together.

    Ties go to the array that stands first, then to the lower flat index.

    Example:

    >>> masks = largest_masks([np.array([1.0, 3.0]), np.array([2.0, 3.0])], 3)
    >>> [mask.tolist() for mask in masks]
    [[False, True], [True, True]]
    """
    flat = [score.reshape(-1) for score in scores]
    size = sum(part.size for part in flat)
    if not 0 <= count <= size:
        raise ValueError(f"`count` must be in [0, {size}]. Received: count={count}")
    if not all(np.isfinite(part).all() for part in flat):
        raise ValueError("Scores must be finite to be compared.")
    if count in (0, size):
        return [np.full(score.shape, count > 0) for score in scores]
    # One array is not copied: at this size memory that is new costs more than arithmetic.
    least = _nth_largest(flat[0] if len(flat) == 1 else np.concatenate(flat), count)
    masks = [part > least for part in flat]
    missing = count - sum(int(np.count_nonzero(mask)) for mask in masks)
    for part, mask in zip(flat, masks, strict=True):
        ties = np.flatnonzero(part == least)[:missing]
        mask[ties] = True
        missing -= ties.size
        if missing == 0:
            break
    return [mask.reshape(score.shape) for mask, score in zip(masks, scores, strict=True)]


def _nth_largest(values: np.ndarray, n: int) -> np.floating:
    """The value of rank `n`, counted from the largest, which has rank 1."""
    # Selection is slow among equal values, and pruned weights are equal: the least stay out.
    least = values.min()
    rest = values[values > least]
    return np.partition(rest, rest.size - n)[rest.size - n] if n <= rest.size else least
