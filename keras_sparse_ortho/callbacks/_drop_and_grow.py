"""One update of dynamic sparse training on one weight, in NumPy.

`drop_and_grow` moves single entries, `move_regular` keeps the fan-in and fan-out of every line, and
`move` keeps any structure.
"""

import functools

import numpy as np
from scipy import sparse
from scipy.optimize import linprog

from keras_sparse_ortho.orthogonal import Block, ConstantFan, NByM, Structure


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


def move_regular(
    magnitudes: np.ndarray,
    live: np.ndarray,
    count: int,
    scores: np.ndarray,
    rng: np.random.Generator,
) -> np.ndarray:
    """Drops the `count` smallest live entries of all matrices, and joins their ends anew.

    An entry that is dropped leaves an open end at its input and one at its output. With as many
    open ends at each line as before, every line keeps its fan: among all ways to join the ends
    of a matrix by entries that are not live, each at most once, one with the largest sum of scores
    is taken. To join all as they were is one of them.

    Args:
        magnitudes: `(matrices, inputs, outputs)`.
        live: bool of the same shape; it is left as it is.
        count: How many to drop, from 0 to the number of live entries.
        scores: Finite numbers of the same shape.
        rng: Decides between equals.

    Returns:
        A new mask, with the sums of `live` along inputs and along outputs.

    Example:

    >>> live = np.eye(3, dtype=bool)[None]
    >>> scores = np.roll(np.eye(3), 1, axis=1)[None]
    >>> move_regular(live * 1.0, live, 3, scores, np.random.default_rng(0))[0].astype(int).tolist()
    [[0, 1, 0], [0, 0, 1], [1, 0, 0]]
    """
    result = live.copy()
    result.reshape(-1)[smallest(magnitudes, live, count, rng)] = False
    for kept, before, score in zip(result, live, scores, strict=True):
        lost = before & ~kept
        kept |= _joined(kept, lost.sum(axis=1), lost.sum(axis=0), score, rng)
    return result


def _joined(
    kept: np.ndarray,
    of_inputs: np.ndarray,
    of_outputs: np.ndarray,
    scores: np.ndarray,
    rng: np.random.Generator,
) -> np.ndarray:
    """Of entries that are not live, so many for each input and output, with the largest scores.

    A linear program whose vertices are integers (a flow of capacity 1 between the two sides); the
    simplex method ends at one of them.
    """
    chosen = np.zeros_like(kept)
    if not of_inputs.any():
        return chosen
    # In random order, so that it is not the order that decides between equals.
    open_ = ~kept & (of_inputs > 0)[:, None] & (of_outputs > 0)
    inputs, outputs = np.nonzero(open_)
    order = rng.permutation(len(inputs))
    inputs, outputs = inputs[order], outputs[order]
    sides = np.concatenate([inputs, len(kept) + outputs])
    entry = np.tile(np.arange(len(inputs)), 2)
    wanted = np.concatenate([of_inputs, of_outputs])
    shape = (len(wanted), len(inputs))
    sums = sparse.csr_array((np.ones(len(sides)), (sides, entry)), shape=shape)
    found = linprog(
        -scores[inputs, outputs], A_eq=sums, b_eq=wanted, bounds=(0, 1), method="highs-ds"
    )
    taken = found.x > 0.5
    chosen[inputs[taken], outputs[taken]] = True
    if (chosen.sum(axis=1) != of_inputs).any() or (chosen.sum(axis=0) != of_outputs).any():
        raise RuntimeError(f"The simplex method did not end at a vertex. Received: {found.message}")
    return chosen


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
