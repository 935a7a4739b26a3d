"""`allocate`: exact counts shared among weights, within the bounds of their needs."""

from collections.abc import Mapping, Sequence

import keras

from keras_sparse_ortho._checks import other_keywords
from keras_sparse_ortho.budgets._budget import Budget
from keras_sparse_ortho.budgets._needs import Needs, Orthogonal, needs_of
from keras_sparse_ortho.errors import BudgetError
from keras_sparse_ortho.initializers import SparseInitializer
from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.models import weights_of
from keras_sparse_ortho.orthogonal import apportion, live_count


def allocate(
    weights: Sequence[PrunableWeight],
    density: float,
    relative: Sequence[float],
    *,
    orthogonal: Orthogonal,
) -> Budget:
    """Shares exactly `round(density * total)` entries in proportion to `relative`, as `lift`.

    Args:
        weights: list of PrunableWeight.
        density: float in (0, 1]. Global live fraction.
        relative: list of float. Density of each weight, up to a common factor.
        orthogonal: As in `uniform`.

    Raises BudgetError for a density that leaves some weights too few entries.
    """
    if not weights:
        raise BudgetError(
            "There are no weights to share a budget among. Received: weights=[]"
        )
    sizes = [weight.size for weight in weights]
    total = live_count(density, sum(sizes))
    needs = [needs_of(weight, orthogonal) for weight in weights]
    if orthogonal is False and total < sum(need.covering for need in needs):
        needs = [need._replace(covering=need.least) for need in needs]
    if total < sum(need.least for need in needs):
        raise BudgetError(
            f"The least global density that leaves room for "
            f"{_kernels_with_too_few(weights, needs, orthogonal)} Received: density={density!r}"
        )
    ideal_counts = []
    for weight, relative_density in zip(weights, relative, strict=True):
        ideal_counts.append(relative_density * weight.size)
    lower, upper = _bounds(total, needs, sizes)
    counts = _clipped_shares(total, ideal_counts, lower, upper)
    unbounded = _clipped_shares(total, ideal_counts, [0] * len(weights), sizes)
    lifted = {}
    for weight, need, share, count in zip(
        weights, needs, unbounded, counts, strict=True
    ):
        needs_several = orthogonal or need.covering > 1
        if needs_several and share < min(count, need.covering):
            lifted[weight.path] = share
    return _budget(weights, counts, lifted)


def _kernels_with_too_few(
    weights: Sequence[PrunableWeight],
    needs: Sequence[Needs],
    orthogonal: Orthogonal,
) -> str:
    """The end of the error for a global density that is too low."""
    size = sum(weight.size for weight in weights)
    least_density = sum(need.least for need in needs) / size
    if not orthogonal:
        return f"a live entry in every weight is {least_density:.6g}."
    most_needed = max(need.least for need in needs)
    neediest = next(
        weight
        for weight, need in zip(weights, needs, strict=True)
        if need.least == most_needed
    )
    return (
        f"exactly orthogonal kernels is {least_density:.6g}. "
        f"{neediest.path!r} needs most: {most_needed} of its {neediest.size} entries. Kernels that "
        "need not be orthogonal take less (initializer='random_sparse')."
    )


def _budget(
    weights: Sequence[PrunableWeight],
    counts: Sequence[int],
    lifted: Mapping[str, int],
) -> Budget:
    """The budget with these counts of live entries."""
    densities: dict[str, float] = {}
    sizes: dict[str, int] = {}
    for weight, count in zip(weights, counts, strict=True):
        densities[weight.path] = count / weight.size
        sizes[weight.path] = weight.size
    return Budget(densities, sizes, lifted)


@other_keywords
def lift(
    model: keras.Model | Sequence[PrunableWeight],
    budget: Budget,
    initializer: SparseInitializer | None = None,
) -> Budget:
    """Returns the budget nearest to another one that exactly orthogonal kernels can have.

    An orthogonal kernel needs `least_count` live entries, and `covering_count` to have no dead
    outputs. Weight `k` gets

        clip(scale * density_k * size_k, covering_k, size_k)

    live entries, with the one `scale` that keeps the global count; if that is too small, a count
    between `least_k` and `covering_k`. `Budget.lifted_from` has the counts before.

    Args:
        model: Model (built) or list of `PrunableWeight`, with the weights of the budget.
        budget: Budget. E.g. the final densities of STR or SNIP, or a published table.
        initializer: SparseInitializer of the kernels. Default: `ExactOrthogonal()`.

    Raises BudgetError for other weights, and for a global count below that of orthogonal kernels.

    Examples:
        >>> import keras, keras_sparse_ortho as kso
        >>> model = keras.Sequential([keras.Input((50,)), keras.layers.Dense(200, name="a"),
        ...                           keras.layers.Dense(10, name="b")])
        >>> lift(model, kso.Budget({"a/kernel": 0.006, "b/kernel": 0.5}))
        <Budget of 2 weights, density 0.0883333, 1060 of 12000 live
          a/kernel  0.02        200 of 10000  (lifted from 60)
          b/kernel  0.43        860 of 2000>
    """
    orthogonal: Orthogonal = True
    if initializer is not None:
        orthogonal = initializer
    weights = [weight for weight in weights_of(model) if weight.path in budget]
    plan = budget.for_weights(weights)
    relative = [plan.counts[weight.path] / weight.size for weight in weights]
    return allocate(
        weights, plan.live / plan.size, relative, orthogonal=orthogonal
    )


