"""Patterns of live blocks, as lists of indices: regular ones, and those of highest score."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import sparse
from scipy.optimize import linprog

from keras_sparse_ortho._checks import told

# Rounds of trades. For 16 to 1024 lines more make no difference: after four times as many, the
# number of blocks that two lines share has the same variance.
_ROUNDS = 16
# Entries of `matched_by_score` that the linear program decides on, at least; rounds of prices. In
# 64 to 2048 lines of uneven scores it has found the best pattern with them.
_LEAST_UNSURE = 1024
_PRICE_ROUNDS = 8


def block_count(side: int, width: int) -> int:
    """Blocks of at most `width` that a side is cut into."""
    return -(-side // width)


def to_blocks(kernel: np.ndarray, rows: int, cols: int, fill: Any = 0) -> np.ndarray:
    """A kernel `(..., inputs, outputs)` as `(..., I, rows, J, cols)`.

    A side that is not divided by its block is cut into as many blocks as fit it, of one size and,
    after these, of one less, which are padded at their ends.
    """
    *outer, inputs, outputs = kernel.shape
    shape = (block_count(inputs, rows), rows, block_count(outputs, cols), cols)
    if shape[0] * rows > inputs or shape[2] * cols > outputs:
        padded = np.full((*outer, shape[0] * rows, shape[2] * cols), fill, kernel.dtype)
        padded[..., _places(inputs, rows)[:, None], _places(outputs, cols)] = kernel
        kernel = padded
    return kernel.reshape(*outer, *shape)


def from_blocks(blocks: np.ndarray, inputs: int, outputs: int) -> np.ndarray:
    """The inverse of `to_blocks`."""
    *outer, count, rows, lines, cols = blocks.shape
    kernel = blocks.reshape(*outer, count * rows, lines * cols)
    if count * rows == inputs and lines * cols == outputs:
        return kernel
    found: np.ndarray = kernel[..., _places(inputs, rows)[:, None], _places(outputs, cols)]
    return found


def whole_blocks(side: int, width: int) -> int:
    """How many blocks of a side have `width` entries; they are the first, the others have less."""
    return side - block_count(side, width) * (width - 1)


def clear_padding(
    blocks: np.ndarray, inputs_of: np.ndarray, outputs_of: np.ndarray, inputs: int, outputs: int
) -> None:
    """Sets the padding of live blocks `(..., *taps, r, c)` to zero, by their input and output."""
    rows, cols = blocks.shape[-2:]
    blocks[inputs_of >= whole_blocks(inputs, rows), ..., -1:, :] = 0.0
    blocks[outputs_of >= whole_blocks(outputs, cols), ..., -1:] = 0.0


def _places(side: int, width: int) -> np.ndarray:
    """Where the entries of a side stand among its padded blocks."""
    every = np.arange(block_count(side, width) * width).reshape(-1, width)
    whole = whole_blocks(side, width)
    return np.concatenate([every[:whole].ravel(), every[whole:, :-1].ravel()])


def fan_step(input_blocks: int, output_blocks: int) -> int:
    """Step between the possible fan-ins: from `J k = I out`, `k` is a multiple of `I / gcd(I, J)`.

    >>> fan_step(64, 64), fan_step(64, 24), fan_step(24, 64)
    (1, 8, 3)
    """
    return input_blocks // math.gcd(input_blocks, output_blocks)


def regular_pattern(
    input_blocks: int, output_blocks: int, fan_in: int, rng: np.random.Generator
) -> np.ndarray:
    """Draws the live input blocks of each output block, such that all blocks are used equally.

    Each of `J` output blocks gets `k = fan_in` of `I` input blocks, a multiple of `I / gcd(I, J)`,
    and each input block goes to `J k / I` output blocks. The inputs are dealt in turn, `k` to each
    output, and shuffled; then random pairs of outputs repeatedly pool the inputs that they do not
    share and divide them at random (Curveball trades). These change no fan and reach all regular
    patterns with equal probability. Few of these admit an exactly orthogonal kernel; see
    `regular_blocks`. Returns int32 `(J, k)`, ascending in each line.

    >>> inputs_of = regular_pattern(6, 4, 3, np.random.default_rng(0))
    >>> inputs_of.shape, np.bincount(inputs_of.ravel()).tolist()
    ((4, 3), [2, 2, 2, 2, 2, 2])

    Reference:

    - Strona et al., "A fast and unbiased procedure to randomize ecological binary matrices with
      fixed row and column totals" (Nature Communications, 2014)
    """
    # So many consecutive numbers modulo `input_blocks` differ, and each comes equally often.
    dealt = (np.arange(output_blocks * fan_in) % input_blocks).reshape(-1, fan_in)
    pattern = _shuffled(input_blocks, rng)[dealt][_shuffled(output_blocks, rng)]
    half = output_blocks // 2
    if half and fan_in < input_blocks:
        for _ in range(_ROUNDS):
            order = _shuffled(output_blocks, rng)
            first, second = order[:half], order[half : 2 * half]
            both = np.sort(np.concatenate([pattern[first], pattern[second]], axis=1), axis=1)
            keys = rng.random(both.shape)
            # What both have occurs twice: one goes to the first, one to the second.
            same = both[:, 1:] == both[:, :-1]
            keys[:, :-1][same] = -1.0
            keys[:, 1:][same] = 2.0
            both = np.take_along_axis(both, np.argsort(keys, axis=1), axis=1)
            pattern[first], pattern[second] = both[:, :fan_in], both[:, fan_in:]
    return np.sort(pattern, axis=1).astype(np.int32)


def matched_by_score(
    kept: np.ndarray,
    of_inputs: np.ndarray,
    of_outputs: np.ndarray,
    scores: np.ndarray,
    rng: np.random.Generator,
) -> np.ndarray:
    """Dead entries of (nearly) largest total score, with given numbers for inputs and outputs.

    A linear program whose vertices are integers (a flow of capacity 1 between the two sides); the
    simplex method ends at a vertex. Prices of the lines, `u` and `v`, tell most entries before: one
    of large `s_ij - u_i - v_j` is taken, one of small is not. The program decides on the others,
    and on more of them where it has no solution.
    """
    chosen = np.zeros_like(kept)
    if not of_inputs.any():
        return chosen
    open_ = ~kept & (of_inputs > 0)[:, None] & (of_outputs > 0)
    inputs, outputs = np.nonzero(open_)
    order = rng.permutation(len(inputs))  # otherwise the order would decide between equals
    inputs, outputs = inputs[order], outputs[order]
    far = scores.min() - 2 * np.ptp(scores)
    gains = scores - _prices(np.where(open_, scores, far), of_inputs, of_outputs)
    gains = gains[inputs, outputs]
    nearest = np.argsort(np.abs(gains), kind="stable")
    unsure = max(_LEAST_UNSURE, 4 * sum(kept.shape))
    while True:
        chosen[...] = False
        sure = nearest[unsure:][gains[nearest[unsure:]] > 0]
        chosen[inputs[sure], outputs[sure]] = True
        left = [of_inputs - chosen.sum(axis=1), of_outputs - chosen.sum(axis=0)]
        near = np.sort(nearest[:unsure])
        taken = _vertex(inputs[near], outputs[near], gains[near], left)
        if taken is not None:
            chosen[inputs[near[taken]], outputs[near[taken]]] = True
        if (chosen.sum(axis=1) == of_inputs).all() and (chosen.sum(axis=0) == of_outputs).all():
            return chosen
        if unsure >= len(nearest):
            raise RuntimeError(
                "The simplex method found no pattern with the numbers that are given"
            )
        unsure *= 4


def _vertex(
    inputs: np.ndarray, outputs: np.ndarray, gains: np.ndarray, wanted: list[np.ndarray]
) -> np.ndarray | None:
    """Which entries of largest total gain make up the numbers `wanted` of inputs and outputs."""
    if min(numbers.min() for numbers in wanted) < 0:
        return None
    count, lines = len(inputs), len(wanted[0])
    at = np.concatenate([inputs, lines + outputs]), np.tile(np.arange(count), 2)
    shape = (lines + len(wanted[1]), count)
    sums = sparse.csr_array((np.ones(2 * count), at), shape=shape)
    bounds = np.concatenate(wanted)
    found = linprog(-gains, A_eq=sums, b_eq=bounds, bounds=(0, 1), method="highs-ds")
    return None if found.x is None else found.x > 0.5


def _prices(scores: np.ndarray, of_inputs: np.ndarray, of_outputs: np.ndarray) -> np.ndarray:
    """`u_i + v_j`, in turns halfway between what a line would take and what it would not."""
    rows = np.zeros((len(scores), 1))
    for _ in range(_PRICE_ROUNDS):
        columns = _between((scores - rows).T, of_outputs).T
        rows = _between(scores - columns, of_inputs)
    return rows + columns


def _between(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """A column: halfway between the last that each line takes, of so many, and the next one."""
    ordered, lines, most = -np.sort(-values, axis=1), np.arange(len(values)), values.shape[1] - 1
    last, first = (ordered[lines, np.clip(counts + k, 0, most)] for k in (-1, 0))
    halfway: np.ndarray = (last + first) / 2
    return halfway[:, None]


def few_counts(counts: np.ndarray, most: int = 8) -> np.ndarray:
    """Counts of the same sum with at most `most` different values, of least squared distance.

    By dynamic programming over the sorted counts, which are cut into segments of equal counts, or
    of two that differ by one. So they are more even than the given ones: where a pattern has
    `counts` on both sides, one with few counts on both exists, too (Gale and Ryser).

    >>> few_counts(np.array([1, 2, 4, 5, 9, 9]), 3).tolist()
    [3, 3, 3, 3, 9, 9]
    """
    order = np.argsort(counts, kind="stable")
    # In steps, where there are very many lines.
    ends = np.unique(np.linspace(0, len(counts), min(len(counts), 512) + 1).round().astype(int))
    sums, squares = (
        np.concatenate([[0], np.cumsum(counts[order] ** power)])[ends] for power in (1, 2)
    )
    sizes, totals = (np.subtract.outer(x, x).T for x in (ends, sums))
    low, high = np.divmod(totals, np.maximum(sizes, 1))
    spread = np.subtract.outer(squares, squares).T - totals**2 / np.maximum(sizes, 1)
    spread = np.where(sizes > 0, spread, np.inf)
    best = np.full((most + 1, len(ends)), np.inf)
    begin = np.zeros(best.shape, dtype=int)
    best[:, 0] = 0.0
    for values in range(1, most + 1):
        for used, allowed in ((1, high == 0), (2, high > 0))[:values]:
            costs = best[values - used][:, None] + np.where(allowed, spread, np.inf)
            found = costs.argmin(axis=0)
            better = costs.min(axis=0) < best[values]
            begin[values][better] = found[better]
            best[values] = np.minimum(best[values], costs.min(axis=0))
    result, end, values = np.empty_like(counts), len(ends) - 1, most
    while end > 0:
        start = begin[values][end]
        segment = order[ends[start] : ends[end]]
        rest = int(high[start, end])
        result[segment] = low[start, end]
        result[segment[len(segment) - rest :]] += 1
        values, end = values - (2 if rest else 1), start
    return result


def check_pattern(inputs_of: np.ndarray, outputs_of: np.ndarray, uses: Sequence[int]) -> None:
    """Refuses the input blocks of live blocks that do not fit, for example from a damaged file.

    Each live block has an entry in `inputs_of` and `outputs_of`; `uses` says how many live blocks
    each input block has.
    """
    integers = inputs_of.size > 0 and np.issubdtype(inputs_of.dtype, np.integer)
    if not (integers and 0 <= inputs_of.min() <= inputs_of.max() < len(uses)):
        rule = f"integers from 0 to {len(uses) - 1}"
    elif len(np.unique(outputs_of.astype(np.int64) * len(uses) + inputs_of)) < len(inputs_of):
        rule = "each at most once for an output block"
    elif (np.bincount(inputs_of, minlength=len(uses)) != uses).any():
        rule = f"each as often as its count, {told(list(uses))}"
    else:
        return
    raise ValueError(f"`inputs_of` must name input blocks, {rule}. Received: {told(inputs_of)}")


def _shuffled(count: int, rng: np.random.Generator) -> np.ndarray:
    # From `random`, whose stream NumPy keeps; `permutation` may change between its versions.
    return rng.random(count).argsort()
