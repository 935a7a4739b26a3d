"""From a density and the name of a budget to the densities of given weights."""

from collections.abc import Callable
from typing import Any

from keras_sparse_ortho._checks import check_density
from keras_sparse_ortho.budgets import Budget, er, erk, uniform
from keras_sparse_ortho.errors import BudgetError
from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.orthogonal import least_count, live_count

_BUDGETS: dict[str, Callable[..., Budget]] = {"uniform": uniform, "er": er, "erk": erk}


def plan_for(
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
        if orthogonal:
            _refuse_too_sparse(plan, weights)
        return plan
    if budget not in _BUDGETS:
        raise BudgetError(
            f"`budget` must be one of {sorted(_BUDGETS)} or a Budget. Received: budget={budget!r}"
        )
    paths = {weight.path for weight in weights}
    return _BUDGETS[budget](
        model, check_density(density), include=lambda w: w.path in paths, orthogonal=orthogonal
    )


def _refuse_too_sparse(plan: Budget, weights: list[PrunableWeight]) -> None:
    """A budget of another method may ask for less than an orthogonal kernel needs."""
    least = {weight.path: least_count(weight.shape, weight.layout) for weight in weights}
    short = [path for path, count in plan.counts.items() if count < least[path]]
    if short:
        path = short[0]
        raise BudgetError(
            f"The budget leaves {len(short)} weights too few entries for an exactly orthogonal "
            f"kernel; keras_sparse_ortho.budgets.lift(model, budget) gives them the least, which "
            f"for '{path}' is {least[path]}. Received: {plan.counts[path]} for '{path}'"
        )
