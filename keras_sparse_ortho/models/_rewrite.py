"""Replacing layers in a whole model, or leaving it as it was."""

from collections.abc import Callable, Iterable
from typing import Any

import keras

from keras_sparse_ortho._keras_internals import (
    Snapshot,
    become,
    copy_objects,
    is_graph,
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
    in_copy: bool | None = None,
) -> Any:
    """Replaces layers of a model, those of nested models and inside other layers included.

    A layer *becomes* its replacement, in a copy of functional and Sequential models (`in_copy`),
    and in subclassed models themselves. If anything fails, the model is as it was.

    `replace` is asked for every layer that is neither a model nor wrapped, inner layers first. It
    returns a built layer to put there, or `None`, given the layer of `model`, its path, and the one
    in its place in the model that is changed. `complete` makes the model to hand out of the new
    one, or raises if that is not as planned. Copies of variables `without_values` are set later.
    """
    if in_copy is None:
        in_copy = isinstance(model, keras.Sequential) or (
            isinstance(model, keras.Model) and is_graph(model)
        )
    before = None if in_copy else Snapshot(model)
    target, copies = copy_objects(model, without_values) if in_copy else (model, {})
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
