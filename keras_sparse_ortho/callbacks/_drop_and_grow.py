"""One update of dynamic sparse training on one weight, in NumPy.

`drop_and_grow` moves single entries, `move_regular` keeps the fan-in and fan-out of every line, and
`move` keeps the structure that a mask was drawn with.
"""

import numpy as np

from keras_sparse_ortho.orthogonal import (
    Block,
    NByM,
    Structure,
    from_blocks,
    matched_by_score,
    to_blocks,
)

Array = np.ndarray
Generator = np.random.Generator


def drop_and_grow(value: Array, mask: Array, count: int, scores: Array, rng: Generator) -> Array:
    """Drops the `count` live entries of smallest magnitude, then grows as many by score.

    Entries that were just dropped may grow again; which of several equals is drawn.

    >>> value, mask = np.array([3.0, 1.0, 0.0, 0.0]), np.array([True, True, False, False])
    >>> drop_and_grow(value, mask, 1, np.array([9.0, 1.0, 2.0, 3.0]), np.random.default_rng(0))
    array([ True, False, False,  True])
    """
    result = mask.reshape(-1).copy()
    result[smallest(value, mask, count, rng)] = False
    dead = np.flatnonzero(~result)
    result[dead[largest(scores.reshape(-1)[dead], count, rng)]] = True
    return result.reshape(mask.shape)


def smallest(value: Array, live: Array, count: int, rng: Generator) -> Array:
    """Flat indices of the `count` live entries of smallest magnitude."""
    entries = np.flatnonzero(live)
    return entries[largest(-np.abs(value.reshape(-1)[entries]), count, rng)]


def largest(scores: Array, count: int, rng: Generator) -> Array:
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


def move_regular(
    magnitudes: Array, live: Array, count: int, scores: Array, rng: Generator
) -> Array:
    """Drops the `count` smallest live entries of all matrices; every line keeps its fan.

    A dropped entry leaves its input and its output one entry short. Among all ways to fill these
    places with dead entries, each at most once, one with the largest sum of scores is taken; the
    dropped entries themselves are one such way. Arrays are `(matrices, inputs, outputs)`.

    >>> live = np.eye(3, dtype=bool)[None]
    >>> scores = np.roll(np.eye(3), 1, axis=1)[None]
    >>> move_regular(live * 1.0, live, 3, scores, np.random.default_rng(0))[0].astype(int).tolist()
    [[0, 1, 0], [0, 0, 1], [1, 0, 0]]
    """
    result = live.copy()
    result.reshape(-1)[smallest(magnitudes, live, count, rng)] = False
    for kept, before, score in zip(result, live, scores, strict=True):
        lost = before & ~kept
        kept |= matched_by_score(kept, lost.sum(axis=1), lost.sum(axis=0), score, rng)
    return result


def move(
    structure: Structure, value: Array, mask: Array, count: int, scores: Array, rng: Generator
) -> Array:
    """Drops about `count` live entries, then grows as many by score, within the structure.

    All arrays are canonical, `(batch, parts, *taps, inputs, outputs)`; see `KernelLayout`. Whole
    blocks drop, as many as fit.

    >>> value = np.array([[[[3.0, 1.0], [2.0, 5.0], [0.0, 0.0]]]])
    >>> scores = np.arange(6.0).reshape(value.shape)
    >>> after = move(Block(1, 2), value, value != 0, 2, scores, np.random.default_rng(0))
    >>> after[0, 0].astype(int).tolist()
    [[0, 0], [1, 1], [1, 1]]
    """
    if isinstance(structure, Block):
        return _move_blocks(structure, value, mask, count, scores, rng)
    if isinstance(structure, NByM):
        return _move_within_groups(structure, value, mask, count, scores, rng)
    raise NotImplementedError(f"No update keeps this structure. Received: {structure}")


def _move_blocks(
    structure: Block, value: Array, mask: Array, count: int, scores: Array, rng: Generator
) -> Array:
    """Whole blocks, by the sums of magnitudes and scores; over taps too if they are regular."""
    rows, cols = structure.rows, structure.cols
    batch, parts, *taps, inputs, outputs = mask.shape
    inside = (*(range(2, 2 + len(taps)) if structure.regular else ()), -3, -1)

    def sums(array: Array) -> Array:
        return np.asarray(to_blocks(array, rows, cols).sum(axis=inside))

    live = np.asarray(to_blocks(mask, rows, cols).any(axis=inside))
    count = int(count * np.count_nonzero(live) // np.count_nonzero(mask))
    if not structure.regular:
        moved = drop_and_grow(sums(np.abs(value)), live, count, sums(scores), rng)
        return moved.repeat(rows, axis=-2).repeat(cols, axis=-1)
    matrices = (batch * parts, *live.shape[2:])
    found = [array.reshape(matrices) for array in (sums(np.abs(value)), live, sums(scores))]
    moved = move_regular(found[0], found[1], count, found[2], rng).reshape(live.shape)
    by_block = moved[..., :, None, :, None] & np.ones((rows, 1, cols), dtype=bool)
    moved = from_blocks(by_block, inputs, outputs)
    moved = moved.reshape(batch, parts, *(1 for _ in taps), inputs, outputs)
    return np.broadcast_to(moved, mask.shape).copy()


def _move_within_groups(
    structure: NByM, value: Array, mask: Array, count: int, scores: Array, rng: Generator
) -> Array:
    """The best dead entries grow of those for which their group of `m` has room."""
    *outer, inputs, outputs = mask.shape
    result = mask.reshape(-1).copy()
    result[smallest(value, mask, count, rng)] = False
    kept = structure.in_groups(result.reshape(mask.shape))
    # The rank of each entry within its group by score, live ones last.
    keys = np.where(kept, np.inf, -structure.in_groups(scores, -np.inf))
    order = np.lexsort((rng.random(keys.shape), keys), axis=-2)
    place = np.empty_like(order)
    np.put_along_axis(place, order, np.arange(structure.m).reshape(-1, 1), axis=-2)
    room = structure.n - kept.sum(axis=-2, keepdims=True)
    may_grow = (~kept & (place < room)).reshape(*outer, -1, outputs)[..., :inputs, :]
    open_ = np.flatnonzero(may_grow)
    result[open_[largest(scores.reshape(-1)[open_], count, rng)]] = True
    return result.reshape(mask.shape)
