"""Every private Keras name that the package uses, in one place.

Tested against the oldest and the newest Keras that pyproject.toml allows (`make test-oldest`).
Private are: `Layer._call_signature` and its kin, `_maybe_build`, `_open_name_scope`,
`_flatten_layers`, `_tracker`, `Variable._direct_assign`, `StatelessScope.original_scope`, the
predicates `in_stateless_scope` and `in_symbolic_scope` with `get_stateless_scope`, the list of
variables that Keras has yet to initialize, `Variable._value`, `_initializer` and `_initialize`, the
lists of a layer's variables, the class of ConvLSTM's cell, `Trainer._compile_loss` and
`_compile_config`, the lists in which optimizers keep their slots, with
`Optimizer._get_variable_index`, `Optimizer._iterations`, `Function._nodes_by_depth` and
`Layer._inbound_nodes` with the nodes, `_keras_mask`, `Sequential._functional`, and the table
`BIT64_TO_BIT32_DTYPE` of the rules for types; `Layer._layers`, `_auto_config`, `_dtype_policy` and
`_trainable`, `Lambda._output_shape`, the mark `_is_default` of methods that are not overridden,
`compute_output_spec` of the backend, and the classes `Functional` and `Tracker`;
`Trainer._initial_epoch`;
`Variable._layout`, `ModelParallel._layout_map` and `Layer._parent_path`.
"""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import keras
from keras.src.backend.common import dtypes
from keras.src.backend.common.stateless_scope import get_stateless_scope, in_stateless_scope
from keras.src.layers.rnn.conv_lstm import ConvLSTMCell

from keras_sparse_ortho._keras_internals._building import (
    WrapperBuiltByCalls as WrapperBuiltByCalls,
)
from keras_sparse_ortho._keras_internals._compiling import compile_like as compile_like
from keras_sparse_ortho._keras_internals._compiling import (
    track_parameters_anew as track_parameters_anew,
)
from keras_sparse_ortho._keras_internals._fit import after_fit as after_fit
from keras_sparse_ortho._keras_internals._fit import before_save as before_save
from keras_sparse_ortho._keras_internals._fit import in_fit as in_fit
from keras_sparse_ortho._keras_internals._fit import initial_epoch_is as initial_epoch_is
from keras_sparse_ortho._keras_internals._fit import length_of_data as length_of_data
from keras_sparse_ortho._keras_internals._graph_classes import Functional as Functional
from keras_sparse_ortho._keras_internals._graph_classes import instance_like as instance_like
from keras_sparse_ortho._keras_internals._graph_classes import (
    layers_in_attributes as layers_in_attributes,
)
from keras_sparse_ortho._keras_internals._graph_classes import (
    tensors_in_attributes as tensors_in_attributes,
)
from keras_sparse_ortho._keras_internals._layouts import Axes as Axes
from keras_sparse_ortho._keras_internals._layouts import along_kernel as along_kernel
from keras_sparse_ortho._keras_internals._layouts import axes_at as axes_at
from keras_sparse_ortho._keras_internals._layouts import axes_of as axes_of
from keras_sparse_ortho._keras_internals._layouts import create_along as create_along
from keras_sparse_ortho._keras_internals._layouts import layout_entries as layout_entries
from keras_sparse_ortho._keras_internals._layouts import layout_of as layout_of
from keras_sparse_ortho._keras_internals._layouts import mesh_size as mesh_size
from keras_sparse_ortho._keras_internals._layouts import stand_in_name_scope as stand_in_name_scope
from keras_sparse_ortho._keras_internals._optimizers import applied_batches as applied_batches
from keras_sparse_ortho._keras_internals._optimizers import (
    counter_of_batches as counter_of_batches,
)
from keras_sparse_ortho._keras_internals._optimizers import optimizer_slots as optimizer_slots
from keras_sparse_ortho._keras_internals._optimizers import refuse_other_slots as refuse_other_slots
from keras_sparse_ortho._keras_internals._optimizers import slot_pairs as slot_pairs
from keras_sparse_ortho._keras_internals._snapshot import Snapshot as Snapshot
from keras_sparse_ortho._keras_internals._stand_ins import DeferredVariables as DeferredVariables
from keras_sparse_ortho._keras_internals._stand_ins import StandIns as StandIns
from keras_sparse_ortho._keras_internals._stand_ins import awaits_value as awaits_value
from keras_sparse_ortho._keras_internals._stand_ins import give_value as give_value
from keras_sparse_ortho._keras_internals._stand_ins import saves_by_itself as saves_by_itself
from keras_sparse_ortho._keras_internals._stand_ins import value_in_scope as value_in_scope
from keras_sparse_ortho._keras_internals._stand_ins import value_source as value_source
from keras_sparse_ortho._keras_internals._sublayers import copy_of_lambda as copy_of_lambda
from keras_sparse_ortho._keras_internals._sublayers import created_trainable as created_trainable
from keras_sparse_ortho._keras_internals._sublayers import own_variables as own_variables
from keras_sparse_ortho._keras_internals._sublayers import replace_sublayers as replace_sublayers
from keras_sparse_ortho._keras_internals._sublayers import sublayers as sublayers

