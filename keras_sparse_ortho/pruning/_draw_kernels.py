"""New sparse kernels for the weights of a model, each with its own initializer and seed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import keras

from keras_sparse_ortho._checks import check_seed
from keras_sparse_ortho._keras_internals import warn_user
from keras_sparse_ortho.budgets import Orthogonal, fit_structure
from keras_sparse_ortho.errors import LayoutError
from keras_sparse_ortho.initializers import (
    AnyDraw,
    Draw,
    ExactOrthogonal,
    PackedDraw,
    RandomSparse,
    SparseInitializer,
    draw,
    layout_for,
)
from keras_sparse_ortho.kernels import PrunableWeight, derived_seed
from keras_sparse_ortho.orthogonal import (
    GivenBlocks,
    Structure,
    dead_outputs,
)
from keras_sparse_ortho.pruning._auto_gains import (
    AutoGains,
    default_initializer,
)
from keras_sparse_ortho.pruning._mirrored_ends import mirrored_ends
from keras_sparse_ortho.pruning._planning import (
    BudgetLike,
    plan_for,
)
from keras_sparse_ortho.pruning._relu_chain import mirrored_chain


def draw_kernels(
    model: keras.Model,
    weights: list[PrunableWeight],
    density: float | None,
    budget: BudgetLike,
    pattern: str | SparseInitializer,
    structure: Structure | Mapping[str, Structure] | None = None,
    seed: int | None = None,
    *,
    dense: bool = False,
) -> dict[str, AnyDraw]:
    """Sparse kernels and masks, by path.

    Args:
        model: Model of the weights.
        weights: list of `PrunableWeight` to draw.
        density: Global live fraction, or `None` where the budget says it.
        budget: As in `sparsify`.
        pattern: Initializer, or its name.
        structure: Structure of all kernels, or by path.
        seed: int, or `None` for a new one.
        dense: bool. Whether kernels will be stored dense. Else only live values wait.
    """
    base_seed = check_seed(seed)
    patterns = _patterns(weights, pattern, structure)
    by_name = pattern == "exact_orthogonal"
    default_density = density if by_name else None
    patterns |= _mirrored(model, weights, patterns, default_density)
    if base_seed is None:
        base_seed = random.randrange(2**31)
    gains = AutoGains(model, weights)
    patterns |= gains.before_normalization(patterns, by_name)
    automatic_paths = {
        path for path in patterns if _gain_of(patterns[path]) == "auto"
    }
    is_exact = all(
        initializer.isometry == "exact" for initializer in patterns.values()
    )
    orthogonal: Orthogonal = False
    if is_exact:
        orthogonal = patterns
    plan = plan_for(density, budget, weights, orthogonal=orthogonal)
    if any(_structure_of(initializer) for initializer in patterns.values()):
        plan = fit_structure(plan, weights, patterns)
    draws: dict[str, AnyDraw] = {}
    dead: dict[str, int] = {}
    for weight in weights:
        path = weight.path
        initializer = patterns[path]
        if path in automatic_paths:
            assert isinstance(initializer, ExactOrthogonal)
            initializer = gains.with_gain(
                weight, initializer, plan.counts[path]
            )
        initializer = _at_density(
            initializer, weight, plan[path], derived_seed(base_seed, path)
        )
        kernel_draw = draw(weight, initializer)
        if isinstance(kernel_draw, Draw):
            if is_exact and not isinstance(
                _structure_of(initializer), GivenBlocks
            ):
                assert kernel_draw.kernel is not None
                layout = layout_for(weight, initializer)
                dead[path] = dead_outputs(kernel_draw.kernel, layout)
            kernel_draw = _packed(kernel_draw, weight, dense)
        draws[path] = kernel_draw
    gains.warn_of_guesses(draws, automatic_paths)
    _warn_of_dead_outputs(dead)
    return draws


def _mirrored(
    model: keras.Model,
    weights: list[PrunableWeight],
    patterns: Mapping[str, SparseInitializer],
    default_density: float | None,
) -> dict[str, SparseInitializer]:
    """The patterns of a chain that is mirrored by default, else those at the ends of a model.

    Args:
        model: Model of the weights.
        weights: list of `PrunableWeight` to draw.
        patterns: dict of initializers by path.
        default_density: The density, where the default may choose; else `None`.
    """
    has_structure = any(map(_structure_of, patterns.values()))
    if default_density is not None and not has_structure:
        chain = mirrored_chain(model, weights, patterns, default_density)
        if chain:
            return chain
    return mirrored_ends(model, weights, patterns)


def _gain_of(initializer: SparseInitializer) -> object:
    return getattr(initializer, "gain", None)


def _structure_of(initializer: SparseInitializer) -> Structure | None:
    return getattr(initializer, "structure", None)


def _at_density(
    initializer: SparseInitializer,
    weight: PrunableWeight,
    density: float,
    seed: int,
) -> SparseInitializer:
    """An initializer for one kernel; a LayoutError names it."""
    try:
        return initializer.at_density(
            density, seed, weight.shape, weight.layout
        )
    except LayoutError as error:
        raise LayoutError(
            f"The weight {weight.path!r} does not fit: {error}"
        ) from None


def _packed(
    kernel_draw: Draw, weight: PrunableWeight, dense: bool
) -> PackedDraw:
    """A draw as it waits for the new model: its mask as bits, values as they will be stored."""
    assert kernel_draw.kernel is not None
    assert kernel_draw.initializer is not None
    variable = None
    if dense:
        variable = weight.variable
    return PackedDraw.of(
        kernel_draw.kernel,
        kernel_draw.mask,
        kernel_draw.initializer,
        variable=variable,
    )


def _warn_of_dead_outputs(dead: Mapping[str, int]) -> None:
    """Warns of kernels with outputs that no input reaches, by their numbers."""
    texts = [
        f"{count} of {path!r}" for path, count in dead.items() if count > 0
    ]
    if texts:
        warn_user(
            "These kernels have outputs without a nonzero entry, which stay dead under ReLU: the "
            "density is too low for all outputs, or the kernel's own count in the `budget` is (see "
            'keras_sparse_ortho.budgets.lift), or start="published" leaves them empty. '
            f"Received: {', '.join(texts)}"
        )


def _patterns(
    weights: list[PrunableWeight],
    pattern: object,
    structure: Structure | Mapping[str, Structure] | None,
) -> dict[str, SparseInitializer]:
    """The initializer of each kernel, by path, without densities."""
    patterns = {}
    for weight in weights:
        structure_of_weight = structure
        if isinstance(structure, Mapping):
            structure_of_weight = structure.get(weight.path)
        patterns[weight.path] = _pattern_for(
            weight, pattern, structure_of_weight
        )
    return patterns


def _pattern_for(
    weight: PrunableWeight,
    pattern: object,
    structure: Any,
) -> SparseInitializer:
    """The initializer of a kernel, without its density; refuses impossible combinations."""
    if pattern is None:
        raise ValueError(
            "sparsify draws new kernels; to keep the weights and mask them, call "
            "keras_sparse_ortho.prune(model, density). Received: initializer=None"
        )
    if pattern == "exact_orthogonal":
        layer_initializer = weight.initializer
        if structure is None and isinstance(layer_initializer, ExactOrthogonal):
            structure = layer_initializer.structure
        return ExactOrthogonal(seed=0, structure=structure)
    if pattern == "random_sparse":
        if structure is None:
            return RandomSparse(initializer=default_initializer(weight), seed=0)
    elif not isinstance(pattern, SparseInitializer):
        raise ValueError(
            '`initializer` must be "exact_orthogonal", "random_sparse", or a sparse initializer '
            f"such as ExactOrthogonal(). Received: initializer={pattern!r}"
        )
    elif structure is None:
        return pattern
    if isinstance(pattern, ExactOrthogonal) and pattern.structure in (
        None,
        structure,
    ):
        config = {**pattern.get_config(), "seed": 0, "structure": structure}
        return ExactOrthogonal.from_config(config)
    raise ValueError(
        "A `structure` needs exactly orthogonal kernels, and can be given only once. "
        f"Received: structure={structure!r}, initializer={pattern!r}"
    )
