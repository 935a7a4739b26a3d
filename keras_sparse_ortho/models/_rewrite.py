"""`prunable_weights`, and replacing the layers that hold them, or leaving the model as it was."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import keras

from keras_sparse_ortho._checks import other_keywords
from keras_sparse_ortho._keras_internals import (
    Snapshot,
    become,
    copy_objects,
    own_variables,
    sublayers,
    track_parameters_anew,
)
from keras_sparse_ortho._values import check_layouts
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.kernels import PrunableWeight, find_kernels, kernel_layouts, walk
from keras_sparse_ortho.layers import PrunableLayer
from keras_sparse_ortho.models._flops import count_flops
from keras_sparse_ortho.models._saved_layers import save_with_layers


@other_keywords
def prunable_weights(
    model: keras.layers.Layer,
    *,
    flops: bool = False,
    sample: Any = None,
    unregistered: bool = False,
) -> list[PrunableWeight]:
    """Lists the kernels of a model with path, shape and density, and FLOPs if asked for.

    For weight `k`, `density_k = live_k / size_k`, where `live_k` counts the mask of a wrapped
    weight, and the nonzero entries of a plain one. Biases and normalization weights are not listed;
    `initializers.kernel_layouts` says what a kernel is. The list is in the order of the layers; a
    shared layer comes once, its FLOPs summed over its calls.

    Args:
        model: Model or Layer, built: functional, Sequential, nested or subclassed.
        flops: bool. Whether to count multiply-adds for one sample, in one trace of the model.
        sample: Batch of the model's inputs, for its shapes, if the model leaves dimensions open.
            Without it the FLOPs of all weights of such a model are `None`.
        unregistered: bool. Whether to add, at the end, matrices whose axes have an unknown meaning:
            weights of other names in layers that are neither Keras' nor registered. Their layout is
            guessed, `(*batch, in, out)`.

    Raises NotPrunableError for a model that is not built: weights have no shapes yet.

    Examples:
        >>> import keras
        >>> layer = keras.layers.Conv2D(8, 3, name="c")
        >>> model = keras.Sequential([keras.Input((28, 28, 1)), layer])
        >>> prunable_weights(model, flops=True)
        [<c/kernel shape=(3, 3, 1, 8), density=1, flops=48672>]
    """
    check_built(model)
    found = find_kernels(model, "", unregistered=unregistered)
    if not flops:
        return found
    table = count_flops(model, found, sample)
    return [dataclasses.replace(w, flops=table.get(id(w.variable))) for w in found]


def check_built(model: Any) -> None:
    """Refuses what is no Keras 3 model or layer, has no weights yet, or unequal layouts."""
    # Layers inside may never be called, as a head for another task, or have no `call` at all.
    if not isinstance(model, keras.layers.Layer):
        hint = ""
        if type(model).__module__.startswith(("tf_keras", "keras.src.engine")):
            hint = " For tf_keras models see keras_sparse_ortho.tfmot."
        raise NotPrunableError(
            f"`model` must be a Keras 3 model or layer.{hint} "
            f"Received: model={model!r} of type {type(model).__name__}"
        )
    if not ((model.built or _has_no_call(model)) and model.weights):
        unbuilt = [path or layer.name for layer, path in walk(model, "") if not layer.built]
        # A subclassed model such as Keras' Distiller may only have the weights of its layers.
        builds_nothing = getattr(type(model), "build", None) is keras.Model.build
        if unbuilt and not (unbuilt == [model.name] and builds_nothing and model.weights):
            raise NotPrunableError(
                "The model must be built, so that its weights have shapes: give it an Input, or "
                "call it once on data. "
                f"Received: a model whose layers {unbuilt[:5]} are not built"
            )
    check_layouts()


def never_called(model: Any) -> list[str]:
    """The paths of layers that will have kernels once they are called."""
    return [
        path
        for layer, path in walk(model, "")
        if not (layer.built or _has_no_call(layer)) and kernel_layouts(layer)
    ]


def _has_no_call(model: Any) -> bool:
    """Whether a model's class only trains other models, so that it is never built itself."""
    return getattr(type(model), "call", None) is keras.Model.call


def weights_of(model: Any) -> list[PrunableWeight]:
    """The prunable weights of a model, or the given list (of `keras_sparse_ortho.tfmot`)."""
    if isinstance(model, list | tuple):
        return list(model)
    return prunable_weights(model)


def refuse_unfit(model: Any, weights: list[PrunableWeight], lack: str) -> None:
    """Raises if there are no weights, or some are wrapped, not dense or not finite."""
    if not weights:
        raise NotPrunableError(
            f"The model has {lack}. Received: model={getattr(model, 'name', model)!r}"
        )
    wrapped = [weight.path for weight in weights if weight.parametrization is not None]
    if wrapped:
        raise NotPrunableError(
            "These weights are wrapped already; strip the model first, or `exclude` them. "
            f"Received: {wrapped}"
        )
    stored = [weight.path for weight in weights if weight.storage is not None]
    if stored:
        raise NotPrunableError(
            "These weights hold their live entries only; strip the model first, or `exclude` them. "
            f"Received: {stored}"
        )
    for weight in weights:
        if getattr(weight.owner, "quantization_mode", None) is not None:
            raise NotPrunableError(
                f"The weight {weight.path!r} is quantized. Prune first, strip, then quantize; or "
                f"`exclude` it. Received: layer={type(weight.owner).__name__} of "
                f"{weight.owner.quantization_mode}"
            )
        weight.finite_raw_value()


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
                f"The variable of the weight {weight.path!r} is used by several layers, and no "
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
