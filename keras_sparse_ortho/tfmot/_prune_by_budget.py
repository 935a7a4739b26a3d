"""`prune_by_budget`: TFMOT's own magnitude pruning, with its own sparsity for each layer."""

from typing import Any

from keras_sparse_ortho.budgets import Budget
from keras_sparse_ortho.errors import BudgetError, NotPrunableError
from keras_sparse_ortho.kernels import PrunableWeight, Selection
from keras_sparse_ortho.pruning import plan_for
from keras_sparse_ortho.schedules import Schedule
from keras_sparse_ortho.tfmot._tf_keras_internals import (
    PruneLowMagnitude,
    PruneRegistry,
    build_attention,
    tfmot,
)
from keras_sparse_ortho.tfmot._weights import (
    find_kernels,
    rewrite,
    select_weights,
)


def prune_by_budget(
    model: Any,
    density: float | None = None,
    budget: str | Budget = "erk",
    schedule: Any = None,
    *,
    include: Selection = None,
    exclude: Selection = None,
) -> Any:
    """Wraps the layers of a tf_keras model with TFMOT's wrapper, each with its own sparsity.

    TFMOT's `prune_low_magnitude` has one schedule for all layers. Here the schedule of each ends at
    `final_sparsity = 1 - density` of the layer in the budget. The rest is TFMOT's: masks by
    magnitude, `UpdatePruningStep` (which must be passed to `fit`), `strip_pruning`. A layer with
    several kernels (a GRU) gets their joint density; layers of density 1 stay as they are.

    `schedule` is one of `keras_sparse_ortho.schedules` or of TFMOT (`PolynomialDecay`,
    `ConstantSparsity`), whose final density or sparsity is replaced, or a function from final
    sparsity to schedule. The other arguments, the
    result, and most errors are those of `prune_with_mask`.

    Raises:
        NotPrunableError: Also for a layer that TFMOT does not prune, or only in other kernels.
        BudgetError: Also for a schedule that starts sparser than a layer's budget.
        ValueError: No schedule, or one whose final sparsity cannot be replaced.

    Limits: TFMOT's. Weights are sparse at the ends of epochs, not in between; with `begin_step=0`
    the first pruning is at step `frequency`. TFMOT's options `block_size` and `sparsity_m_by_n` end
    at other densities than a budget's: use `prune_exact_orthogonal(structure=)`.

    Examples:
        >>> import keras_sparse_ortho as kso
        >>> tf_keras = kso.tfmot.register_initializers()
        >>> from tensorflow_model_optimization.sparsity.keras import PolynomialDecay
        >>> layers = [tf_keras.layers.Dense(128), tf_keras.layers.Dense(10)]
        >>> dense = tf_keras.Sequential([tf_keras.Input((64,)), *layers])
        >>> schedule = PolynomialDecay(0.0, 0.9, begin_step=0, end_step=1000)
        >>> model = kso.tfmot.prune_by_budget(dense, 0.1, "erk", schedule)
        >>> [round(layer.pruning_schedule.final_sparsity, 4) for layer in model.layers]
        [0.9327, 0.6906]
    """
    weights = select_weights(model, include, exclude)
    plan = plan_for(density, budget, weights, orthogonal=False)
    if not callable(schedule):
        raise ValueError(
            "`schedule` must be one of keras_sparse_ortho.schedules or of TFMOT, or a function "
            "from final sparsity to one. "
            f"Received: schedule={schedule!r}"
        )

    def wrap(
        copy: Any, indices: list[int], kernels: list[PrunableWeight]
    ) -> Any:
        """TFMOT's wrapper around a layer, with the density of its kernels."""
        paths = [weight.path for weight in kernels]
        if not (
            PruneRegistry.supports(copy)
            or hasattr(copy, "get_prunable_weights")
        ):
            raise NotPrunableError(
                f"TFMOT does not know how to prune the layer {copy.name!r}, which holds {paths}. "
                "`exclude` it, or use prune_with_mask or prune_with_soft_threshold, which accept "
                f"every layer. Received: layer={type(copy).__name__}"
            )
        # TFMOT asks for kernels that would be created in the first call.
        build_attention(copy)
        live = sum(plan.counts[path] for path in paths)
        size = sum(plan.sizes[path] for path in paths)
        if live == size:
            return copy
        return PruneLowMagnitude(
            copy, _schedule_for(schedule, live / size, paths)
        )

    result, wrapped = rewrite(model, weights, wrap)
    is_pruned = False
    for layer, indices, selected in wrapped:
        if isinstance(layer, PruneLowMagnitude):
            _check_pruned(layer, indices, selected)
            is_pruned = True
    if not is_pruned:
        raise NotPrunableError(
            "Nothing in the model would be pruned: the budget leaves all weights dense. "
            f"Received: density={plan.density:.6g}"
        )
    return result


def _schedule_for(schedule: Any, density: float, paths: list[str]) -> Any:
    """A schedule of TFMOT, or ours, that ends at the density of a layer."""
    if isinstance(schedule, Schedule):
        start = getattr(schedule, "initial_density", 1.0)
        if start < density:
            raise BudgetError(
                f"The schedule starts with less density than {paths} must end with, "
                f"{density:.6g}. Received: initial_density={start!r}"
            )
        return schedule.with_density(density)
    if not isinstance(schedule, tfmot.sparsity.keras.PruningSchedule):
        return schedule(1 - density)
    config = schedule.get_config()
    config = config.get("config", config)
    argument = None
    for name in ("target_sparsity", "final_sparsity"):
        if name in config:
            argument = name
    if argument is None:
        raise ValueError(
            "The schedule must have `final_sparsity` or `target_sparsity`, which the budget "
            f"replaces; else give a function of it. Received: schedule={schedule!r}"
        )
    new_schedule = type(schedule)(**{**config, argument: 1 - density})
    start = getattr(new_schedule, "initial_sparsity", 0.0)
    if start > 1 - density:
        raise BudgetError(
            f"The schedule starts with more sparsity than {paths} must end with, "
            f"{1 - density:.6g}. Received: initial_sparsity={start!r}"
        )
    return new_schedule


def _check_pruned(
    wrapper: Any, indices: list[int], selected: list[PrunableWeight]
) -> None:
    """Raises unless TFMOT prunes exactly the selected kernels."""
    pruned = {id(variable) for variable, _, _ in wrapper.pruning_vars}
    kernels = find_kernels(wrapper.layer, wrapper.layer.name)
    by_tfmot = {
        k: weight.path
        for k, weight in enumerate(kernels)
        if id(weight.variable) in pruned
    }
    not_pruned = [
        w.path
        for k, w in zip(indices, selected, strict=True)
        if k not in by_tfmot
    ]
    not_selected = [path for k, path in by_tfmot.items() if k not in indices]
    if not_pruned or not_selected:
        raise NotPrunableError(
            f"TFMOT prunes other weights of the layer {wrapper.layer.name!r} than were selected. "
            "Select the same ones, or use prune_with_mask or prune_with_soft_threshold. "
            f"Received: selected but not pruned {not_pruned}, pruned but not selected "
            f"{not_selected}"
        )
