"""One update of one weight by dynamic sparse training, in NumPy: entries, or whole blocks."""

import numpy as np

from keras_sparse_ortho.orthogonal import Block, matched_by_score, to_blocks

Array = np.ndarray
Generator = np.random.Generator


def drop_and_grow(
    value: Array,
    mask: Array,
    count: int,
    scores: Array,
    rng: Generator,
) -> Array:
    """Drops the `count` live entries of smallest magnitude, then grows as many by score."""
    live = mask.reshape(-1).copy()
    live[smallest(value, mask, count, rng)] = False
    dead = np.flatnonzero(~live)
    dead_scores = scores.reshape(-1)[dead]
    grown = dead[largest(dead_scores, count, rng)]
    live[grown] = True
    return live.reshape(mask.shape)


def smallest(
    value: Array,
    live: Array,
    count: int,
    rng: Generator,
) -> Array:
    """Flat indices of the `count` live entries of smallest magnitude."""
    entries = np.flatnonzero(live)
    magnitudes = np.abs(value.reshape(-1)[entries])
    return entries[largest(-magnitudes, count, rng)]


def largest(scores: Array, count: int, rng: Generator) -> Array:
    """Indices of the `count` largest of a vector of scores; ties are drawn.

    A fixed rule would pile up new entries at one end of kernels without gradients.
    """
    if count == 0:
        return np.zeros(0, dtype=np.intp)
    rank = scores.size - count
    threshold = np.partition(scores, rank)[rank]
    above = np.flatnonzero(scores > threshold)
    equal = np.flatnonzero(scores == threshold)
    missing = count - above.size
    if missing < equal.size:
        equal = rng.choice(equal, missing, replace=False)
    return np.concatenate([above, equal])


def move_regular(
    magnitudes: Array,
    live: Array,
    count: int,
    scores: Array,
    rng: Generator,
) -> Array:
    """Moves the `count` smallest live entries of matrices to (nearly) the best that keep fans."""
    moved = live.copy()
    moved.reshape(-1)[smallest(magnitudes, live, count, rng)] = False
    for place in np.ndindex(live.shape[:-2]):
        stays = moved[place]
        dropped = live[place] & ~stays
        row_counts = dropped.sum(axis=1)
        column_counts = dropped.sum(axis=0)
        stays |= matched_by_score(
            stays, row_counts, column_counts, scores[place], rng
        )
    return moved


def move_blocks(
    structure: Block,
    value: Array,
    mask: Array,
    count: int,
    scores: Array,
    rng: Generator,
) -> Array:
    """Drops as many whole blocks as `count` entries make, then grows as many by sums of scores.

    Args:
        structure: Block. Regular blocks span all taps.
        value: array of a canonical shape (`KernelLayout`), as the other arrays are.
        mask: bool array.
        count: int. Live entries to drop.
        scores: array. Scores of entries to grow.
        rng: NumPy generator, to decide between equals.
    """
    rows = structure.rows
    cols = structure.cols
    taps = range(2, mask.ndim - 2)
    axes_of_block: tuple[int, ...] = (-3, -1)
    if structure.regular:
        axes_of_block = (*taps, -3, -1)
    magnitudes = np.asarray(
        to_blocks(np.abs(value), rows, cols).sum(axis=axes_of_block)
    )
    totals = np.asarray(to_blocks(scores, rows, cols).sum(axis=axes_of_block))
    live = np.asarray(to_blocks(mask, rows, cols).any(axis=axes_of_block))
    block_count = count * np.count_nonzero(live) // np.count_nonzero(mask)
    if structure.regular:
        moved = move_regular(magnitudes, live, int(block_count), totals, rng)
    else:
        moved = drop_and_grow(magnitudes, live, int(block_count), totals, rng)
    entries = moved.repeat(rows, axis=-2).repeat(cols, axis=-1)
    if structure.regular:
        no_taps = (1,) * len(taps)
        entries = entries.reshape(*mask.shape[:2], *no_taps, *mask.shape[-2:])
    return np.broadcast_to(entries, mask.shape).copy()
