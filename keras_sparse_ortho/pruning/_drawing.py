"""Drawing sparse kernels for given weights, each with its own density and seed."""

import random
from typing import Any

from keras_sparse_ortho._checks import check_seed
from keras_sparse_ortho.budgets import Budget, fit_structure
from keras_sparse_ortho.errors import LayoutError
from keras_sparse_ortho.initializers import (
    Draw,
    ExactOrthogonal,
    RandomSparse,
    SparseInitializer,
    draw,
)
from keras_sparse_ortho.kernels import PrunableWeight, derived_seed
from keras_sparse_ortho.orthogonal import Structure
from keras_sparse_ortho.pruning._planning import BudgetLike, plan_for

Pattern = str | SparseInitializer
"""`"exact_orthogonal"`, `"random_sparse"`, or an initializer to take the settings from."""


def draw_kernels(
    model: Any,
    weights: list[PrunableWeight],
    density: float | None,
    budget: BudgetLike,
    pattern: Pattern,
    structure: Structure | None = None,
    seed: int | None = None,
) -> dict[str, Draw]:
    """Sparse kernels and their masks for weights, by path.

    The budget shares out the live entries, and every kernel is drawn with a seed that is derived
    from `seed` and its path. Nothing is changed.

    Args:
        model: The model, or the list of its weights.
        weights: The weights.
        density: Global live fraction, or `None` where the budget says it.
        budget: See `plan_for`.
        pattern: See `Pattern`; with `"exact_orthogonal"` a layer whose own initializer has a
            structure keeps it.
        structure: For all kernels.
        seed: Integer, or `None` for one from Python's `random`.
    """
    base_seed = check_seed(seed)
    pattern = _checked(pattern, structure)
    base_seed = random.randrange(2**31) if base_seed is None else base_seed
    plan = plan_for(model, density, budget, weights, orthogonal=is_orthogonal(pattern))
    patterns = {weight.path: _own_pattern(pattern, weight) for weight in weights}
    structures = {path: getattr(own, "structure", None) for path, own in patterns.items()}
    if any(structures.values()):
        plan = fit_structure(plan, weights, structures)
    draws = {}
    for weight in weights:
        own_seed = derived_seed(base_seed, weight.path)
        draws[weight.path] = _draw(weight, patterns[weight.path], plan, own_seed)
    return draws


def is_orthogonal(pattern: Pattern) -> bool:
    """Whether kernels of this pattern are exactly orthogonal, and so have a least density."""
    return pattern == "exact_orthogonal" or getattr(pattern, "isometry", None) == "exact"


def _draw(weight: PrunableWeight, pattern: SparseInitializer, plan: Budget, seed: int) -> Draw:
    try:
        own = pattern.at_density(plan[weight.path], seed, weight.shape, weight.layout)
    except LayoutError as error:
        raise LayoutError(f"The weight '{weight.path}' does not fit: {error}") from None
    return draw(weight, own)


def _checked(pattern: Pattern, structure: Structure | None) -> Pattern:
    """The pattern with the structure, or an error that says what is possible."""
    if pattern is None:
        raise ValueError(
            "sparsify draws new kernels; to keep the weights and mask them, call "
            "keras_sparse_ortho.prune(model, density). Received: initializer=None"
        )
    if pattern not in ("exact_orthogonal", "random_sparse") and not isinstance(
        pattern, SparseInitializer
    ):
        raise ValueError(
            '`initializer` must be "exact_orthogonal", "random_sparse", or an initializer that '
            f"draws a mask, such as ExactOrthogonal(). Received: initializer={pattern!r}"
        )
    if structure is None:
        return pattern
    if pattern == "exact_orthogonal":
        return ExactOrthogonal(seed=0, structure=structure)
    if isinstance(pattern, ExactOrthogonal) and pattern.structure in (None, structure):
        config = {**pattern.get_config(), "seed": 0, "structure": structure}
        return ExactOrthogonal.from_config(config)
    raise ValueError(
        "A `structure` is for exactly orthogonal kernels, and is given once. "
        f"Received: structure={structure!r}, initializer={pattern!r}"
    )


def _own_pattern(pattern: Pattern, weight: PrunableWeight) -> SparseInitializer:
    own = weight.initializer
    if pattern == "exact_orthogonal":
        structure = own.structure if isinstance(own, ExactOrthogonal) else None
        return ExactOrthogonal(seed=0, structure=structure)
    if pattern == "random_sparse":
        usual = own is not None and not isinstance(own, SparseInitializer)
        return RandomSparse(initializer=own if usual else "glorot_uniform", seed=0)
    assert isinstance(pattern, SparseInitializer)
    return pattern
