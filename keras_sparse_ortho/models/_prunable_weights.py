"""`prunable_weights`, the kernels of a model, and refusals of models and weights."""

import dataclasses
import functools
import importlib
import sys
from collections.abc import Sequence
from typing import Any

import keras

from keras_sparse_ortho._checks import as_text, other_keywords
from keras_sparse_ortho._workers import check_layouts
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.kernels import (
    PrunableWeight,
    find_kernels,
    kernel_layouts,
    walk,
)
from keras_sparse_ortho.models._flops import count_flops


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
    return [
        dataclasses.replace(w, flops=table.get(id(w.variable))) for w in found
    ]


def check_built(model: keras.Model) -> None:
    """Refuses what is no Keras 3 model or layer, has no weights yet, or unequal layouts."""
    # Layers inside may never be called, as a head for another task, or have no `call` at all.
    if not isinstance(model, keras.layers.Layer):
        hint = ""
        if is_of_tf_keras(model):
            hint = " For tf_keras models see keras_sparse_ortho.tfmot."
        compiled = getattr(model, "_orig_mod", None)
        if isinstance(compiled, keras.layers.Layer):
            hint = " After torch.compile use the model that was compiled: model._orig_mod."
        raise NotPrunableError(
            f"`model` must be a Keras 3 model or layer.{hint} "
            f"Received: model={as_text(model)} of type {type(model).__name__}"
        )
    if not ((model.built or _has_no_call(model)) and model.weights):
        unbuilt = [
            path or layer.name
            for layer, path in walk(model, "")
            if not layer.built
        ]
        # A subclassed model such as Keras' Distiller may only have the weights of its layers.
        builds_nothing = (
            getattr(type(model), "build", None) is keras.Model.build
        )
        if unbuilt and not (
            unbuilt == [model.name] and builds_nothing and model.weights
        ):
            raise NotPrunableError(
                "The model must be built, so that its weights have shapes: give it an Input, or "
                "call it once on data. "
                f"Received: a model whose layers {unbuilt[:5]} are not built"
            )
    check_layouts()


def never_called(model: keras.Model) -> list[str]:
    """The paths of layers that will have kernels once they are called."""
    return [
        path
        for layer, path in walk(model, "")
        if not (layer.built or _has_no_call(layer)) and kernel_layouts(layer)
    ]


def _has_no_call(model: keras.Model) -> bool:
    """Whether a model's class only trains other models, so that it is never built itself."""
    return getattr(type(model), "call", None) is keras.Model.call


@functools.singledispatch
def weights_of(model: Any) -> list[PrunableWeight]:
    """The prunable weights of a model of Keras 3 or tf_keras, or the given list.

    Dispatches on the class of the model: `keras_sparse_ortho.tfmot` registers that of tf_keras, and
    is loaded for the first such model.
    """
    package = __name__.partition(".")[0]
    room = f"{package}.tfmot"
    if is_of_tf_keras(model) and room not in sys.modules:
        importlib.import_module(room)
        return weights_of(model)
    return prunable_weights(model)


@weights_of.register(list)
@weights_of.register(tuple)
def _(weights: Sequence[PrunableWeight]) -> list[PrunableWeight]:
    return list(weights)


def is_of_tf_keras(model: Any) -> bool:
    """Whether an object's class is one of tf_keras, or derived from one."""
    return any(
        kind.__module__.startswith("tf_keras.") for kind in type(model).__mro__
    )


def refuse_unfit(
    model: keras.Model, weights: list[PrunableWeight], lack: str
) -> None:
    """Raises if there are no weights, or some are wrapped, not dense or not finite."""
    if not weights:
        raise NotPrunableError(
            f"The model has {lack}. Received: model={getattr(model, 'name', model)!r}"
        )
    wrapped = [
        weight.path for weight in weights if weight.parametrization is not None
    ]
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
