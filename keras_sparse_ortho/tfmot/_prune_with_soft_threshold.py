"""`prune_with_soft_threshold`: learnt thresholds for a whole tf_keras model."""

from typing import Any

from keras_sparse_ortho.kernels import Selection
from keras_sparse_ortho.tfmot._prune_with_soft_threshold_layer import (
    PruneWithSoftThreshold,
    check_arguments,
)
from keras_sparse_ortho.tfmot._rewrite import rewrite, select_weights
from keras_sparse_ortho.tfmot._soft_threshold_state import SoftThresholdState
from keras_sparse_ortho.tfmot._unbuilt import sizes_are_unknown, wrap_unbuilt
from keras_sparse_ortho.tfmot._weights import TfKerasWeight


def prune_with_soft_threshold(
    model: Any,
    granularity: str = "layer",
    g: str = "sigmoid",
    s_init: float = -8.0,
    weight_decay: float = 0.0,
    *,
    include: Selection = None,
    exclude: Selection = None,
    pruning_policy: Any = None,
) -> Any:
    """Wraps the layers of a tf_keras model so that their kernels get learnt thresholds (STR).

    What `keras_sparse_ortho.parametrize(model, SoftThreshold(...))` is on Keras 3. Layers are
    wrapped by `PruneWithSoftThreshold`, whether or not TFMOT knows them. `tfmot.TargetDensity`
    ends at the density asked for, and TFMOT's `strip_pruning` returns the plain model with the
    effective weights.

    Args:
        model: A built tf_keras model: Sequential, functional or nested. It is left as it is. Or a
            Sequential model that is not built, or a list of layers, which are wrapped themselves.
        granularity: `"layer"`: one threshold for each kernel; `"channel"`: one for each output.
        g: `"sigmoid"`, `"exp"` or `"softplus"`.
        s_init: What the trainable `s` of `t = g(s)` starts from.
        weight_decay: Strength of the L2 on raw weights and `s` that is added to the loss.
        include: Which kernels: weight paths, layer paths or regular expressions (one or a list),
            or a predicate. Default: all kernels and embeddings.
        exclude: Which kernels not.
        pruning_policy: A TFMOT `PruningPolicy`: which layers may be pruned, such as
            `PruneForLatencyOnXNNPack()`. Default: all.

    Returns:
        A new model, not compiled, whose raw weights are those of the given one; for a list, the
        list with the wrappers.

    Raises:
        NotPrunableError: A Keras 3 model, one that is not built or written as a class; weights
            that are wrapped already or not finite; nothing to prune.
        UnknownWeightError: An `include` or `exclude` that names nothing.
        ValueError: An unknown granularity or function, a negative strength.

    Example:

    >>> import numpy as np
    >>> import keras_sparse_ortho as kso
    >>> tf_keras = kso.tfmot.register_initializers()
    >>> dense = tf_keras.Sequential(
    ...     [tf_keras.Input((64,)), tf_keras.layers.Dense(34, name="hidden")])
    >>> model = kso.tfmot.prune_with_soft_threshold(dense)
    >>> model.compile("sgd", "mse")
    >>> history = model.fit(np.ones((64, 64)), np.ones((64, 34)), verbose=0, batch_size=4,
    ...                     callbacks=[kso.tfmot.TargetDensity(0.125, frequency=4)])
    >>> kso.tfmot.prunable_weights(model)
    [<hidden/kernel shape=(64, 34), density=0.125>]

    Reference:

    - Kusupati et al., "Soft Threshold Weight Reparameterization for Learnable Sparsity" (ICML
      2020), arXiv 2002.03231
    """
    check_arguments(granularity, g, s_init, weight_decay)
    if sizes_are_unknown(model):
        return wrap_unbuilt(
            model,
            lambda layer: PruneWithSoftThreshold(layer, granularity, g, s_init, weight_decay),
            pruning_policy=pruning_policy,
            include=include,
            exclude=exclude,
        )
    weights = select_weights(model, include, exclude, pruning_policy)

    def wrap(copy: Any, indices: list[int], kernels: list[TfKerasWeight]) -> PruneWithSoftThreshold:
        selected = None if len(indices) == len(kernels) else indices
        return PruneWithSoftThreshold(copy, granularity, g, s_init, weight_decay, selected=selected)

    result, wrappers = rewrite(model, weights, wrap)
    for wrapper in wrappers:
        for state in wrapper.states:
            assert isinstance(state, SoftThresholdState)
            state.adopt_raw()
    return result
