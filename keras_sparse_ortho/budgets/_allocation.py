"""Uniform, ER and ERK budgets, and sharing an exact number of live entries among weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from keras_sparse_ortho._checks import other_keywords
from keras_sparse_ortho.budgets._budget import Budget
from keras_sparse_ortho.errors import BudgetError, LayoutError
from keras_sparse_ortho.initializers import ExactOrthogonal, SparseInitializer, axes_for, layout_for
from keras_sparse_ortho.kernels import KernelLayout, PrunableWeight, Selection, choose
from keras_sparse_ortho.models import weights_of
from keras_sparse_ortho.orthogonal import apportion, live_count

Orthogonal = bool | SparseInitializer | Mapping[str, SparseInitializer]
"""Whether kernels must be exactly orthogonal, or their initializer: for all, or by weight path."""


@other_keywords()
def uniform(
    model: Any,
    density: float,
    *,
    dense_first: bool = False,
    dense_last: bool = False,
    include: Selection = None,
    exclude: Selection = None,
    orthogonal: Orthogonal = True,
) -> Budget:
    """Every weight has the same density.

    With `dense_first` or `dense_last` those weights stay dense and the others share the rest, so
    that the global density is still `density`.

    Args:
        model: A built Keras model, or a list of `PrunableWeight`.
        density: Global live fraction over the selected weights, in (0, 1]; the total is exactly
            `round(density * size)`.
        dense_first: Whether the first weight stays dense.
        dense_last: Whether the last weight stays dense.
        include: Which weights: paths, layers, regular expressions or a predicate. Default: all.
        exclude: Which weights to leave out.
        orthogonal: Whether weights are lifted to what an exactly orthogonal kernel without dead
            outputs needs (see `lift`); or the initializer that will draw the kernels.

    Raises:
        BudgetError: A global density that the bounds do not allow.

    Example:

    >>> import keras
    >>> model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(10, name="a"),
    ...                           keras.layers.Dense(10, name="b")])
    >>> uniform(model, 0.5)
    <Budget of 2 weights, density 0.5, 150 of 300 live
      a/kernel  0.5         100 of 200
      b/kernel  0.5         50 of 100>
    """
    weights = choose(weights_of(model), include, exclude)
    ends = [*(weights[:1] if dense_first else []), *(weights[-1:] if dense_last else [])]
    dense = [weight.path for weight in ends]
    relative = [1.0] * len(weights)
    return allocate(weights, density, relative, orthogonal=orthogonal, dense=dense)


@other_keywords()
def er(
    model: Any,
    density: float,
    *,
    include: Selection = None,
    exclude: Selection = None,
    orthogonal: Orthogonal = True,
) -> Budget:
    """Erdos-Renyi (ER): the density of a layer is proportional to `(in + out) / (in * out)`.

    Layers that would exceed density 1 are dense, and the rest is rescaled. The spatial dimensions
    of convolutions are ignored; see `erk`.

    Arguments and errors are those of `uniform`.

    Example:

    >>> import keras
    >>> model = keras.Sequential([keras.Input((100,)), keras.layers.Dense(100, name="a"),
    ...                           keras.layers.Dense(10, name="b")])
    >>> er(model, 0.1)
    <Budget of 2 weights, density 0.1, 1100 of 11000 live
      a/kernel  0.071       710 of 10000
      b/kernel  0.39        390 of 1000>

    Reference:

    - Mocanu et al., "Scalable training of artificial neural networks with adaptive sparse
      connectivity inspired by network science" (Nature Communications 2018), arXiv 1707.04780
    """
    return _erdos_renyi(choose(weights_of(model), include, exclude), density, orthogonal)


@other_keywords()
def erk(
    model: Any,
    density: float,
    *,
    include: Selection = None,
    exclude: Selection = None,
    orthogonal: Orthogonal = True,
) -> Budget:
    """Erdos-Renyi-Kernel (ERK): density proportional to `sum(dims) / prod(dims)` of the kernel.

    For a convolution `(in + out + k_1 + ... ) / (in * out * k_1 * ...)`; for a matrix as in `er`.
    Layers that would exceed density 1 are dense, and the rest is rescaled.

    Arguments and errors are those of `uniform`.

    Example:

    >>> import keras
    >>> model = keras.Sequential([keras.Input((8, 8, 16)), keras.layers.Conv2D(32, 3, name="a"),
    ...                           keras.layers.Conv2D(32, 1, name="b")])
    >>> [round(d, 3) for d in erk(model, 0.2).values()]
    [0.11, 0.604]

    Reference:

    - Evci et al., "Rigging the Lottery: Making All Tickets Winners" (ICML 2020), arXiv 1911.11134
    """
    return _erdos_renyi(
        choose(weights_of(model), include, exclude), density, orthogonal, spatial=True
    )


def _erdos_renyi(
    weights: Sequence[PrunableWeight], density: float, orthogonal: Orthogonal, spatial: bool = False
) -> Budget:
    relative = []
    for weight in weights:
        layout = weight.layout or KernelLayout.convolution()
        # Attention heads and the like are flattened to in and out.
        batch, parts, *taps, inputs, outputs = layout.canonical_shape(weight.shape)
        dims = [outputs * parts]
        dims += [inputs] if layout.inputs else []
        dims += [batch] if layout.batch else []
        dims += taps if spatial else []
        relative.append(sum(dims) / math.prod(dims))
    return allocate(weights, density, relative, orthogonal=orthogonal)


def allocate(
    weights: Sequence[PrunableWeight],
    density: float,
    relative: Sequence[float],
    *,
    orthogonal: Orthogonal,
    dense: Sequence[str] = (),
) -> Budget:
    """Densities proportional to `relative`, with exactly `round(density * total)` live entries.

    As `lift` shares them; fractions are rounded by largest remainder. Kernels that need not be
    `orthogonal` keep at least one live entry. Weights of the paths in `dense` stay dense.
    """
    if not weights:
        raise BudgetError("There are no weights to share a budget among. Received: weights=[]")
    size = sum(weight.size for weight in weights)
    total = live_count(density, size)
    upper = [weight.size for weight in weights]
    full = [w.path in dense for w in weights]
    least, covering = (
        [most if stays else few for most, stays, few in zip(upper, full, counts, strict=True)]
        for counts in needs_of(weights, orthogonal)
    )
    if total < sum(least):
        what = "exactly orthogonal kernels" if orthogonal else "a live entry in every weight"
        what += " and the weights that stay dense" if dense else ""
        hint = ""
        if orthogonal:
            hint = " Kernels that need not be orthogonal take less (initializer='random_sparse')."
            ours = [(few, w) for few, w in zip(least, weights, strict=True) if w.path not in dense]
            if ours:
                most, weight = max(ours, key=lambda pair: pair[0])
                hint = f" Most needs '{weight.path}', {most} of its {weight.size} entries.{hint}"
        raise BudgetError(
            f"The least global density that leaves room for {what} is {sum(least) / size:.6g}."
            f"{hint} Received: density={density!r}"
        )
    wanted = [share * weight.size for share, weight in zip(relative, weights, strict=True)]
    counts = _clipped_shares(total, wanted, *_bounds(total, least, covering, upper))
    unbounded = _clipped_shares(total, wanted, [0] * len(weights), upper)
    lifted = {
        w.path: share
        for w, share, count, enough in zip(weights, unbounded, counts, covering, strict=True)
        if orthogonal and share < min(count, enough) and w.path not in dense
    }
    return _budget(weights, counts, lifted)


def _budget(
    weights: Sequence[PrunableWeight], counts: Sequence[int], lifted: Mapping[str, int | None]
) -> Budget:
    densities = {w.path: count / w.size for w, count in zip(weights, counts, strict=True)}
    return Budget(densities, {w.path: w.size for w in weights}, lifted)


def lift(model: Any, budget: Budget, initializer: SparseInitializer | None = None) -> Budget:
    """The budget nearest to another one that exactly orthogonal kernels can have.

    An orthogonal kernel needs at least `least_count` live entries, and more so that none of its
    outputs is all zero (a ReLU unit with such weights stays dead). Methods that learn or score
    densities ignore this. Here weight `k` gets

        clip(scale * density_k * size_k, covering_k, size_k)

    live entries, with the one `scale` that keeps the global count: weights that lack entries get
    them, and the others give up entries in proportion. A global count that is too small to cover
    all outputs is shared between `least_k` and `covering_k`. `Budget.lifted_from` has the original
    counts of the weights that were lifted.

    Args:
        model: A built Keras model, or a list of `PrunableWeight`, with the weights of the budget.
        budget: Densities, e.g. the final ones of STR or SNIP, or those of a published table.
        initializer: What will draw the kernels, if not `ExactOrthogonal()`.

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
    """`plan` within the bounds of the structures of `patterns`, every count a multiple of its unit.

    The result has at most as many live entries, and fewer by less than the smallest unit.
    """
    rows = [_structure_bounds(weight, patterns[weight.path]) for weight in weights]
    units, least, covering, most = ([row[k] for row in rows] for k in range(4))
    if not sum(least) <= plan.live <= sum(most):
        found = (getattr(pattern, "structure", None) for pattern in patterns.values())
        names = sorted({str(structure) for structure in found if structure})
        raise BudgetError(
            f"Exactly orthogonal kernels with the structure {', '.join(names)} allow global "
            f"densities from {sum(least) / plan.size:.6g} to {sum(most) / plan.size:.6g}. "
            f"Received: density={plan.density:.6g}"
        )
    lower, upper = _bounds(plan.live, least, covering, most)
    given = [plan.counts[w.path] for w in weights]
    wanted = _clipped_shares(plan.live, given, lower, upper)
    # The bounds are multiples of the units, so rounding down stays within them.
    counts = [count - count % unit for count, unit in zip(wanted, units, strict=True)]
    left = plan.live - sum(counts)
    for k in sorted(range(len(counts)), key=lambda k: (counts[k] - wanted[k]) / units[k]):
        if units[k] <= left and counts[k] + units[k] <= upper[k]:
            counts[k] += units[k]
            left -= units[k]
    # The rest is less than a unit of each; weights with smaller units can take it.
    for k in sorted(range(len(counts)), key=lambda k: units[k]):
        more = min(left, most[k] - counts[k]) // units[k] * units[k]
        counts[k] += more
        left -= more
    lifted = dict(plan.lifted_from)
    for weight, share, count, few in zip(weights, given, counts, lower, strict=True):
        if share < few <= count:
            lifted.setdefault(weight.path, share)
    return _budget(weights, counts, lifted)


