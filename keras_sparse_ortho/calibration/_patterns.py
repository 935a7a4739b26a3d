"""Patterns of live entries that the solver projects kernels onto.

Arrays hold `M` matrices: scores and masks are `(M, k, outputs)`.
"""

import dataclasses
import math

import numpy as np

from keras_sparse_ortho.orthogonal import (
    Block,
    NByM,
    best_blocks,
    block_unit,
    floored_columns,
    largest_mask,
    to_blocks,
)

Array = np.ndarray


@dataclasses.dataclass(frozen=True)
class Entries:
    """Single entries; with a `structure`, at most `n` among every `m` consecutive inputs.

    Args:
        structure: NByM or `None`.
        taps: int. Taps of a convolution: they come before the inputs, with their own groups.
        floored: bool. Whether each output keeps a live entry, as in depthwise kernels.
    """

    structure: NByM | None = None
    taps: int = 1
    floored: bool = False

    lines = None
    """No entries are dropped together."""

    def largest(
        self,
        scores: Array,
        count: int,
        *,
        last: bool = True,
    ) -> Array:
        """The mask of largest total score with `count` live entries."""
        if self.structure is not None:
            matrices, _, outputs = scores.shape
            by_tap = scores.reshape(
                matrices,
                self.taps,
                -1,
                outputs,
            )
            strongest = self.structure.strongest(by_tap, self.structure.n)
            scores = strongest.reshape(scores.shape)
        if self.floored:
            return floored_columns(scores, count)
        return largest_mask(scores, count)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Blocks, regular ones or in any pattern, live at all taps or at none.

    Args:
        block: Block.
        shape: tuple. The canonical shape of the kernel.
        few: bool. Whether lines have few different counts, as live blocks need.
    """

    block: Block
    shape: tuple[int, ...]
    few: bool = True

    @property
    def lines(self) -> list[Array]:
        """Index arrays that part the `k` inputs: an output drops the entries of one together."""
        taps = math.prod(self.shape[2:-2])
        inputs = self.shape[-2]
        numbers = np.arange(inputs)[:, None]
        rows = to_blocks(
            numbers,
            self.block.rows,
            1,
            fill=-1,
        )[:, :, 0, 0]
        first_of_tap = inputs * np.arange(taps)[:, None]
        lines = []
        for row in rows:
            line = row[row >= 0]
            lines.append((first_of_tap + line).ravel())
        return lines

    def largest(
        self,
        scores: Array,
        count: int,
        *,
        last: bool = True,
    ) -> Array:
        """The mask of largest total score.

        Args:
            scores: array `(M, k, outputs)`.
            count: int. Live entries, rounded up to whole blocks, or to the unit of regular ones.
            last: bool. Whether this mask stays, so that its lines need few different counts.
        """
        unit = block_unit(self.block, self.shape)
        count = -(-count // unit) * unit
        if count > scores.size - unit:
            return np.ones(scores.shape, bool)
        by_entry = scores.reshape(self.shape)
        rng = np.random.default_rng(0)
        few = last and self.few
        mask = best_blocks(
            self.block,
            by_entry,
            count,
            rng,
            few=few,
        )
        return mask.reshape(scores.shape)


Pattern = Entries | Blocks
