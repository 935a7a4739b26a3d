"""`sparsify`: new sparse kernels for a whole model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import keras

from keras_sparse_ortho._keras_internals import warn_user
from keras_sparse_ortho.budgets import Budget
from keras_sparse_ortho.errors import DensityError
from keras_sparse_ortho.initializers import (
    SparseInitializer,
)
from keras_sparse_ortho.kernels import PrunableWeight, Selection
from keras_sparse_ortho.models import Plan, carry_out, verb
from keras_sparse_ortho.orthogonal import (
    Block,
    Structure,
    StructureLike,
    as_structure,
)
from keras_sparse_ortho.pruning._blocks import BlockPlan
from keras_sparse_ortho.pruning._draw_kernels import draw_kernels
from keras_sparse_ortho.pruning._planning import (
    BudgetLike,
    Densities,
    density_and_budget,
    plan_for,
    plan_of_draws,
    weights_to_prune,
)
from keras_sparse_ortho.pruning._signs_of_training import signs_of_training
from keras_sparse_ortho.storages import BlockForm, check_storage


def plan_sparsify(
    model: keras.Model,
    density: float | Densities | None = None,
    budget: BudgetLike = "erk",
    initializer: str | SparseInitializer = "exact_orthogonal",
    *,
    structure: StructureLike | None = None,
    seed: int | None = None,
    include: Selection = None,
    exclude: Selection = None,
    storage: str = "masked",
) -> Plan:
    """Plans `sparsify`, with the same arguments."""
    form = check_storage(storage)
    density, budget = density_and_budget(density, budget)
    blocks_of_budget: Mapping[str, Structure] = {}
    if isinstance(budget, Budget) and budget.blocks and structure is None:
        blocks_of_budget = budget.blocks
        if include is None:
            include = list(budget)
    weights = weights_to_prune(model, include, exclude)
    if density is None and isinstance(budget, str):
        raise DensityError(
            "sparsify needs a `density`, the live fraction, or a `budget` that says it. To hold "
            "the masks that the layers' own initializers drew, call "
            f"keras_sparse_ortho.apply_masks(model). Received: density=None, budget={budget!r}"
        )
    pattern: Structure | None = None
    if structure is not None:
        pattern = as_structure(structure)
    structures: Structure | Mapping[str, Structure] | None = (
        blocks_of_budget or pattern
    )
    blocks = None
    if storage == BlockForm.name and not blocks_of_budget:
        if isinstance(pattern, Block):  # others are not drawn as blocks alone
            pattern = dataclasses.replace(pattern, regular=True)
        asked = plan_for(density, budget, weights, orthogonal=True)
        blocks = BlockPlan.of(
            weights, asked, pattern, orthogonal=True, budget=budget
        )
        weights = blocks.weights
        density = None
        budget = blocks.budget
        structures = blocks.blocks
    draws = draw_kernels(
        model,
        weights,
        density,
        budget,
        initializer,
        structures,
        seed,
        dense=form.keeps_dense_kernel,
    )
    _warn_of_training(model, weights)
    return plan_of_draws(model, weights, draws, storage, blocks)


def _warn_of_training(
    model: keras.Model, weights: list[PrunableWeight]
) -> None:
    reason = signs_of_training(model, weights)
    if reason is not None:
        warn_user(
            "sparsify draws new kernels, so the trained ones are lost. To keep trained weights and "
            f"mask them, call keras_sparse_ortho.prune(model, density). {reason}"
        )


@verb(plan_sparsify)
def sparsify(
    model: keras.Model,
    density: float | Densities | None = None,
    budget: BudgetLike = "erk",
    initializer: str | SparseInitializer = "exact_orthogonal",
    *,
    structure: StructureLike | None = None,
    seed: int | None = None,
    include: Selection = None,
    exclude: Selection = None,
    storage: str = "masked",
) -> keras.Model:
    """Draws new sparse kernels, exactly orthogonal by default, with fixed masks of exact count.

    The budget shares `round(density * size)` live entries among the selected kernels; every kernel
    `K` is drawn with `K^T K = gain^2 I` (or `K K^T`, if it is wide) and its mask stays:

        w_e = w  where the mask is live, and 0 elsewhere.

    Each kernel's seed is derived from `seed` and its path: equal shapes get different kernels.
    Biases, normalization and kernels that are not selected keep their values.

    To mask the present weights, call `prune`; to keep masks drawn by the layers' own initializers,
    `apply_masks`; for masks and thresholds learned in training, `parametrize`.

    Args:
        model: A built Keras 3 model: Sequential, functional, nested, or written as a class.
        density: float in (0, 1]. Global live fraction over the selected kernels, unless the budget
            says it. A dict or list of densities is taken as the budget.
        budget: `"erk"` (default), `"er"`, `"uniform"`, a `Budget` for the selected kernels, a dict
            of densities by weight path, layer path or regular expression, or a list of densities in
            the order of the kernels. Live blocks of a budget of `callbacks.probe` are used unless
            there is a `structure`: kernels on them are exactly orthogonal where every input (or
            output) block has a live one of its own, see `report`; else each block is orthogonal,
            scaled by its fan.
        initializer: `"exact_orthogonal"` (default; a layer whose own initializer is an
            `ExactOrthogonal` with a `structure` keeps that structure); `"random_sparse"` (the
            layer's own initializer times a random mask); or a sparse initializer as a pattern,
            whose density (degree, of a `RamanujanOrthogonal`) and seed are replaced. By name,
            kernels before normalization get the norm of the layer's own initializer under the same
            mask, and those of convolutions are orthogonal as `(taps * in, out)`, as with
            `ExactOrthogonal(gain="auto")`; all others have gain 1, at the center tap. In
            subclassed models a symbolic call shows what follows a kernel. If at least 30 kernels of
            a functional model follow each other, with ReLUs alone in between, they are drawn as
            with `ExactOrthogonal(gain="auto", mirrored=True)`, where widths and density allow it.
        structure: `Block` or `NByM` for every selected kernel, or a short form: `"2:4"`, `"16x1"`,
            `(16, 1)`. With `storage="blocks"` the size of blocks, which are regular.
        seed: int, or `None` for a new one at each call (from Python's `random`, which
            `keras.utils.set_random_seed` seeds). Paths count: name the layers, or a second model's
            `dense_1` gets other kernels than the first one's `dense`.
        include: Which kernels: weight paths, layer paths, regular expressions, layers, classes of
            layers, or indices into `prunable_weights(model)` (one or a list); or a predicate of a
            `PrunableWeight`. Default: all kernels and embeddings. Matrices of unregistered custom
            layers (`initializers.kernel_layouts`) stay dense, with a warning, unless their full
            paths are named here, or in `exclude`.
        exclude: Which kernels not. Biases and normalization weights are never pruned.
        storage: str. `"masked"`, `"compact"` or `"blocks"`, as for `convert`, which changes it
            later. With `"blocks"`, blocks are the largest regular ones that shape and density of a
            kernel allow (128 x 128 down to 16 x 16), or those of `structure`. Kernels that do not
            fit are compact, or stay dense while they are small and have no density of their own;
            the total is at most `density`.

    Returns:
        A new model, not compiled; `sparsify.in_place` changes the given one instead, and
        `sparsify.plan` only says what each kernel would become.

    Raises:
        DensityError: A density outside (0, 1], or none where the budget is a name.
        BudgetError: A density or budget that does not fit the model, e.g. one too small for exactly
            orthogonal kernels; the message names the least one.
        LayoutError: A kernel that the structure or degree does not fit.
        NotPrunableError: A model that is not built or has no kernels; layers that are wrapped or
            quantized already; weights that are not finite, or cannot be stored compactly.
        UnknownWeightError: An `include` or `exclude` that names nothing.

    Warns:
        UserWarning: A trained model, whose weights are lost. Unregistered matrices, which stay
            dense. Exactly orthogonal kernels with dead outputs, which stay dead under ReLU; budgets
            by name leave none where the density allows. With `storage="blocks"` larger kernels that
            do not fit, and densities off by more than a tenth. Layers of which it is unknown what
            follows them, where the gain depends on it.

    Examples:
        >>> import keras, keras_sparse_ortho as kso
        >>> hidden, head = keras.layers.Dense(128, "relu"), keras.layers.Dense(10, name="head")
        >>> dense = keras.Sequential([keras.Input((64,)), hidden, head])
        >>> kso.prunable_weights(sparsify(dense, density=0.1, seed=0))[1]
        <head/kernel shape=(128, 10), density=0.309375>
        >>> pattern = kso.initializers.ExactOrthogonal(gain="auto")
        >>> sparse = sparsify(dense, density=0.1, initializer=pattern, seed=0)
        >>> [round(row.gain, 4) for row in kso.report(sparse).rows]
        [1.4142, 1.0]

    Reference: Nowak et al., "Sparser, Better, Deeper, Stronger" (ICML 2024), arXiv 2406.01755
    """
    return carry_out(
        model,
        plan_sparsify(
            model,
            density,
            budget,
            initializer,
            structure=structure,
            seed=seed,
            include=include,
            exclude=exclude,
            storage=storage,
        ),
    )
