"""Replaces layers of a model, or leaves the model as it was."""

from collections.abc import Callable, Iterable
from typing import Any

import keras

from keras_sparse_ortho._keras_internals import (
    Snapshot,
    become,
    copy_objects,
    own_variables,
    sublayers,
    track_parameters_anew,
)
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.kernels import PrunableWeight, find_kernels, walk
from keras_sparse_ortho.layers import PrunableLayer
from keras_sparse_ortho.models._saved_layers import save_with_layers

# They read or assign the weights of layers inside them, not only call these.
_READING_INSIDE = (keras.layers.RNN, keras.layers.SpectralNormalization)


def places_to_wrap(model: Any, weights: list[PrunableWeight]) -> dict[int, dict[str, str]]:
    """Which layers to wrap: by `id`, the paths of their weights by the names below the layer."""
    # A weight is wrapped with its owner; where a layer reads weights inside another (a recurrent
    # layer those of its cell), or several hold the variable, with the one that holds them all.
    places: dict[int, dict[str, str]] = {}
    names: dict[int, dict[int, str]] = {}
    layers = [layer for layer, _ in walk(model, "")]
    owners: dict[int, list[Any]] = {}
    readers: dict[int, Any] = {}  # the outermost one around each layer, as `walk` comes from above
    for layer in layers:
        for variable in own_variables(layer):
            owners.setdefault(id(variable), []).append(layer)
        if isinstance(layer, _READING_INSIDE):
            for inner, _ in walk(layer, ""):
                readers.setdefault(id(inner), layer)
    for weight in weights:
        held_by = owners.get(id(weight.variable)) or [weight.owner]
        layer, reader = held_by[0], readers.get(id(held_by[0]))
        if reader is not None or len(held_by) > 1:
            layer = _holding_all(model, layers if reader is None else [reader], held_by)
        if layer is None or isinstance(layer, keras.Model):
            raise NotPrunableError(
                f"The variable of the weight '{weight.path}' is used by several layers, and no "
                "layer holds all of them, or by a model itself, so that a mask would not be "
                "applied everywhere. Hand the layer that owns it to the others instead of its "
                f"variable, or `exclude` it. Received: {[one.name for one in held_by]}"
            )
        if id(layer) not in names:
            kernels = find_kernels(layer, "", unregistered=True)
            names[id(layer)] = {id(w.variable): w.path for w in kernels}
        places.setdefault(id(layer), {})[names[id(layer)][id(weight.variable)]] = weight.path
    paths = [weight.path for weight in weights]
    if sum(map(len, places.values())) != len(set(paths)) or len(set(paths)) != len(paths):
        raise NotPrunableError(
            "Two weights have the same path; give their layers different names. "
            f"Received: {sorted({path for path in paths if paths.count(path) > 1})}"
        )
    return places


def _holding_all(model: Any, layers: list[Any], owners: list[Any]) -> Any:
    """The innermost layer, no model, through which every way to some layers leads, or `None`."""
    wanted = {id(owner) for owner in owners}
    for layer in reversed(layers):
        if isinstance(layer, keras.Model) or not wanted <= {id(at) for at, _ in walk(layer, "")}:
            continue
        seen, waiting = {id(layer)}, [model]
        while waiting:
            here = waiting.pop()
            if id(here) not in seen:
                seen.add(id(here))
                waiting += sublayers(here)
        if wanted.isdisjoint(seen - {id(layer)}):
            return layer
    return None


Replace = Callable[[Any, str, Any], Any]  # (layer, path, own) -> new layer or None


def rewrite(
    model: Any,
    replace: Replace,
    complete: Callable[[Any], Any] = lambda rewritten: rewritten,
    without_values: Iterable[Any] = (),
    in_place: bool = False,
) -> Any:
    """Replaces layers in a copy of a model (or `in_place`), also in nested models and other layers.

    `replace(layer, path, own)` is called for every layer that is neither a model nor wrapped, inner
    layers first: with the layer of `model`, its path, and the same layer in the copy. It returns a
    built layer for that place, or `None`. `complete` turns the copy into the result. Copies of the
    variables `without_values` are set later. If anything fails, the given model is as it was.
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
        raise
    track_parameters_anew(completed)
    return completed
