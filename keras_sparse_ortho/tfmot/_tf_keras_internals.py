"""tf_keras and TFMOT, and every private name of them that this room uses."""
# ruff: noqa: E402 (TFMOT may be imported only as `_import` does it)

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from keras_sparse_ortho._interception import intercepted
from keras_sparse_ortho._keras_internals import GraphCall, replaced
from keras_sparse_ortho._types import AnyLayer, Tensor


def _import() -> tuple[Any, Any]:
    """Imports tf_keras and TFMOT without changing what `tf.keras` is."""
    try:
        # TFMOT sets TF_USE_LEGACY_KERAS when it is imported, and `tf.keras` reads it when it is
        # first used. So `tf.keras` is used first, and the variable is restored afterwards.
        _ = tf.keras.__name__
        before = os.environ.get("TF_USE_LEGACY_KERAS")
        try:
            import tensorflow_model_optimization as tfmot
            import tf_keras
        finally:
            if before is None:
                os.environ.pop("TF_USE_LEGACY_KERAS", None)
            else:
                os.environ["TF_USE_LEGACY_KERAS"] = before
    except ImportError as error:
        raise ImportError(
            "keras_sparse_ortho.tfmot needs tf_keras and tensorflow-model-optimization: "
            "pip install 'keras-sparse-ortho[tfmot]'"
        ) from error
    return tf_keras, tfmot


tf_keras, tfmot = _import()

from tensorflow_model_optimization.python.core.keras.utils import (
    smart_cond as smart_cond,
)
from tensorflow_model_optimization.python.core.quantization.keras import (
    collab_opts,
)
from tensorflow_model_optimization.python.core.sparsity.keras.prune_registry import (
    PruneRegistry as PruneRegistry,
)
from tensorflow_model_optimization.python.core.sparsity.keras.pruning_wrapper import (
    PruneLowMagnitude as PruneLowMagnitude,
)
from tf_keras.src import initializers as tf_keras_initializers
from tf_keras.src.engine.functional import _map_graph_network
from tf_keras.src.engine.keras_tensor import KerasTensor
from tf_keras.src.engine.node import Node
from tf_keras.src.layers.core import tf_op_layer


