"""Wrapping the layers of a tf_keras model, built or not."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.initializers import SparseInitializer
from keras_sparse_ortho.kernels import PrunableWeight, Selection, choose
from keras_sparse_ortho.tfmot._tf_keras_internals import (
    PruneLowMagnitude,
    is_graph,
    rename,
    tf_keras,
)
from keras_sparse_ortho.tfmot._weights import TfKerasWeight, find_kernels, prunable_weights, walk

Wrap = Callable[[Any, list[int], list[TfKerasWeight]], Any]
"""`(copied layer, indices of its selected kernels, the kernels of the original) -> wrapper`."""
# Attributes of tf_keras' layers that hold the initializers of kernels before these exist.
_KERNELS = tuple(
    f"{prefix}{name}_initializer"
    for prefix in ("", "_")
    for name in ("kernel", "embeddings", "depthwise", "pointwise", "recurrent")
)


def select_weights(
    model: Any, include: Selection, exclude: Selection, pruning_policy: Any = None
) -> list[PrunableWeight]:
    """The weights to prune; raises for models, layers and weights that cannot be pruned."""
    if isinstance(model, list | tuple):
        raise NotPrunableError(
            "A budget needs the sizes of all layers, so it takes a built model. Lists of layers "
            "are accepted by prune_with_mask(layers, density=..., budget='uniform') and by "
            f"prune_with_soft_threshold. Received: a {type(model).__name__} of {len(model)}"
        )
    if not isinstance(model, tf_keras.Model):
        prunable_weights(model)  # raises for anything that is not a layer
        raise NotPrunableError(
            "`model` must be a whole model; wrap a single layer with keras_sparse_ortho.tfmot."
            f"PruneWithMask. Received: model={type(model).__name__}"
        )
    _check_model(model, model.name)
    weights = choose(prunable_weights(model), include, exclude)
    if pruning_policy is not None:
        pruning_policy.ensure_model_supports_pruning(model)
        layers = [layer for layer in _single_layers(model) if pruning_policy.allow_pruning(layer)]
        allowed = {id(w.variable) for layer in layers for w in find_kernels(layer, layer.name)}
        weights = [weight for weight in weights if id(weight.variable) in allowed]
    if not weights:
        raise NotPrunableError(
            "Nothing in the model would be pruned: it has no kernels, or none is selected. "
            f"Received: model={model.name!r}"
        )
    wrapped = [weight.path for weight in weights if getattr(weight, "wrapped", False)]
    if wrapped:
        raise NotPrunableError(
            "These weights have a pruning wrapper already: call TFMOT's strip_pruning first, or "
            f"`exclude` them. Received: {wrapped}"
        )
    for weight in weights:
        weight.finite_raw_value()
    return weights


def rewrite(model: Any, weights: Sequence[PrunableWeight], wrap: Wrap) -> tuple[Any, list[Any]]:
    """A copy of a model with every layer that holds some of `weights` wrapped, and the wrappers."""
    chosen = {id(weight.variable) for weight in weights}
    wrappers: list[Any] = []
    pairs: list[tuple[Any, Any]] = []

    def replace(layer: Any) -> Any:
        if isinstance(layer, tf_keras.Model):
            return clone(layer)
        copy = copy_layer(layer)
        pairs.append((layer, copy))
        if isinstance(layer, PruneLowMagnitude):
            return copy
        kernels = find_kernels(layer, layer.name)
        indices = [k for k, w in enumerate(kernels) if id(w.variable) in chosen]
        if not indices:
            return copy
        wrappers.append(wrap(copy, indices, kernels))
        return wrappers[-1]

    def clone(part: Any) -> Any:
        return tf_keras.models.clone_model(part, clone_function=replace)

    result = clone(model)
    for old, new in pairs:
        for source, target in zip(old.weights, new.weights, strict=True):
            target.assign(source)
    return result, wrappers


def copy_layer(layer: Any) -> Any:
    """An unbuilt layer with the same configuration and name."""
    with warnings.catch_warnings():
        # Initializers of this package are serialized correctly.
        warnings.filterwarnings("ignore", message=".*keras.initializers.serialize")
        copy = type(layer).from_config(layer.get_config())
    if copy.name != layer.name:  # the configuration has no name
        rename(copy, layer.name)
    return copy


def _single_layers(model: Any) -> Iterator[Any]:
    for layer in model.layers:
        if isinstance(layer, tf_keras.Model):
            yield from _single_layers(layer)
        else:
            yield layer


def _check_model(model: Any, path: str) -> None:
    """Raises if a model, or one inside it, cannot be cloned layer by layer."""
    if not isinstance(model, tf_keras.Sequential) and not is_graph(model):
        raise NotPrunableError(
            f"The model '{path}' is a subclassed model, into which TFMOT's wrappers cannot be put. "
            "Wrap its layers where they are created, with keras_sparse_ortho.tfmot.PruneWithMask. "
            f"Received: model={type(model).__name__}"
        )
    if not model.built:
        raise NotPrunableError(
            f"The model '{path}' is not built: give it an Input or call it once. (An unbuilt "
            "Sequential model is accepted by prune_with_mask(model, density=..., "
            "budget='uniform') and prune_with_soft_threshold.) "
            f"Received: model={type(model).__name__}"
        )
    for layer in model.layers:
        if isinstance(layer, tf_keras.Model):
            _check_model(layer, f"{path}/{layer.name}")


def sizes_are_unknown(model: Any) -> bool:
    """Whether this is a list of layers, or an unbuilt Sequential model."""
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
    """Wraps every layer with kernels, or a sparse initializer, of a list or a copy of a model.

    `given` are arguments that need the paths or sizes of weights, and must be `None`.
    """
    named = {name: value for name, value in given.items() if value is not None}
    if named:
        raise ValueError(
            "Weights have paths and sizes only once the model is built: give it an Input or call "
            f"it, then prune it; or use budget='uniform'. Received: {named}"
        )
    is_model = isinstance(model, tf_keras.Sequential)
    if is_model and pruning_policy is not None:
        pruning_policy.ensure_model_supports_pruning(model)  # TFMOT's policies refuse it
    layers = model.layers if is_model else list(model)
    wrapped = []
    for layer in layers:
        allowed = pruning_policy is None or pruning_policy.allow_pruning(layer)
        if not (allowed and _is_to_be_wrapped(layer, only_sparse)):
            wrapped.append(copy_layer(layer) if is_model else layer)
            continue
        if is_model and layer.weights:
            raise NotPrunableError(
                f"The layer '{layer.name}' has weights already, but its model is not built: give "
                f"the model an Input, or call it. Received: model={model.name!r}"
            )
        wrapped.append(wrap(copy_layer(layer) if is_model else layer))
    if not any(isinstance(layer, PruneLowMagnitude) for layer in wrapped):
        raise NotPrunableError(
            "Nothing would be pruned: no layer has a kernel, or, without a `density`, a sparse "
            f"initializer. Received: {[one.name for one in layers]}"
        )
    return tf_keras.Sequential(wrapped, name=model.name) if is_model else wrapped


def _is_to_be_wrapped(layer: Any, only_sparse: bool) -> bool:
    if not isinstance(layer, tf_keras.layers.Layer) or isinstance(layer, tf_keras.Model):
        raise NotPrunableError(
            "A list, or an unbuilt Sequential model, must hold single tf_keras layers. "
            f"Received: {type(layer).__name__}"
        )
    if isinstance(layer, PruneLowMagnitude):
        return False  # TFMOT does not wrap it again either
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
