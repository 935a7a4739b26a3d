"""One initializer for each weight: same pattern, own density, own seed."""

import hashlib
from typing import Any

import keras

from keras_sparse_ortho.errors import LayoutError
from keras_sparse_ortho.initializers import (
    ExactOrthogonal,
    RamanujanOrthogonal,
    RandomSparse,
    SparseInitializer,
)
from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.orthogonal import Structure


def derived_seed(seed: int, path: str) -> int:
    """A seed for the weight at `path` that is the same on every machine, and differs by path."""
    digest = hashlib.blake2b(f"{seed}/{path}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1  # 31 bits: some backends take no more


def is_orthogonal(initializer: Any) -> bool:
    """Whether kernels of this initializer have a least density."""
    exact = ExactOrthogonal | RamanujanOrthogonal
    return initializer == "exact_orthogonal" or isinstance(initializer, exact)


def structure_for(pattern: str | SparseInitializer, weight: PrunableWeight) -> Structure | None:
    """The structure that the mask of one weight is to have.

    That of the pattern; if kernels are drawn anew by name, that of the weight's own initializer.
    """
    if pattern == "exact_orthogonal":
        pattern = weight.initializer
    return pattern.structure if isinstance(pattern, ExactOrthogonal) else None


def initializer_for(
    pattern: str | SparseInitializer, weight: PrunableWeight, density: float, seed: int
) -> SparseInitializer:
    """The initializer of one weight.

    Args:
        pattern: `"exact_orthogonal"` (with the structure of the weight's own initializer, if it
            has one), `"random_sparse"`, or an instance to take settings from.
        weight: The weight.
        density: Its live fraction.
        seed: Its seed, which a dense initializer inside the sparse one gets as well.

    Raises:
        LayoutError: A shape or density that the pattern does not fit; the message names the weight.
    """
    if pattern == "exact_orthogonal":
        return ExactOrthogonal(density, seed=seed, structure=structure_for(pattern, weight))
    if pattern == "random_sparse":
        dense = weight.initializer
        if dense is None or isinstance(dense, SparseInitializer):
            dense = keras.initializers.GlorotUniform()
        pattern = RandomSparse(density, dense)
    if not isinstance(pattern, SparseInitializer):
        raise ValueError(
            '`initializer` must be "exact_orthogonal", "random_sparse", an initializer that '
            f"draws a mask, or None to keep the weights. Received: initializer={pattern!r}"
        )
    try:
        return pattern.at_density(density, seed, weight.shape, weight.layout)
    except LayoutError as error:
        raise LayoutError(f"The weight '{weight.path}' does not fit: {error}") from None
