"""`prune_with_mask`: a whole tf_keras model with masks that are given and held."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_sparse_ortho.budgets import Budget
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.initializers import AnyDraw, Draw, SparseInitializer, adopt
from keras_sparse_ortho.kernels import PrunableWeight, Selection, select
from keras_sparse_ortho.orthogonal import largest_mask
from keras_sparse_ortho.pruning import BudgetLike, plan_for
from keras_sparse_ortho.tfmot._prune_with_mask_layer import PruneWithMask
from keras_sparse_ortho.tfmot._rewrite import rewrite, select_weights
from keras_sparse_ortho.tfmot._unbuilt import sizes_are_unknown, wrap_unbuilt
from keras_sparse_ortho.tfmot._weights import TfKerasWeight


def prune_with_mask(
    model: Any,
    masks: Mapping[str, np.ndarray] | None = None,
    *,
    density: float | None = None,
    budget: BudgetLike = "erk",
    include: Selection = None,
    exclude: Selection = None,
    pruning_policy: Any = None,
) -> Any:
    """Wraps the layers of a tf_keras model so that their kernels keep masks.

    1. `prune_with_mask(model, {"hidden/kernel": mask})`: the given masks.
    2. `prune_with_mask(model, density=0.1)`: the largest magnitudes of each kernel stay, as many
       as the budget gives it. For trained models.
    3. `prune_with_mask(model)`: the masks of our initializers, in the layers that have one.

    The wrappers are `PruneWithMask`; TFMOT's `strip_pruning`, callbacks, and what follows
    (clustering, quantization, TFLite) take the model as if TFMOT had wrapped it. Layers are
    wrapped whether or not TFMOT knows them: subclasses of Dense, depthwise convolutions,
    EinsumDense, Bidirectional, blocks of layers.

    Where sizes are not known yet, `density` with `budget="uniform"` gives every kernel the same
    density when it is built: `prune_with_mask(layers, density=0.1, budget="uniform")`.

    Args:
        model: A built tf_keras model: Sequential, functional or nested. It is left as it is. Or a
            Sequential model that is not built, or a list of layers, which are wrapped themselves.
        masks: Dict from weight path (see `prunable_weights`) to a bool array of its shape.
        density: Global live fraction over the selected kernels, in (0, 1].
        budget: `"erk"` (default), `"er"`, `"uniform"`, or a `Budget` for the selected kernels.
        include: Which kernels, in ways 2 and 3: weight paths, layer paths or regular expressions
            (one or a list), or a predicate. Default: all kernels and embeddings.
        exclude: Which kernels not.
        pruning_policy: A TFMOT `PruningPolicy`: which layers may be pruned, such as
            `PruneForLatencyOnXNNPack()`. Default: all.

    Returns:
        A new model with the same weights, not compiled; for a list, the list with the wrappers.

    Raises:
        NotPrunableError: A Keras 3 model, one that is not built or written as a class; weights
            that are wrapped already or not finite; nothing to prune.
        BudgetError: A density or budget that does not fit the model.
        UnknownWeightError: A path that no weight has.
        ValueError: A mask of another shape or dtype, or without live entries; masks, selections or
            budgets for what is not built.

    Example:

    >>> import numpy as np
    >>> import keras_sparse_ortho as kso
    >>> tf_keras = kso.tfmot.register_initializers()
    >>> dense = tf_keras.Sequential(
    ...     [tf_keras.Input((16,)), tf_keras.layers.Dense(8, name="hidden")])
    >>> model = kso.tfmot.prune_with_mask(dense, density=0.25)
    >>> kso.tfmot.prunable_weights(model)
    [<hidden/kernel shape=(16, 8), density=0.25>]
    """
    by_density = density is not None or isinstance(budget, Budget)
    if sizes_are_unknown(model):
        shared = budget if density is not None and budget != "uniform" else None
        return wrap_unbuilt(
            model,
            lambda layer: PruneWithMask(layer, density=density),
            only_sparse=density is None,
            pruning_policy=pruning_policy,
            **{"masks": masks, "budget": shared, "include": include, "exclude": exclude},
        )
    if masks is not None and (by_density or include is not None or exclude is not None):
        raise ValueError(
            "`masks` name the weights and say how sparse they are; leave the other arguments out. "
            f"Received: density={density!r}, include={include!r}, exclude={exclude!r}"
        )
    if masks is not None:
        weights = select_weights(model, lambda w: w.path in masks, None)
        for path in masks:
            select(weights, path, "masks")
        return hold(model, {w.path: Draw(np.asarray(masks[w.path])) for w in weights})
    weights = select_weights(model, include, exclude, pruning_policy)
    if by_density:
        counts = plan_for(density, budget, weights, orthogonal=False).counts
        return hold(
            model,
            {w.path: Draw(largest_mask(np.abs(w.raw_value()), counts[w.path])) for w in weights},
        )  # fmt: skip
    table: dict[str, Draw] = {}
    for weight in weights:
        if isinstance(weight.initializer, SparseInitializer):
            # The layer keeps its initializer, of which a clone takes the mask.
            drawn = adopt(weight, weight.initializer)
            kernel = drawn.kernel if drawn.sets_values else None
            table[weight.path] = Draw(drawn.mask, kernel, fresh=drawn.fresh)
    if not table:
        raise NotPrunableError(
            "The model has no layer with one of our initializers, and neither `masks` nor "
            f"`density` was given. Received: model={model.name!r}"
        )
    return hold(model, table)


def hold(model: Any, table: Mapping[str, AnyDraw]) -> Any:
    """A copy of a model in which the weights of `table` keep their masks."""
    weights: list[PrunableWeight] = select_weights(model, lambda w: w.path in table, None)
    full_paths = {id(weight.variable): weight.path for weight in weights}
    plans: list[list[AnyDraw]] = []

    def wrap(copy: Any, indices: list[int], kernels: list[TfKerasWeight]) -> PruneWithMask:
        chosen = [kernels[k] for k in indices]
        # In the order of the wrapper's states: a copy may have got another name.
        plans.append([table[full_paths[id(w.variable)]] for w in chosen])
        # Built with full masks, for there are the weights of the given model only afterwards.
        selected = None if len(indices) == len(kernels) else indices
        return PruneWithMask(copy, selected=selected, live=[w.size for w in chosen])

    result, wrappers = rewrite(model, weights, wrap)
    for wrapper, plan in zip(wrappers, plans, strict=True):
        for state, drawn in zip(wrapper.states, plan, strict=True):
            path = state.weight.path
            wrapper.assign_mask(path, drawn.mask, drawn.kernel, drawn.initializer)
    return result
