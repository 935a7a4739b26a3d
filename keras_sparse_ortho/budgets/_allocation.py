"""Sharing out an exact number of live entries among weights, within the bounds of each."""

from collections.abc import Mapping, Sequence
from typing import Any

from keras_sparse_ortho.budgets._budget import Budget
from keras_sparse_ortho.errors import BudgetError, LayoutError
from keras_sparse_ortho.initializers import (
    ExactOrthogonal,
    SparseInitializer,
    axes_for,
    layout_for,
)
from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.models import weights_of
from keras_sparse_ortho.orthogonal import apportion, live_count

Orthogonal = bool | SparseInitializer | Mapping[str, SparseInitializer]
"""Whether kernels are to be exactly orthogonal; or what draws them, for all or by weight path."""


def allocate(
    weights: Sequence[PrunableWeight],
    density: float,
    relative: Sequence[float],
    *,
    orthogonal: Orthogonal,
    dense: Sequence[str] = (),
) -> Budget:
    """Densities proportional to `relative`, with exactly `round(density * total)` live entries.

    Weight `k` gets `clip(scale * relative_k * size_k, covering_k, size_k)` entries, with the one
    `scale` for which these sum to the total; fractions are rounded by largest remainder. So a
    weight that would pass density 1 is dense, and one whose share is too small for an orthogonal
    kernel without dead outputs is lifted to the least count of one; the others are rescaled to
    keep the total. A total that is too small for that is shared out between the bounds `least_k`
    of an orthogonal kernel and `covering_k`, so that as few outputs are dead as it allows.

    Args:
        weights: The weights.
        density: Global live fraction over all of them.
        relative: Density of each weight relative to the others.
        orthogonal: Whether every kernel must be able to be exactly orthogonal; else each keeps at
            least one live entry. Or what is to draw the kernels.
        dense: Paths of weights that stay dense.

    Raises:
        BudgetError: A total that the bounds do not allow, with the densities that are possible.
    """
    if not weights:
        raise BudgetError("There are no weights to share a budget among. Received: weights=[]")
    size = sum(weight.size for weight in weights)
    total = live_count(density, size)
    upper = [weight.size for weight in weights]
    given = [w.path in dense for w in weights]
    least, covering = (
        [full if all_of_it else few for full, all_of_it, few in zip(upper, given, row, strict=True)]
        for row in needs_of(weights, orthogonal)
    )
    if total < sum(least):
        what = "exactly orthogonal kernels" if orthogonal else "a live entry in every weight"
        what += " and the weights that stay dense" if dense else ""
        raise BudgetError(
            f"The least global density that leaves room for {what} is {sum(least) / size:.6g}."
            f"{_greediest(weights, least, given) if orthogonal else ''} "
            f"Received: density={density!r}"
        )
    wanted = [share * weight.size for share, weight in zip(relative, weights, strict=True)]
    counts = _clipped_shares(total, wanted, *bounds_for(total, least, covering, upper))
    unbounded = _clipped_shares(total, wanted, [0] * len(weights), upper)
    lifted = {
        w.path: share
        for w, share, count, enough in zip(weights, unbounded, counts, covering, strict=True)
        if orthogonal and share < min(count, enough) and w.path not in dense
    }
    return Budget(
        {w.path: count / w.size for w, count in zip(weights, counts, strict=True)},
        {w.path: w.size for w in weights},
        lifted,
    )


def _greediest(weights: Sequence[PrunableWeight], least: list[int], given: list[bool]) -> str:
    """Which weight needs most, and what needs less."""
    ours = [(few, w) for few, w, full in zip(least, weights, given, strict=True) if not full]
    text = " Kernels that need not be orthogonal take less (initializer='random_sparse')."
    if ours:
        most, weight = max(ours, key=lambda pair: pair[0])
        text = f" Most needs '{weight.path}', {most} of its {weight.size} entries.{text}"
    return text


def lift(model: Any, budget: Budget, initializer: SparseInitializer | None = None) -> Budget:
    """The budget nearest to another one that exactly orthogonal kernels can have.

    An orthogonal kernel needs `least_count` live entries, and `covering_count` for none of its
    outputs to be zero (a unit after ReLU that is zero never wakes). Methods that learn or score
    densities do not take that into account. Here weight `k` gets

        clip(scale * density_k * size_k, covering_k, size_k)

    live entries, with the one `scale` that keeps the global count: weights below what they need
    get it, and the others give entries up in proportion. A global count that is too small for all
    outputs is shared out between `least_k` and `covering_k`. `Budget.lifted_from` says what was
    lifted, and from which count.

    Args:
        model: A built Keras model, or a list of `PrunableWeight`, with the weights of the budget.
        budget: Densities, e.g. those that STR, SNIP or a published table ends with.
        initializer: What is to draw the kernels, if not `ExactOrthogonal()`: with other `norms`,
            `taps` or `start` a kernel needs another count.

    Raises:
        BudgetError: A budget for other weights; a global count below what orthogonal kernels need.

    Example:

    >>> import keras
    >>> import keras_sparse_ortho as kso
    >>> model = keras.Sequential([keras.Input((50,)), keras.layers.Dense(200, name="a"),
    ...                           keras.layers.Dense(10, name="b")])
    >>> lift(model, kso.Budget({"a/kernel": 0.006, "b/kernel": 0.5}))
    <Budget of 2 weights, density 0.0883333, 1060 of 12000 live
      a/kernel  0.02        200 of 10000  (lifted from 60)
      b/kernel  0.43        860 of 2000>
    """
    weights = [weight for weight in weights_of(model) if weight.path in budget]
    plan = budget.for_weights(weights)
    relative = [plan.counts[weight.path] / weight.size for weight in weights]
    return allocate(weights, plan.live / plan.size, relative, orthogonal=initializer or True)


