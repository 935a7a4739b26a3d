"""`prune_exact_orthogonal`: sparse from the first step, inside TFMOT."""

import random
from typing import Any

import numpy as np

from keras_sparse_ortho.budgets import Budget
from keras_sparse_ortho.initializers import SparseInitializer
from keras_sparse_ortho.kernels import Selection, derived_seed
from keras_sparse_ortho.parametrizations._adoption import true_layout
from keras_sparse_ortho.pruning._planning import plan_for
from keras_sparse_ortho.pruning._seeding import initializer_for, is_orthogonal
from keras_sparse_ortho.tfmot._prune_with_mask import Drawn, hold
from keras_sparse_ortho.tfmot._rewrite import select_weights


def prune_exact_orthogonal(
    model: Any,
    density: float | None = None,
    budget: str | Budget = "erk",
    initializer: str | SparseInitializer = "exact_orthogonal",
    *,
    seed: int | None = None,
    include: Selection = None,
    exclude: Selection = None,
) -> Any:
    """Draws sparse, exactly orthogonal kernels for a tf_keras model, and holds their masks.

    What `keras_sparse_ortho.sparsify` is for Keras 3: the budget shares `round(density * size)`
    live entries among the kernels, each kernel is drawn anew with `K^T K = I`, and its layer is
    wrapped with `PruneWithMask`. For equal paths and seeds the kernels are those of Keras 3.
    Train with or without TFMOT's `UpdatePruningStep`, then call its `strip_pruning`.

    Args:
        model: A built tf_keras model: Sequential, functional or nested. It is left as it is.
        density: Global live fraction over the selected kernels, in (0, 1]; may be left out if
            `budget` is a `Budget`.
        budget: `"erk"` (default), `"er"`, `"uniform"`, or a `Budget` for the selected kernels.
        initializer: `"exact_orthogonal"` (default), `"random_sparse"`, or an instance of a sparse
            initializer as a pattern, of which density and seed are replaced.
        seed: Integer, or `None` for a new one at each call (from Python's `random`). Each
            kernel's seed is derived from it and the kernel's path.
        include: Which kernels: weight paths, layer paths or regular expressions (one or a list),
            or a predicate. Default: all kernels and embeddings.
        exclude: Which kernels not.

    Returns:
        A new model, not compiled. Biases and what is not selected keep their values.

    Raises:
        DensityError: A density outside (0, 1].
        BudgetError: A density or budget that does not fit the model, e.g. one too small for
            exactly orthogonal kernels; the message names the least one.
        NotPrunableError: A Keras 3 model, one that is not built or written as a class; weights
            that are wrapped already or not finite; nothing to prune.
        UnknownWeightError: An `include` or `exclude` that names nothing.

    Example:

    >>> import keras_sparse_ortho as kso
    >>> tf_keras = kso.tfmot.register_initializers()
    >>> dense = tf_keras.Sequential([
    ...     tf_keras.Input((64,)),
    ...     tf_keras.layers.Dense(128, activation="relu", name="hidden"),
    ...     tf_keras.layers.Dense(10, name="head"),
    ... ])
    >>> model = kso.tfmot.prune_exact_orthogonal(dense, density=0.1, seed=0)
    >>> for weight in kso.tfmot.prunable_weights(model):
    ...     print(weight)
    <hidden/kernel shape=(64, 128), density=0.0672607>
    <head/kernel shape=(128, 10), density=0.309375>

    Reference:

    - Nowak et al. (ICML 2024), arXiv 2406.01755
    """
    weights = select_weights(model, include, exclude)
    base_seed = random.randrange(2**31) if seed is None else seed
    if isinstance(base_seed, bool) or not isinstance(base_seed, int | np.integer):
        raise ValueError(f"`seed` must be an integer or None. Received: seed={seed!r}")
    plan = plan_for(weights, density, budget, weights, orthogonal=is_orthogonal(initializer))
    table: dict[str, Drawn] = {}
    for weight in weights:
        own_seed = derived_seed(int(base_seed), weight.path)
        own = initializer_for(initializer, weight, plan[weight.path], own_seed)
        kernel, mask = own.sample(weight.shape, layout=true_layout(weight, own))
        table[weight.path] = (mask, kernel, own)
    return hold(model, table)
