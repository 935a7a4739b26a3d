"""Fitting a budget to what structured kernels can hold."""

from collections.abc import Mapping, Sequence

from keras_sparse_ortho.budgets._allocation import _clipped_shares
from keras_sparse_ortho.budgets._budget import Budget
from keras_sparse_ortho.errors import BudgetError, LayoutError
from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.orthogonal import KernelLayout, Structure, least_count


def fit_structure(
    plan: Budget, weights: Sequence[PrunableWeight], structures: Mapping[str, Structure | None]
) -> Budget:
    """`plan` within the bounds of the structures, every count a multiple of its unit.

    The total is at most that of the plan, and less than it by less than the smallest unit of the
    weights that are not full.

    Args:
        plan: Densities of the weights.
        weights: The weights, all of which are to be exactly orthogonal.
        structures: By path; `None` for a weight without a structure.

    Raises:
        LayoutError: A weight that its structure does not fit; the message names it.
        BudgetError: A total that the structures do not allow, with the densities that they do.
    """
    bounds = [_bounds(weight, structures[weight.path]) for weight in weights]
    units, lower, upper = ([int(row[k]) for row in bounds] for k in range(3))
    if not sum(lower) <= plan.live <= sum(upper):
        names = sorted({str(structure) for structure in structures.values() if structure})
        raise BudgetError(
            f"Exactly orthogonal kernels with the structure {', '.join(names)} allow global "
            f"densities from {sum(lower) / plan.size:.6g} to {sum(upper) / plan.size:.6g}. "
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
    # Less than a unit of each is left, which weights of smaller units can take.
    for k in sorted(range(len(counts)), key=lambda k: units[k]):
        more = min(left, upper[k] - counts[k]) // units[k] * units[k]
        counts[k] += more
        left -= more
    return Budget(
        {w.path: c / w.size for w, c in zip(weights, counts, strict=True)},
        {w.path: w.size for w in weights},
        plan.lifted,
    )


def _bounds(weight: PrunableWeight, structure: Structure | None) -> tuple[int, int, int]:
    """Unit, least and most of the live entries of a weight."""
    if structure is None:
        return 1, least_count(weight.shape, weight.layout), weight.size
    shape = (weight.layout or KernelLayout.convolution()).canonical_shape(weight.shape)
    try:
        structure.check(shape)
    except LayoutError as error:
        raise LayoutError(f"The weight '{weight.path}' does not fit: {error}") from None
    return structure.unit(shape), structure.least(shape), structure.most(shape)
