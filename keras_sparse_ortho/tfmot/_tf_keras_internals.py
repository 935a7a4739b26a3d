"""Every private name of tf_keras and TFMOT that this room uses, in one place.

Private are: `Layer._flatten_layers`, `Layer._call_spec`, `Layer._autocast`, the lists of nodes, the
two attributes in which a layer remembers how it was called for SavedModel, what
MultiHeadAttention calls its projections, the index by which optimizers find their slots, and the
modules of TFMOT under `python`.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf
from tensorflow_model_optimization.python.core.keras.utils import smart_cond
from tensorflow_model_optimization.python.core.quantization.keras import collab_opts
from tensorflow_model_optimization.python.core.sparsity.keras.prune_registry import PruneRegistry
from tensorflow_model_optimization.python.core.sparsity.keras.pruning_wrapper import (
    PruneLowMagnitude,
)

from keras_sparse_ortho.tfmot._imports import tf_keras

__all__ = [
    "KeepsDepthwiseZeros",
    "PruneLowMagnitude",
    "PruneRegistry",
    "attribute_overrides",
    "build_attention",
    "build_by_calling",
    "every_layer_is_built",
    "forget_calls",
    "in_replica",
    "is_graph",
    "keep_inputs_uncast",
    "known_to_tfmot",
    "own_weights",
    "rename",
    "smart_cond",
    "sublayers",
    "takes",
    "track",
    "zero_slots",
]


def sublayers(layer: Any) -> list[Any]:
    """The layers that a tf_keras layer or model itself holds, in the order of their creation."""
    return list(layer._flatten_layers(include_self=False, recursive=False))


def every_layer_is_built(layer: Any) -> bool:
    """Whether a layer and all layers inside it have their weights."""
    return all(inner.built for inner in layer._flatten_layers())


def build_attention(layer: Any) -> None:
    """Builds the projections of a MultiHeadAttention, whose own `build` makes no weights.

    Only one that has been called, or made from the configuration of one that has, knows how.
    """
    if not isinstance(layer, tf_keras.layers.MultiHeadAttention) or layer._query_shape is None:
        return
    heads = [*layer._query_shape[:-1], layer._num_heads, layer._value_dim]
    for projection, shape in (
        (layer._query_dense, layer._query_shape),
        (layer._key_dense, layer._key_shape),
        (layer._value_dense, layer._value_shape),
        (layer._output_dense, heads),
    ):
        if not projection.built:
            projection.build(shape)
            projection.built = True


def build_by_calling(layer: Any, args: Any, kwargs: Any) -> None:
    """Builds a layer whose sublayers get their weights when it is first called."""
    before = len(layer._inbound_nodes)
    layer(*args, **kwargs)
    for node in layer._inbound_nodes[before:]:  # of a call on symbolic inputs: it never was
        layer._inbound_nodes.remove(node)
        for tensor in node.keras_inputs:
            outbound = tensor._keras_history.layer._outbound_nodes
            if node in outbound:
                outbound.remove(node)


def is_graph(model: Any) -> bool:
    """Whether a tf_keras model is functional, and can be cloned layer by layer."""
    return bool(model._is_graph_network)


def own_weights(layer: Any) -> list[Any]:
    """The variables that a layer made itself, without those of the layers inside it."""
    return [*layer._trainable_weights, *layer._non_trainable_weights]


def in_replica() -> bool:
    """Whether this is one of the replicas of a strategy, which may not assign to all."""
    return tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()


def track(layer: Any, inner: Any) -> None:
    """Counts `inner` among the layers of `layer`, as an attribute that is no property does."""
    layer._maybe_create_attribute("_self_tracked_trackables", [])
    if not any(one is inner for one in layer._self_tracked_trackables):
        layer._self_tracked_trackables.append(inner)


def rename(layer: Any, name: str) -> None:
    """Gives a layer that has no weights yet another name."""
    layer._name = name


def takes(layer: Any, argument: str) -> bool:
    """Whether the call of a layer takes `training` or `mask`."""
    return bool(getattr(layer._call_spec, f"expects_{argument}_arg"))


@contextmanager
def known_to_tfmot(layer: Any) -> Iterator[None]:
    """Lets TFMOT's wrapper take a layer of any kind, which it knows by a method.

    The method does not stay: TFMOT would go on pruning what it names after `strip_pruning`.
    """
    own = "get_prunable_weights" in vars(layer) if hasattr(layer, "__dict__") else True
    if own or not isinstance(layer, tf_keras.layers.Layer):
        yield
        return
    layer.get_prunable_weights = list
    try:
        yield
    finally:
        del layer.get_prunable_weights


def keep_inputs_uncast(layer: Any) -> None:
    """Leaves the casting of inputs to the layers inside `layer`."""
    layer._autocast = False


def forget_calls(layer: Any) -> None:
    """Makes SavedModel trace the inside of `layer` as a part of its wrapper, not by itself.

    A trace of its own would read its variables, not the effective weights.
    """
    for inner in layer._flatten_layers():
        inner._saved_model_inputs_spec = None
        inner._saved_model_arg_spec = None


@contextmanager
def attribute_overrides(overrides: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Lets attributes that hold variables answer with tensors.

    Past `Layer.__setattr__`, which would take the variable off the layer's list of weights.

    Args:
        overrides: `(owner, attribute, tensor)` triples.

    Raises:
        RuntimeError: If something else has been put there in the meantime, such as another
            replica of a MirroredStrategy whose threads take turns inside the layer.
    """
    overrides = list(overrides)
    before = [vars(owner)[name] for owner, name, _ in overrides]
    for owner, name, tensor in overrides:
        vars(owner)[name] = tensor
    try:
        yield
        for owner, name, tensor in overrides:
            if vars(owner)[name] is not tensor:
                raise RuntimeError(
                    f"The weight '{name}' of '{owner.name}' was replaced while the layer ran: a "
                    "replica of MirroredStrategy took its turn inside it, as BatchNormalization "
                    "makes it do. Wrap the layers inside one by one. "
                    f"Received: owner={type(owner).__name__}"
                )
    finally:
        for (owner, name, _), variable in zip(overrides, before, strict=True):
            vars(owner)[name] = variable


