"""Which weights become sparse, how sparse each is, and the plan that gives them their masks."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._checks import as_text, check_density
from keras_sparse_ortho._foreign_names import for_value
from keras_sparse_ortho._keras_internals import warn_user
from keras_sparse_ortho.budgets import Budget, Orthogonal, er, erk, needs_of, uniform
from keras_sparse_ortho.calibration import Sensitivity
from keras_sparse_ortho.errors import BudgetError, NotPrunableError
from keras_sparse_ortho.initializers import AnyDraw
from keras_sparse_ortho.kernels import PrunableWeight, Selection, choose, names_in, select, walk
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

_BUDGETS: dict[str, Callable[..., Budget]] = {"uniform": uniform, "er": er, "erk": erk}


def weights_to_prune(
    model: keras.Model, include: Selection, exclude: Selection
) -> list[PrunableWeight]:
    """The weights that `include` and `exclude` select; warns of unregistered ones left dense."""
    everything = prunable_weights(model, unregistered=True)
    names = [] if include is None else names_in(include) or []
    paths = {name for name in names if isinstance(name, str)}
    known = [weight for weight in everything if weight.registered or weight.path in paths]
    others = [weight for weight in everything if weight not in known]
    weights = choose(known, include, exclude, others)
    if known and not weights:
        raise NotPrunableError(
            "`include` and `exclude` leave no kernel. There are: "
            f"{', '.join(weight.path for weight in known)}. "
            f"Received: include={as_text(include)}, exclude={as_text(exclude)}"
        )
    if include is None:
        named = [] if exclude is None else select(everything, exclude, "exclude")
        if dense := [weight for weight in others if weight not in named]:
            share = sum(w.size for w in dense) / sum(w.size for w in everything)
            listed = ", ".join(f"{weight.path!r} {weight.shape}" for weight in dense[:5])
            more = f" and {len(dense) - 5} more" if len(dense) > 5 else ""
            warn_user(
                f"Matrices with {share:.2%} of all entries stay dense, because the meaning of "
                "their axes is unknown. Register their layers with keras_sparse_ortho.initializers."
                "kernel_layouts; or name them by their full paths, in `include` to mask them as "
                "(*batch, in, out), or in `exclude` to keep them dense without this warning. "
                f"Received: {listed}{more}"
            )
    refuse_unfit(model, weights, "no kernel that could be pruned")
    return weights


def density_and_budget(density: Any, budget: BudgetLike | None) -> tuple[float | None, Any]:
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
        return _BUDGETS[budget](weights, check_density(density), orthogonal=orthogonal)
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
        needs = [(weight, needs_of(weight, orthogonal)[1]) for weight in weights]
        if short := [(w.path, least) for w, least in needs if plan.counts[w.path] < least]:
            path, least = short[0]
            raise BudgetError(
                f"The budget leaves {len(short)} weights too few entries for an exactly orthogonal "
                "kernel; keras_sparse_ortho.budgets.lift(model, budget) gives them enough (with "
                f"the `initializer`, unless it is ExactOrthogonal()). The least for {path!r} is "
                f"{least}. Received: {plan.counts[path]} for {path!r}"
            )
    return plan


def _from_patterns(table: Any, weights: list[PrunableWeight]) -> Budget:
    """A budget from a list, or from a dict of patterns; a full path wins over a pattern."""
    if isinstance(table, Sequence | np.ndarray) and np.ndim(table) == 1:
        if len(table) != len(weights):
            raise BudgetError(
                f"A list of densities needs one for each of the {len(weights)} kernels: "
                f"{', '.join(weight.path for weight in weights)}. Received: {len(table)} densities"
            )
        return Budget({w.path: share for w, share in zip(weights, table, strict=True)})
    if not isinstance(table, Mapping):
        raise _unknown(table)
    chosen: dict[str, tuple[str, float]] = {}
    paths = {weight.path for weight in weights}
    for name, density in sorted(table.items(), key=lambda item: item[0] in paths):
        for weight in select(weights, name, "budget"):
            other = chosen.get(weight.path)
            if other is not None and weight.path != name and other[1] != density:
                raise BudgetError(
                    f"Two entries of `budget` name the weight {weight.path!r} with other "
                    f"densities; name it by its path. Received: {other[0]!r} and {name!r}"
                )
            chosen[weight.path] = (name, density)
    return Budget({path: density for path, (_, density) in chosen.items()})


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
                name: KernelChange(by_path[path], Target(layer_form.name, draws[path]))
                for name, path in paths.items()
            }
            reason = layer_form.why_not(layer, changes)
            if reason is None:
                break
            if layer_form.fallback is None:
                raise NotPrunableError(reason)
            layer_form = storage_form(layer_form.fallback)
        targets |= {paths[name]: change.target for name, change in changes.items()}
    return {weight.path: targets[weight.path] for weight in weights}


def plan_of_targets(
    model: keras.Model, weights: list[PrunableWeight], targets: dict[str, Target]
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
