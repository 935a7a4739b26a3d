"""Which entries of a kernel stay, and their values: least squares on the inputs of its layer.

Arrays hold `M` matrices: kernels, scores and masks `(M, k, outputs)`, Gram matrices `G = X^T X` of
the layer's inputs `(M, k, k)` in float64, or `(1, k, k)` where all matrices have the same inputs.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import scipy.linalg

from keras_sparse_ortho.calibration._moments import Moments
from keras_sparse_ortho.calibration._patterns import Blocks, Entries, Pattern

DAMPING = 0.01
AIM = 0.5
ITERATIONS = 64
_SMALL_KERNEL = 256  # inputs
_ITERATIONS_OF_SMALL = 128
_RELAXATION = 1.5  # the errors of twice the iterations at 1.0
_SETTLED = 1e-3  # changed entries of a mask that is final
_FIRST_RATE = 0.01
_LAST_RATE = 3.0
_EACH = 4  # iterations with one penalty, whose matrix is factored once
EXTRA = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
"""More damping, for the unit diagonal of `H`; held-out rows choose."""

TOLERANCE = 1e-7
_WIDE = (
    8  # neighbours with one mask for which a direct solution takes less time
)
_CLOSE = 1e-3  # where refits are only compared
# Outputs are solved one by one for more inputs, and for fewer cubes of live entries over squares of
# inputs: else iterations take less time.
_FEW_INPUTS = 64
_DIRECT = 100
_FEW_ITERATIONS = 16  # where only errors are needed
# That are refitted to choose the damping, or to know errors alone.
_OUTPUTS = 64
_CHECK_EVERY = 4
_REFINEMENTS: tuple[type, ...] = (np.float32, np.float32, np.float64)
# of squared residuals in one refinement
_REDUCTION: dict[type, float] = {
    np.float32: 1e-7,
    np.float64: 0.0,
}

Array = np.ndarray


class Solution(NamedTuple):
    """Values of a kernel, zero where they are dead, and its mask."""

    values: Array
    mask: Array


def obs(
    kernel: Array,
    count: int,
    pattern: Pattern,
    used: Moments,
    held: Moments,
) -> Solution:
    """Values and mask of least error of the layer's outputs, with `count` live entries.

    Args:
        kernel: array `(M, k, outputs)`.
        count: int. Live entries.
        pattern: Entries or Blocks.
        used: Moments of the rows to solve on.
        held: Moments of the rows that choose the damping. Then all rows are used.
    """
    moments = used + held
    if moments.gram.ndim == 2:
        return Solution(
            kernel,
            _of_tokens(
                kernel,
                count,
                used,
                held,
                pattern,
            ),
        )
    problem = RefitProblem(kernel, moments, pattern)
    iterations = (
        ITERATIONS if kernel.shape[1] > _SMALL_KERNEL else _ITERATIONS_OF_SMALL
    )
    # Their mask cannot follow few rows, its values can.
    if isinstance(pattern, Blocks):
        start = problem.pruned(count, 0.0, iterations)
        extra = chosen_damping(
            kernel,
            start.mask,
            used,
            held,
            pattern,
        )
    else:
        first_mask = pattern.largest(problem.full**2, count)
        extra = chosen_damping(
            kernel,
            first_mask,
            used,
            held,
            pattern,
        )
        start = problem.pruned(count, extra, iterations)
    refitted = problem.refitted(
        start.mask,
        extra,
        start.values,
        TOLERANCE,
    )
    return Solution(problem.back(refitted), start.mask)


def refit(
    kernel: Array,
    mask: Array,
    used: Moments,
    held: Moments,
) -> Array:
    """The live entries `argmin tr (V - W)^T H (V - W)` over `V` that are zero off the mask."""
    if used.gram.ndim == 2:
        return kernel
    pattern = Entries()
    problem = RefitProblem(kernel, used + held, pattern)
    extra = chosen_damping(
        kernel,
        mask,
        used,
        held,
        pattern,
    )
    refitted = problem.refitted(
        mask,
        extra,
        problem.full,
        TOLERANCE,
    )
    return problem.back(refitted)


def wanda(
    kernel: Array,
    moments: Moments,
) -> Array:
    """The scores `abs(w_i) * norm(X_i)`."""
    norms = np.sqrt(moments.squares)[..., None]
    return np.abs(kernel) * norms


def errors_of(
    kernel: Array,
    counts: Sequence[int],
    pattern: Entries,
    used: Moments,
    held: Moments,
) -> Iterator[float]:
    """The relative errors on held-out rows of kernels that `obs` prunes to these counts.

    At most 64 outputs, in equal distances, are pruned: to the same part of their entries.
    """
    judge = (held if held.rows else used).gram
    if judge.ndim == 2:
        for count in counts:
            mask = _of_tokens(
                kernel,
                count,
                used,
                held,
                pattern,
            )
            yield relative_error(kernel * mask, kernel, judge)
        return
    size = kernel.size
    kernel = _some_outputs(kernel)
    problem = RefitProblem(kernel, used, pattern)
    counts = [max(count * kernel.size // size, 1) for count in counts]
    middle_count = sorted(counts)[len(counts) // 2]
    middle_mask = pattern.largest(problem.full**2, middle_count)
    extra = chosen_damping(
        kernel,
        middle_mask,
        used,
        held,
        pattern,
    )
    for count in counts:
        start = problem.pruned(count, extra, _FEW_ITERATIONS)
        refitted = problem.refitted(
            start.mask,
            extra,
            start.values,
            _CLOSE,
        )
        yield relative_error(problem.back(refitted), kernel, judge)


def relative_error(
    pruned: Array,
    kernel: Array,
    gram: Array,
) -> float:
    """`tr (V - W)^T G (V - W) / tr W^T G W`: the squared error of the layer's outputs."""
    full = np.asarray(kernel, np.float64)
    missed = np.asarray(pruned, np.float64) - kernel
    squares = _squared_outputs(full, gram)
    if squares <= 0:
        return 0.0
    return _squared_outputs(missed, gram) / squares


