"""Functional models as graphs of calls."""

import dataclasses
from typing import Any

import keras

from keras_sparse_ortho._keras_internals._graphs import graph_of, is_graph


def graph_ends(model: keras.Model) -> tuple[Any, Any]:
    """Inputs and outputs of a model that `is_graph`, nested as it takes and gives them."""
    graph = graph_of(model)  # `input` of a Sequential model is that of its first call, if any
    return graph.input, graph.output


def computes_its_graph(model: keras.Model) -> bool:
    """Whether a model is a graph and its class comes from Keras, so that `call` runs the graph."""
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
    nodes = graph_of(model)._nodes_by_depth
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
