"""Replacing layers in a whole model, or leaving it as it was."""

from collections.abc import Callable, Iterable
from typing import Any

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

Replace = Callable[[Any, str, Any], Any]  # (layer, path, own) -> new layer or None


def rewrite(
    model: Any,
    replace: Replace,
    complete: Callable[[Any], Any] = lambda rewritten: rewritten,
    without_values: Iterable[Any] = (),
    in_place: bool = False,
) -> Any:
    """Replaces layers in a copy of a model, also those of nested models and inside other layers.

    A layer *becomes* its replacement. If anything fails, the given model is as it was. With
    `in_place` the model itself is changed and returned.

    `replace(layer, path, own)` is called for every layer that is neither a model nor wrapped, inner
    layers first: with the layer of `model`, its path, and the same layer in the copy. It returns a
    built layer for that place, or `None`. `complete` turns the copy into the result, or raises if
    the copy is not as planned. Copies of the variables `without_values` are set later.
    """
    before = Snapshot(model) if in_place else None
    target, copies = (model, {}) if in_place else copy_objects(model, without_values)
    try:
        layers = list(walk(model, ""))
        wrapped = {id(layer.layer) for layer, _ in layers if isinstance(layer, PrunableLayer)}
        for layer, path in reversed(layers):
            own = copies.get(id(layer), layer)
            if id(layer) in wrapped:
                continue
            if isinstance(layer, keras.Model):
                for name in ("train_function", "test_function", "predict_function"):
                    if getattr(own, name, None) is not None:
                        setattr(own, name, None)  # compiled with the layers that were there before
            elif (new := replace(layer, path, own)) is not None:
                become(own, new)
        save_with_layers(target)
        completed = complete(target)
    except BaseException:
        if before is not None:
            before.restore()
            track_parameters_anew(model)
        raise
    track_parameters_anew(completed)
    return completed
