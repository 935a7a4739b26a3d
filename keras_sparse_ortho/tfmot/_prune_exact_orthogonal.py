"""`prune_exact_orthogonal`: sparse from the first step, inside TFMOT."""

from typing import Any

from keras_sparse_ortho._checks import explains_density
from keras_sparse_ortho.initializers import SparseInitializer
from keras_sparse_ortho.kernels import Selection
from keras_sparse_ortho.orthogonal import Structure
from keras_sparse_ortho.pruning import BudgetLike, draw_kernels
from keras_sparse_ortho.tfmot._prune_with_mask import hold
from keras_sparse_ortho.tfmot._rewrite import select_weights


@explains_density
def prune_exact_orthogonal(
    model: Any,
    density: float | None = None,
    budget: BudgetLike = "erk",
    initializer: str | SparseInitializer = "exact_orthogonal",
    *,
    structure: Structure | None = None,
    seed: int | None = None,
    include: Selection = None,
    exclude: Selection = None,
    pruning_policy: Any = None,
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
        budget: `"erk"` (default), `"er"`, `"uniform"`, a `Budget` for the selected kernels, or a
            dict of densities by weight path, layer path or regular expression.
        initializer: `"exact_orthogonal"` (default), `"random_sparse"`, or an instance of a sparse
            initializer as a pattern, of which density and seed are replaced.
        structure: `Block`, `NByM` or `ConstantFan` for every selected kernel.
        seed: Integer, or `None` for a new one at each call (from Python's `random`). Each
            kernel's seed is derived from it and the kernel's path.
        include: Which kernels: weight paths, layer paths or regular expressions (one or a list),
            or a predicate. Default: all kernels and embeddings.
        exclude: Which kernels not.
        pruning_policy: A TFMOT `PruningPolicy`: which layers may be pruned, such as
            `PruneForLatencyOnXNNPack()`. Default: all.

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
    weights = select_weights(model, include, exclude, pruning_policy)
    draws = draw_kernels(weights, weights, density, budget, initializer, structure, seed)
    return hold(model, draws)
