"""How many live entries a weight needs, for what is to draw its kernel."""

from collections.abc import Mapping, Sequence

from keras_sparse_ortho.errors import LayoutError
from keras_sparse_ortho.initializers import ExactOrthogonal, SparseInitializer, axes_for
from keras_sparse_ortho.kernels import PrunableWeight

Orthogonal = bool | SparseInitializer | Mapping[str, SparseInitializer]
"""Whether kernels are to be exactly orthogonal; or what draws them, for all or by weight path."""


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
