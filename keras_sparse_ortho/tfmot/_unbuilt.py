"""Layers whose sizes are not known yet: each wrapper finds its kernels when it is built."""

from collections.abc import Callable
from typing import Any

from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.initializers import SparseInitializer
from keras_sparse_ortho.tfmot._imports import tf_keras
from keras_sparse_ortho.tfmot._rewrite import copy_layer
from keras_sparse_ortho.tfmot._tf_keras_internals import PruneLowMagnitude
from keras_sparse_ortho.tfmot._weights import find_kernels, walk

# What tf_keras' layers call the initializers of kernels, before there are kernels.
_KERNELS = tuple(
    f"{prefix}{name}_initializer"
    for prefix in ("", "_")
    for name in ("kernel", "embeddings", "depthwise", "pointwise", "recurrent")
)


def sizes_are_unknown(model: Any) -> bool:
    """Whether this is a list of layers, or a Sequential model that is not built."""
    if isinstance(model, list | tuple):
        return True
    return isinstance(model, tf_keras.Sequential) and not model.built


def wrap_unbuilt(
    model: Any,
    wrap: Callable[[Any], Any],
    *,
    only_sparse: bool = False,
    pruning_policy: Any = None,
    **given: Any,
) -> Any:
    """Wraps every layer with kernels of a list, or of a Sequential model that is not built.

    Args:
        model: A list of layers, which are wrapped themselves, or a model, which is copied.
        wrap: From a layer to its wrapper.
        only_sparse: Whether only layers with initializers of ours are wrapped.
        pruning_policy: See `select_weights`.
        given: Arguments that need the paths or sizes of weights, and must be `None`.

    Raises:
        NotPrunableError: Something in it that is no single layer, or whose kernels are not known
            before it is built; nothing to prune.
        ValueError: An argument that needs a built model.
    """
    named = {name: value for name, value in given.items() if value is not None}
    if named:
        raise ValueError(
            "Weights have paths and sizes once the model is built: give it an Input, or call it, "
            f"then prune it; without that take budget='uniform'. Received: {named}"
        )
    is_model = isinstance(model, tf_keras.Sequential)
    if is_model and pruning_policy is not None:
        pruning_policy.ensure_model_supports_pruning(model)  # TFMOT's refuse it
    layers = model.layers if is_model else list(model)
    wrapped = []
    for layer in layers:
        allowed = pruning_policy is None or pruning_policy.allow_pruning(layer)
        if not (allowed and _is_to_be_wrapped(layer, only_sparse)):
            wrapped.append(copy_layer(layer) if is_model else layer)
            continue
        if is_model and layer.weights:
            raise NotPrunableError(
                f"The layer '{layer.name}' has weights already, and its model is not built: give "
                f"the model an Input, or call it. Received: model={model.name!r}"
            )
        wrapped.append(wrap(copy_layer(layer) if is_model else layer))
    if not any(isinstance(layer, PruneLowMagnitude) for layer in wrapped):
        raise NotPrunableError(
            "Nothing would be pruned: there is no layer with a kernel, or, without a `density`, "
            f"none with one of our initializers. Received: {[one.name for one in layers]}"
        )
    return tf_keras.Sequential(wrapped, name=model.name) if is_model else wrapped


def _is_to_be_wrapped(layer: Any, only_sparse: bool) -> bool:
    if not isinstance(layer, tf_keras.layers.Layer) or isinstance(layer, tf_keras.Model):
        raise NotPrunableError(
            "A list, or a Sequential model that is not built, must hold single tf_keras layers. "
            f"Received: {type(layer).__name__}"
        )
    if isinstance(layer, PruneLowMagnitude):
        return False  # as TFMOT leaves it
    parts = [inner for inner, _ in walk(layer, layer.name)]
    found = [getattr(part, name) for part in parts for name in _KERNELS if hasattr(part, name)]
    if only_sparse:
        return any(isinstance(initializer, SparseInitializer) for initializer in found)
    if found or any(hasattr(type(part), "get_prunable_weights") for part in parts):
        return True
    if layer.built:
        return bool(find_kernels(layer, layer.name))
    unknown = [part for part in parts if not type(part).__module__.startswith("tf_keras.")]
    if unknown:
        raise NotPrunableError(
            f"Whether the layer '{layer.name}' has kernels is not known before it is built: give "
            "the model an Input, call the layer once, or wrap it with PruneWithMask or "
            f"PruneWithSoftThreshold. Received: layer={type(unknown[0]).__name__}"
        )
    return False