def fit_structure(
    plan: Budget, weights: Sequence[PrunableWeight], patterns: Mapping[str, SparseInitializer]
) -> Budget:
    """`plan` within the bounds of structures, every count a multiple of its unit.

    No kernel has dead outputs, where the total allows. It is at most that of the plan, and less
    than it by less than the smallest unit of the weights that are not full.

    Args:
        plan: Densities of the weights.
        weights: The weights, all of which are to be exactly orthogonal.
        patterns: By path what is to draw them, with a structure or without.

    Raises:
        LayoutError: A weight that its structure does not fit; the message names it.
        BudgetError: A total that the structures do not allow, with the densities that they do.
    """
    rows = [_structured(weight, patterns[weight.path]) for weight in weights]
    units, least, covering, most = ([row[k] for row in rows] for k in range(4))
    if not sum(least) <= plan.live <= sum(most):
        found = (getattr(pattern, "structure", None) for pattern in patterns.values())
        names = sorted({str(structure) for structure in found if structure})
        raise BudgetError(
            f"Exactly orthogonal kernels with the structure {', '.join(names)} allow global "
            f"densities from {sum(least) / plan.size:.6g} to {sum(most) / plan.size:.6g}. "
            f"Received: density={plan.density:.6g}"
        )
    lower, upper = bounds_for(plan.live, least, covering, most)
    given = [plan.counts[w.path] for w in weights]
    wanted = _clipped_shares(plan.live, given, lower, upper)
    # The bounds are multiples of the units, so rounding down keeps them.
    counts = [count - count % unit for count, unit in zip(wanted, units, strict=True)]
    left = plan.live - sum(counts)
    for k in sorted(range(len(counts)), key=lambda k: (counts[k] - wanted[k]) / units[k]):
        if units[k] <= left and counts[k] + units[k] <= upper[k]:
            counts[k] += units[k]
            left -= units[k]
    # Less than a unit of each is left, which weights of smaller units can take.
    for k in sorted(range(len(counts)), key=lambda k: units[k]):
        more = min(left, most[k] - counts[k]) // units[k] * units[k]
        counts[k] += more
        left -= more
    lifted = dict(plan.lifted_from)
    for weight, share, count, few in zip(weights, given, counts, lower, strict=True):
        if share < few <= count:
            lifted.setdefault(weight.path, share)
    return Budget(
        {w.path: c / w.size for w, c in zip(weights, counts, strict=True)},
        {w.path: w.size for w in weights},
        lifted,
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


def _structured(weight: PrunableWeight, pattern: SparseInitializer) -> tuple[int, int, int, int]:
    """Unit of the live entries of a weight; the least, the least without dead outputs, the most."""
    (least,), (covering,) = needs_of([weight], pattern)
    structure = getattr(pattern, "structure", None)
    if structure is None:
        return 1, least, covering, weight.size
    shape = layout_for(weight, pattern).canonical_shape(weight.shape)
    return structure.unit(shape), least, covering, structure.most(shape)


def needs_of(
    weights: Sequence[PrunableWeight], orthogonal: Orthogonal
) -> tuple[list[int], list[int]]:
    """Fewest live entries of each weight, and fewest with which no output of it is dead."""
    pairs = [_needs(weight, orthogonal) for weight in weights]
    return [least for least, _ in pairs], [covering for _, covering in pairs]


def bounds_for(
    total: int, least: Sequence[int], covering: Sequence[int], most: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Lower and upper bounds of counts that leave as few outputs dead as `total` allows.

    Where it is enough for all outputs of all weights, none gets fewer than `covering`; else none
    gets more, as what one weight has beyond that is missing to another.
    """
    if total >= sum(covering):
        return list(covering), list(most)
    return list(least), list(covering)


def _needs(weight: PrunableWeight, orthogonal: Orthogonal) -> tuple[int, int]:
    if isinstance(orthogonal, bool):
        if not orthogonal:
            return 1, 1
        initializer: SparseInitializer = ExactOrthogonal(seed=0)
    elif isinstance(orthogonal, Mapping):
        initializer = orthogonal[weight.path]
    else:
        initializer = orthogonal
    try:
        return initializer.least_counts(weight.shape, axes_for(weight, initializer))
    except LayoutError as error:
        raise LayoutError(f"The weight '{weight.path}' does not fit: {error}") from None
