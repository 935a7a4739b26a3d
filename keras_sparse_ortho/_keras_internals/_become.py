"""A layer that becomes another one: the same object, wherever it stands."""

import types
from typing import Any

import keras

from keras_sparse_ortho._keras_internals._object_copy import contents, with_cells

# A layer's place in graphs of calls.
_PLACE = ("_inbound_nodes", "_outbound_nodes")


def body_of(layer: keras.layers.Layer) -> Any:
    """The layer in another object, to stand inside the layer that the first one becomes.

    Both share all variables and layers: use the second once the first has become another layer.
    """
    body = object.__new__(type(layer))
    vars(body).update({**vars(layer), **{name: [] for name in _PLACE}})
    _rebind(body, layer)
    return body


def become(layer: keras.layers.Layer, other: keras.layers.Layer) -> None:
    """Gives a layer the class and the state of another one, which is not to be used any more.

    Graphs, lists, attributes and functions that hold the layer hold the new one then.
    """
    place = {name: vars(layer)[name] for name in _PLACE if name in vars(layer)}
    layer.__class__ = type(other)
    # Not by setattr, with which Keras and its backends look at what is set.
    vars(layer).clear()
    vars(layer).update({**vars(other), **place})
    _rebind(layer, other)


def track_parameters_anew(model: Any) -> None:
    """Gives a model and its layers their torch parameters, as Keras does when a layer is built."""
    if keras.backend.backend() != "torch":
        return
    for layer in model._flatten_layers():
        for owner in (layer, getattr(layer, "_functional", None)):
            if owner is not None:
                owner._track_variables()


def _rebind(layer: Any, old: Any) -> None:
    """Binds what Keras puts into every layer, such as its `build`, to another object."""

    def bound(value: Any) -> Any:
        if isinstance(value, types.MethodType) and value.__self__ is old:
            return types.MethodType(value.__func__, layer)
        return layer if value is old else value

    for name, value in list(vars(layer).items()):
        if isinstance(value, types.FunctionType) and value.__closure__:
            cells = [types.CellType(*map(bound, contents(cell))) for cell in value.__closure__]
            vars(layer)[name] = with_cells(value, cells)
