"""Which weights become sparse, how sparse each is, and the plan that gives them their masks."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._checks import as_text, check_density
from keras_sparse_ortho._foreign_names import for_value
from keras_sparse_ortho._keras_internals import warn_user
from keras_sparse_ortho.budgets import (
    Budget,
    Orthogonal,
    er,
    erk,
    needs_of,
    uniform,
)
from keras_sparse_ortho.calibration import Sensitivity
from keras_sparse_ortho.errors import BudgetError, NotPrunableError
from keras_sparse_ortho.initializers import AnyDraw
from keras_sparse_ortho.kernels import (
    PrunableWeight,
    Selection,
    choose,
    names_in,
    select,
    walk,
)
from keras_sparse_ortho.models import (
    Plan,
    never_called,
    places_to_wrap,
    prunable_weights,
    refuse_unfit,
)
from keras_sparse_ortho.orthogonal import live_count
from keras_sparse_ortho.pruning._blocks import BlockPlan
from keras_sparse_ortho.saliency import is_model_score
from keras_sparse_ortho.storages import (
    KernelChange,
    StorageForm,
    Target,
    check_storage,
    storage_form,
)

Densities = Mapping[str, float] | Sequence[float] | np.ndarray
"""A density for each kernel: a dict from weight path or pattern, or in the order of the kernels."""

BudgetLike = str | Budget | Sensitivity | Densities
"""The name of a budget, a `Budget`, measured errors, or a density for each kernel."""

_BUDGETS: dict[str, Callable[..., Budget]] = {
    "uniform": uniform,
    "er": er,
    "erk": erk,
}


def weights_to_prune(
    model: keras.Model, include: Selection, exclude: Selection
) -> list[PrunableWeight]:
    """The weights that `include` and `exclude` select; warns of unregistered ones left dense."""
    matrices = prunable_weights(model, unregistered=True)
    included_paths: set[object] = set()
    if include is not None:
        included_paths = {
            name for name in names_in(include) or [] if isinstance(name, str)
        }
    kernels = []
    unregistered = []
    for weight in matrices:
        if weight.registered or weight.path in included_paths:
            kernels.append(weight)
        else:
            unregistered.append(weight)
    weights = choose(kernels, include, exclude, unregistered)
    if kernels and not weights:
        raise NotPrunableError(
            "`include` and `exclude` leave no kernel. There are: "
            f"{', '.join(weight.path for weight in kernels)}. "
            f"Received: include={as_text(include)}, exclude={as_text(exclude)}"
        )
    if include is None:
        _warn_of_unregistered(unregistered, exclude, matrices)
    refuse_unfit(model, weights, "no kernel that could be pruned")
    return weights


def _warn_of_unregistered(
    unregistered: list[PrunableWeight],
    exclude: Selection,
    matrices: list[PrunableWeight],
) -> None:
    """Warns of matrices that stay dense although `exclude` does not name them."""
    excluded_paths: set[str] = set()
    if exclude is not None:
        excluded_paths = {
            weight.path for weight in select(matrices, exclude, "exclude")
        }
    dense = [
        weight for weight in unregistered if weight.path not in excluded_paths
    ]
    if not dense:
        return
    share = sum(weight.size for weight in dense) / sum(
        weight.size for weight in matrices
    )
    listed = ", ".join(
        f"{weight.path!r} {weight.shape}" for weight in dense[:5]
    )
    if len(dense) > 5:
        listed += f" and {len(dense) - 5} more"
    warn_user(
        f"Matrices with {share:.2%} of all entries stay dense, because the meaning of "
        "their axes is unknown. Register their layers with keras_sparse_ortho.initializers."
        "kernel_layouts; or name them by their full paths, in `include` to mask them as "
        "(*batch, in, out), or in `exclude` to keep them dense without this warning. "
        f"Received: {listed}"
    )


def density_and_budget(
    density: Any, budget: BudgetLike | None
) -> tuple[float | None, Any]:
    """A density for all kernels, and a budget: densities for each kernel are one."""
    if not isinstance(density, Mapping) and np.ndim(density) == 0:
        return density, budget
    if budget is not None and not (isinstance(budget, str) and budget == "erk"):
        raise BudgetError(
            "A `density` for each kernel is a budget; leave `budget` out. "
            f"Received: density={density!r}, budget={budget!r}"
        )
    return None, density


def plan_for(
    density: float | None,
    budget: BudgetLike,
    weights: list[PrunableWeight],
    *,
    orthogonal: Orthogonal,
) -> Budget:
    """The budget for exactly these weights; `orthogonal` may be by path."""
    if isinstance(budget, str):
        if budget not in _BUDGETS:
            hint = for_value("budget", budget)
            if budget == "error":
                hint = ' "error" is a budget of prune, with `data`.'
            if is_model_score(budget):
                hint = (
                    f" For masks by {budget} call keras_sparse_ortho.prune(model, density, "
                    f"score={budget!r}); for its densities alone give `budget` the `.budget` of "
                    "its Saliency."
                )
            raise _unknown(budget, hint)
        return _BUDGETS[budget](
            weights, check_density(density), orthogonal=orthogonal
        )
    if isinstance(budget, Sensitivity) and not orthogonal:
        return budget.budget(weights, check_density(density))
    if not isinstance(budget, Budget):
        budget = _from_patterns(budget, weights)
    plan = budget.for_weights(weights)
    if density is not None and live_count(density, plan.size) != plan.live:
        raise BudgetError(
            f"The budget has the global density {plan.density:.6g}; leave `density` out. "
            f"Received: density={density!r}"
        )
    if orthogonal:
        _check_needs(plan, weights, orthogonal)
    return plan


def _check_needs(
    plan: Budget, weights: list[PrunableWeight], orthogonal: Orthogonal
) -> None:
    """Raises BudgetError unless all kernels have the entries that orthogonal ones need."""
    missing: dict[str, int] = {}
    for weight in weights:
        minimum = needs_of(weight, orthogonal).least
        if plan.counts[weight.path] < minimum:
            missing[weight.path] = minimum
    if missing:
        path = next(iter(missing))
        raise BudgetError(
            f"The budget leaves {len(missing)} weights too few entries for an exactly orthogonal "
            "kernel; keras_sparse_ortho.budgets.lift(model, budget) gives them enough (with "
            f"the `initializer`, unless it is ExactOrthogonal()). The least for {path!r} is "
            f"{missing[path]}. Received: {plan.counts[path]} for {path!r}"
        )


def _from_patterns(table: Any, weights: list[PrunableWeight]) -> Budget:
    """A budget from a list, or from a dict of patterns; a full path wins over a pattern."""
    if isinstance(table, Sequence | np.ndarray) and np.ndim(table) == 1:
        if len(table) != len(weights):
            raise BudgetError(
                f"A list of densities needs one for each of the {len(weights)} kernels: "
                f"{', '.join(weight.path for weight in weights)}. Received: {len(table)} densities"
            )
        return Budget(
            {w.path: share for w, share in zip(weights, table, strict=True)}
        )
    if not isinstance(table, Mapping):
        raise _unknown(table)
    densities: dict[str, float] = {}
    names: dict[str, str] = {}
    paths = {weight.path for weight in weights}
    for name, density in sorted(
        table.items(), key=lambda item: item[0] in paths
    ):
        for weight in select(weights, name, "budget"):
            path = weight.path
            if (
                path in densities
                and path != name
                and densities[path] != density
            ):
                raise BudgetError(
                    f"Two entries of `budget` name the weight {path!r} with other "
                    f"densities; name it by its path. Received: {names[path]!r} and {name!r}"
                )
            densities[path] = density
            names[path] = name
    return Budget(densities)


def _unknown(budget: Any, hint: str = "") -> BudgetError:
    return BudgetError(
        f"`budget` must be one of {sorted(_BUDGETS)}, a Budget, a dict from weight to density, or "
        f"a list of one density for each kernel.{hint} Received: budget={budget!r}"
    )


def plan_of_draws(
    model: keras.Model,
    weights: list[PrunableWeight],
    draws: Mapping[str, AnyDraw],
    storage: str = "masked",
    blocks: BlockPlan | None = None,
) -> Plan:
    """Plans the masks, and the values, that were drawn for weights.

    Args:
        model: Model that the weights are of.
        weights: list of `PrunableWeight`.
        draws: dict from path to the draw.
        storage: str. Form of the kernels. Those that cannot have it get its fallback.
        blocks: BlockPlan, where live blocks were asked for.

    Raises NotPrunableError for a kernel that neither form fits.

    Warns of kernels that are not on the blocks that were asked for.
    """
    targets = _targets_that_fit(model, weights, draws, check_storage(storage))
    plan = plan_of_targets(model, weights, targets)
    if blocks is not None:
        blocks.warn(model, plan, storage)
    return plan


def _targets_that_fit(
    model: keras.Model,
    weights: list[PrunableWeight],
    draws: Mapping[str, AnyDraw],
    form: StorageForm,
) -> dict[str, Target]:
    """A target for each weight: of this form, or of its fallback where the layer cannot have it."""
    targets: dict[str, Target] = {}
    by_path = {weight.path: weight for weight in weights}
    layers = {id(layer): layer for layer, _ in walk(model, "")}
    for layer_id, paths in places_to_wrap(model, weights).items():
        layer = layers[layer_id]
        layer_form = form
        while True:
            changes = {
                name: KernelChange(
                    by_path[path], Target(layer_form.name, draws[path])
                )
                for name, path in paths.items()
            }
            reason = layer_form.why_not(layer, changes)
            if reason is None:
                break
            if layer_form.fallback is None:
                raise NotPrunableError(reason)
            layer_form = storage_form(layer_form.fallback)
        targets |= {
            paths[name]: change.target for name, change in changes.items()
        }
    return {weight.path: targets[weight.path] for weight in weights}


def plan_of_targets(
    model: keras.Model,
    weights: list[PrunableWeight],
    targets: dict[str, Target],
) -> Plan:
    """The plan of targets; warns of layers that have no weights yet."""
    paths = never_called(model)
    if paths:
        warn_user(
            "Layers that have never been called have no weights yet, and will be dense. To have "
            "them masked, call the model so that they are reached, before it is made sparse. "
            f"Received: {paths}"
        )
    return Plan(weights, targets)


def shows_progress() -> int:
    """1 where long work shows a bar: in a terminal, unless Keras is set to be silent."""
    interactive = keras.config.is_interactive_logging_enabled()
    return int(interactive and sys.stdout is not None and sys.stdout.isatty())
