"""What kind of model it is: who knows its structure, and what makes it."""

from typing import Any

import keras

from keras_sparse_ortho._keras_internals import Functional, is_graph


def is_clonable(model: Any) -> bool:
    """Whether a model is a functional or Sequential one of no class of its own."""
    return type(model) in (Functional, keras.Sequential)


def is_graph_of_class(model: Any) -> bool:
    """Whether a model is functional or Sequential, and of a class derived from these."""
    return isinstance(model, keras.Model) and is_graph(model) and not is_clonable(model)


def is_made_from_layers(model: Any) -> bool:
    """Whether a graph is made again from the layers in its configuration, whatever its class.

    Else its constructor makes them, and the configuration has the arguments of that.
    """
    if isinstance(model, keras.Sequential):
        kind: Any = class_of(model)
        return kind.from_config.__func__ is keras.Sequential.from_config.__func__
    config = model.plain_config() if hasattr(model, "plain_config") else model.get_config()
    return {"layers", "input_layers", "output_layers"} <= set(config)


def lists_its_layers(layer: Any) -> bool:
    """Whether the configuration of a layer or model has those of the layers inside it."""
    if isinstance(layer, keras.layers.Wrapper | keras.layers.RNN):
        return True
    return is_clonable(layer) or (is_graph_of_class(layer) and is_made_from_layers(layer))


def class_of(layer: Any) -> type:
    """The class of a layer or model as it was written, not one derived from it to save it."""
    kind: type = getattr(type(layer), "saved_as", type(layer))
    return kind
