"""`parametrize`: learnt and scheduled sparsity for a whole model."""

import keras

from keras_sparse_ortho.budgets import Budget
from keras_sparse_ortho.kernels import Selection, choose
from keras_sparse_ortho.models import prunable_weights, refuse_unfit
from keras_sparse_ortho.parametrizations import Parametrization
from keras_sparse_ortho.pruning._planning import plan_for
from keras_sparse_ortho.pruning._wrapping import wrap


def parametrize(
    model: keras.Model,
    parametrization: Parametrization,
    density: float | None = None,
    budget: str | Budget | None = None,
    *,
    include: Selection = None,
    exclude: Selection = None,
) -> keras.Model:
    """Gives every selected kernel `w` an effective weight `w_e = parametrization(w)`.

    Kernels keep their values, so that what a model starts from is its own affair: Keras'
    initializers, ours, or trained weights. `sparsify` is the way to masks that are fixed from the
    first step; this one is for thresholds that are learnt (`SoftThreshold`), masks on a schedule
    (`MagnitudeMask`) and straight-through estimation (`StraightThroughTopK`).

    Args:
        model: A built Keras 3 model: Sequential, functional, nested, or written as a class.
        parametrization: The template, of which each kernel gets its own.
        density: Global live fraction in the end, in (0, 1], shared out by `budget`. Default: what
            the parametrization itself says, for every kernel alike.
        budget: `"erk"` (default if there is a density), `"er"`, `"uniform"`, or a `Budget`.
        include: Which kernels, as for `sparsify`. Default: all kernels and embeddings.
        exclude: Which kernels not.

    Returns:
        A new model, not compiled. A model written as a class cannot be cloned: its layers are
        wrapped in place, it is returned itself, and is to be compiled again.

    Raises:
        BudgetError: A budget that does not fit the model.
        NotPrunableError: A model that is not built, has no kernels or is wrapped already; a
            density for a parametrization that takes none.
        UnknownWeightError: An `include` or `exclude` that names nothing.
        ValueError: A parametrization that shares variables between layers: wrap the whole model.

    Example:

    >>> import keras
    >>> import keras_sparse_ortho as kso
    >>> dense = keras.Sequential([
    ...     keras.Input((64,)),
    ...     keras.layers.Dense(128, activation="relu", name="hidden"),
    ...     keras.layers.Dense(10, name="head"),
    ... ])
    >>> template = kso.parametrizations.StraightThroughTopK(1.0)
    >>> model = parametrize(dense, template, density=0.1)
    >>> for weight in kso.prunable_weights(model, flops=False):
    ...     print(weight)
    <hidden/kernel shape=(64, 128), density=0.0672607>
    <head/kernel shape=(128, 10), density=0.309375>
    """
    if not isinstance(parametrization, Parametrization):
        raise ValueError(
            f"`parametrization` must be a Parametrization. Received: {parametrization!r}"
        )
    weights = choose(prunable_weights(model, flops=False), include, exclude)
    refuse_unfit(model, weights, "no kernel that could be pruned")
    _refuse_global(model, parametrization)
    if density is None and budget is None:
        return wrap(model, weights, {weight.path: parametrization.twin() for weight in weights})
    plan = plan_for(model, density, budget or "erk", weights, orthogonal=False)
    return wrap(
        model, weights, {path: parametrization.for_density(share) for path, share in plan.items()}
    )


def _refuse_global(model: keras.Model, parametrization: Parametrization) -> None:
    if getattr(parametrization, "granularity", None) == "global":
        raise ValueError(
            "A threshold for the whole model needs one wrapper around it: "
            "keras.Sequential([keras.Input(shape), PrunableLayer(model, SoftThreshold('global'))])"
            f". Received: granularity='global' for the layers of model={model.name!r}"
        )
