"""Patterns of live blocks, as lists of indices: regular ones, and those of highest score."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_sparse_ortho._checks import as_text

_ROUNDS = 16  # of trades; four times as many change nothing that two of 16 to 1024 lines share
_PRICE_ROUNDS = 60  # after 8 of them .1 to .3% of the sum are lost


def block_count(side: int, width: int) -> int:
    """Blocks of at most `width` that a side is cut into."""
    return -(-side // width)


def to_blocks(kernel: np.ndarray, rows: int, cols: int, fill: Any = 0) -> np.ndarray:
    """A kernel `(..., inputs, outputs)` as `(..., I, rows, J, cols)`."""
    # If the block does not divide a side, the last blocks have one entry less, and a padded end.
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
    """Step between the possible fan-ins `k`: `J k = I out`, so `I / gcd(I, J)`."""
    return input_blocks // math.gcd(input_blocks, output_blocks)


def regular_pattern(
    input_blocks: int, output_blocks: int, fan_in: int, rng: np.random.Generator
) -> np.ndarray:
    """Draws the live input blocks of each output block, int32 `(J, k)`, ascending in each line."""
    # `k = fan_in` of `I` is a multiple of `I / gcd(I, J)`. Inputs are dealt in turn; then random
    # pairs of outputs pool the inputs that they do not share and divide them at random (Curveball
    # trades: Strona et al., Nature Communications, 2014). All regular patterns are equally likely;
    # few admit an exactly orthogonal kernel, see `regular_blocks`.
    dealt = (np.arange(output_blocks * fan_in) % input_blocks).reshape(-1, fan_in)
    pattern = _shuffled(input_blocks, rng)[dealt][_shuffled(output_blocks, rng)]
    half = output_blocks // 2
    if half and fan_in < input_blocks:
        for _ in range(_ROUNDS):
            order = _shuffled(output_blocks, rng)
            first, second = order[:half], order[half : 2 * half]
            both = np.sort(np.concatenate([pattern[first], pattern[second]], axis=1), axis=1)
            keys = rng.random(both.shape)
            # Inputs of both occur twice: one goes to the first, one to the second.
            same = both[:, 1:] == both[:, :-1]
            keys[:, :-1][same] = -1.0
            keys[:, 1:][same] = 2.0
            both = np.take_along_axis(both, np.argsort(keys, axis=1), axis=1)
            pattern[first], pattern[second] = both[:, :fan_in], both[:, fan_in:]
    return np.sort(pattern, axis=1).astype(np.int32)


def complete(live: np.ndarray, line_fan: Any, group_fan: Any, rng: np.random.Generator) -> bool:
    """Sets entries of a bool `(lines, groups)` matrix live to reach fans; whether that worked."""
    # Each line takes the groups that lack most; augmenting paths find the rest.
    added = np.zeros_like(live)
    missing = line_fan - live.sum(axis=1)
    needs = group_fan - live.sum(axis=0)
    for line in rng.random(len(live)).argsort():
        keys = needs + rng.random(len(needs))
        keys[live[line] | (needs <= 0)] = -1.0
        count = missing[line]
        if count:
            chosen = np.argsort(-keys)[:count]
            chosen = chosen[keys[chosen] > 0]
            live[line, chosen] = added[line, chosen] = True
            needs[chosen] -= 1
            missing[line] -= len(chosen)
    for line in np.repeat(np.arange(len(live)), missing):
        if not _augment(live, added, needs, int(line)):
            return False
    return True


def _augment(live: np.ndarray, added: np.ndarray, needs: np.ndarray, start: int) -> bool:
    """Gives a line one more group by an augmenting path, on which lines hand over added groups."""
    given_up: dict[int, int] = {start: -1}  # the group that a line on the path would hand over
    taken_by: dict[int, int] = {}
    seen = np.zeros(len(needs), dtype=bool)
    queue = [start]
    for line in queue:
        found = ~live[line] & ~seen
        ends = np.flatnonzero(found & (needs > 0))
        if len(ends):
            group = int(ends[0])
            needs[group] -= 1
            while group >= 0:
                live[line, group] = added[line, group] = True
                group = given_up[line]
                if group >= 0:
                    live[line, group] = added[line, group] = False
                    line = taken_by[group]
            return True
        seen |= found
        for group in np.flatnonzero(found).tolist():
            taken_by[group] = line
            for other in np.flatnonzero(added[:, group]).tolist():
                if other not in given_up:
                    given_up[other] = group
                    queue.append(other)
    return False


def matched_by_score(
    kept: np.ndarray,
    of_inputs: np.ndarray,
    of_outputs: np.ndarray,
    scores: np.ndarray,
    rng: np.random.Generator,
) -> np.ndarray:
    """Dead entries of (nearly) largest total score, with given numbers for inputs and outputs."""
    # By prices of the lines an entry is worth `s_ij - u_i - v_j`. The best ones are taken while
    # both lines lack some, then augmenting paths find the rest. In 16 to 256 lines the sum is
    # within .3% of the largest one, within 1.2% where most entries are kept.
    chosen = np.zeros_like(kept)
    open_ = ~kept & (of_inputs > 0)[:, None] & (of_outputs > 0)
    if not open_.any():
        return chosen
    worth = np.where(open_, scores, scores.min() - 2 * np.ptp(scores))
    worth = worth - _prices(worth, of_inputs, of_outputs)
    entries = np.flatnonzero(open_)
    entries = entries[_shuffled(len(entries), rng)]  # the order would decide between equals
    entries = entries[np.argsort(-worth.ravel()[entries], kind="stable")]
    lacking, needs = of_inputs.tolist(), of_outputs.tolist()
    for entry in entries.tolist():
        i, j = divmod(entry, len(needs))
        if lacking[i] and needs[j]:
            chosen[i, j] = True
            lacking[i] -= 1
            needs[j] -= 1
    live, open_needs = kept | chosen, np.array(needs)
    for line in np.repeat(np.arange(len(lacking)), lacking):
        if not _augment(live, chosen, open_needs, int(line)):
            raise RuntimeError("There is no pattern with the numbers that are given")
    return chosen


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


def few_counts(counts: np.ndarray, most: int) -> np.ndarray:
    """Counts of the same sum with at most `most` different values, of least squared distance."""
    # Dynamic programming cuts the sorted counts into segments of equal counts, or of two that
    # differ by one. These are more even: where a pattern has `counts` on both sides, there is one
    # with few counts on both, too (Gale and Ryser).
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
    """Refuses places of live blocks, one entry each, unless input blocks have `uses` of them."""
    integers = inputs_of.size > 0 and np.issubdtype(inputs_of.dtype, np.integer)
    if not (integers and 0 <= inputs_of.min() <= inputs_of.max() < len(uses)):
        rule = f"integers from 0 to {len(uses) - 1}"
    elif len(np.unique(outputs_of.astype(np.int64) * len(uses) + inputs_of)) < len(inputs_of):
        rule = "each at most once for an output block"
    elif (np.bincount(inputs_of, minlength=len(uses)) != uses).any():
        rule = f"each as often as its count, {as_text(list(uses))}"
    else:
        return
    raise ValueError(f"`inputs_of` must name input blocks, {rule}. Received: {as_text(inputs_of)}")


def _shuffled(count: int, rng: np.random.Generator) -> np.ndarray:
    return rng.random(count).argsort()  # NumPy may change the stream of `permutation`
