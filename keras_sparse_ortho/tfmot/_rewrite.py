"""Replacing layers of a tf_keras model by wrappers: our clone function."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.kernels import PrunableWeight, Selection, choose
from keras_sparse_ortho.tfmot._imports import tf_keras
from keras_sparse_ortho.tfmot._tf_keras_internals import PruneLowMagnitude, is_graph, rename
from keras_sparse_ortho.tfmot._weights import TfKerasWeight, find_kernels, prunable_weights

Wrap = Callable[[Any, list[int], list[TfKerasWeight]], Any]
"""`(copied layer, indices of its selected kernels, the kernels of the original) -> wrapper`."""


def select_weights(
    model: Any, include: Selection, exclude: Selection, pruning_policy: Any = None
) -> list[PrunableWeight]:
    """The weights that are to be pruned; refuses models and weights that cannot be.

    A TFMOT `PruningPolicy` is asked about the model, and about every layer that would be wrapped.
    """
    if isinstance(model, list | tuple):
        raise NotPrunableError(
            "A budget needs the sizes of all layers, so that it takes a built model. Lists of "
            "layers are taken by prune_with_mask(layers, density=..., budget='uniform') and by "
            f"prune_with_soft_threshold. Received: a {type(model).__name__} of {len(model)}"
        )
    if not isinstance(model, tf_keras.Model):
        prunable_weights(model)  # names what is wrong with something that is no layer
        raise NotPrunableError(
            "A whole model is pruned here; one layer is wrapped by keras_sparse_ortho.tfmot."
            f"PruneWithMask. Received: model={type(model).__name__}"
        )
    _refuse_structure(model, model.name)
    weights = choose(prunable_weights(model), include, exclude)
    if pruning_policy is not None:
        pruning_policy.ensure_model_supports_pruning(model)
        layers = [layer for layer in _single_layers(model) if pruning_policy.allow_pruning(layer)]
        allowed = {id(w.variable) for layer in layers for w in find_kernels(layer, layer.name)}
        weights = [weight for weight in weights if id(weight.variable) in allowed]
    if not weights:
        raise NotPrunableError(
            "Nothing in the model would be pruned: it has no kernels, or the selection leaves none "
            f"of them. Received: model={model.name!r}"
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
    """A copy of a model in which every outermost layer that holds some of `weights` is wrapped.

    All layers are copied, with their weights. (TFMOT's `prune_low_magnitude` shares them with the
    given model, which is then changed by training the pruned one.)

    Returns:
        The copy, and the wrappers in it, built and with the weights of the given model.
    """
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
    """A layer of the same configuration and name, not built."""
    with warnings.catch_warnings():
        # Initializers that are not tf_keras' own, such as ours, are written and read correctly.
        warnings.filterwarnings("ignore", message=".*keras.initializers.serialize")
        copy = type(layer).from_config(layer.get_config())
    if copy.name != layer.name:  # its configuration leaves the name out
        rename(copy, layer.name)
    return copy


def _single_layers(model: Any) -> Iterator[Any]:
    for layer in model.layers:
        if isinstance(layer, tf_keras.Model):
            yield from _single_layers(layer)
        else:
            yield layer


def _refuse_structure(model: Any, path: str) -> None:
    """Raises for a model, or one inside it, that cannot be cloned layer by layer."""
    sequential = isinstance(model, tf_keras.Sequential)
    if not sequential and not is_graph(model):
        raise NotPrunableError(
            f"The model '{path}' is written as a class, and TFMOT's wrappers cannot be put into "
            "it. Wrap its layers where they are made, by keras_sparse_ortho.tfmot.PruneWithMask. "
            f"Received: model={type(model).__name__}"
        )
    if not model.built:
        raise NotPrunableError(
            f"The model '{path}' is not built: give it an Input or call it once. (Without that "
            "prune_with_mask(model, density=..., budget='uniform') and prune_with_soft_threshold "
            "take a Sequential model.) "
            f"Received: model={type(model).__name__}"
        )
    for layer in model.layers:
        if isinstance(layer, tf_keras.Model):
            _refuse_structure(layer, f"{path}/{layer.name}")
