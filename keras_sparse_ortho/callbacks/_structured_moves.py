"""One update of dynamic sparse training that keeps a structure, in NumPy.

All arrays are canonical, `(batch, parts, *taps, inputs, outputs)`; see `KernelLayout`.
"""

import functools

import numpy as np

from keras_sparse_ortho.callbacks._drop_and_grow import drop_and_grow, largest, smallest
from keras_sparse_ortho.callbacks._regular_moves import move_regular
from keras_sparse_ortho.orthogonal import Block, ConstantFan, NByM, Structure


@functools.singledispatch
def move(
    structure: Structure,
    value: np.ndarray,
    mask: np.ndarray,
    count: int,
    scores: np.ndarray,
    rng: np.random.Generator,
) -> np.ndarray:
    """Drops about `count` live entries, then grows as many by score, within the structure.

    Args:
        structure: What the live entries keep to, before and after.
        value: The kernel.
        mask: Which entries are live; it is left as it is.
        count: How many entries to drop; whole blocks: as many as fit.
        scores: Finite numbers of the kernel's shape; the largest ones grow.
        rng: Decides between equals.

    Returns:
        A new mask with as many live entries as `mask`.

    Example:

    >>> value = np.array([[[[3.0, 1.0], [2.0, 5.0], [0.0, 0.0]]]])
    >>> scores = np.arange(6.0).reshape(value.shape)
    >>> options = {"count": 1, "scores": scores, "rng": np.random.default_rng(0)}
    >>> after = move(ConstantFan("in"), value, value != 0, **options)
    >>> after[0, 0].astype(int).tolist()
    [[1, 0], [1, 1], [0, 1]]
    """
    raise NotImplementedError(f"nothing moves entries within {structure}")


@move.register
def _(
    structure: Block,
    value: np.ndarray,
    mask: np.ndarray,
    count: int,
    scores: np.ndarray,
    rng: np.random.Generator,
) -> np.ndarray:
    """Whole blocks: magnitudes and scores are summed over each, of regular ones over taps too."""
    rows, cols = structure.rows, structure.cols
    batch, parts, *taps, inputs, outputs = mask.shape
    grid = (batch, parts, *taps, inputs // rows, rows, outputs // cols, cols)
    inside = (*(range(2, 2 + len(taps)) if structure.regular else ()), -3, -1)

    def sums(array: np.ndarray) -> np.ndarray:
        return array.reshape(grid).sum(axis=inside)

    live = np.asarray(mask.reshape(grid).any(axis=inside))
    count = int(count * np.count_nonzero(live) // np.count_nonzero(mask))
    if not structure.regular:
        moved = drop_and_grow(sums(np.abs(value)), live, count, sums(scores), rng)
        return moved.repeat(rows, axis=-2).repeat(cols, axis=-1)
    matrices = (batch * parts, *live.shape[2:])
    found = [array.reshape(matrices) for array in (sums(np.abs(value)), live, sums(scores))]
    moved = move_regular(found[0], found[1], count, found[2], rng).reshape(live.shape)
    moved = moved.repeat(rows, axis=-2).repeat(cols, axis=-1)
    moved = moved.reshape(batch, parts, *(1 for _ in taps), inputs, outputs)
    return np.broadcast_to(moved, mask.shape).copy()


@move.register
def _(
    structure: ConstantFan,
    value: np.ndarray,
    mask: np.ndarray,
    count: int,
    scores: np.ndarray,
    rng: np.random.Generator,
) -> np.ndarray:
    """As SRigL: small entries are dropped wherever they are; each line grows what it has lost."""
    axis = -1 if structure.side == "in" else -2
    by_line = np.moveaxis(mask, axis, 2)
    lines = by_line.reshape(int(np.prod(by_line.shape[:3])), -1).copy()
    fans = lines.sum(axis=1)
    of_lines = [np.moveaxis(array, axis, 2).reshape(lines.shape) for array in (value, scores)]
    lines.reshape(-1)[smallest(of_lines[0], lines, count, rng)] = False
    lost = fans - lines.sum(axis=1)
    for line in np.flatnonzero(lost):
        dead = np.flatnonzero(~lines[line])
        lines[line, dead[largest(of_lines[1][line, dead], int(lost[line]), rng)]] = True
    return np.ascontiguousarray(np.moveaxis(lines.reshape(by_line.shape), 2, axis))


@move.register
def _(
    structure: NByM,
    value: np.ndarray,
    mask: np.ndarray,
    count: int,
    scores: np.ndarray,
    rng: np.random.Generator,
) -> np.ndarray:
    """What grows is the best of what the groups have room for: `n` less their live entries."""
    *outer, inputs, outputs = mask.shape
    groups = (*outer, inputs // structure.m, structure.m, outputs)
    result = mask.reshape(-1).copy()
    result[smallest(value, mask, count, rng)] = False
    kept = result.reshape(groups)
    # The places within a group by score, those that are live last.
    keys = np.where(kept, np.inf, -scores.reshape(groups))
    order = np.lexsort((rng.random(groups), keys), axis=-2)
    place = np.empty_like(order)
    np.put_along_axis(place, order, np.arange(structure.m).reshape(-1, 1), axis=-2)
    room = structure.n - kept.sum(axis=-2, keepdims=True)
    open_ = np.flatnonzero(~kept & (place < room))
    result[open_[largest(scores.reshape(-1)[open_], count, rng)]] = True
    return result.reshape(mask.shape)
