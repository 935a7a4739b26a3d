"""Finds the blocks of a kernel that hold all of its entries but zeros."""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from keras_sparse_ortho.layers import BlockGrid
from keras_sparse_ortho.orthogonal import (
    block_count,
    to_blocks,
    whole_blocks,
)

# Sides of blocks: smaller gathers cost what the product saves; few kernels have larger zero blocks.
_LEAST_SIDE, _MOST_SIDE = 8, 256
_POWERS = [2**exponent for exponent in range(3, 9)]
_PADDED_SIDE = 1.05  # relative to the side
_STORED_SHARE = (
    0.7  # of a kernel's entries: if more of them are stored, there is no gain
)
_NEAR_FEWEST = 1.05  # entries of a cut over those of the cut with the fewest
# Counts of live blocks are raised to so many different ones, each a convolution of its own; to just
# one if that stores at most a tenth more.
_MOST_COUNTS, _RAISED_TO_ONE = 4, 1.1


class ZeroBlocks(NamedTuple):
    """The blocks of a kernel that hold all nonzero entries, and some zeros, to few counts."""

    grid: BlockGrid
    inputs_of: np.ndarray  # the input block of each, by slot

    @property
    def stored(self) -> int:
        grid = self.grid
        return math.prod(
            (
                self.inputs_of.size,
                grid.rows,
                grid.cols,
                *grid.taps,
            )
        )


def zero_blocks(kernel: np.ndarray) -> ZeroBlocks | str:
    """The blocks of a kernel `(*taps, inputs, outputs)`, or the reason that there are none."""
    *taps, inputs, outputs = kernel.shape
    axes_of_taps = tuple(range(len(taps)))
    live = np.asarray(kernel.any(axis=axes_of_taps))
    cuts = _cuts(live, tuple(taps))
    if not cuts:
        return (
            f"a side of its kernel of {inputs} x {outputs} cannot be cut into blocks of "
            f"{_LEAST_SIDE} to {_MOST_SIDE}"
        )
    fewest = min(stored for stored, _ in cuts)
    if fewest > _STORED_SHARE * live.size:
        return (
            f"its zeros are not in whole blocks of {_LEAST_SIDE} x {_LEAST_SIDE} or more: in the "
            f"best cut the blocks with other values are {fewest / live.size:.0%} of the kernel"
        )
    grid = _fastest(
        [grid for stored, grid in cuts if stored <= _NEAR_FEWEST * fewest]
    )
    is_live = to_blocks(live, grid.rows, grid.cols).any(axis=(1, 3))
    counts = _raised(np.maximum(is_live.sum(axis=0), 1))
    # Live blocks come first.
    order = np.argsort(~is_live, axis=0, kind="stable")
    rank = np.argsort(order, axis=0)
    is_stored = rank < counts
    if (counts == counts[0]).all():
        grid = dataclasses.replace(grid, fan_in=int(counts[0]))
    else:
        counts_of_inputs = is_stored.sum(axis=1)
        both = (
            tuple(counts.tolist()),
            tuple(counts_of_inputs.tolist()),
        )
        grid = dataclasses.replace(grid, counts=both)
    return ZeroBlocks(grid, grid.pattern(is_stored))


def _cuts(
    live: np.ndarray, taps: tuple[int, ...]
) -> list[tuple[int, BlockGrid]]:
    """Every cut of a matrix into blocks, with the entries of its live blocks at one tap.

    Args:
        live: bool array `(inputs, outputs)`. Entries that are not zero at some tap.
        taps: tuple of int. The taps of the kernel.
    """
    inputs, outputs = live.shape
    cuts = []
    for rows in _widths(inputs):
        # (I, outputs).
        live_columns = np.any(to_blocks(live, rows, 1)[..., 0], axis=1)
        for cols in _widths(outputs):
            is_live = to_blocks(live_columns, 1, cols).any(axis=(1, 3))
            counts = np.maximum(is_live.sum(axis=0), 1)
            grid = BlockGrid(inputs, outputs, rows, cols, taps=taps)
            cuts.append((int(counts.sum()) * rows * cols, grid))
    return cuts


def _widths(side: int) -> list[int]:
    """The sizes of blocks that cut a side into two or more, with at most little padding."""
    divisors = [
        width
        for width in range(_LEAST_SIDE, _MOST_SIDE + 1)
        if side % width == 0
    ]
    widths = []
    for width in sorted({*_POWERS, *divisors}):
        if width >= side or whole_blocks(side, width) <= 0:
            continue
        if block_count(side, width) * width <= _PADDED_SIDE * side:
            widths.append(width)
    return widths


def _fastest(grids: Sequence[BlockGrid]) -> BlockGrid:
    """The grid with the largest blocks."""

    def size(grid: BlockGrid) -> tuple[int, int]:
        return min(grid.rows, grid.cols), grid.rows * grid.cols

    return max(grids, key=size)


def _raised(counts: np.ndarray) -> np.ndarray:
    """Counts of live blocks by output block, raised to few different ones."""
    parts = _MOST_COUNTS
    if counts.max() <= _RAISED_TO_ONE * counts.mean():
        parts = 1
    raised = counts.copy()
    for outputs in np.array_split(np.argsort(counts, kind="stable"), parts):
        raised[outputs] = counts[outputs].max(initial=0)
    return raised
