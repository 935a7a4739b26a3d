"""`sparsify`: a budget, an initializer and masks for a whole model."""

import random

import keras
import numpy as np

from keras_sparse_ortho.budgets import Budget, fit_structure
from keras_sparse_ortho.initializers import SparseInitializer
from keras_sparse_ortho.kernels import Selection, choose, derived_seed
from keras_sparse_ortho.models import prunable_weights, refuse_unfit
from keras_sparse_ortho.orthogonal import largest_mask
from keras_sparse_ortho.parametrizations import FixedMask, adopt_mask
from keras_sparse_ortho.pruning._planning import plan_for
from keras_sparse_ortho.pruning._seeding import initializer_for, is_orthogonal, structure_for
from keras_sparse_ortho.pruning._wrapping import wrap


def sparsify(
    model: keras.Model,
    density: float | None = None,
    budget: str | Budget = "erk",
    initializer: str | SparseInitializer | None = "exact_orthogonal",
    *,
    seed: int | None = None,
    include: Selection = None,
    exclude: Selection = None,
) -> keras.Model:
    """Makes a model sparse: every selected kernel gets a fixed mask of exact count.

    1. `sparsify(model, 0.1)` draws sparse, exactly orthogonal kernels anew. The budget shares
       `round(density * size)` live entries among the kernels; each kernel's seed is derived from
       `seed` and its path, so that equal shapes do not get equal kernels. Biases, normalization
       and kernels that are not selected keep their values.
    2. `sparsify(model, 0.1, initializer=None)` keeps the given weights and masks them: in each
       kernel the largest magnitudes stay.
    3. `sparsify(model)` wraps exactly the layers whose initializer is one of ours, and adopts its
       mask. (An initializer alone holds no mask: in training every entry moves.)

    Args:
        model: A built Keras 3 model: Sequential, functional, nested, or written as a class.
        density: Global live fraction over the selected kernels, in (0, 1]. `None` for mode 3, or
            if `budget` is a `Budget`.
        budget: `"erk"` (default), `"er"`, `"uniform"`, or a `Budget` for the selected kernels.
        initializer: `"exact_orthogonal"` (default; a layer whose own initializer is an
            `ExactOrthogonal` with a `structure` keeps that structure); `"random_sparse"` (the
            layer's own initializer times a random mask); an instance of a sparse initializer as a
            pattern, of which density (degree, of a `RamanujanOrthogonal`) and seed are replaced;
            or `None` to keep the weights.
        seed: Integer, or `None` for a new one at each call (from Python's `random`, as Keras
            does, so that `keras.utils.set_random_seed` makes it reproducible). Paths count: name
            the layers, or a second model gets `dense_1` where the first had `dense`, and other
            kernels.
        include: Which kernels: weight paths, layer paths or regular expressions (one or a list),
            or a predicate of a `PrunableWeight`. Default: all kernels and embeddings.
        exclude: Which kernels not. Biases and normalization weights are never pruned.

    Returns:
        A new model, not compiled. A model written as a class cannot be cloned: its layers are
        wrapped in place, it is returned itself, and is to be compiled again.

    Raises:
        DensityError: A density outside (0, 1].
        BudgetError: A density or budget that does not fit the model, e.g. one too small for
            exactly orthogonal kernels; the message names the least one.
        LayoutError: A kernel that its initializer's structure or degree does not fit.
        NotPrunableError: A model that is not built or has no kernels; layers that are wrapped or
            quantized already; weights that are not finite.
        UnknownWeightError: An `include` or `exclude` that names nothing.

    Example:

    >>> import keras
    >>> import keras_sparse_ortho as kso
    >>> dense = keras.Sequential([
    ...     keras.Input((64,)),
    ...     keras.layers.Dense(128, activation="relu", name="hidden"),
    ...     keras.layers.Dense(10, name="head"),
    ... ])
    >>> sparse = sparsify(dense, density=0.1, seed=0)
    >>> for weight in kso.prunable_weights(sparse, flops=False):
    ...     print(weight)
    <hidden/kernel shape=(64, 128), density=0.0672607>
    <head/kernel shape=(128, 10), density=0.309375>
    """
    weights = choose(prunable_weights(model, flops=False), include, exclude)
    if density is None and not isinstance(budget, Budget):
        weights = [w for w in weights if isinstance(w.initializer, SparseInitializer)]
        refuse_unfit(
            model, weights, "no layer with one of our initializers, and no `density` was given"
        )
        adopted = {weight.path: adopt_mask(weight, weight.initializer) for weight in weights}
        table = {path: FixedMask(mask=mask) for path, (mask, _) in adopted.items()}
        kernels = {path: kernel for path, (_, kernel) in adopted.items() if kernel is not None}
        return wrap(model, weights, table, kernels)
    refuse_unfit(model, weights, "no kernel that could be pruned")
    if initializer is None:
        plan = plan_for(model, density, budget, weights, orthogonal=False)
        masks = {
            weight.path: largest_mask(np.abs(weight.raw_value()), plan.counts[weight.path])
            for weight in weights
        }
        return wrap(model, weights, {p: FixedMask(mask=mask) for p, mask in masks.items()})
    base_seed = random.randrange(2**31) if seed is None else seed
    if isinstance(base_seed, bool) or not isinstance(base_seed, int | np.integer):
        raise ValueError(f"`seed` must be an integer or None. Received: seed={seed!r}")
    plan = plan_for(model, density, budget, weights, orthogonal=is_orthogonal(initializer))
    structures = {weight.path: structure_for(initializer, weight) for weight in weights}
    if any(structures.values()):
        plan = fit_structure(plan, weights, structures)
    table = {
        weight.path: FixedMask(
            initializer=initializer_for(
                initializer, weight, plan[weight.path], derived_seed(int(base_seed), weight.path)
            )
        )
        for weight in weights
    }
    return wrap(model, weights, table, drawn=table)
