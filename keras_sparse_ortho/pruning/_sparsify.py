"""`sparsify`: a budget, an initializer and masks for a whole model."""

import random
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho.budgets import Budget, er, erk, uniform
from keras_sparse_ortho.errors import BudgetError, NotPrunableError
from keras_sparse_ortho.initializers import SparseInitializer
from keras_sparse_ortho.layers import PrunableLayer
from keras_sparse_ortho.models import Replacement, prunable_weights, rewrite
from keras_sparse_ortho.orthogonal import check_density, largest_mask, live_count
from keras_sparse_ortho.parametrizations import (
    FixedMask,
    PrunableWeight,
    Selection,
    adopt_mask,
)
from keras_sparse_ortho.parametrizations._selection import choose
from keras_sparse_ortho.pruning._seeding import derived_seed, initializer_for, is_orthogonal

_BUDGETS: dict[str, Callable[..., Budget]] = {"uniform": uniform, "er": er, "erk": erk}


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
        initializer: `"exact_orthogonal"` (default); `"random_sparse"` (the layer's own
            initializer times a random mask); an instance of a sparse initializer as a pattern, of
            which density and seed are replaced; or `None` to keep the weights.
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
        _check(model, weights, "no layer with one of our initializers, and no `density` was given")
        adopted = {weight.path: adopt_mask(weight, weight.initializer) for weight in weights}
        table = {path: FixedMask(mask=mask) for path, (mask, _) in adopted.items()}
        kernels = {path: kernel for path, (_, kernel) in adopted.items() if kernel is not None}
        return _wrap(model, weights, table, kernels)
    _check(model, weights, "no kernel that could be pruned")
    if initializer is None:
        plan = _plan(model, density, budget, weights, orthogonal=False)
        masks = {
            weight.path: largest_mask(np.abs(weight.raw_value()), plan.counts[weight.path])
            for weight in weights
        }
        return _wrap(model, weights, {p: FixedMask(mask=mask) for p, mask in masks.items()}, {})
    base_seed = random.randrange(2**31) if seed is None else seed
    if isinstance(base_seed, bool) or not isinstance(base_seed, int | np.integer):
        raise ValueError(f"`seed` must be an integer or None. Received: seed={seed!r}")
    plan = _plan(model, density, budget, weights, orthogonal=is_orthogonal(initializer))
    table = {
        weight.path: FixedMask(
            initializer=initializer_for(
                initializer, weight, plan[weight.path], derived_seed(int(base_seed), weight.path)
            )
        )
        for weight in weights
    }
    return _wrap(model, weights, table, {})


def _check(model: Any, weights: list[PrunableWeight], lack: str) -> None:
    if not weights:
        raise NotPrunableError(
            f"The model has {lack}. Received: model={getattr(model, 'name', model)!r}"
        )
    wrapped = [weight.path for weight in weights if weight.parametrization is not None]
    if wrapped:
        raise NotPrunableError(
            "These weights are wrapped already; strip the model first, or `exclude` them. "
            f"Received: {wrapped}"
        )
    for weight in weights:
        weight.finite_raw_value()


def _plan(
    model: Any,
    density: float | None,
    budget: str | Budget,
    weights: list[PrunableWeight],
    *,
    orthogonal: bool,
) -> Budget:
    """The budget for exactly these weights."""
    if isinstance(budget, Budget):
        plan = budget.for_weights(weights)
        if density is not None and live_count(density, plan.size) != plan.live:
            raise BudgetError(
                f"The budget has the global density {plan.density:.6g}; leave `density` out. "
                f"Received: density={density!r}"
            )
        return plan
    if budget not in _BUDGETS:
        raise BudgetError(
            f"`budget` must be one of {sorted(_BUDGETS)} or a Budget. Received: budget={budget!r}"
        )
    paths = {weight.path for weight in weights}
    return _BUDGETS[budget](
        model, check_density(density), include=lambda w: w.path in paths, orthogonal=orthogonal
    )


def _wrap(
    model: Any,
    weights: list[PrunableWeight],
    table: dict[str, FixedMask],
    kernels: dict[str, np.ndarray],
) -> Any:
    """Wraps every outermost layer that holds some of the weights.

    Weights keep their values, but for those with a kernel in `kernels`, and those whose FixedMask
    draws kernel and mask anew.
    """

    def replace(layer: Any, path: str, copy: Callable[[Any], Any]) -> Replacement | None:
        inside = [w.path for w in weights if w.path.startswith(f"{path}/")]
        if not inside:
            return None
        inner = copy(layer)
        keys = {full.removeprefix(f"{path}/"): full for full in inside}
        wrapper = PrunableLayer(inner, {key: table[full] for key, full in keys.items()})

        def finish() -> None:
            if not wrapper.built:
                wrapper.build()  # around a layer of a class-written model, which is built
            drawn = {
                id(p.weight.variable)
                for key, p in wrapper.parametrizations.items()
                if table[keys[key]].initializer is not None
            }
            for old, new in zip(layer.weights, inner.weights, strict=True):
                if old is not new and id(new) not in drawn:
                    # A copy: on JAX `fit` frees the arrays of its model, which may not be shared.
                    new.assign(keras.ops.copy(old))
            for key, parametrization in wrapper.parametrizations.items():
                if keys[key] in kernels:
                    parametrization.weight.variable.assign(kernels[keys[key]])
            wrapper.bake()

        return Replacement(wrapper, finish)

    return rewrite(model, replace)