def fit_structure(
    plan: Budget,
    weights: Sequence[PrunableWeight],
    patterns: Mapping[str, SparseInitializer],
) -> Budget:
    """Fits a budget to the structures of kernels; it loses less than the smallest unit.

    Args:
        plan: Budget.
        weights: list of PrunableWeight. The weights of the budget.
        patterns: dict of initializers by weight path.

    Raises BudgetError for a global density that the structures do not allow.
    """
    needs = [needs_of(weight, patterns) for weight in weights]
    least_total = sum(need.least for need in needs)
    most_total = sum(need.most for need in needs)
    if not least_total <= plan.live <= most_total:
        structures = [
            getattr(pattern, "structure", None) for pattern in patterns.values()
        ]
        names = sorted(
            {str(structure) for structure in structures if structure}
        )
        raise BudgetError(
            f"Exactly orthogonal kernels with the structure {', '.join(names)} allow global "
            f"densities from {least_total / plan.size:.6g} to {most_total / plan.size:.6g}. "
            f"Received: density={plan.density:.6g}"
        )
    lower, upper = _bounds(plan.live, needs, [need.most for need in needs])
    shares = [plan.counts[weight.path] for weight in weights]
    clipped_counts = _clipped_shares(plan.live, shares, lower, upper)
    counts = _whole_units(plan.live, clipped_counts, upper, needs)
    lifted = dict(plan.lifted_from)
    for weight, share, count, bound in zip(
        weights, shares, counts, lower, strict=True
    ):
        if share < bound <= count:
            lifted.setdefault(weight.path, share)
    return _budget(weights, counts, lifted)


def _whole_units(
    total: int,
    ideal_counts: Sequence[int],
    upper: Sequence[int],
    needs: Sequence[Needs],
) -> list[int]:
    """Counts in whole units near the ideal ones, with a sum of at most `total`.

    Counts are rounded down. Then the counts that lost the largest part of a unit get one more, up
    to `upper`. The remainder is less than a unit of each; weights with smaller units can take it.
    """
    units = [need.unit for need in needs]
    counts = []
    gains = []
    for ideal_count, unit in zip(ideal_counts, units, strict=True):
        lost = ideal_count % unit
        counts.append(ideal_count - lost)
        gains.append(-lost / unit)
    missing = total - sum(counts)
    indices = range(len(counts))
    for k in sorted(indices, key=gains.__getitem__):
        unit = units[k]
        if unit <= missing and counts[k] + unit <= upper[k]:
            counts[k] += unit
            missing -= unit
    for k in sorted(indices, key=units.__getitem__):
        room = min(missing, needs[k].most - counts[k])
        extra = room - room % units[k]
        counts[k] += extra
        missing -= extra
    return counts


def _clipped_shares(
    total: int,
    ideal_counts: Sequence[float],
    lower: Sequence[int],
    upper: Sequence[int],
) -> list[int]:
    """Integers within bounds that sum to `total`, proportional to `ideal_counts` where possible.

    The sum of the clipped shares grows with their scale: fixing all on the side with the larger
    excess and rescaling the rest ends at the unique solution.
    """
    counts = [0] * len(ideal_counts)
    free = list(range(len(ideal_counts)))
    to_share = total
    while free:
        ideals = [ideal_counts[k] for k in free]
        scale = to_share / sum(ideals)
        over: dict[int, float] = {}
        under: dict[int, float] = {}
        for k, ideal in zip(free, ideals, strict=True):
            share = scale * ideal
            if share > upper[k]:
                over[k] = share - upper[k]
            elif share < lower[k]:
                under[k] = lower[k] - share
        if not over and not under:
            shares = apportion(to_share, ideals)
            for k, count in zip(free, shares, strict=True):
                counts[k] = count
            break
        excess = sum(over.values())
        lack = sum(under.values())
        bounds = lower
        fixed = under
        if excess >= lack:
            bounds = upper
            fixed = over
        for k in fixed:
            counts[k] = bounds[k]
            to_share -= bounds[k]
        free = [k for k in free if k not in fixed]
    return counts


def _bounds(
    total: int,
    needs: Sequence[Needs],
    sizes: list[int],
) -> tuple[list[int], list[int]]:
    """Bounds of counts with as few dead outputs as `total` allows."""
    covering = [need.covering for need in needs]
    if total < sum(covering):
        # what one weight has beyond covering, another lacks
        return [need.least for need in needs], covering
    return covering, sizes
