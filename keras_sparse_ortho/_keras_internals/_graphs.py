"""The layers and variables that a layer holds, and whether a model is a graph of calls."""

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
    """The variables that the layer itself created as trainable, frozen now or not."""
    return list(layer._trainable_variables)


def graph_of(model: keras.Model) -> Any:
    # A Sequential model that knows its input holds a functional one.
    inner = model._functional if isinstance(model, keras.Sequential) else model
    return inner if hasattr(inner, "_nodes_by_depth") else None


def is_graph(model: keras.Model) -> bool:
    """Whether a model is a graph of calls: functional, or Sequential with a known input."""
    return graph_of(model) is not None
