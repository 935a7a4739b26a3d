"""Which entries of a kernel stay, and their values: least squares on the inputs of its layer.

Everything here is on `M` matrices at once, NumPy arrays: kernels, scores and masks are
`(M, k, outputs)`, the Gram matrices `G = X^T X` of the layer's inputs `(M, k, k)` in float64.

A pattern says what is dropped together: entries, N of every M, blocks, or whole inputs. It has

- `precision(inverse)`: what `costs` needs of the inverse Hessians `(M, k, k)`;
- `costs(kernel, precision)`: by entry, its part of the error of dropping its group with the rest
  refitted. For the entries `w` that are dropped of one output that is `w^T ((H^-1)_ww)^-1 w`;
- `largest(scores, count, live, last)`: the mask of largest total score with `count` live entries,
  inside the mask `live`. Before the last round there may be more, where the pattern needs it.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np

from keras_sparse_ortho.orthogonal import (
    Block,
    NByM,
    best_blocks,
    block_unit,
    largest_mask,
    live_count,
    to_blocks,
)

DAMPING = 0.01
AIM = 0.5
ROUNDS = 8
EXCHANGES = 12
TOLERANCE = 1e-9
_BETWEEN_ROUNDS = 1e-3  # where the next round only ranks the weights
_CHECK_EVERY = 8

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
    """Blocks, regular ones or in any pattern, live at all taps or at none.

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
        unit = block_unit(self.block, self.shape)
        count = -(-count // unit) * unit
        if live is not None and count >= np.count_nonzero(live):
            return live
        among = None if live is None else live.reshape(self.shape)
        rng = np.random.default_rng(0)
        by_entry = scores.reshape(self.shape)
        found = best_blocks(self.block, by_entry, count, rng, among, few=last)
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


def damped(gram: Array) -> Array:
    """`G + 0.01 mean(diag G) I`: what rows that are fewer than inputs do not determine stays."""
    mean = np.diagonal(gram, axis1=-2, axis2=-1).mean(axis=-1)
    shift = np.where(mean > 0, DAMPING * mean, 1.0)
    return gram + shift[:, None, None] * np.eye(gram.shape[-1])


def refit(kernel: Array, mask: Array, gram: Array) -> Array:
    """The live entries `argmin tr (V - W)^T H (V - W)` over `V` that are zero off the mask.

    `H` is the damped Gram matrix. Conjugate gradients from the masked kernel, for all columns at
    once, until the preconditioned residual is 1e-9 of that of zero.
    """
    full = np.asarray(kernel, np.float64)
    return _refit(full, mask, damped(gram), full, TOLERANCE)


def _refit(full: Array, live: Array, normal: Array, start: Array, tolerance: float) -> Array:
    scale = 1.0 / np.diagonal(normal, axis1=-2, axis2=-1)[..., None]
    target = live * (normal @ full)
    goal = tolerance**2 * np.sum(target * scale * target, axis=-2, keepdims=True)
    found = start * live
    residual = target - live * (normal @ found)
    step = scale * residual
    power = np.sum(residual * step, axis=-2, keepdims=True)
    for number in range(2 * full.shape[-2] + 100):
        if number % _CHECK_EVERY == 0 and np.all(power <= goal):
            break
        image = live * (normal @ step)
        length = _ratio(power, np.sum(step * image, axis=-2, keepdims=True))
        found = found + length * step
        residual = residual - length * image
        ahead = scale * residual
        next_power = np.sum(residual * ahead, axis=-2, keepdims=True)
        step = ahead + _ratio(next_power, power) * step
        power = next_power
    return found


def _ratio(above: Array, below: Array) -> Array:
    """`above / below`, and 0 where nothing is left to do."""
    positive = below > 0
    return np.where(positive, above / np.where(positive, below, 1.0), 0.0)


def aimed(kernel: Array, gram: Array, across: Array) -> Array:
    """The kernel whose outputs fit the average of two models' outputs best.

    `W + H^-1 X^T (Y - X) W / 2`, where the rows are `X` in the pruned model and `Y` in the given
    one. All the way to `Y` follows the few rows too closely.
    """
    full = np.asarray(kernel, np.float64)
    return full + AIM * np.linalg.solve(damped(gram), across @ full)


def obs(kernel: Array, count: int, gram: Array, pattern: Pattern) -> tuple[Array, Array]:
    """Values and mask by optimal brain surgeon, in eight rounds from dense to `count` entries.

    Live fractions fall geometrically. Then entries are exchanged while that lowers the error.
    """
    density = count / kernel.size
    counts = [live_count(density ** (k / ROUNDS), kernel.size) for k in range(1, ROUNDS)]
    full, normal = np.asarray(kernel, np.float64), damped(gram)
    precision = pattern.precision(np.linalg.inv(normal))
    *_, (found, mask) = obs_rounds(full, normal, precision, [*counts, count], pattern)
    return _exchanged(full, normal, precision, found, mask, pattern)


def obs_rounds(
    full: Array, normal: Array, precision: Array, counts: Sequence[int], pattern: Pattern
) -> Iterator[tuple[Array, Array]]:
    """Values and mask with each of these numbers of live entries, which fall.

    Each round drops what costs least if the other entries of its columns make up for it, single
    entries `w^2 / (H^-1)_ii`, and refits the rest.
    """
    found, mask = full, np.ones(full.shape, bool)
    for round_, count in enumerate(counts, 1):
        last = round_ == len(counts)
        costs = pattern.costs(found, precision)
        before, mask = mask, pattern.largest(costs, count, mask, last=last)
        if mask is not before or last:
            found = _refit(full, mask, normal, found, TOLERANCE if last else _BETWEEN_ROUNDS)
        yield found, mask


def _exchanged(
    full: Array, normal: Array, precision: Array, found: Array, mask: Array, pattern: Pattern
) -> tuple[Array, Array]:
    """Exchanges live entries for dead ones, as many, while the error falls.

    A dead entry gains `(H (W - V))_i^2 / H_ii` alone. Exchanged together they can gain less than
    the live ones cost; then these count twice as much in the next round.
    """
    count, weight = int(np.count_nonzero(mask)), 2.0
    whole, before = np.ones(mask.shape, bool), mask
    ahead = pattern.precision(normal)
    lowered = normal @ (full - found)
    error = np.sum((full - found) * lowered)
    for _ in range(EXCHANGES):
        costs = weight * pattern.costs(found, precision)
        gains = pattern.costs(lowered, ahead)
        moved = pattern.largest(np.where(mask, costs, gains), count, whole)
        if np.array_equal(moved, mask):
            break
        tried = _refit(full, moved, normal, found, _BETWEEN_ROUNDS)
        left = normal @ (full - tried)
        reached = np.sum((full - tried) * left)
        if reached < error:
            found, mask, lowered, error = tried, moved, left, reached
        else:
            weight *= 2
    if mask is not before:
        found = _refit(full, mask, normal, found, TOLERANCE)
    return found, mask


def wanda(kernel: Array, gram: Array) -> Array:
    """Scores `|w_ij| * norm of input i`."""
    return np.abs(kernel) * np.sqrt(np.diagonal(gram, axis1=-2, axis2=-1))[..., None]


def relative_error(found: Array, kernel: Array, gram: Array) -> float:
    """`tr (V - W)^T H (V - W) / tr W^T H W`: the damped squared error of the layer's outputs."""
    normal, full = damped(gram), np.asarray(kernel, np.float64)
    error, whole = (float(np.sum(w * (normal @ w))) for w in (full - found, full))
    return error / whole if whole > 0 else 0.0
