"""Fitting a budget to what structured kernels can hold."""

from collections.abc import Sequence

from keras_sparse_ortho.budgets._allocation import _clipped_shares
from keras_sparse_ortho.budgets._budget import Budget
from keras_sparse_ortho.errors import BudgetError, LayoutError
from keras_sparse_ortho.orthogonal import KernelLayout, Structure
from keras_sparse_ortho.parametrizations import PrunableWeight


def fit_structure(plan: Budget, weights: Sequence[PrunableWeight], structure: Structure) -> Budget:
    """`plan` within the bounds of the structure, every count a multiple of its unit.

    The total is at most that of the plan, and less than it by less than one unit of the weight
    with the smallest (unless all weights are full).

    Raises:
        LayoutError: A weight that the structure does not fit; the message names it.
        BudgetError: A total that the structure does not allow, with the densities that it does.
    """
    shapes = []
    for weight in weights:
        shape = (weight.layout or KernelLayout.convolution()).canonical_shape(weight.shape)
        try:
            structure.check(shape)
        except LayoutError as error:
            raise LayoutError(f"The weight '{weight.path}' does not fit: {error}") from None
        shapes.append(shape)
    lower = [structure.least(shape) for shape in shapes]
    upper = [structure.most(shape) for shape in shapes]
    units = [structure.unit(shape) for shape in shapes]
    if not sum(lower) <= plan.live <= sum(upper):
        raise BudgetError(
            f"Exactly orthogonal kernels with the structure {structure} allow global densities "
            f"from {sum(lower) / plan.size:.6g} to {sum(upper) / plan.size:.6g}. "
            f"Received: density={plan.density:.6g}"
        )
    wanted = _clipped_shares(plan.live, [plan.counts[w.path] for w in weights], lower, upper)
    # The bounds are multiples of the units, so rounding down keeps them.
    counts = [count - count % unit for count, unit in zip(wanted, units, strict=True)]
    left = plan.live - sum(counts)
    for k in sorted(range(len(counts)), key=lambda k: (counts[k] - wanted[k]) / units[k]):
        if units[k] <= left and counts[k] + units[k] <= upper[k]:
            counts[k] += units[k]
            left -= units[k]
    return Budget(
        {w.path: c / w.size for w, c in zip(weights, counts, strict=True)},
        {w.path: w.size for w in weights},
        plan.lifted,
    )
