"""Where the zeros of a kernel leave whole blocks: found in its values, however they came about."""

from typing import NamedTuple

import numpy as np

from keras_sparse_ortho.layers import BlockGrid
from keras_sparse_ortho.orthogonal import block_count, to_blocks, whole_blocks

# Sides of blocks: with smaller ones a gather costs what the product saves, with larger ones few
# kernels have whole zero blocks.
_LEAST, _MOST = 8, 256
_PADDED = 1.05  # a padded side relative to the side
_STORED = 0.7  # the share of a kernel's entries that may be left: less is no gain
_NEAR = 1.05  # entries of a cut over those of the cut with the fewest


class ZeroBlocks(NamedTuple):
    """The blocks of a kernel that hold all that is not zero.

    Args:
        grid: The cut of the kernel, with `k` blocks for each of its `J` output blocks.
        inputs_of: `(J, k)`: the input block of each of them. An output block with fewer has zero
            blocks for the rest.
    """

    grid: BlockGrid
    inputs_of: np.ndarray


def zero_blocks(kernel: np.ndarray) -> ZeroBlocks | str:
    """The blocks of a kernel `(*taps, inputs, outputs)`, or the reason that there are none.

    Of all cuts into `r x c` blocks, with `k` the largest number of blocks of an output block that
    are not zero, the one with the fewest entries `J k r c` is taken, and among those within 5% of
    it the one of the largest blocks, which take the least time. Not the masks but the zeros count:
    `strip` leaves no masks, and zeros that training has made are as good.
    """
    *taps, inputs, outputs = kernel.shape
    live = np.asarray(kernel.any(axis=tuple(range(len(taps)))))
    cuts = []
    for rows in _widths(inputs):
        lines = np.any(to_blocks(live, rows, 1)[..., 0], axis=1)  # (I, outputs)
        for cols in _widths(outputs):
            fan_in = int(to_blocks(lines, 1, cols).any(axis=(1, 3)).sum(axis=0).max())
            cuts.append(BlockGrid(inputs, outputs, rows, cols, max(fan_in, 1), tuple(taps)))
    if not cuts:
        return (
            f"a side of its kernel of {inputs} x {outputs} cannot be cut into blocks of "
            f"{_LEAST} to {_MOST}"
        )
    fewest = min(map(_stored, cuts))
    if fewest > _STORED * live.size:
        return (
            f"its zeros are not in whole blocks of {_LEAST} x {_LEAST} or more: in the best cut "
            f"the blocks with other values are {fewest / live.size:.0%} of the kernel"
        )
    grid = max(
        (one for one in cuts if _stored(one) <= _NEAR * fewest),
        key=lambda one: (min(one.rows, one.cols), one.rows * one.cols),
    )
    table = to_blocks(live, grid.rows, grid.cols).any(axis=(1, 3))
    found = np.argsort(~table.T, axis=1, kind="stable")[:, : grid.fan_in]
    return ZeroBlocks(grid, np.sort(found, axis=1).astype("int32"))


def _stored(grid: BlockGrid) -> int:
    return grid.out_blocks * grid.fan_in * grid.rows * grid.cols


def _widths(side: int) -> list[int]:
    """The sizes of blocks that cut a side, with little padding or none, into two or more."""
    powers = [2**k for k in range(3, 9)]
    divisors = [width for width in range(_LEAST, _MOST + 1) if side % width == 0]
    return [
        width
        for width in sorted({*powers, *divisors})
        if width < side
        and whole_blocks(side, width) > 0
        and block_count(side, width) * width <= _PADDED * side
    ]