__all__ = [
    "Axes",
    "ConvLSTMCell",
    "DeferredVariables",
    "Functional",
    "GraphCall",
    "Snapshot",
    "StandIns",
    "VariableOverrides",
    "WrapperBuiltByCalls",
    "adopt_call_interface",
    "after_fit",
    "along_kernel",
    "applied_batches",
    "awaits_value",
    "axes_at",
    "axes_of",
    "before_save",
    "compile_like",
    "compiled_loss_waits",
    "computes_its_graph",
    "copy_of_lambda",
    "counter_of_batches",
    "create_along",
    "created_trainable",
    "float64_not_narrowed",
    "give_value",
    "graph_calls",
    "graph_ends",
    "in_fit",
    "in_stateless_scope",
    "initial_epoch_is",
    "instance_like",
    "is_graph",
    "is_overridden",
    "layers_in_attributes",
    "layout_entries",
    "layout_of",
    "length_of_data",
    "maps_one_tensor",
    "mesh_size",
    "optimizer_slots",
    "own_variables",
    "refuse_other_slots",
    "replace_sublayers",
    "saves_by_itself",
    "slot_pairs",
    "stand_in_name_scope",
    "sublayers",
    "tensors_in_attributes",
    "track_parameters_anew",
    "value_in_scope",
    "value_source",
]

_CALL_INTERFACE = (
    "_call_signature",
    "call_signature_parameters",
    "_call_has_training_arg",
    "_call_has_mask_arg",
    "_call_has_context_arg",
    "supports_masking",
)


class VariableOverrides(keras.StatelessScope):
    """Answers for some variables with given tensors, and passes the rest to the enclosing scope.

    Inside, `variable.value` of an overridden variable is its tensor; every other variable has the
    value, and takes the updates (moving averages, seed states), that it would outside. Losses that
    layers add go to the enclosing scope, or are collected in `losses` where there is none.

    Args:
        pairs: `(variable, tensor)` pairs.

    Raises:
        RuntimeError: An assignment to an overridden variable inside the scope.
    """

    def __init__(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        super().__init__()
        # Not through StatelessScope's mapping: that one forgets what it does not hold.
        self._overrides = {id(variable): tensor for variable, tensor in pairs}
        self.parent: keras.StatelessScope | None = None

    def __enter__(self) -> "VariableOverrides":
        super().__enter__()
        self.parent = self.original_scope
        self.collect_losses = self.parent is None or self.parent.collect_losses
        return self

    def get_current_value(self, variable: Any) -> Any:
        if id(variable) in self._overrides:
            return self._overrides[id(variable)]
        return None if self.parent is None else self.parent.get_current_value(variable)

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        if id(variable) in self._overrides:
            raise RuntimeError(
                f"The weight {variable.path} is parametrized, and its layer assigned to it during "
                "the call. Such layers cannot be wrapped."
            )
        if self.parent is None:
            variable._direct_assign(value)
        else:
            self.parent.add_update(update)

    def add_loss(self, loss: Any) -> None:
        if self.parent is None:
            self.losses.append(loss)
        else:
            self.parent.add_loss(loss)


def is_overridden(variable: Any) -> bool:
    """Whether `VariableOverrides` answer for a variable now."""
    scope: Any = get_stateless_scope()
    while isinstance(scope, VariableOverrides):
        if id(variable) in scope._overrides:
            return True
        scope = scope.parent
    return False


def adopt_call_interface(wrapper: keras.layers.Layer, layer: keras.layers.Layer) -> None:
    """Makes Keras pass `wrapper` the call arguments (training, mask, ...) that `layer` takes."""
    for name in _CALL_INTERFACE:
        if hasattr(layer, name):
            setattr(wrapper, name, getattr(layer, name))


def _graph(model: keras.Model) -> Any:
    # A Sequential model that knows its input holds a functional one.
    inner = model._functional if isinstance(model, keras.Sequential) else model
    return inner if hasattr(inner, "_nodes_by_depth") else None


def is_graph(model: keras.Model) -> bool:
    """Whether a model is a graph of calls: functional, or Sequential with a known input."""
    return _graph(model) is not None


def graph_ends(model: keras.Model) -> tuple[Any, Any]:
    """Inputs and outputs of a model that `is_graph`, nested as it takes and gives them."""
    graph = _graph(model)  # `input` of a Sequential model is that of its first call, if any
    return graph.input, graph.output


def computes_its_graph(model: keras.Model) -> bool:
    """Whether a model is a graph, and no class of its own computes something else with it."""
    plain = keras.Sequential.call if isinstance(model, keras.Sequential) else Functional.call
    return is_graph(model) and type(model).call is plain


@dataclasses.dataclass(frozen=True)
class GraphCall:
    """A call in a graph: layer or operation, tensors, and the other arguments that were given."""

    operation: Any
    inputs: list[Any]
    outputs: list[Any]
    settings: list[Any]


def graph_calls(model: keras.Model) -> list[GraphCall]:
    """The calls of a model that `is_graph`, each after those that it depends on."""
    nodes = _graph(model)._nodes_by_depth
    return [
        GraphCall(
            node.operation,
            list(node.input_tensors),
            list(node.output_tensors),
            [*node.arguments.args[1:], *node.arguments.kwargs.values()],
        )
        for depth in sorted(nodes, reverse=True)
        for node in nodes[depth]
    ]


def maps_one_tensor(layer: keras.layers.Layer) -> bool:
    """Whether all symbolic calls of a layer are with a single tensor that has no mask."""
    calls = [node.input_tensors for node in layer._inbound_nodes]
    return all(
        len(tensors) == 1 and getattr(tensors[0], "_keras_mask", None) is None for tensors in calls
    )


def compiled_loss_waits(model: Any) -> bool:
    """Whether the loss of `compile` makes its variables only at its first call, yet to come."""
    loss = getattr(model, "_compile_loss", None)
    return loss is not None and not loss.built


@contextlib.contextmanager
def float64_not_narrowed() -> Iterator[None]:
    """Keeps Keras from casting float64 arguments of its operations to float32."""
    narrowed = dtypes.BIT64_TO_BIT32_DTYPE["float64"]
    dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"
    try:
        yield
    finally:
        dtypes.BIT64_TO_BIT32_DTYPE["float64"] = narrowed
