"""Sharing out an exact number of live entries among weights, within bounds."""

from collections.abc import Sequence

from keras_sparse_ortho.budgets._budget import Budget
from keras_sparse_ortho.errors import BudgetError
from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.orthogonal import apportion, least_count, live_count


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
    weight that would pass density 1 is dense and the rest is rescaled, and one whose share is too
    small for an orthogonal kernel is lifted to the least that is possible, which the rest pays.

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