def _clipped_shares(
    total: int, wanted: Sequence[float], lower: Sequence[int], upper: Sequence[int]
) -> list[int]:
    """Integers within bounds, proportional to `wanted` where the bounds allow, that sum to `total`.

    The sum of the clipped shares grows with their scale. So fixing all shares on the side with the
    larger excess and rescaling the rest ends at the unique solution.
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


def _structure_bounds(
    weight: PrunableWeight, pattern: SparseInitializer
) -> tuple[int, int, int, int]:
    """Unit, minimum, minimum without dead outputs, and maximum of a weight's live entries."""
    least, covering = _needs(weight, pattern)
    structure = getattr(pattern, "structure", None)
    if structure is None:
        return 1, least, covering, weight.size
    shape = layout_for(weight, pattern).canonical_shape(weight.shape)
    return structure.unit(shape), least, covering, structure.most(shape)


def needs_of(
    weights: Sequence[PrunableWeight], orthogonal: Orthogonal
) -> tuple[list[int], list[int]]:
    """Minimum live entries of each weight, and the minimum without dead outputs."""
    pairs = [_needs(weight, orthogonal) for weight in weights]
    return [least for least, _ in pairs], [covering for _, covering in pairs]


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


def _bounds(
    total: int, least: Sequence[int], covering: Sequence[int], most: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Lower and upper bounds of counts that leave as few dead outputs as `total` allows."""
    if total >= sum(covering):
        return list(covering), list(most)
    return list(least), list(covering)  # what one weight has beyond covering, another lacks
