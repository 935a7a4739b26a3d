"""Replaces layers of a model, or leaves the model as it was."""

from collections.abc import Callable, Iterable
from typing import TypeAlias

import keras

from keras_sparse_ortho._keras_internals import (
    Snapshot,
    become,
    copy_objects,
    track_parameters_anew,
)
from keras_sparse_ortho.kernels import walk
from keras_sparse_ortho.layers import PrunableLayer
from keras_sparse_ortho.models._saved_layers import save_with_layers

Layer: TypeAlias = keras.layers.Layer

Replace = Callable[[Layer, str, Layer], Layer | None]
"""`(layer, path, layer_copy)` -> the built layer for that place, or `None`."""

_COMPILED_FUNCTIONS = ("train_function", "test_function", "predict_function")


def rewrite(
    model: Layer,
    replace: Replace,
    complete: Callable[[Layer], Layer] = lambda rewritten: rewritten,
    without_values: Iterable[keras.Variable] = (),
    in_place: bool = False,
) -> Layer:
    """Replaces layers in a copy of a model, also in nested models and other layers.

    If anything fails, the given model is as it was.

    Args:
        model: Model.
        replace: callable for every layer that is neither a model nor wrapped, inner layers first:
            with the layer of `model`, its path, and the same layer in the copy.
        complete: callable that turns the copy into the result.
        without_values: Variables whose copies are set later.
        in_place: bool. Changes the model itself.
    """
    snapshot = Snapshot(model) if in_place else None
    target, copies = (
        (model, {}) if in_place else copy_objects(model, without_values)
    )
    is_complete = False
    try:
        _replace_layers(model, replace, copies)
        save_with_layers(target)
        result = complete(target)
        is_complete = True
    finally:
        if snapshot is not None and not is_complete:
            snapshot.restore()
    track_parameters_anew(result)
    return result


def _replace_layers(
    model: Layer, replace: Replace, copies: dict[int, Layer]
) -> None:
    layers = list(walk(model, ""))
    wrapped_ids = {
        id(layer.layer)
        for layer, _ in layers
        if isinstance(layer, PrunableLayer)
    }
    for layer, path in reversed(layers):
        if id(layer) in wrapped_ids:
            continue
        layer_copy = copies.get(id(layer), layer)
        if isinstance(layer, keras.Model):
            _forget_compiled_functions(layer_copy)
            continue
        new_layer = replace(layer, path, layer_copy)
        if new_layer is not None:
            become(layer_copy, new_layer)


def _forget_compiled_functions(model: keras.Model) -> None:
    """Functions that were compiled with the layers that were there before."""
    for name in _COMPILED_FUNCTIONS:
        if getattr(model, name, None) is not None:
            setattr(model, name, None)
