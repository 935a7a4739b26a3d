"""`sparsify`: sparse kernels, drawn anew, for a whole model."""

from __future__ import annotations

from collections.abc import Mapping

import keras

from keras_sparse_ortho._other_names import other_keywords
from keras_sparse_ortho.errors import DensityError
from keras_sparse_ortho.initializers import SparseInitializer
from keras_sparse_ortho.kernels import Selection
from keras_sparse_ortho.models import Plan, refuse_unfit, verb
from keras_sparse_ortho.orthogonal import Structure, StructureLike, as_structure
from keras_sparse_ortho.pruning._block_plan import BlockPlan
from keras_sparse_ortho.pruning._drawing import draw_kernels, warn_of_training_lost
from keras_sparse_ortho.pruning._holding import hold, mask_class
from keras_sparse_ortho.pruning._planning import (
    BudgetLike,
    Densities,
    density_and_budget,
    plan_for,
    weights_to_prune,
)


@verb
@other_keywords()
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
) -> Plan:
    """Draws sparse kernels anew, exactly orthogonal by default, with fixed masks of exact count.

    The budget shares `round(density * size)` live entries among the selected kernels; every
    kernel `K` is drawn with `K^T K = gain^2 I` (or `K K^T`, if it is wide) and its mask is held:

        w_e = w where the mask is live, and 0 elsewhere.

    Each kernel's seed is derived from `seed` and its path, so that equal shapes do not get equal
    kernels. Biases, normalization and kernels that are not selected keep their values.

    To keep the weights and mask them, call `prune`; to hold the masks of initializers that stand
    in the layers, `apply_masks`; for masks and thresholds that training brings,
    `parametrize`.

    Args:
        model: A built Keras 3 model: Sequential, functional, nested, or written as a class.
        density: Global live fraction over the selected kernels, in (0, 1]. May be left out if the
            budget says it. A dict or list of densities is taken as the budget.
        budget: `"erk"` (default), `"er"`, `"uniform"`, a `Budget` for the selected kernels, a
            dict of densities by weight path, layer path or regular expression, or a list of
            densities in the order of the kernels.
        initializer: `"exact_orthogonal"` (default; a layer whose own initializer is an
            `ExactOrthogonal` with a `structure` keeps that structure); `"random_sparse"` (the
            layer's own initializer times a random mask); or a sparse initializer as a pattern, of
            which density (degree, of a `RamanujanOrthogonal`) and seed are replaced. By name the
            gain is 1. `ExactOrthogonal(gain="auto")` chooses it for each kernel by what follows
            its layer; that trained no better where each start had a learning rate of its own
            (benchmarks/results/methods.md).
        structure: `Block` or `NByM` for every selected kernel, or a short form:
            `"2:4"`, `"16x1"`, `(16, 1)`. With `storage="blocks"` the size of blocks, which are
            regular.
        seed: Integer, or `None` for a new one at each call (from Python's `random`, as Keras
            does, so that `keras.utils.set_random_seed` makes it reproducible). Paths count: name
            the layers, or a second model gets `dense_1` where the first had `dense`, and other
            kernels.
        include: Which kernels: weight paths, layer paths, regular expressions, layers, classes of
            layers, or indices into `prunable_weights(model)` (one or a list); or a predicate of a
            `PrunableWeight`.
            Default: all kernels and embeddings. Matrices in layers that are neither Keras' nor
            registered (`initializers.kernel_layouts`) have axes of unknown meaning: they stay
            dense, with a warning, unless their full paths are named here, or in `exclude`.
        exclude: Which kernels not. Biases and normalization weights are never pruned.
        storage: `"masked"` keeps dense kernels with masks (`FixedMask`), `"compact"` live values
            and their indices only (`CompactMask`): at density 0.1 a fifth of the weights' memory,
            and a tenth of the optimizer's. `"blocks"`: layers that compute on live blocks, for
            speed: each kernel gets the largest regular blocks that its shape and density allow
            (128 x 128 down to 16 x 16), or those of `structure=Block(64, 64)`.
            What cannot be on blocks is compact, or stays dense while it is small and no density
            was given for it; the total is at most `density`. `"auto"`: live blocks where the
            masks are of regular blocks already, compact elsewhere. `convert` changes the storage
            later.

    Returns:
        A new model, not compiled. The given one stays as it was; `sparsify.in_place` changes the
        model itself, and `sparsify.plan` only says what each kernel would become.

    Raises:
        DensityError: A density outside (0, 1], or none where the budget is a name.
        BudgetError: A density or budget that does not fit the model, e.g. one too small for
            exactly orthogonal kernels; the message names the least one.
        LayoutError: A kernel that the structure or degree does not fit.
        NotPrunableError: A model that is not built or has no kernels; layers that are wrapped or
            quantized already; weights that are not finite, or cannot be stored compactly.
        UnknownWeightError: An `include` or `exclude` that names nothing.

    Warns:
        UserWarning: A model that has been trained, whose weights are lost. Matrices that stay dense
            because they are not registered. Exactly orthogonal
            kernels with outputs that are zero, by name and number: they never wake under ReLU. The
            budgets by name leave none where the density allows. With `storage="auto"` kernels that
            are not on live blocks: those of another structure, and large ones of any kind. With
            `storage="masked"` or `"compact"` large kernels of blocks of 16 x 16 and more. With
            `storage="blocks"` larger kernels that cannot be on blocks, and densities that are
            missed by more than a tenth. An option that is `"auto"`, where it is not known what
            follows a layer.

    Example:

    >>> import keras
    >>> import keras_sparse_ortho as kso
    >>> dense = keras.Sequential([
    ...     keras.Input((64,)),
    ...     keras.layers.Dense(128, activation="relu", name="hidden"),
    ...     keras.layers.Dense(10, name="head"),
    ... ])
    >>> sparse = sparsify(dense, density=0.1, seed=0)
    >>> for weight in kso.prunable_weights(sparse):
    ...     print(weight)
    <hidden/kernel shape=(64, 128), density=0.0672607>
    <head/kernel shape=(128, 10), density=0.309375>
    >>> pattern = kso.initializers.ExactOrthogonal(gain="auto")
    >>> sparse = sparsify(dense, density=0.1, initializer=pattern, seed=0)
    >>> [round(row.gain, 4) for row in kso.report(sparse).rows]
    [1.4142, 1.0]

    Reference:

    - Nowak et al., "Sparser, Better, Deeper, Stronger: Improving Sparse Training with Exact
      Orthogonal Initialization" (ICML 2024), arXiv 2406.01755
    """
    kind = mask_class(storage)
    density, budget = density_and_budget(density, budget)
    weights = weights_to_prune(model, include, exclude)
    refuse_unfit(model, weights, "no kernel that could be pruned")
    if density is None and isinstance(budget, str):
        raise DensityError(
            "sparsify needs a `density`, the live fraction, or a `budget` that says it. To hold "
            "the masks that the layers' own initializers drew, call "
            f"keras_sparse_ortho.apply_masks(model). Received: density=None, budget={budget!r}"
        )
    blocks = None
    pattern: Structure | None = None if structure is None else as_structure(structure)
    structures: Structure | Mapping[str, Structure] | None = pattern
    if storage == "blocks":
        asked = plan_for(density, budget, weights, orthogonal=True)
        given = not isinstance(budget, str)
        blocks = BlockPlan.of(weights, asked, pattern, orthogonal=True, given=given)
        weights, density, budget = blocks.weights, None, blocks.budget
        structures = blocks.blocks
    draws = draw_kernels(
        model, weights, density, budget, initializer, structures, seed, dense=not kind.compact
    )
    warn_of_training_lost(model, weights)
    return hold(model, weights, draws, storage, blocks)
