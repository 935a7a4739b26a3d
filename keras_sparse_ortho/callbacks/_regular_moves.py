"""One update of dynamic sparse training that keeps the fans of both sides, in NumPy."""

import numpy as np
from scipy import sparse
from scipy.optimize import linprog

from keras_sparse_ortho.callbacks._drop_and_grow import smallest


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
