"""What kind of model it is: who knows its structure, and what makes it."""

from typing import Any

import keras

from keras_sparse_ortho._keras_internals import Functional, is_graph


def is_clonable(model: Any) -> bool:
    """Whether Keras knows the structure of a model: Sequential and functional ones."""
    # A subclass has a constructor of its own, which a clone would not call.
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


def class_of(model: Any) -> type:
    """The class of a model as it was written, not one derived from it to save the model."""
    kind: type = getattr(type(model), "rebuilt_from", type(model))
    return kind
