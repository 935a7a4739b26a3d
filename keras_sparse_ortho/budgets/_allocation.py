"""Sharing out an exact number of live entries among weights, within the bounds of each."""

from collections.abc import Mapping, Sequence
from typing import Any

from keras_sparse_ortho.budgets._budget import Budget
from keras_sparse_ortho.errors import BudgetError, LayoutError
from keras_sparse_ortho.kernels import KernelLayout, PrunableWeight
from keras_sparse_ortho.models import weights_of
from keras_sparse_ortho.orthogonal import Structure, apportion, least_count, live_count


def allocate(
    weights: Sequence[PrunableWeight],
    density: float,
    relative: Sequence[float],
    *,
    orthogonal: bool,
    dense: Sequence[str] = (),
) -> Budget:
    """Densities proportional to `relative`, with exactly `round(density * total)` live entries.

    Weight `k` gets `clip(scale * relative_k * size_k, least_k, size_k)` entries, with the one
    `scale` for which these sum to the total; fractions are rounded by largest remainder. So a
    weight that would pass density 1 is dense, and one whose share is too small for an orthogonal
    kernel is lifted to the least that is possible; the others are rescaled to keep the total.

    Args:
        weights: The weights.
        density: Global live fraction over all of them.
        relative: Density of each weight relative to the others.
        orthogonal: Whether every kernel must be able to be exactly orthogonal; else each keeps at
            least one live entry.
        dense: Paths of weights that stay dense.

    Raises:
        BudgetError: A total that the bounds do not allow, with the densities that are possible.
    """
    if not weights:
        raise BudgetError("There are no weights to share a budget among. Received: weights=[]")
    size = sum(weight.size for weight in weights)
    total = live_count(density, size)
    upper = [weight.size for weight in weights]
    least = [least_count(w.shape, w.layout) if orthogonal else 1 for w in weights]
    lower = [w.size if w.path in dense else few for w, few in zip(weights, least, strict=True)]
    if total < sum(lower):
        what = "exactly orthogonal kernels" if orthogonal else "a live entry in every weight"
        what += " and the weights that stay dense" if dense else ""
        raise BudgetError(
            f"The least global density that leaves room for {what} is {sum(lower) / size:.6g}. "
            f"Received: density={density!r}"
        )
    wanted = [share * weight.size for share, weight in zip(relative, weights, strict=True)]
    counts = _clipped_shares(total, wanted, lower, upper)
    unbounded = _clipped_shares(total, wanted, [0] * len(weights), upper)
    lifted = [
        w.path
        for w, few, share in zip(weights, least, unbounded, strict=True)
        if orthogonal and share < few and w.path not in dense
    ]
    return Budget(
        {w.path: count / w.size for w, count in zip(weights, counts, strict=True)},
        {w.path: w.size for w in weights},
        lifted,
    )


def lift(model: Any, budget: Budget) -> Budget:
    """The budget nearest to another one that exactly orthogonal kernels can have.

    An orthogonal kernel cannot be sparser than `least_density` of its shape, and methods that
    learn or score densities do not take that into account. Here weight `k` gets
    `clip(scale * density_k * size_k, least_k, size_k)` live entries, with the one `scale` that
    keeps the global count: weights below their least density get it, and the others give entries
    up in proportion. `Budget.lifted` names those that were lifted.

    Args:
        model: A built Keras model, or a list of `PrunableWeight`, with the weights of the budget.
        budget: Densities, e.g. those that STR, SNIP or a published table ends with.

    Raises:
        BudgetError: A budget for other weights; a global count below what orthogonal kernels need.

    Example:

    >>> import keras
    >>> import keras_sparse_ortho as kso
    >>> model = keras.Sequential([keras.Input((100,)), keras.layers.Dense(100, name="a"),
    ...                           keras.layers.Dense(10, name="b")])
    >>> lift(model, kso.Budget({"a/kernel": 0.002, "b/kernel": 0.5}))
    <Budget of 2 weights, density 0.0472727, 520 of 11000 live
      a/kernel  0.01        100 of 10000  (lifted to the least orthogonal density)
      b/kernel  0.42        420 of 1000>
    """
    weights = [weight for weight in weights_of(model) if weight.path in budget]
    plan = budget.for_weights(weights)
    relative = [plan[weight.path] for weight in weights]
    return allocate(weights, plan.live / plan.size, relative, orthogonal=True)


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


def _clipped_shares(
    total: int, wanted: Sequence[float], lower: Sequence[int], upper: Sequence[int]
) -> list[int]:
    """Integers within bounds, proportional to `wanted` where the bounds allow, that sum to `total`.

    The sum of the clipped shares grows with their scale, so fixing all shares on the side that
    has the larger excess, and rescaling the rest, ends at the one solution.
    """
    counts = [0] * len(wanted)
    free = list(range(len(wanted)))
    left = total
    while free:
        scale = left / sum(wanted[k] for k in free)
        over = [k for k in free if scale * wanted[k] > upper[k]]
        under = [k for k in free if scale * wanted[k] < lower[k]]
        excess = sum(scale * wanted[k] - upper[k] for k in over)
        lack = sum(lower[k] - scale * wanted[k] for k in under)
        if not over and not under:
            for k, count in zip(free, apportion(left, [wanted[k] for k in free]), strict=True):
                counts[k] = count
            break
        bounds, fixed = (upper, over) if excess >= lack else (lower, under)
        for k in fixed:
            counts[k] = bounds[k]
            left -= bounds[k]
        free = [k for k in free if k not in fixed]
    return counts


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
