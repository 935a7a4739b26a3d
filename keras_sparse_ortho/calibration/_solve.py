"""Which entries of a kernel stay, and their values: least squares on the inputs of its layer.

Arrays hold `M` matrices: kernels, scores and masks `(M, k, outputs)`, Gram matrices `G = X^T X` of
the layer's inputs `(M, k, k)` in float64, or `(1, k, k)` where all matrices have the same inputs.

A pattern has `lines`, index arrays that part the `k` inputs (for one output the entries of a line
are dropped together; `None`: single entries) and `largest(scores, count)`, the mask of largest
total score with `count` live entries.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from keras_sparse_ortho.calibration._moments import Moments
from keras_sparse_ortho.orthogonal import (
    Block,
    NByM,
    best_blocks,
    block_unit,
    floored_columns,
    largest_mask,
    to_blocks,
)

DAMPING = 0.01
AIM = 0.5
ITERATIONS = 88
_MORE = 300  # of kernels with at most 256 inputs, which take no time
_FIRST_RATE, _LAST_RATE = 0.01, 3.0
_EACH = 4  # iterations with one penalty, for which an inverse takes half of the products
EXTRA = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
"""More damping, for the unit diagonal of `H`; held-out rows choose."""

TOLERANCE = 1e-6
_WIDE = 8  # neighbours with one mask for which a direct solution takes less time
_CLOSE = 1e-3  # where refits are only compared
_FEW_ITERATIONS = 16  # where only errors are wanted
_OUTPUTS = 64  # that are refitted to choose the damping
_CHECK_EVERY = 4

Array = np.ndarray


@dataclasses.dataclass(frozen=True)
class Entries:
    """Single entries; with a `structure`, at most `n` among every `m` consecutive inputs."""

    structure: NByM | None = None
    taps: int = 1  # of a convolution: they come before the inputs, with groups of their own
    floored: bool = False  # whether each output keeps a live entry, as in depthwise kernels
    lines = None

    def largest(self, scores: Array, count: int, *, last: bool = True) -> Array:
        if self.structure is not None:
            matrices, _, outputs = scores.shape
            by_tap = scores.reshape(matrices, self.taps, -1, outputs)
            scores = self.structure.strongest(by_tap, self.structure.n).reshape(scores.shape)
        if self.floored:
            return floored_columns(scores, count)
        return largest_mask(scores, count)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Blocks, regular ones or in any pattern, live at all taps or at none."""

    block: Block
    shape: tuple[int, ...]  # canonical
    few: bool = True  # whether lines have few different counts, as live blocks need

    @property
    def lines(self) -> list[Array]:
        taps, inputs = math.prod(self.shape[2:-2]), self.shape[-2]
        rows = to_blocks(np.arange(inputs)[:, None], self.block.rows, 1, fill=-1)[:, :, 0, 0]
        starts = inputs * np.arange(taps)[:, None]
        return [(starts + line[line >= 0]).ravel() for line in rows]

    def largest(self, scores: Array, count: int, *, last: bool = True) -> Array:
        """Counts are rounded up to whole blocks, or to the unit of regular ones."""
        unit = block_unit(self.block, self.shape)
        count = -(-count // unit) * unit
        if count > scores.size - unit:
            return np.ones(scores.shape, bool)
        by_entry, rng = scores.reshape(self.shape), np.random.default_rng(0)
        found = best_blocks(self.block, by_entry, count, rng, few=last and self.few)
        return found.reshape(scores.shape)


Pattern = Entries | Blocks


def damped(gram: Array) -> Array:
    """`G + 0.01 mean(diag G) I`: what no row determines stays."""
    mean = np.diagonal(gram, axis1=-2, axis2=-1).mean(axis=-1)
    shift = np.where(mean > 0, DAMPING * mean, 1.0)
    return gram + shift[:, None, None] * np.eye(gram.shape[-1])


class _Problem:
    """`min tr (V - T)^T H (V - T)` in coordinates that make the inputs of each line white.

    With `U^T U = H` for each line, the kernel is `U V` and the Hessian `U^-T H U^-1`: dropping
    entries costs the sum of their squares. `T` is halfway between the models, see `prune`.
    """

    def __init__(self, kernel: Array, moments: Moments, pattern: Pattern) -> None:
        self.pattern, normal = pattern, damped(moments.gram)
        full = np.asarray(kernel, np.float64)
        if pattern.lines is None:
            upper = np.sqrt(np.diagonal(normal, axis1=-2, axis2=-1))[..., None]
            turned = self._back = 1.0 / upper
            self.normal = turned * normal * np.swapaxes(turned, -1, -2)
        else:
            upper, self._back = np.zeros_like(normal), np.zeros_like(normal)
            for line in pattern.lines:
                at = np.ix_(np.arange(len(normal)), line, line)
                upper[at] = np.swapaxes(np.linalg.cholesky(normal[at]), -1, -2)
                self._back[at] = np.linalg.inv(upper[at])
            turned = np.swapaxes(self._back, -1, -2)
            self.normal = turned @ normal @ self._back
        self.full = _scaled(upper, full)
        if np.ndim(moments.across):
            missed = _scaled(turned, moments.across @ full)
            self.full = self.full + AIM * np.linalg.solve(self.normal, missed)

    def back(self, found: Array) -> Array:
        return _scaled(self._back, found)

    def refitted(self, mask: Array, extra: float, start: Array, tolerance: float) -> Array:
        """Least squares on a mask: directly for outputs with one mask, if many neighbours have."""
        normal = self.normal + extra * np.eye(self.normal.shape[-1])
        other = (mask[..., 1:] != mask[..., :-1]).any(axis=(0, 1))
        groups = np.split(np.arange(mask.shape[-1]), np.flatnonzero(other) + 1)
        if _WIDE * len(groups) > mask.shape[-1]:
            return _refit(self.full, mask, normal, start, tolerance)
        found, target = np.zeros_like(self.full), normal @ self.full
        for own, outputs in itertools.product(range(len(mask)), groups):
            live = np.flatnonzero(mask[own, :, outputs[0]])
            at, square = np.ix_(live, outputs), np.ix_(live, live)
            found[own][at] = np.linalg.solve(normal[own % len(normal)][square], target[own][at])
        return found

    def found(self, count: int, damping: float, iterations: int) -> tuple[Array, Array]:
        """Values and mask by the alternating direction method of multipliers (ADMM).

        `V` minimizes the error plus `r/2 |V - D + U/r|^2`, `D` projects `V + U/r` onto the pattern,
        and the multipliers `U` sum their difference. `r` rises around the Hessian's diagonal, 1.
        """
        extra, full = np.float32(damping), self.full.astype(np.float32)
        roots, axes = self._spectrum
        roots, turned = roots[..., None] + extra, np.swapaxes(axes, -1, -2)
        target = self.normal.astype(np.float32) @ full + extra * full
        mask = self.pattern.largest(full * full, count)
        found, dual = full * mask, np.zeros_like(full)
        rates = np.geomspace(_FIRST_RATE, _LAST_RATE, iterations // _EACH)
        inverse, inverts = axes, full.shape[-2] <= _EACH * full.shape[-1]
        for k, rate in enumerate(np.repeat(rates, _EACH).astype(np.float32)):
            right = target - dual + rate * found
            if inverts and k % _EACH == 0:
                inverse = axes @ (turned / (roots + rate))
            free = inverse @ right if inverts else axes @ ((turned @ right) / (roots + rate))
            moved = free + dual / rate
            mask = self.pattern.largest(moved * moved, count, last=k == iterations - 1)
            found = moved * mask
            dual = dual + rate * (free - found)
        return found, mask

    @functools.cached_property
    def _spectrum(self) -> Any:
        return np.linalg.eigh(self.normal.astype(np.float32))


def _scaled(scale: Array, kernel: Array) -> Array:
    return scale * kernel if scale.shape[-1] == 1 else scale @ kernel


def obs(
    kernel: Array, count: int, pattern: Pattern, used: Moments, held: Moments
) -> tuple[Array, Array]:
    """Values and mask of least error of the layer's outputs, with `count` live entries."""
    moments = used + held
    if moments.gram.ndim == 2:
        return kernel, _of_tokens(kernel, count, used, held, pattern)
    problem = _Problem(kernel, moments, pattern)
    iterations = ITERATIONS if kernel.shape[1] > 256 else _MORE
    if isinstance(pattern, Blocks):  # their mask cannot follow few rows, its values can
        found, mask = problem.found(count, 0.0, iterations)
        extra = _extra(kernel, mask, used, held, pattern)
    else:
        first = pattern.largest(problem.full**2, count)
        extra = _extra(kernel, first, used, held, pattern)
        found, mask = problem.found(count, extra, iterations)
    return problem.back(problem.refitted(mask, extra, found, TOLERANCE)), mask


def errors_of(
    kernel: Array, counts: Sequence[int], pattern: Entries, used: Moments, held: Moments
) -> Iterator[float]:
    """The relative errors on held-out rows of kernels that `obs` prunes to these counts."""
    judge = (held if held.rows else used).gram
    if judge.ndim == 2:
        for count in counts:
            mask = _of_tokens(kernel, count, used, held, pattern)
            yield relative_error(kernel * mask, kernel, judge)
        return
    problem = _Problem(kernel, used, pattern)
    middle = pattern.largest(problem.full**2, sorted(counts)[len(counts) // 2])
    extra = _extra(kernel, middle, used, held, pattern)
    for count in counts:
        found, mask = problem.found(count, extra, _FEW_ITERATIONS)
        found = problem.refitted(mask, extra, found, _CLOSE)
        yield relative_error(problem.back(found), kernel, judge)


def _of_tokens(kernel: Array, count: int, used: Moments, held: Moments, pattern: Pattern) -> Array:
    """The mask of an embedding, whose `H` is diagonal: no entry makes up for another."""
    squares = np.asarray(kernel, np.float64) ** 2

    def mask(counts: Array, extra: float) -> Array:
        shift = (DAMPING + extra) * counts.mean()  # for tokens that do not occur
        return pattern.largest(squares * (counts + shift)[..., None], count)

    def lost(extra: float) -> float:
        return float(np.sum(squares * held.gram[..., None] * ~mask(used.gram, extra)))

    extra = min(EXTRA, key=lost) if held.rows else EXTRA[-1]
    return mask((used + held).gram, extra)


def refit(kernel: Array, mask: Array, used: Moments, held: Moments) -> Array:
    """The live entries `argmin tr (V - W)^T H (V - W)` over `V` that are zero off the mask."""
    if used.gram.ndim == 2:
        return kernel
    pattern = Entries()
    problem = _Problem(kernel, used + held, pattern)
    extra = _extra(kernel, mask, used, held, pattern)
    return problem.back(problem.refitted(mask, extra, problem.full, TOLERANCE))


def _extra(kernel: Array, mask: Array, used: Moments, held: Moments, pattern: Pattern) -> float:
    """The addition to the unit diagonal of `H` that is best for some outputs on held-out rows."""
    if not held.rows:
        return EXTRA[-1]
    some = slice(None, None, -(-kernel.shape[-1] // _OUTPUTS))
    part, live = np.asarray(kernel[..., some], np.float64), mask[..., some]
    problem, losses = _Problem(part, used, pattern), []
    wanted = 0.0 if np.ndim(held.across) == 0 else 2 * AIM * (held.across @ part)
    found = problem.full
    for extra in EXTRA:
        found = problem.refitted(live, extra, found, _CLOSE)
        value = problem.back(found)
        left = value - part
        losses.append(float(np.sum(left * (held.gram @ left) - value * wanted)))
    return EXTRA[int(np.argmin(losses))]


def _refit(full: Array, live: Array, normal: Array, start: Array, tolerance: float) -> Array:
    """Conjugate gradients for all columns at once, until preconditioned residuals are small."""
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
    positive = below > 0
    return np.where(positive, above / np.where(positive, below, 1.0), 0.0)


def wanda(kernel: Array, moments: Moments) -> Array:
    return np.abs(kernel) * np.sqrt(moments.squares)[..., None]


def relative_error(found: Array, kernel: Array, gram: Array) -> float:
    """`tr (V - W)^T G (V - W) / tr W^T G W`: the squared error of the layer's outputs."""
    left, whole = (
        float(np.sum(w * (gram[..., None] * w if gram.ndim == 2 else gram @ w)))
        for w in (np.asarray(found, np.float64) - kernel, np.asarray(kernel, np.float64))
    )
    return left / whole if whole > 0 else 0.0
