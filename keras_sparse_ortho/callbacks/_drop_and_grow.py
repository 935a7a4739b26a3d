"""One update of dynamic sparse training on one weight, in NumPy."""

import numpy as np


def drop_and_grow(
    value: np.ndarray,
    mask: np.ndarray,
    count: int,
    scores: np.ndarray,
    rng: np.random.Generator,
) -> np.ndarray:
    """Drops the `count` live entries of smallest magnitude, then grows as many by score.

    Whatever is not live after the drop may grow, so an entry that was just dropped may come back.

    Args:
        value: The weight.
        mask: Which entries are live; it is left as it is.
        count: How many to drop, from 0 to the number of live entries.
        scores: Finite numbers of the weight's shape; the largest ones grow.
        rng: Decides between equals.

    Returns:
        A new mask with as many live entries as `mask`.

    Example:

    >>> value, mask = np.array([3.0, 1.0, 0.0, 0.0]), np.array([True, True, False, False])
    >>> drop_and_grow(value, mask, 1, np.array([9.0, 1.0, 2.0, 3.0]), np.random.default_rng(0))
    array([ True, False, False,  True])
    """
    result = mask.reshape(-1).copy()
    result[smallest(value, mask, count, rng)] = False
    dead = np.flatnonzero(~result)
    result[dead[largest(scores.reshape(-1)[dead], count, rng)]] = True
    return result.reshape(mask.shape)


def smallest(
    value: np.ndarray, live: np.ndarray, count: int, rng: np.random.Generator
) -> np.ndarray:
    """Flat indices of the `count` live entries of smallest magnitude."""
    entries = np.flatnonzero(live)
    return entries[largest(-np.abs(value.reshape(-1)[entries]), count, rng)]


def largest(scores: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Indices of the `count` largest of a vector of scores; which of several equals is drawn.

    A fixed rule for equals would pile up new entries at one end of kernels whose gradients are
    zero, such as the rows of an embedding that no sample of a batch uses.
    """
    if not 0 <= count <= scores.size:
        raise ValueError(f"`count` must be in [0, {scores.size}]. Received: count={count}")
    if count == 0:
        return np.zeros(0, dtype=np.intp)
    least = np.partition(scores, scores.size - count)[scores.size - count]
    above = np.flatnonzero(scores > least)
    equal = np.flatnonzero(scores == least)
    needed = count - above.size
    if needed < equal.size:
        equal = rng.choice(equal, needed, replace=False)
    return np.concatenate([above, equal])
