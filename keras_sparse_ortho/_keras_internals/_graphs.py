"""The layers and variables that a layer holds, and functional models as graphs of calls."""

import dataclasses
from typing import Any

import keras
from keras.src.layers.rnn.conv_lstm import ConvLSTMCell as ConvLSTMCell


def sublayers(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    """The layers that `layer` itself holds, in the order of their creation.

    A functional model may hold others in attributes than those in its graph; they come last.
    """
    held = list(layer._flatten_layers(include_self=False, recursive=False))
    if not isinstance(layer, keras.Model):
        return held
    graph = {id(inner): inner for inner in layer.layers}
    return [*graph.values(), *(inner for inner in held if id(inner) not in graph)]


def own_variables(layer: keras.layers.Layer) -> list[Any]:
    """The variables that a layer itself tracks, without those of the layers that it holds."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def created_trainable(layer: keras.layers.Layer) -> list[Any]:
    """The variables of its own that a layer has made to be trained, frozen now or not."""
    return list(layer._trainable_variables)


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
    return is_graph(model) and type(model).call.__module__.partition(".")[0] == "keras"


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


def leave_graphs(layer: keras.layers.Layer) -> None:
    """Lets a layer forget where it has been called, so that it can stand in another model."""
    layer._inbound_nodes.clear()
    layer._outbound_nodes.clear()


def maps_one_tensor(layer: keras.layers.Layer) -> bool:
    """Whether all symbolic calls of a layer are with a single tensor that has no mask."""
    calls = [node.input_tensors for node in layer._inbound_nodes]
    return all(
        len(tensors) == 1 and getattr(tensors[0], "_keras_mask", None) is None for tensors in calls
    )
