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

Replace = Callable[[Any, str, Any], Any]
"""`(layer, path, own) -> new layer or None`; see `rewrite`."""

Complete = Callable[[Any], Any]
"""From the new model to the one to hand out, or an error if it is not what it was to be."""


def rewrite(
    model: Any,
    replace: Replace,
    complete: Complete = lambda rewritten: rewritten,
    without_values: Iterable[Any] = (),
    in_copy: bool | None = None,
) -> Any:
    """Replaces layers of a model, those of nested models and inside other layers included.

    A layer *becomes* its replacement: it stays the same object, so that all that holds it (graphs,
    lists, attributes, functions, other layers) holds the replacement. This happens in a copy of
    functional and Sequential models, and in subclassed models themselves, which are returned. If
    anything fails, the given model is as it was.

    Args:
        model: A built model.
        replace: Asked for every layer that is neither a model nor wrapped, inner layers first:
            given the layer of `model`, its path, and the layer in its place in the model that is
            changed (the same one where that is `model`), returns a built layer to put there, or
            `None`.
        complete: See `Complete`.
        without_values: Variables whose copies get no value, as their layers are replaced by ones
            that are given other values. In models that are not copied they keep theirs.
        in_copy: Whether the model is copied. Default: functional and Sequential ones are.
    """
    copied = in_copy
    if copied is None:
        copied = isinstance(model, keras.Model) and (
            isinstance(model, keras.Sequential) or is_graph(model)
        )
    before = None if copied else Snapshot(model)
    target, copies = copy_objects(model, without_values) if copied else (model, {})
    try:
        layers = list(walk(model, ""))
        wrapped = {id(layer.layer) for layer, _ in layers if isinstance(layer, PrunableLayer)}
        for layer, path in reversed(layers):
            own = copies.get(id(layer), layer)
            if id(layer) in wrapped:
                continue
            if isinstance(layer, keras.Model):
                _forget_compiled(own)
            elif (new := replace(layer, path, own)) is not None:
                become(own, new)
        save_with_layers(target)
        completed = complete(target)
    except BaseException:
        if before is not None:
            before.restore()
        _track_anew(model)
        raise
    _track_anew(completed)
    return completed


def _forget_compiled(model: Any) -> None:
    for name in ("train_function", "test_function", "predict_function"):
        if getattr(model, name, None) is not None:
            setattr(model, name, None)  # compiled with the layers that were there before


def _track_anew(model: Any) -> None:
    track_parameters_anew([layer for layer, _ in walk(model, "")])
