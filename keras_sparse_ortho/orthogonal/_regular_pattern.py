"""Patterns of live blocks, as lists of indices: regular ones, and those of highest score."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import sparse
from scipy.optimize import linprog

# Rounds of trades. For 16 to 1024 lines more make no difference: after four times as many, the
# number of blocks that two lines share has the same variance.
_ROUNDS = 16


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


def slots_of(inputs_of: np.ndarray, input_blocks: int) -> np.ndarray:
    """The slots of each input block in a regular pattern, for the transposed product.

    From `(..., J, k)`, the input blocks of each output block, to int32 `(..., I, out)`: the slots
    `j * k + l` with `inputs_of[j, l] == i`, ascending.

    >>> slots_of(np.array([[0, 1], [1, 2], [0, 2]]), 3).tolist()
    [[0, 4], [1, 2], [3, 5]]
    """
    inputs_of = np.asarray(inputs_of)
    *batch, lines, fan = inputs_of.shape
    flat = inputs_of.reshape(*batch, lines * fan)
    order = np.argsort(flat, axis=-1, kind="stable").astype(np.int32)
    return order.reshape(*batch, input_blocks, lines * fan // input_blocks)


def matched_by_score(
    kept: np.ndarray,
    of_inputs: np.ndarray,
    of_outputs: np.ndarray,
    scores: np.ndarray,
    rng: np.random.Generator,
) -> np.ndarray:
    """Dead entries of largest total score, with given numbers for each input and each output.

    A linear program whose vertices are integers (a flow of capacity 1 between the two sides); the
    simplex method ends at a vertex.
    """
    chosen = np.zeros_like(kept)
    if not of_inputs.any():
        return chosen
    open_ = ~kept & (of_inputs > 0)[:, None] & (of_outputs > 0)
    inputs, outputs = np.nonzero(open_)
    order = rng.permutation(len(inputs))  # otherwise the order would decide between equals
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


def check_pattern(inputs_of: np.ndarray, outputs_of: np.ndarray, uses: Sequence[int]) -> None:
    """Refuses the input blocks of live blocks that do not fit, for example from a damaged file.

    Each live block has an entry in `inputs_of` and `outputs_of`; `uses` says how many live blocks
    each input block has.
    """
    inputs_of, count = np.asarray(inputs_of), len(uses)
    if not inputs_of.size or not np.issubdtype(inputs_of.dtype, np.integer):
        raise ValueError(
            "`inputs_of` must be an array of integers. Received: shape "
            f"{inputs_of.shape}, dtype {inputs_of.dtype}"
        )
    outside = (inputs_of < 0) | (inputs_of >= count)
    pairs = outputs_of.astype(np.int64) * count + np.where(outside, 0, inputs_of)
    order = np.argsort(pairs, kind="stable")
    twice = np.zeros(len(pairs), dtype=bool)
    twice[order[1:]] = np.diff(pairs[order]) == 0
    for faulty, rule in (
        (outside, f"Input blocks are numbered from 0 to {count - 1}"),
        (twice, "An output block has an input block once at most"),
    ):
        if faulty.any():
            own = outputs_of[np.argmax(faulty)]
            text = f"those of output block {own} are {inputs_of[outputs_of == own].tolist()}"
            raise ValueError(f"{rule}. Received: {text}")
    found = np.bincount(inputs_of, minlength=count)
    if (wrong := np.flatnonzero(found != uses)).size:
        block = int(wrong[0])
        raise ValueError(
            f"Input block {block} must be used by {uses[block]} output blocks. "
            f"Received: it is used {found[block]} times"
        )


def _shuffled(count: int, rng: np.random.Generator) -> np.ndarray:
    # From `random`, whose stream NumPy keeps; `permutation` may change between its versions.
    return rng.random(count).argsort()
