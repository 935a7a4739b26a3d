"""`Needs`: how many live entries a weight can have, orthogonal or not."""

from collections.abc import Mapping
from typing import NamedTuple

from keras_sparse_ortho.errors import LayoutError
from keras_sparse_ortho.initializers import (
    ExactOrthogonal,
    SparseInitializer,
    axes_for,
    layout_for,
)
from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.orthogonal import depthwise_outputs

Orthogonal = bool | SparseInitializer | Mapping[str, SparseInitializer]
"""Whether kernels must be exactly orthogonal, or their initializer: for all, or by weight path."""


class Needs(NamedTuple):
    """How many live entries a weight can have."""

    unit: int  # counts are multiples of this
    least: int
    covering: int  # the least without dead outputs
    most: int


def needs_of(
    weight: PrunableWeight,
    orthogonal: Orthogonal,
) -> Needs:
    """How many live entries a weight can have; a LayoutError if a structure does not fit it."""
    if orthogonal is False:
        outputs = depthwise_outputs(weight.shape, weight.layout)
        return Needs(1, 1, max(outputs, 1), weight.size)
    initializer = _initializer_of(weight, orthogonal)
    try:
        minimum, covering = initializer.least_counts(
            weight.shape, axes_for(weight, initializer)
        )
    except LayoutError as error:
        raise LayoutError(
            f"The weight {weight.path!r} does not fit: {error}"
        ) from None
    structure = getattr(initializer, "drawn_structure", None)
    if structure is None:
        return Needs(1, minimum, covering, weight.size)
    shape = layout_for(weight, initializer).canonical_shape(weight.shape)
    return Needs(
        structure.unit(shape), minimum, covering, structure.most(shape)
    )


def _initializer_of(
    weight: PrunableWeight, orthogonal: Orthogonal
) -> SparseInitializer:
    """The initializer that will draw a weight, exactly orthogonal by default."""
    if isinstance(orthogonal, bool):
        return ExactOrthogonal(seed=0)
    if isinstance(orthogonal, Mapping):
        return orthogonal[weight.path]
    return orthogonal
