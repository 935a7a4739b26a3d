"""Which entries of a kernel stay, and their values: least squares on the inputs of its layer.

Arrays hold `M` matrices: kernels, scores and masks `(M, k, outputs)`, Gram matrices `G = X^T X` of
the layer's inputs `(M, k, k)` in float64, or `(1, k, k)` where all matrices have the same inputs.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from keras_sparse_ortho.calibration._admm import admm
from keras_sparse_ortho.calibration._least_squares import (
    CLOSE,
    add_to_diagonal,
    least_squares,
    shifted_diagonal,
    solve_positive,
    with_diagonal,
)
from keras_sparse_ortho.calibration._moments import Moments
from keras_sparse_ortho.calibration._patterns import Blocks, Entries, Pattern

DAMPING = 0.01
AIM = 0.5
ITERATIONS = 48
_SMALL_KERNEL = 256  # inputs
_ITERATIONS_OF_SMALL = 128
EXTRA = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
"""More damping, for the unit diagonal of `H`; held-out rows choose."""

TOLERANCE = 1e-7
_FEW_ITERATIONS = 16  # where only errors are needed
# That are refitted to choose the damping, or to know errors alone.
_OUTPUTS = 32

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
    if used.gram.ndim == 2:
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
    problem = RefitProblem(kernel, [used, held], pattern)
    iterations = ITERATIONS
    if kernel.shape[1] <= _SMALL_KERNEL:
        iterations = _ITERATIONS_OF_SMALL
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
    problem = RefitProblem(kernel, [used, held], pattern)
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

    At most 32 outputs, in equal distances, are pruned: to the same part of their entries.
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
    problem = RefitProblem(kernel, [used], pattern)
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
            CLOSE,
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
    return with_diagonal(gram, _damping_of(gram))


def _damping_of(gram: Array) -> Array:
    """`0.01 mean(diag G)` as a column, or 1 for inputs that are zero."""
    mean = np.diagonal(gram, axis1=-2, axis2=-1).mean(axis=-1)
    return np.where(mean > 0, DAMPING * mean, 1.0)[:, None]


class RefitProblem:
    """`min tr (V - T)^T H (V - T)` in coordinates that make the inputs of each line white.

    With `U^T U = H` for each line, the kernel is `U V` and the Hessian `U^-T H U^-1`: dropping
    entries costs the sum of their squares. `T` is halfway between the models, see `prune`.

    Args:
        kernel: array `(M, k, outputs)`.
        moments: list of Moments, whose sum is that of the rows. They stay as they are.
        pattern: Entries or Blocks.
    """

    def __init__(
        self,
        kernel: Array,
        moments: Sequence[Moments],
        pattern: Pattern,
    ) -> None:
        self.pattern = pattern
        kernel = np.asarray(kernel, np.float64)
        hessian = _damped_sum(moments)
        if pattern.lines is None:
            upper = np.sqrt(np.diagonal(hessian, axis1=-2, axis2=-1))[..., None]
            self._inverse = 1.0 / upper
            turned = self._inverse
            hessian *= turned
            hessian *= np.swapaxes(turned, -1, -2)
            self.normal = hessian
        else:
            upper, self._inverse = _by_line(hessian, pattern.lines)
            turned = np.swapaxes(self._inverse, -1, -2)
            self.normal = turned @ hessian @ self._inverse
        self.full = _scaled(upper, kernel)
        products = [
            part.across @ kernel for part in moments if np.ndim(part.across)
        ]
        if products:
            missed = _scaled(turned, sum(products[1:], products[0]))
            self.full = self.full + AIM * solve_positive(self.normal, missed)

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
        """Least squares on a mask, see `least_squares`."""
        with shifted_diagonal(self.normal, extra):
            return least_squares(self.full, mask, self.normal, start, tolerance)

    def pruned(
        self,
        count: int,
        damping: float,
        iterations: int,
    ) -> Solution:
        """Values and mask of least error, see `admm`."""
        values, mask = admm(
            self.full,
            self.normal,
            self.pattern,
            count,
            damping,
            iterations,
        )
        return Solution(values, mask)


def _damped_sum(moments: Sequence[Moments]) -> Array:
    """The damped sum of Gram matrices, in one array: they may be large."""
    total: Array = moments[0].gram.copy()
    for part in moments[1:]:
        total += part.gram
    add_to_diagonal(total, _damping_of(total))
    return total


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
    problem = RefitProblem(kernel, [used], pattern)
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
            CLOSE,
        )
        pruned = problem.back(values)
        missed = pruned - kernel
        loss = np.sum(missed * (held.gram @ missed) - pruned * target)
        losses.append(float(loss))
    return EXTRA[int(np.argmin(losses))]


def _some_outputs(kernel: Array) -> Array:
    """At most 32 outputs of a kernel, in equal distances."""
    step = -(-kernel.shape[-1] // _OUTPUTS)
    return kernel[..., ::step]
