"""What is dropped together when a kernel is solved: entries, N of every M, blocks, whole inputs.

Kernels, scores and masks are `M` matrices `(M, k, outputs)` here, as in `_solve.py`, and NumPy
arrays. Each kind of pattern has

- `precision(inverse)`: what `costs` needs of the inverse Hessians `(M, k, k)`;
- `costs(kernel, precision)`: by entry, its part of the error of dropping what it is dropped with,
  the rest refitted. For entries `w` of one output that is `w^T ((H^-1)_ww)^-1 w`;
- `largest(scores, count, live, last)`: the mask of largest total score with `count` live entries,
  inside the mask `live`. Before the last round there may be more, where the pattern needs it.
"""

import dataclasses
import math

import numpy as np

from keras_sparse_ortho.orthogonal import Block, NByM, best_regular, largest_mask, to_blocks

Array = np.ndarray


@dataclasses.dataclass(frozen=True)
class Entries:
    """Single entries; with a `structure`, at most `n` among every `m` consecutive inputs.

    Args:
        structure: The pattern, if there is one.
        taps: Taps of a convolution, which come before the inputs; each has groups of its own.
    """

    structure: NByM | None = None
    taps: int = 1

    def precision(self, inverse: Array) -> Array:
        """`1 / (H^-1)_ii`, a column."""
        return 1.0 / np.diagonal(inverse, axis1=-2, axis2=-1)[..., None]

    def costs(self, kernel: Array, precision: Array) -> Array:
        """`w^2 / (H^-1)_ii`."""
        return kernel * kernel * precision

    def largest(
        self, scores: Array, count: int, live: Array | None = None, *, last: bool = True
    ) -> Array:
        """More than `n` of a group are live where early counts need it."""
        scores = scores if live is None else np.where(live, scores, -1.0)
        if self.structure is not None:
            n, m = self.structure.n, self.structure.m
            most = n if last else max(n, math.ceil(count / scores.size * m))
            matrices, k, outputs = scores.shape
            by_tap = scores.reshape(matrices, self.taps, -1, outputs)
            groups = self.structure.in_groups(by_tap, -3.0)
            ranks = np.argsort(np.argsort(-groups, axis=-2, kind="stable"), axis=-2, kind="stable")
            chosen = np.where(ranks < most, groups, -2.0).reshape(matrices, self.taps, -1, outputs)
            scores = chosen[:, :, : k // self.taps].reshape(scores.shape)
        return largest_mask(scores, count)


@dataclasses.dataclass(frozen=True)
class RegularPattern:
    """Regular blocks, live at all taps or at none.

    Args:
        block: The blocks.
        shape: The canonical shape of the kernel.
    """

    block: Block
    shape: tuple[int, ...]

    def precision(self, inverse: Array) -> Array:
        """The inverses of the parts of `H^-1` that belong to one line of blocks, `(M, k, k)`."""
        matrices, taps, inputs, _ = self._folded
        lines = to_blocks(np.arange(inputs)[:, None], self.block.rows, 1, fill=-1)[:, :, 0, 0]
        found = np.zeros_like(inverse)
        for line in lines:
            at = (np.arange(taps)[:, None] * inputs + line[line >= 0]).ravel()
            part = np.ix_(range(matrices), at, at)
            found[part] = np.linalg.inv(inverse[part])
        return found

    def costs(self, kernel: Array, precision: Array) -> Array:
        """`w * (P w)`, whose sum over a block is what dropping it costs."""
        return kernel * (precision @ kernel)

    def largest(
        self, scores: Array, count: int, live: Array | None = None, *, last: bool = True
    ) -> Array:
        """Counts are rounded up to multiples of the unit of the blocks."""
        unit = self.block.unit(self.shape)
        count = -(-count // unit) * unit
        if live is not None and count >= np.count_nonzero(live):
            return live
        among = None if live is None else live.reshape(self.shape)
        rng = np.random.default_rng(0)
        found = best_regular(self.block, scores.reshape(self.shape), count, rng, among)
        return found.reshape(scores.shape)

    @property
    def _folded(self) -> tuple[int, int, int, int]:
        batch, parts, *taps, inputs, outputs = self.shape
        return batch * parts, math.prod(taps), inputs, outputs


@dataclasses.dataclass(frozen=True)
class WholeInputs(RegularPattern):
    """Groups of inputs, live for all outputs and at all taps or not at all.

    `block` is one group of inputs by all outputs.
    """

    def largest(
        self, scores: Array, count: int, live: Array | None = None, *, last: bool = True
    ) -> Array:
        """Counts are rounded up to whole groups."""
        matrices, taps, _, outputs = self._folded
        folded = (matrices, taps, -1, self.block.rows, outputs)
        totals = scores.reshape(folded).sum(axis=(1, 3, 4))
        if live is not None:
            totals = np.where(live.reshape(folded).any(axis=(1, 3, 4)), totals, -1.0)
        kept = largest_mask(totals, -(-count // (taps * self.block.rows * outputs)))
        mask = np.broadcast_to(kept[:, None, :, None, None], scores.reshape(folded).shape)
        return mask.reshape(scores.shape).copy()


Pattern = Entries | RegularPattern
