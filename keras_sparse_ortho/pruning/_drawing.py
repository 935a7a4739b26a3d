"""Drawing sparse kernels for given weights, and the warning where that loses trained ones."""

import random
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_sparse_ortho._checks import check_seed
from keras_sparse_ortho._keras_internals import level_of_user
from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.budgets import Budget, fit_structure
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
from keras_sparse_ortho.orthogonal import Structure, dead_outputs
from keras_sparse_ortho.pruning._auto_gains import AutoGains, default_initializer
from keras_sparse_ortho.pruning._planning import BudgetLike, plan_for

Pattern = str | SparseInitializer
"""`"exact_orthogonal"`, `"random_sparse"`, or an initializer to take the settings from."""

# Drawing larger kernels again would take too long; training changes small ones as well.
_MOST_ENTRIES = 2**18


def draw_kernels(
    model: Any,
    weights: list[PrunableWeight],
    density: float | None,
    budget: BudgetLike,
    pattern: Pattern,
    structure: Structure | Mapping[str, Structure] | None = None,
    seed: int | None = None,
    *,
    dense: bool = False,
) -> dict[str, AnyDraw]:
    """Sparse kernels and their masks for weights, by path.

    The budget allocates the live entries, and every kernel is drawn with a seed that is derived
    from `seed` and its path. Nothing is changed.

    Args:
        model: The model, or the list of its weights.
        weights: The weights.
        density: Global live fraction, or `None` if the budget has it.
        budget: See `plan_for`.
        pattern: See `Pattern`; with `"exact_orthogonal"` a layer whose own initializer has a
            structure keeps it.
        structure: For all kernels, or by path.
        seed: Integer, or `None` for one from Python's `random`.
        dense: Whether the weights will be stored densely; else draws keep live values alone.

    Warns:
        UserWarning: Outputs of exactly orthogonal kernels that stay zero; with `gain="auto"`,
            layers for which it is not known what follows.
    """
    base_seed = check_seed(seed)
    of = structure if isinstance(structure, Mapping) else {w.path: structure for w in weights}
    checked = {w.path: _checked(pattern, of.get(w.path)) for w in weights}
    base_seed = random.randrange(2**31) if base_seed is None else base_seed
    patterns = {weight.path: _own_pattern(checked[weight.path], weight) for weight in weights}
    auto = [w for w in weights if getattr(patterns[w.path], "gain", None) == "auto"]
    choices = AutoGains(model, auto, patterns) if auto else None
    exact = all(own.isometry == "exact" for own in patterns.values())
    plan = plan_for(density, budget, weights, orthogonal=patterns if exact else False)
    if any(getattr(own, "structure", None) for own in patterns.values()):
        plan = fit_structure(plan, weights, patterns)
    draws: dict[str, AnyDraw] = {}
    dead: dict[str, int] = {}
    for weight in weights:
        own = patterns[weight.path]
        if choices is not None and isinstance(own, ExactOrthogonal) and own.gain == "auto":
            own = choices.with_gain(weight, own, plan.counts[weight.path])
        drawn = _draw(weight, own, plan, derived_seed(base_seed, weight.path))
        if isinstance(drawn, Draw):
            assert drawn.kernel is not None
            assert drawn.initializer is not None
            if exact:
                dead[weight.path] = dead_outputs(drawn.kernel, layout_for(weight, own))
            variable = weight.variable if dense else None
            drawn = PackedDraw.of(drawn.kernel, drawn.mask, drawn.initializer, variable=variable)
        draws[weight.path] = drawn
    if choices is not None:
        choices.warn_of_guesses(draws)
    _warn_of_dead_outputs(dead)
    return draws


def _draw(weight: PrunableWeight, pattern: SparseInitializer, plan: Budget, seed: int) -> AnyDraw:
    try:
        own = pattern.at_density(plan[weight.path], seed, weight.shape, weight.layout)
    except LayoutError as error:
        raise LayoutError(f"The weight '{weight.path}' does not fit: {error}") from None
    return draw(weight, own)


