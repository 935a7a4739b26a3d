"""`parametrize`: learnt and scheduled sparsity for a whole model."""

from __future__ import annotations

import keras

from keras_sparse_ortho._keras_internals import warn_user
from keras_sparse_ortho.budgets import Budget
from keras_sparse_ortho.kernels import Selection
from keras_sparse_ortho.models import Plan, Target, carry_out, verb
from keras_sparse_ortho.orthogonal import live_count
from keras_sparse_ortho.parametrizations import Parametrization
from keras_sparse_ortho.pruning._planning import (
    BudgetLike,
    Densities,
    density_and_budget,
    plan_for,
    plan_of_draws,
    plan_of_targets,
    weights_to_prune,
)


def plan_parametrize(
    model: keras.Model,
    parametrization: Parametrization | type[Parametrization],
    density: float | Densities | None = None,
    budget: BudgetLike | None = None,
    *,
    include: Selection = None,
    exclude: Selection = None,
) -> Plan:
    """Plans `parametrize`, with the same arguments."""
    density, budget = density_and_budget(density, budget)
    if isinstance(parametrization, type) and issubclass(
        parametrization, Parametrization
    ):
        parametrization = parametrization()
    if not isinstance(parametrization, Parametrization):
        raise ValueError(
            "`parametrization` must be a Parametrization, such as SoftThreshold(). "
            f"Received: {parametrization!r}"
        )
    weights = weights_to_prune(model, include, exclude)
    if getattr(parametrization, "granularity", None) == "global":
        raise ValueError(
            "A threshold for the whole model needs one wrapper around it: "
            "keras.Sequential([keras.Input(shape), PrunableLayer(model, SoftThreshold('global'))])"
            f". Received: granularity='global' for the layers of model={model.name!r}"
        )
    if density is None and budget is None:
        table = {weight.path: parametrization.clone() for weight in weights}
    else:
        plan = plan_for(
            density,
            "erk" if budget is None else budget,
            weights,
            orthogonal=False,
        )
        _warn_of_another_density(parametrization, plan)
        table = {
            path: parametrization.for_density(share)
            for path, share in plan.items()
        }
    # A fixed mask, found for the weights as they are.
    if parametrization.movable:
        draws = {w.path: table[w.path].resolve(w) for w in weights}  # type: ignore[attr-defined]
        return plan_of_draws(model, weights, draws, parametrization.form_name)
    targets = {
        path: Target(template.form_name, parametrization=template)
        for path, template in table.items()
    }
    return plan_of_targets(model, weights, targets)


@verb(plan_parametrize)
def parametrize(
    model: keras.Model,
    parametrization: Parametrization | type[Parametrization],
    density: float | Densities | None = None,
    budget: BudgetLike | None = None,
    *,
    include: Selection = None,
    exclude: Selection = None,
) -> keras.Model:
    """Gives every selected kernel `w` an effective weight `w_e = parametrization(w)`.

    For learnt thresholds (`SoftThreshold`), masks on a schedule (`MagnitudeMask`) and
    straight-through estimation (`StraightThroughTopK`). Kernel values are unchanged, so any
    initialization works. For masks that are fixed from the first step, call `sparsify`.

    Args:
        model: A built Keras 3 model, as for `sparsify`.
        parametrization: A template, copied for each kernel; or a class, for its defaults.
        density: float in (0, 1]. Global live fraction in the end, shared out by `budget`, as in
            `parametrize(model, MagnitudeMask(Cubic()), 0.1)`. Default: the density of the
            parametrization, for every kernel. A dict or list of densities is taken as the budget.
        budget: As for `sparsify`, or a table of `sensitivity`; `"erk"` by default if there is a
            density.
        include: Which kernels, as for `sparsify`. Default: all kernels and embeddings.
        exclude: Which kernels not.

    Returns:
        As for `sparsify`.

    Raises:
        BudgetError: A budget that does not fit the model.
        NotPrunableError: A model that is not built, has no kernels or is wrapped already; a density
            for a parametrization that takes none.
        UnknownWeightError: An `include` or `exclude` that names nothing.
        ValueError: A parametrization that shares variables between layers: wrap the whole model.

    Warns:
        UserWarning: Unregistered matrices, which stay dense. A density of the parametrization that
            `density` or `budget` replaces.

    Examples:
        >>> import keras, keras_sparse_ortho as kso
        >>> dense = keras.Sequential([keras.Input((64,)), keras.layers.Dense(128, name="hidden")])
        >>> template = kso.parametrizations.StraightThroughTopK()
        >>> kso.prunable_weights(parametrize(dense, template, density=0.1))
        [<hidden/kernel shape=(64, 128), density=0.0999756>]
    """
    return carry_out(
        model,
        plan_parametrize(
            model,
            parametrization,
            density,
            budget,
            include=include,
            exclude=exclude,
        ),
    )


def _warn_of_another_density(
    parametrization: Parametrization, plan: Budget
) -> None:
    schedule = getattr(parametrization, "schedule", None)
    own = (
        getattr(parametrization, "density", None)
        if schedule is None
        else schedule.density
    )
    if own not in (None, 1.0) and live_count(own, plan.size) != plan.live:
        kind = type(parametrization).__name__
        warn_user(
            f"`density` or `budget` replaces the density of the {kind}: set it in one place. "
            f"Received: {own:.6g} in the {kind}, replaced by {plan.density:.6g}"
        )
