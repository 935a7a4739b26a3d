"""Pruning on a quadratic error by the alternating direction method of multipliers (ADMM)."""

import functools
from collections.abc import Callable

import numpy as np
import scipy.linalg

from keras_sparse_ortho.calibration._least_squares import with_diagonal
from keras_sparse_ortho.calibration._patterns import Pattern

_RELAXATION = 1.5  # the errors of twice the iterations at 1.0
_SETTLED = 4e-3  # changed entries of a mask that is final
_FIRST_RATE = 0.05
_LAST_RATE = 2.0
_EACH = 8  # iterations with one penalty, whose matrix is factored once

Array = np.ndarray


def admm(
    kernel: Array,
    normal: Array,
    pattern: Pattern,
    count: int,
    damping: float,
    iterations: int,
) -> tuple[Array, Array]:
    """Values and mask of small error `tr (V - W)^T H (V - W)` with `count` live entries.

    `V` minimizes the error plus `r/2 |V - D + U/r|^2`, `D` projects `R + U/r` onto the pattern, and
    the multipliers `U` sum their difference. `R = 1.5 V - 0.5 D` is over-relaxed. `r` rises around
    the Hessian's diagonal, 1. The iteration ends early where the mask has settled.

    Args:
        kernel: array `(M, k, outputs)`. `W`.
        normal: array `(M, k, k)` or `(1, k, k)`. `H`, with a unit diagonal.
        pattern: Entries or Blocks.
        count: int. Live entries.
        damping: float. An addition to the diagonal of `H`.
        iterations: int. Iterations, at most.
    """
    extra = np.float32(damping)
    full = kernel.astype(np.float32)
    single = normal.astype(np.float32)
    target = single @ full + extra * full
    step = _PenaltyStep(single, extra, full.shape)
    mask = pattern.largest(full * full, count)
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
        mask = pattern.largest(moved * moved, count, last=False)
        values = moved * mask
        multipliers = moved - values
        settled += 1
        if np.count_nonzero(mask != previous_mask) > _SETTLED * mask.size:
            settled = 0
        # Masks rest at small penalties, too, before entries compete.
        if settled >= _EACH and 3 * number > iterations:
            break
    mask = pattern.largest(moved * moved, count)
    return moved * mask, mask


class _PenaltyStep:
    """`(H + extra I + r I)^-1 B` in float32, factored once for all calls with one `r`.

    One matrix is factored by Cholesky. Products with its inverse take half of the time, so it pays
    to invert for many outputs. LAPACK fills the lower triangle of the inverse alone.

    Args:
        normal: array `(M, k, k)`. `H`.
        extra: float. More damping.
        shape: tuple. That of `B`.
    """

    def __init__(
        self,
        normal: Array,
        extra: np.floating,
        shape: tuple[int, ...],
    ) -> None:
        matrices, inputs, outputs = shape
        self._normal = normal
        self._extra = extra
        self._is_single = matrices == 1
        self._inverts = inputs <= _EACH * outputs
        self._rate: np.floating | None = None
        self._solve: Callable[[Array], Array] = np.asarray

    def __call__(
        self,
        right: Array,
        rate: np.floating,
    ) -> Array:
        if rate != self._rate:
            self._rate = rate
            self._solve = self._solver(rate)
        return self._solve(right)

    def _solver(self, rate: np.floating) -> Callable[[Array], Array]:
        """The function from `B` to the solution, for one penalty."""
        shift = self._extra + rate
        failed = 1
        if self._is_single:
            # The transpose, which is equal, is in the order that LAPACK overwrites.
            factor, failed = scipy.linalg.lapack.spotrf(
                with_diagonal(self._normal, shift)[0].T,
                lower=True,
                clean=False,
                overwrite_a=True,
            )
        if (
            failed
        ):  # several matrices, or an eigenvalue that rounding made negative
            inverses = np.linalg.inv(with_diagonal(self._normal, shift))
            return functools.partial(np.matmul, inverses)
        if self._inverts:
            inverse, _ = scipy.linalg.lapack.spotri(
                factor, lower=True, overwrite_c=True
            )
            return functools.partial(_symmetric_product, inverse)
        return functools.partial(_solution_of_factor, factor)


def _symmetric_product(triangle: Array, right: Array) -> Array:
    """`A B` for the lower triangle of a symmetric `A`, with `B` of shape `(1, k, outputs)`."""
    transposed = scipy.linalg.blas.ssymm(
        1.0, triangle, right[0].T, side=True, lower=True
    )
    product: Array = transposed.T[None]
    return product


def _solution_of_factor(factor: Array, right: Array) -> Array:
    """`A^-1 B` for the lower factor of `A` by Cholesky, with `B` of shape `(1, k, outputs)`."""
    solution, _ = scipy.linalg.lapack.spotrs(factor, right[0], lower=True)
    return np.ascontiguousarray(solution)[None]