def serializing_other_initializers() -> contextlib.AbstractContextManager[None]:
    """Lets tf_keras serialize initializers of this package, in this thread, without a warning."""

    def serialize(
        original: Any, initializer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        # of Keras 3
        if isinstance(initializer, keras.initializers.Initializer):
            return tf_keras.saving.serialize_keras_object(initializer)
        return original(initializer, *args, **kwargs)

    return intercepted(tf_keras_initializers, "serialize", serialize)


def sublayers(layer: Any) -> list[Any]:
    return list(layer._flatten_layers(include_self=False, recursive=False))


def every_layer_is_built(layer: Any) -> bool:
    return all(inner.built for inner in layer._flatten_layers())


def build_attention(layer: Any) -> None:
    """Builds the projections of a MultiHeadAttention that was called once, or is a copy of such."""
    if (
        not isinstance(layer, tf_keras.layers.MultiHeadAttention)
        or layer._query_shape is None
    ):
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
    """Builds a layer whose sublayers get their weights in its first call."""
    before = len(layer._inbound_nodes)
    layer(*args, **kwargs)
    # A symbolic call leaves nodes; remove them.
    for node in layer._inbound_nodes[before:]:
        layer._inbound_nodes.remove(node)
        for tensor in node.keras_inputs:
            outbound = tensor._keras_history.layer._outbound_nodes
            if node in outbound:
                outbound.remove(node)


def is_graph(model: Any) -> bool:
    return bool(model._is_graph_network)


def graph_calls(model: AnyLayer) -> list[GraphCall]:
    """The calls of a model that `is_graph`, each after the calls that it depends on."""
    return _calls_of(model._nodes_by_depth)


def _calls_of(nodes_by_depth: Mapping[int, list[Node]]) -> list[GraphCall]:
    calls = []
    for depth in sorted(nodes_by_depth, reverse=True):
        for node in nodes_by_depth[depth]:
            if node.is_input:
                continue
            call = GraphCall(
                node.layer,
                list(node.keras_inputs),
                tf.nest.flatten(node.outputs),
                [],
                tuple(node.call_args),
                node.call_kwargs,
            )
            calls.append(call)
    return calls


def calls_inside(
    call: GraphCall,
) -> tuple[list[GraphCall], list[tuple[Tensor, Tensor]], list[Tensor]]:
    """The calls in the `call` of a layer on symbolic tensors, its inputs and outputs there.

    Inputs are pairs of a tensor outside and the one that stands for it.

    Graphs are afterwards as before. Raises what `call` raises.
    """
    inputs = {
        id(tensor): tf_keras.Input(type_spec=tensor.type_spec)
        for tensor in call.inputs
    }

    def symbol(value: object) -> object:
        return inputs.get(id(value), value)

    args, kwargs = tf.nest.map_structure(symbol, (call.args, dict(call.kwargs)))
    calls, outputs = _symbolic_calls(
        call.operation, list(inputs.values()), args, kwargs
    )
    pairs = [(tensor, inputs[id(tensor)]) for tensor in call.inputs]
    return calls, pairs, outputs


def was_called(model: AnyLayer) -> bool:
    """Whether the shapes of a model's inputs are known from a call."""
    return getattr(model, "_saved_model_arg_spec", None) is not None


def calls_alone(model: AnyLayer) -> tuple[list[GraphCall], list[Tensor]]:
    """The calls in the `call` of a model that `was_called`, on symbols of the same inputs.

    Returns the calls and the outputs. Graphs are afterwards as before. Raises what `call` raises.
    """
    inputs = []

    def symbol(value: object) -> object:
        if not isinstance(value, tf.TypeSpec):
            return value
        inputs.append(tf_keras.Input(type_spec=value))
        return inputs[-1]

    args, kwargs = tf.nest.map_structure(symbol, model._saved_model_arg_spec)
    return _symbolic_calls(model, inputs, args, kwargs)


def _symbolic_calls(
    layer: AnyLayer,
    inputs: list[Tensor],
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> tuple[list[GraphCall], list[Tensor]]:
    """The calls in the `call` of a layer on symbolic arguments, and its outputs."""
    nodes = [
        (nodes, list(nodes))
        for inner in layer._flatten_layers()
        for nodes in (inner._inbound_nodes, inner._outbound_nodes)
    ]
    try:
        outputs = [
            value
            for value in tf.nest.flatten(layer.call(*args, **kwargs))
            if isinstance(value, KerasTensor)
        ]
        _, nodes_by_depth, *_ = _map_graph_network(inputs, outputs)
        return _calls_of(nodes_by_depth), outputs
    finally:
        for after, before in nodes:
            after[:] = before


def operation_name(layer: AnyLayer) -> str | None:
    """The last part of the name of the TensorFlow function that a layer stands for, if any."""
    if not isinstance(layer, tf_op_layer.TFOpLambda):
        return None
    return str(layer.symbol or layer.name).rpartition(".")[2]


def own_weights(layer: Any) -> list[Any]:
    return [*layer._trainable_weights, *layer._non_trainable_weights]


def track(layer: Any, inner: Any) -> None:
    layer._maybe_create_attribute("_self_tracked_trackables", [])
    if not any(one is inner for one in layer._self_tracked_trackables):
        layer._self_tracked_trackables.append(inner)


def rename(layer: Any, name: str) -> None:
    layer._name = name


def takes(layer: Any, argument: str) -> bool:
    return bool(getattr(layer._call_spec, f"expects_{argument}_arg"))


def known_to_tfmot(layer: Any) -> contextlib.AbstractContextManager[None]:
    """Lets TFMOT's wrapper accept any layer; the method must not stay, see `strip_pruning`."""
    if not isinstance(
        layer, tf_keras.layers.Layer
    ) or "get_prunable_weights" in vars(layer):
        return contextlib.nullcontext()
    return replaced(layer, "get_prunable_weights", list)


def in_strip_pruning() -> bool:
    """Whether TFMOT's `strip_pruning` asks for the attribute of a wrapper.

    Read from the stack: it takes the attribute, and calls nothing of the wrapper.
    """
    frame = sys._getframe(2)
    return frame.f_code.co_name == "_strip_pruning_wrapper"


def forget_calls(layer: Any) -> None:
    """Keeps SavedModel from tracing sublayers separately, with variables, not effective weights."""
    for inner in layer._flatten_layers():
        inner._saved_model_inputs_spec = None
        inner._saved_model_arg_spec = None


@contextlib.contextmanager
def attribute_overrides(
    overrides: Iterable[tuple[Any, str, Any]],
) -> Iterator[None]:
    """Replaces attributes that hold variables by tensors: `(owner, attribute, tensor)` triples."""
    overrides = list(overrides)
    with contextlib.ExitStack() as stack:
        for override in overrides:
            stack.enter_context(replaced(*override))
        yield
        for owner, name, tensor in overrides:
            if vars(owner)[name] is not tensor:
                raise RuntimeError(
                    f"Another replica of MirroredStrategy replaced the weight {name!r} while the "
                    "layer ran, as happens with BatchNormalization. Wrap the layers inside one by "
                    f"one. Received: the layer {owner.name!r}, a {type(owner).__name__}"
                )


def zero_slots(optimizer: Any, variable: Any, entries: np.ndarray) -> None:
    """Resets the optimizer slots of some entries of a weight."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if hasattr(optimizer, "get_slot_names"):  # legacy
        slots = {
            name: optimizer.get_slot(variable, name)
            for name in optimizer.get_slot_names()
        }
    else:
        index = getattr(optimizer, "_index_dict", {})
        place: Any = index.get(optimizer._var_key(variable)) if index else None
        slots = {
            name: value[place]
            for name, value in (
                () if place is None else vars(optimizer).items()
            )
            if isinstance(value, list)
            and len(value) == len(index)
            and name != "_variables"
        }
    for name, slot in slots.items():
        if (
            isinstance(slot, tf.Variable)
            and slot is not variable
            and slot.shape == variable.shape
        ):
            # Adagrad's accumulators do not start from 0.
            start = getattr(optimizer, "initial_accumulator_value", 0.0)
            start = start if "accumulator" in name else 0.0
            slot.assign(tf.where(entries, tf.cast(start, slot.dtype), slot))


_preserving: Any = collab_opts.prune_preserve.prune_preserve_quantize_registry


class _KeepsDepthwiseZeros(
    _preserving.Default8bitPrunePreserveQuantizeRegistry
):
    _DISABLE_PRUNE_PRESERVE: ClassVar[frozenset[Any]] = frozenset()
    _LAYERS_CONFIG_MAP: ClassVar[dict[Any, Any]] = {
        **_preserving.Default8bitPrunePreserveQuantizeRegistry._LAYERS_CONFIG_MAP,
        tf_keras.layers.DepthwiseConv2D: _preserving._PrunePreserveInfo(
            ["depthwise_kernel"], ["Default8BitConvQuantizeConfig"]
        ),
    }


_Scheme: Any = tfmot.experimental.combine.Default8BitPrunePreserveQuantizeScheme


class PrunePreserveQuantizeScheme(_Scheme):
    """TFMOT's prune-preserving scheme, extended to DepthwiseConv2D.

    TFMOT's `Default8BitPrunePreserveQuantizeScheme` does not preserve zeros there, as TFMOT does
    not prune these layers. This scheme also multiplies their kernel by the mask of its nonzeros
    before it is quantized.

    Limits: TFMOT does not quantize a layer directly followed by a ReLU layer: give the layer
    `activation="relu"`, or put a BatchNormalization between.

    Examples:
        >>> import keras_sparse_ortho as kso
        >>> tf_keras = kso.tfmot.register_initializers()
        >>> import tensorflow_model_optimization as tfmot
        >>> layer = tf_keras.layers.DepthwiseConv2D(3, name="depth")
        >>> plain = tf_keras.Sequential([tf_keras.Input((8, 8, 4)), layer])
        >>> annotated = tfmot.quantization.keras.quantize_annotate_model(plain)
        >>> scheme = kso.tfmot.PrunePreserveQuantizeScheme()
        >>> tfmot.quantization.keras.quantize_apply(annotated, scheme).layers[-1].name
        'quant_depth'
    """

    def get_quantize_registry(self) -> Any:
        return _KeepsDepthwiseZeros()