def _squared_outputs(
    kernel: Array,
    gram: Array,
) -> float:
    """`tr W^T G W`."""
    image = gram[..., None] * kernel if gram.ndim == 2 else gram @ kernel
    return float(np.sum(kernel * image))


def damped(gram: Array) -> Array:
    """`G + 0.01 mean(diag G) I`: directions that no row has keep their values."""
    mean = np.diagonal(gram, axis1=-2, axis2=-1).mean(axis=-1)
    shift = np.where(mean > 0, DAMPING * mean, 1.0)
    return gram + shift[:, None, None] * np.eye(gram.shape[-1])


class RefitProblem:
    """`min tr (V - T)^T H (V - T)` in coordinates that make the inputs of each line white.

    With `U^T U = H` for each line, the kernel is `U V` and the Hessian `U^-T H U^-1`: dropping
    entries costs the sum of their squares. `T` is halfway between the models, see `prune`.

    Args:
        kernel: array `(M, k, outputs)`.
        moments: Moments of the rows.
        pattern: Entries or Blocks.
    """

    def __init__(
        self,
        kernel: Array,
        moments: Moments,
        pattern: Pattern,
    ) -> None:
        self.pattern = pattern
        kernel = np.asarray(kernel, np.float64)
        hessian = damped(moments.gram)
        if pattern.lines is None:
            upper = np.sqrt(np.diagonal(hessian, axis1=-2, axis2=-1))[..., None]
            self._inverse = 1.0 / upper
            turned = self._inverse
            self.normal = turned * hessian * np.swapaxes(turned, -1, -2)
        else:
            upper, self._inverse = _by_line(hessian, pattern.lines)
            turned = np.swapaxes(self._inverse, -1, -2)
            self.normal = turned @ hessian @ self._inverse
        self.full = _scaled(upper, kernel)
        if np.ndim(moments.across):
            missed = _scaled(turned, moments.across @ kernel)
            self.full = self.full + AIM * np.linalg.solve(self.normal, missed)

    def back(self, values: Array) -> Array:
        """Values in the coordinates of the kernel."""
        return _scaled(self._inverse, values)

    def refitted(
        self,
        mask: Array,
        extra: float,
        start: Array,
        tolerance: float,
    ) -> Array:
        """Least squares on a mask: directly where that takes less time than iterations.

        That is where many neighbours have one mask, and where outputs have few live entries.
        """
        normal = self.normal + extra * np.eye(self.normal.shape[-1])
        outputs = mask.shape[-1]
        differs = (mask[..., 1:] != mask[..., :-1]).any(axis=(0, 1))
        groups = np.split(np.arange(outputs), np.flatnonzero(differs) + 1)
        has_few_groups = _WIDE * len(groups) <= outputs
        if not (has_few_groups or _solves_fast(mask, tolerance)):
            return _refit(
                self.full,
                mask,
                normal,
                start,
                tolerance,
            )
        return _refit_directly(
            self.full,
            mask,
            normal,
            groups,
        )

    def pruned(
        self,
        count: int,
        damping: float,
        iterations: int,
    ) -> Solution:
        """Values and mask by the alternating direction method of multipliers (ADMM).

        `V` minimizes the error plus `r/2 |V - D + U/r|^2`, `D` projects `R + U/r` onto the pattern,
        and the multipliers `U` sum their difference. `R = 1.5 V - 0.5 D` is over-relaxed. `r` rises
        around the Hessian's diagonal, 1. The iteration ends early where the mask has settled.
        """
        extra = np.float32(damping)
        full = self.full.astype(np.float32)
        normal = self.normal.astype(np.float32)
        target = normal @ full + extra * full
        step = _PenaltyStep(normal, extra, outputs=full.shape[-1])
        mask = self.pattern.largest(full * full, count)
        values = full * mask
        multipliers = np.zeros_like(full)  # `U/r`
        rates = np.geomspace(_FIRST_RATE, _LAST_RATE, iterations // _EACH)
        rates = np.repeat(rates, _EACH).astype(np.float32)
        previous_rate = rates[0]
        settled = 0
        for number, rate in enumerate(rates, 1):
            if rate != previous_rate:
                multipliers *= previous_rate / rate
                previous_rate = rate
            right = values - multipliers
            right *= rate
            right += target
            moved = step(right, rate)
            moved *= _RELAXATION
            values *= 1 - _RELAXATION
            moved += values
            moved += multipliers
            previous_mask = mask
            mask = self.pattern.largest(moved * moved, count, last=False)
            values = moved * mask
            multipliers = moved - values
            settled += 1
            if np.count_nonzero(mask != previous_mask) > _SETTLED * mask.size:
                settled = 0
            # Masks rest at small penalties, too, before entries compete.
            if settled >= _EACH and 3 * number > iterations:
                break
        mask = self.pattern.largest(moved * moved, count)
        return Solution(moved * mask, mask)


class _PenaltyStep:
    """`(H + extra I + r I)^-1 B` in float32, factored once for all calls with one `r`.

    One matrix is factored by Cholesky. Products with its inverse take half of the time, so it pays
    to invert for many outputs.

    Args:
        normal: array `(M, k, k)`. `H`.
        extra: float. More damping.
        outputs: int. Columns of `B`.
    """

    def __init__(
        self,
        normal: Array,
        extra: np.floating,
        outputs: int,
    ) -> None:
        self._normal = normal
        self._extra = extra
        self._is_single = len(normal) == 1
        self._inverts = normal.shape[-1] <= _EACH * outputs
        self._rate: np.floating | None = None
        self._inverse: Array | None = None
        self._factor = normal

    def __call__(
        self,
        right: Array,
        rate: np.floating,
    ) -> Array:
        if rate != self._rate:
            self._rate = rate
            self._prepare(rate)
        if self._inverse is not None:
            return self._inverse @ right
        solution, _ = scipy.linalg.lapack.spotrs(
            self._factor, right[0], lower=True
        )
        return np.ascontiguousarray(solution)[None]

    def _prepare(self, rate: np.floating) -> None:
        """Makes the factor of Cholesky, or the inverse."""
        shifted = self._normal.copy()
        diagonal = np.arange(shifted.shape[-1])
        shifted[:, diagonal, diagonal] += self._extra + rate
        self._inverse = None
        if not self._is_single:
            self._inverse = np.linalg.inv(shifted)
            return
        self._factor, failed = scipy.linalg.lapack.spotrf(
            shifted[0], lower=True
        )
        if failed:  # rounding has made an eigenvalue negative
            self._inverse = np.linalg.inv(shifted)
        elif self._inverts:
            lower, _ = scipy.linalg.lapack.spotri(self._factor, lower=True)
            self._inverse = (np.tril(lower) + np.tril(lower, -1).T)[None]


def _by_line(
    hessian: Array,
    lines: Sequence[Array],
) -> tuple[Array, Array]:
    """Block diagonal `U` with `U^T U` the blocks of `H` at the lines, and its inverse."""
    upper = np.zeros_like(hessian)
    inverse = np.zeros_like(hessian)
    matrices = np.arange(len(hessian))
    for line in lines:
        square = np.ix_(matrices, line, line)
        lower = np.linalg.cholesky(hessian[square])
        upper[square] = np.swapaxes(lower, -1, -2)
        inverse[square] = np.linalg.inv(upper[square])
    return upper, inverse


def _scaled(
    scale: Array,
    kernel: Array,
) -> Array:
    """The product with a matrix, or with a diagonal one as a column."""
    if scale.shape[-1] == 1:
        return scale * kernel
    return scale @ kernel


def _of_tokens(
    kernel: Array,
    count: int,
    used: Moments,
    held: Moments,
    pattern: Pattern,
) -> Array:
    """The mask of an embedding, whose `H` is diagonal: no entry makes up for another."""
    squares = np.asarray(kernel, np.float64) ** 2

    def mask(
        counts: Array,
        extra: float,
    ) -> Array:
        # For tokens that do not occur.
        shift = (DAMPING + extra) * counts.mean()
        scores = squares * (counts + shift)[..., None]
        return pattern.largest(scores, count)

    def lost(extra: float) -> float:
        dead = ~mask(used.gram, extra)
        return float(np.sum(squares * held.gram[..., None] * dead))

    extra = min(EXTRA, key=lost) if held.rows else EXTRA[-1]
    return mask((used + held).gram, extra)


def chosen_damping(
    kernel: Array,
    mask: Array,
    used: Moments,
    held: Moments,
    pattern: Pattern,
) -> float:
    """The addition to the unit diagonal of `H` that is best for some outputs on held-out rows."""
    if not held.rows:
        return EXTRA[-1]
    kernel = np.asarray(_some_outputs(kernel), np.float64)
    mask = _some_outputs(mask)
    problem = RefitProblem(kernel, used, pattern)
    target: Array | float = 0.0
    if np.ndim(held.across):
        target = 2 * AIM * (held.across @ kernel)
    losses = []
    values = problem.full
    for extra in EXTRA:
        values = problem.refitted(
            mask,
            extra,
            values,
            _CLOSE,
        )
        pruned = problem.back(values)
        missed = pruned - kernel
        loss = np.sum(missed * (held.gram @ missed) - pruned * target)
        losses.append(float(loss))
    return EXTRA[int(np.argmin(losses))]


def _solves_fast(mask: Array, tolerance: float) -> bool:
    """Whether a solution for each output takes less time than exact conjugate gradients."""
    _, inputs, _ = mask.shape
    if tolerance >= _CLOSE or inputs < _FEW_INPUTS:
        return False
    live_counts = np.count_nonzero(mask, axis=1)
    cubes = np.mean(live_counts.astype(float) ** 3)
    return bool(cubes <= _DIRECT * inputs**2)


def _some_outputs(kernel: Array) -> Array:
    """At most 64 outputs of a kernel, in equal distances."""
    step = -(-kernel.shape[-1] // _OUTPUTS)
    return kernel[..., ::step]


def _refit_directly(
    full: Array,
    mask: Array,
    normal: Array,
    groups: Sequence[Array],
) -> Array:
    """Least squares on a mask, solved at once for each group of outputs with one mask."""
    values = np.zeros_like(full)
    target = normal @ full
    for matrix in range(len(mask)):
        hessian = normal[matrix % len(normal)]
        for outputs in groups:
            live = np.flatnonzero(mask[matrix, :, outputs[0]])
            entries = np.ix_(live, outputs)
            square = np.ix_(live, live)
            if live.size:
                values[matrix][entries] = _solve_positive(
                    hessian[square], target[matrix][entries]
                )
    return values


def _solve_positive(matrix: Array, right: Array) -> Array:
    """`A^-1 B` by Cholesky's decomposition: LAPACK itself, as SciPy's checks would take longer."""
    _, solution, failed = scipy.linalg.lapack.dposv(matrix, right, lower=True)
    if failed:  # rounding has made an eigenvalue negative
        return np.linalg.solve(matrix, right)
    return solution


def _refit(
    full: Array,
    live: Array,
    normal: Array,
    start: Array,
    tolerance: float,
) -> Array:
    """Conjugate gradients for all columns at once, until preconditioned residuals are small.

    Iterations in float32 take half of the time. Residuals are computed in float64, so the tolerance
    is that of float64.
    """
    target = live * (normal @ full)
    scale = 1.0 / np.diagonal(normal, axis1=-2, axis2=-1)[..., None]
    goal = tolerance**2 * _dots(target, scale * target)
    values = start * live
    for dtype in _REFINEMENTS if tolerance < _CLOSE else _REFINEMENTS[:1]:
        residual = target - live * (normal @ values)
        values = values + _conjugate_gradients(
            residual,
            live,
            normal,
            goal,
            dtype,
        )
    return values


def _conjugate_gradients(
    residual: Array,
    live: Array,
    normal: Array,
    goal: Array,
    dtype: type,
) -> Array:
    """The correction that reduces residuals to the goal, or as far as the type allows.

    Args:
        residual: array `(M, k, outputs)`.
        live: bool array. The mask.
        normal: array. The Hessian.
        goal: array `(M, 1, outputs)`. The square of each preconditioned residual.
        dtype: type. The type to iterate in.
    """
    correction: Array = np.zeros(residual.shape, dtype)
    residual = residual.astype(dtype)
    normal = normal.astype(dtype)
    scale = 1.0 / np.diagonal(normal, axis1=-2, axis2=-1)[..., None]
    step = scale * residual
    power = _dots(residual, step)
    goal = np.maximum(goal, _REDUCTION[dtype] * power).astype(dtype)
    for number in range(2 * residual.shape[-2] + 100):
        if number % _CHECK_EVERY == 0 and np.all(power <= goal):
            break
        image = normal @ step
        image *= live
        length = _ratio(power, _dots(step, image))
        correction += length * step
        image *= length
        residual -= image
        ahead = scale * residual
        next_power = _dots(residual, ahead)
        step *= _ratio(next_power, power)
        step += ahead
        power = next_power
    return correction


def _dots(
    first: Array,
    second: Array,
) -> Array:
    """The inner product of each pair of columns."""
    return np.sum(first * second, axis=-2, keepdims=True)


def _ratio(
    above: Array,
    below: Array,
) -> Array:
    """`above / below`, or 0 where `below` is not positive."""
    positive = below > 0
    divisor = np.where(positive, below, 1.0)
    return np.where(positive, above / divisor, 0.0)