def _warn_of_dead_outputs(dead: dict[str, int]) -> None:
    found = [f"{count} of '{path}'" for path, count in dead.items() if count]
    if found:
        warnings.warn(
            "These kernels have outputs without a nonzero entry, which stay dead under ReLU: the "
            "density is too low for all outputs, or the kernel's own count in the `budget` is (see "
            'keras_sparse_ortho.budgets.lift), or start="published" leaves them empty. '
            f"Received: {', '.join(found)}",
            stacklevel=level_of_user(),
        )


def _checked(pattern: Pattern, structure: Structure | None) -> Pattern:
    """The pattern with the structure; refuses impossible combinations."""
    if pattern is None:
        raise ValueError(
            "sparsify draws new kernels; to keep the weights and mask them, call "
            "keras_sparse_ortho.prune(model, density). Received: initializer=None"
        )
    if pattern not in ("exact_orthogonal", "random_sparse") and not isinstance(
        pattern, SparseInitializer
    ):
        raise ValueError(
            '`initializer` must be "exact_orthogonal", "random_sparse", or a sparse initializer '
            f"such as ExactOrthogonal(). Received: initializer={pattern!r}"
        )
    if structure is None:
        return pattern
    if pattern == "exact_orthogonal":
        return ExactOrthogonal(seed=0, structure=structure)
    if isinstance(pattern, ExactOrthogonal) and pattern.structure in (None, structure):
        config = {**pattern.get_config(), "seed": 0, "structure": structure}
        return ExactOrthogonal.from_config(config)
    raise ValueError(
        "A `structure` needs exactly orthogonal kernels, and can be given only once. "
        f"Received: structure={structure!r}, initializer={pattern!r}"
    )


def _own_pattern(pattern: Pattern, weight: PrunableWeight) -> SparseInitializer:
    own = weight.initializer
    if pattern == "exact_orthogonal":
        structure = own.structure if isinstance(own, ExactOrthogonal) else None
        return ExactOrthogonal(seed=0, structure=structure)
    if pattern == "random_sparse":
        return RandomSparse(initializer=default_initializer(weight), seed=0)
    assert isinstance(pattern, SparseInitializer)
    return pattern


def signs_of_training(model: Any, weights: list[PrunableWeight]) -> str | None:
    """What says that the optimizer has stepped, or a kernel is not what its initializer draws."""
    return _steps(model) or _changed(weights)


def warn_of_training_lost(model: Any, weights: list[PrunableWeight]) -> None:
    """Warns if there are signs of training."""
    if reason := signs_of_training(model, weights):
        warnings.warn(
            "sparsify draws new kernels, so the trained ones are lost. To keep trained weights and "
            f"mask them, call keras_sparse_ortho.prune(model, density). {reason}",
            stacklevel=level_of_user(),
        )


def _steps(model: Any) -> str | None:
    iterations = getattr(getattr(model, "optimizer", None), "iterations", None)
    steps = 0 if iterations is None else int(to_numpy(iterations))
    return f"Received: a model whose optimizer has made {steps} steps" if steps else None


def _changed(weights: list[PrunableWeight]) -> str | None:
    for weight in sorted(weights, key=lambda weight: weight.size):
        initializer = weight.initializer
        # Other initializers may not be reproducible.
        seed = getattr(initializer, "seed", None)
        if not isinstance(seed, int) or isinstance(initializer, SparseInitializer):
            continue
        if weight.size > _MOST_ENTRIES:
            return None
        drawn = to_numpy(initializer(weight.shape, dtype=weight.variable.dtype))
        if _are_proportional(drawn, weight.raw_value()):
            return None
        return (
            f"Received: the weight '{weight.path}', which differs from what its initializer "
            f"{type(initializer).__name__} draws"
        )
    return None


def _are_proportional(drawn: np.ndarray, value: np.ndarray) -> bool:
    """Whether two kernels are equal up to a factor.

    EinsumDense draws with the fans of its equation, which its initializer does not know.
    """
    square = np.vdot(drawn, drawn)
    factor = np.vdot(drawn, value) / square if square > 0 else 1.0
    # Relative to the largest entry: small values of a uniform draw are differences of large ones.
    rounding = 1e-6 * float(np.abs(value).max(initial=0.0))
    return bool(np.abs(drawn * factor - value).max(initial=0.0) <= rounding)