def zero_slots(optimizer: Any, variable: Any, entries: np.ndarray) -> None:
    """Resets moments and averages of some entries of a weight to where they started.

    Args:
        optimizer: A tf_keras optimizer, new or legacy, or `None`.
        variable: The weight.
        entries: Bool array of its shape: which entries to forget.
    """
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if hasattr(optimizer, "get_slot_names"):  # legacy
        slots = {name: optimizer.get_slot(variable, name) for name in optimizer.get_slot_names()}
    else:
        index = getattr(optimizer, "_index_dict", {})
        known = bool(index) and optimizer._var_key(variable) in index
        lists = vars(optimizer).items() if known else ()
        slots = {
            name: value[index[optimizer._var_key(variable)]]
            for name, value in lists
            if isinstance(value, list) and len(value) == len(index) and name != "_variables"
        }
    for name, slot in slots.items():
        if isinstance(slot, tf.Variable) and slot is not variable and slot.shape == variable.shape:
            # Adagrad's sums of squares do not start from 0.
            start = getattr(optimizer, "initial_accumulator_value", 0.0)
            start = start if "accumulator" in name else 0.0
            slot.assign(tf.where(entries, tf.cast(start, slot.dtype), slot))


preserving: Any = collab_opts.prune_preserve.prune_preserve_quantize_registry


class KeepsDepthwiseZeros(preserving.Default8bitPrunePreserveQuantizeRegistry):
    """TFMOT's registry for prune-preserving quantization, DepthwiseConv2D not left out."""

    _DISABLE_PRUNE_PRESERVE: ClassVar[frozenset[Any]] = frozenset()
    _LAYERS_CONFIG_MAP: ClassVar[dict[Any, Any]] = {
        **preserving.Default8bitPrunePreserveQuantizeRegistry._LAYERS_CONFIG_MAP,
        tf_keras.layers.DepthwiseConv2D: preserving._PrunePreserveInfo(
            ["depthwise_kernel"], ["Default8BitConvQuantizeConfig"]
        ),
    }
