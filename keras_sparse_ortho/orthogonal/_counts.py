"""Exact counts: how many entries are live, and which dead ones are unmasked at random."""

import math
from collections.abc import Sequence

import numpy as np

from keras_sparse_ortho._checks import check_density

# Below this share of dead entries listing them all costs less than drawing and rejecting.
_LIST_DEAD_BELOW = 0.25


def live_count(density: float, size: int) -> int:
    """Number of live entries, `round(density * size)`, ties to even (Python's `round`).

    Args:
        density: Live fraction, in (0, 1].
        size: Number of entries.

    Example:

    >>> live_count(0.1, 784 * 300)
    23520
    """
    return round(check_density(density) * size)


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Splits `total` in proportion to `weights` by largest remainder, ties to the earlier one.

    The parts are integers, sum to `total`, and each lies within one of its exact share.

    Example:

    >>> apportion(10, [1, 1, 1])
    [4, 3, 3]
    """
    scale = math.fsum(weights)
    if not scale > 0:
        raise ValueError(f"`weights` must have a positive sum. Received: weights={weights}")
    shares = [total * weight / scale for weight in weights]
    parts = [math.floor(share) for share in shares]
    by_remainder = sorted(range(len(parts)), key=lambda k: (parts[k] - shares[k], k))
    for k in by_remainder[: total - sum(parts)]:
        parts[k] += 1
    return parts


def unmask_at_random(mask: np.ndarray, count: int, rng: np.random.Generator) -> None:
    """Sets uniformly drawn dead entries live, in place, until `mask` holds `count` live ones.

    The entries added are trainable zeros: they change no value of the kernel.
    """
    missing = count - int(np.count_nonzero(mask))
    if missing < 0:
        raise ValueError(f"The mask already holds more than {count} live entries: {-missing} more.")
    if missing == 0:
        return
    flat = mask.reshape(-1)
    if not np.shares_memory(flat, mask):
        raise ValueError("`mask` must be contiguous to be filled in place.")
    dead = flat.size - (count - missing)
    if missing == dead:
        flat[:] = True
    elif missing > dead // 2 or dead < _LIST_DEAD_BELOW * flat.size:
        position = np.flatnonzero(~flat)
        # The `missing` smallest of as many random keys: a uniform subset.
        flat[position[np.argpartition(rng.random(dead), missing - 1)[:missing]]] = True
    else:
        while missing:
            # Each round draws at most what is missing, so every draw that hits a dead entry counts.
            flat[(rng.random(missing) * flat.size).astype(np.int64)] = True
            missing = count - int(np.count_nonzero(mask))
