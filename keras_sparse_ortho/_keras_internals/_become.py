"""Layers that become others: the same object with another class and state."""

import types

import keras

from keras_sparse_ortho._interception import stand_in
from keras_sparse_ortho._keras_internals._object_graph import (
    contents,
    with_cells,
)

# A layer's place in graphs of calls.
_PLACE = ("_inbound_nodes", "_outbound_nodes")


def body_of(layer: keras.layers.Layer) -> keras.layers.Layer:
    """Puts a layer into a new object, to stand inside the layer that the first one becomes.

    They share variables and layers: use the new one once the first has become another layer.
    """
    body = stand_in(layer, **{name: [] for name in _PLACE})
    _rebind(body, layer)
    return body


def become(layer: keras.layers.Layer, other: keras.layers.Layer) -> None:
    """Gives a layer, wherever it is held, the class and state of another; drop that one."""
    # Bypass `__setattr__`: Keras would track the value.
    attributes = vars(layer)
    place = {name: attributes[name] for name in _PLACE if name in attributes}
    layer.__class__ = type(other)
    attributes.clear()
    attributes.update(vars(other))
    attributes.update(place)
    _rebind(layer, other)


def track_parameters_anew(model: keras.layers.Layer) -> None:
    """Gives a model and its layers their torch parameters, as Keras does when a layer is built."""
    if keras.backend.backend() != "torch":
        return
    for layer in model._flatten_layers():
        layer._track_variables()
        graph = getattr(layer, "_functional", None)
        if graph is not None:
            graph._track_variables()


def _rebind(layer: keras.layers.Layer, old: keras.layers.Layer) -> None:
    """Binds the functions that Keras puts into every layer, such as `build`, to another object."""

    def bound(value: object) -> object:
        if isinstance(value, types.MethodType) and value.__self__ is old:
            return types.MethodType(value.__func__, layer)
        if value is old:
            return layer
        return value

    attributes = vars(layer)
    for name, value in list(attributes.items()):
        if not isinstance(value, types.FunctionType):
            continue
        cells = []
        for cell in value.__closure__ or ():
            items = [bound(item) for item in contents(cell)]
            cells.append(types.CellType(*items))
        if cells:
            attributes[name] = with_cells(value, cells)
