"""Patterns of live blocks, as lists of indices: regular ones, and those of highest score."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numpy.random import Generator

from keras_sparse_ortho._checks import as_text

_TRADE_ROUNDS = (
    16  # four times as many change nothing that two of 16 to 1024 lines share
)
_PRICE_ROUNDS = 60  # after 8 of them 0.1 to .3% of the sum are lost
_MOST_SEGMENT_ENDS = 512  # of `few_counts`: very many lines are cut in steps


def shuffled(
    count: int,
    rng: Generator,
) -> np.ndarray:
    """The numbers below `count` in random order: NumPy may change the stream of `permutation`."""
    return rng.random(count).argsort()


@dataclasses.dataclass(frozen=True)
class BlockGrid:
    """The blocks of a matrix, seen along its longer side.

    The longer side is cut into `lines` of `line_size` entries, the shorter one into `groups` of
    `group_size`. In a square matrix the lines are on the side with the smaller blocks.
    """

    lines: int
    line_size: int
    groups: int
    group_size: int
    is_wide: bool  # whether the lines are outputs

    @classmethod
    def of(
        cls,
        input_blocks: int,
        output_blocks: int,
        rows: int,
        cols: int,
    ) -> "BlockGrid":
        """The grid of a matrix with blocks of `rows` inputs by `cols` outputs."""
        inputs = input_blocks * rows
        outputs = output_blocks * cols
        if outputs > inputs or (outputs == inputs and cols <= rows):
            return cls(output_blocks, cols, input_blocks, rows, is_wide=True)
        return cls(input_blocks, rows, output_blocks, cols, is_wide=False)


def block_count(
    side: int,
    width: int,
) -> int:
    """Blocks of at most `width` that a side is cut into."""
    return -(-side // width)


def whole_blocks(
    side: int,
    width: int,
) -> int:
    """How many blocks of a side have `width` entries; they are the first, the others have less."""
    return side - block_count(side, width) * (width - 1)


def _places(
    side: int,
    width: int,
) -> np.ndarray:
    """Where the entries of a side stand among its padded blocks."""
    count = block_count(side, width)
    whole_entries = whole_blocks(side, width)
    padded = np.arange(count * width).reshape(-1, width)
    in_whole = padded[:whole_entries].ravel()
    in_shorter = padded[whole_entries:, :-1].ravel()
    return np.concatenate([in_whole, in_shorter])


def to_blocks(
    kernel: np.ndarray,
    rows: int,
    cols: int,
    fill: float = 0,
) -> np.ndarray:
    """A kernel `(..., inputs, outputs)` as `(..., I, rows, J, cols)`.

    If the block does not divide a side, the last blocks have one entry less, and a padded end.

    Args:
        kernel: array of any type.
        rows: int. Inputs of a block.
        cols: int. Outputs of a block.
        fill: Value of the padding.
    """
    *outer, inputs, outputs = kernel.shape
    input_blocks = block_count(inputs, rows)
    output_blocks = block_count(outputs, cols)
    padded_inputs = input_blocks * rows
    padded_outputs = output_blocks * cols
    if padded_inputs > inputs or padded_outputs > outputs:
        padded = np.full(
            (*outer, padded_inputs, padded_outputs), fill, kernel.dtype
        )
        input_places = _places(inputs, rows)[:, None]
        output_places = _places(outputs, cols)
        padded[..., input_places, output_places] = kernel
        kernel = padded
    return kernel.reshape(*outer, input_blocks, rows, output_blocks, cols)


def from_blocks(
    blocks: np.ndarray,
    inputs: int,
    outputs: int,
) -> np.ndarray:
    """The inverse of `to_blocks`."""
    *outer, input_blocks, rows, output_blocks, cols = blocks.shape
    padded_inputs = input_blocks * rows
    padded_outputs = output_blocks * cols
    kernel = blocks.reshape(*outer, padded_inputs, padded_outputs)
    if padded_inputs > inputs or padded_outputs > outputs:
        input_places = _places(inputs, rows)[:, None]
        output_places = _places(outputs, cols)
        kernel = kernel[..., input_places, output_places]
    return kernel


def clear_padding(
    blocks: np.ndarray,
    inputs_of: np.ndarray,
    outputs_of: np.ndarray,
    inputs: int,
    outputs: int,
) -> None:
    """Sets the padding of live blocks to zero, in place.

    Args:
        blocks: array `(..., *taps, r, c)`.
        inputs_of: int array. The input block of each live block.
        outputs_of: int array. The output block of each live block.
        inputs: int. Inputs of the kernel, without padding.
        outputs: int. Outputs of the kernel, without padding.
    """
    rows, cols = blocks.shape[-2:]
    has_short_input = inputs_of >= whole_blocks(inputs, rows)
    has_short_output = outputs_of >= whole_blocks(outputs, cols)
    blocks[has_short_input, ..., -1:, :] = 0.0
    blocks[has_short_output, ..., -1:] = 0.0


def fan_step(
    input_blocks: int,
    output_blocks: int,
) -> int:
    """Step between the possible fan-ins `k`: `J k = I out`, so `I / gcd(I, J)`."""
    return input_blocks // math.gcd(input_blocks, output_blocks)


def regular_pattern(
    input_blocks: int,
    output_blocks: int,
    fan_in: int,
    rng: Generator,
) -> np.ndarray:
    """Draws the live input blocks of each output block of a regular pattern.

    Inputs are dealt in turn. Then random pairs of outputs pool the inputs that they do not share
    and divide them at random (Curveball trades: Strona et al., Nature Communications, 2014). All
    regular patterns are equally likely; few admit an exactly orthogonal kernel, see
    `regular_blocks`.

    Args:
        input_blocks: int. `I`.
        output_blocks: int. `J`.
        fan_in: int. Live input blocks of each output block, a multiple of `I / gcd(I, J)`.
        rng: NumPy generator.

    Returns:
        int32 array `(J, fan_in)`, ascending in each line.
    """
    dealt = np.arange(output_blocks * fan_in) % input_blocks
    pattern = shuffled(input_blocks, rng)[dealt.reshape(-1, fan_in)]
    pattern = pattern[shuffled(output_blocks, rng)]
    half = output_blocks // 2
    if half and fan_in < input_blocks:
        for _ in range(_TRADE_ROUNDS):
            order = shuffled(output_blocks, rng)
            partners = order[half : 2 * half]
            _trade(pattern, order[:half], partners, rng)
    return np.sort(pattern, axis=1).astype(np.int32)


def _trade(
    pattern: np.ndarray,
    outputs: np.ndarray,
    partners: np.ndarray,
    rng: Generator,
) -> None:
    """Lets pairs of outputs divide their inputs again, in place."""
    fan_in = pattern.shape[1]
    pool = np.concatenate([pattern[outputs], pattern[partners]], axis=1)
    pool.sort(axis=1)
    keys = rng.random(pool.shape)
    # An input of both occurs twice: one goes to the output, one to its partner.
    is_shared = pool[:, 1:] == pool[:, :-1]
    keys[:, :-1][is_shared] = -1.0
    keys[:, 1:][is_shared] = 2.0
    order = np.argsort(keys, axis=1)
    pool = np.take_along_axis(pool, order, axis=1)
    pattern[outputs] = pool[:, :fan_in]
    pattern[partners] = pool[:, fan_in:]


def complete(
    live: np.ndarray,
    line_fan: int | np.ndarray,
    group_fan: int | np.ndarray,
    rng: Generator,
) -> bool:
    """Sets dead entries live, in place, until all lines and groups have their fans.

    Each line takes the groups that lack most; augmenting paths find the rest.

    Args:
        live: bool array `(lines, groups)`.
        line_fan: int, or array by line. Live groups of each line in the end.
        group_fan: int, or array by group. Live lines of each group in the end.
        rng: NumPy generator.

    Returns:
        Whether that was possible.
    """
    added = np.zeros_like(live)
    missing = line_fan - live.sum(axis=1)
    needs = group_fan - live.sum(axis=0)
    for line in shuffled(len(live), rng):
        keys = needs + rng.random(len(needs))
        keys[live[line] | (needs <= 0)] = -1.0
        count = missing[line]
        if count:
            groups = np.argsort(-keys)[:count]
            groups = groups[keys[groups] > 0]
            live[line, groups] = True
            added[line, groups] = True
            needs[groups] -= 1
            missing[line] -= len(groups)
    return _augment_all(live, added, missing, needs)


def _augment_all(
    live: np.ndarray,
    added: np.ndarray,
    missing: np.ndarray,
    needs: np.ndarray,
) -> bool:
    """Gives each line its missing groups by augmenting paths; whether that was possible."""
    lines = np.arange(len(live)).repeat(missing)
    return all(_augment(live, added, needs, line) for line in lines.tolist())


def _augment(
    live: np.ndarray,
    added: np.ndarray,
    needs: np.ndarray,
    start: int,
) -> bool:
    """Gives a line one more group by an augmenting path, on which lines hand over added groups.

    Args:
        live: bool array `(lines, groups)`, changed in place.
        added: bool array of the same shape. The entries that lines may hand over; changed, too.
        needs: int array. How many lines each group still lacks; changed, too.
        start: int. The line.

    Returns:
        Whether there was such a path.
    """
    # By the lines of the search.
    group_to_hand_over: dict[int, int] = {start: -1}
    line_before_group: dict[int, int] = {}
    reached = np.zeros(len(needs), dtype=bool)
    queue = [start]
    for line in queue:
        reachable = ~live[line] & ~reached
        ends = np.flatnonzero(reachable & (needs > 0))
        if len(ends):
            group = int(ends[0])
            needs[group] -= 1
            while group >= 0:
                live[line, group] = True
                added[line, group] = True
                group = group_to_hand_over[line]
                if group >= 0:
                    live[line, group] = False
                    added[line, group] = False
                    line = line_before_group[group]
            return True
        reached |= reachable
        for group in np.flatnonzero(reachable).tolist():
            line_before_group[group] = line
            for owner in np.flatnonzero(added[:, group]).tolist():
                if owner not in group_to_hand_over:
                    group_to_hand_over[owner] = group
                    queue.append(owner)
    return False


def matched_by_score(
    live: np.ndarray,
    input_fans: np.ndarray,
    output_fans: np.ndarray,
    scores: np.ndarray,
    rng: Generator,
) -> np.ndarray:
    """Chooses dead entries of (nearly) largest total score, with given numbers by line.

    By prices `u_i` and `v_j` of the lines an entry is worth `s_ij - u_i - v_j`. The best ones are
    taken while both lines lack some, then augmenting paths find the rest. In 16 to 256 lines the
    sum is within .3% of the largest one, within 1.2% where most entries are chosen.

    Args:
        live: bool array `(inputs, outputs)`. Entries that are live already.
        input_fans: int array. Entries to choose for each input.
        output_fans: int array. Entries to choose for each output.
        scores: array of the same shape.
        rng: NumPy generator, to decide between equals.

    Returns:
        Bool array of the chosen entries.
    """
    matching = np.zeros_like(live)
    has_need = (input_fans > 0)[:, None] & (output_fans > 0)
    candidates = ~live & has_need
    if not candidates.any():
        return matching
    hopeless = scores.min() - 2 * np.ptp(scores)
    worth = np.where(candidates, scores, hopeless)
    worth = worth - _prices(worth, input_fans, output_fans)
    entries = np.flatnonzero(candidates)
    # The order would decide between equals.
    entries = entries[shuffled(len(entries), rng)]
    worth = worth.ravel()[entries]
    entries = entries[np.argsort(-worth, kind="stable")]
    missing = input_fans.tolist()
    needs = output_fans.tolist()
    for entry in entries.tolist():
        i, j = divmod(entry, len(needs))
        if missing[i] and needs[j]:
            matching[i, j] = True
            missing[i] -= 1
            needs[j] -= 1
    could_complete = _augment_all(
        live | matching,
        matching,
        np.array(missing),
        np.array(needs),
    )
    if not could_complete:
        raise RuntimeError(
            "There is no pattern with the numbers that are given"
        )
    return matching


def _prices(
    scores: np.ndarray,
    input_fans: np.ndarray,
    output_fans: np.ndarray,
) -> np.ndarray:
    """`u_i + v_j`, in turns halfway between what a line would take and what it would not."""
    input_prices = np.zeros((len(scores), 1))
    for _ in range(_PRICE_ROUNDS):
        for_outputs = scores - input_prices
        output_prices = _marginal(for_outputs.T, output_fans).T
        input_prices = _marginal(scores - output_prices, input_fans)
    return input_prices + output_prices


def _marginal(
    values: np.ndarray,
    counts: np.ndarray,
) -> np.ndarray:
    """Halfway between the least of the `counts` largest values of each line, and the next one.

    Returns:
        A column, with a value for each line.
    """
    descending = -np.sort(-values, axis=1)
    lines = np.arange(len(values))
    end = values.shape[1] - 1
    place = np.clip(counts - 1, 0, end)
    next_place = np.clip(counts, 0, end)
    least_taken = descending[lines, place]
    next_value = descending[lines, next_place]
    halfway: np.ndarray = (least_taken + next_value) / 2
    return halfway[:, None]


def few_counts(
    counts: np.ndarray,
    most: int,
) -> np.ndarray:
    """Counts of the same sum with at most `most` different values, of least squared distance.

    Dynamic programming cuts the sorted counts into segments of equal counts, or of two that differ
    by one. These are more even: where a pattern has `counts` on both sides, there is one with few
    counts on both, too (Gale and Ryser).

    Args:
        counts: int array.
        most: int. Number of different values.
    """
    order = np.argsort(counts, kind="stable")
    steps = min(len(counts), _MOST_SEGMENT_ENDS)
    ends = np.linspace(0, len(counts), steps + 1)
    ends = np.unique(ends.round().astype(int))
    low, high, spread = _segments(counts[order], ends)
    least_spread = np.full((most + 1, len(ends)), np.inf)
    begin = np.zeros(least_spread.shape, dtype=int)
    least_spread[:, 0] = 0.0
    # A segment whose counts are equal has one value, any other two.
    spread_of_equal = np.where(high == 0, spread, np.inf)
    spread_of_two = np.where(high > 0, spread, np.inf)
    for values in range(1, most + 1):
        for values_used, segment_spread in (
            (1, spread_of_equal),
            (2, spread_of_two),
        )[:values]:
            costs = least_spread[values - values_used][:, None] + segment_spread
            least_costs = costs.min(axis=0)
            is_better = least_costs < least_spread[values]
            begin[values][is_better] = costs.argmin(axis=0)[is_better]
            least_spread[values] = np.minimum(least_spread[values], least_costs)
    result = np.empty_like(counts)
    end = len(ends) - 1
    values = most
    while end > 0:
        start = begin[values][end]
        segment = order[ends[start] : ends[end]]
        raised = int(high[start, end])
        result[segment] = low[start, end]
        result[segment[len(segment) - raised :]] += 1
        values -= 1
        if raised:
            values -= 1
        end = start
    return result


def _segments(
    counts: np.ndarray,
    ends: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The evened-out segments of sorted counts, by begin and end.

    Returns:
        The lower count of each segment, how many of its counts are one more, and its squared
        distance from their mean; infinite where a segment is empty.
    """
    sums = np.concatenate([[0], np.cumsum(counts)])[ends]
    squares = np.concatenate([[0], np.cumsum(counts**2)])[ends]
    sizes = np.subtract.outer(ends, ends).T
    totals = np.subtract.outer(sums, sums).T
    divisors = np.maximum(sizes, 1)
    low, high = np.divmod(totals, divisors)
    spread = np.subtract.outer(squares, squares).T - totals**2 / divisors
    return low, high, np.where(sizes > 0, spread, np.inf)


def check_pattern(
    inputs_of: np.ndarray,
    outputs_of: np.ndarray,
    uses: Sequence[int],
) -> None:
    """Refuses places of live blocks, unless input blocks have the expected numbers of them.

    Args:
        inputs_of: int array. The input block of each live block.
        outputs_of: int array. The output block of each live block.
        uses: Number of live blocks of each input block.

    Raises ValueError for other places.
    """
    input_blocks = len(uses)
    are_integers = inputs_of.size > 0 and np.issubdtype(
        inputs_of.dtype, np.integer
    )
    if not (
        are_integers and 0 <= inputs_of.min() <= inputs_of.max() < input_blocks
    ):
        rule = f"integers from 0 to {input_blocks - 1}"
    elif len(
        np.unique(outputs_of.astype(np.int64) * input_blocks + inputs_of)
    ) < len(inputs_of):
        rule = "each at most once for an output block"
    elif (np.bincount(inputs_of, minlength=input_blocks) != uses).any():
        rule = f"each as often as its count, {as_text(list(uses))}"
    else:
        return
    raise ValueError(
        f"`inputs_of` must name input blocks, {rule}. Received: {as_text(inputs_of)}"
    )
