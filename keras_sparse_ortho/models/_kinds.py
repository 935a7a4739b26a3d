"""What kind of model it is: who knows its structure, and what makes it."""

from typing import Any

import keras

from keras_sparse_ortho._keras_internals import is_graph


def is_clonable(model: Any) -> bool:
    """Whether Keras knows the structure of a model: Sequential and functional ones."""
    # keras.Model(inputs, outputs) makes a Functional, which Keras does not export. A subclass of
    # it has a constructor of its own, which a clone would not call.
    return isinstance(model, keras.Model) and type(model).__name__ in ("Functional", "Sequential")


def is_graph_of_class(model: Any) -> bool:
    """Whether a model is functional, and of a class whose constructor makes the graph."""
    plain = isinstance(model, keras.Sequential) or type(model).__name__ == "Functional"
    return isinstance(model, keras.Model) and is_graph(model) and not plain


def class_of(model: Any) -> type:
    """The class of a model as it was written, not one derived from it to save the model."""
    kind: type = getattr(type(model), "rebuilt_from", type(model))
    return kind
