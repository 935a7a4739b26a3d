"""Clones of layers: what they are made by, and what is carried over to them."""

import contextvars
import types
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import keras

from keras_sparse_ortho._keras_internals import copy_of_lambda, sublayers
from keras_sparse_ortho.kernels import walk
from keras_sparse_ortho.layers import PrunableLayer, ScannedStack
from keras_sparse_ortho.models._kinds import class_of, is_made_from_layers

_I = keras.initializers
_DRAWING = (
    _I.RandomNormal,
    _I.TruncatedNormal,
    _I.RandomUniform,
    _I.VarianceScaling,
    _I.Orthogonal,
)
_ZEROS = _I.Zeros()


class Copy(Protocol):
    """Makes the layer to build upon."""

    def __call__(self, layer: Any) -> Any:
        """An unbuilt clone where the model is cloned, the layer itself where it is changed.

        Layers inside it that others hold, too, are those that all of them get.
        """

    def own(self, weights: list[Any]) -> list[Any]:
        """Those of the weights, of a layer or its clone, that no such layer brings along."""


def copy_names(old: Any, new: Any) -> None:
    """Gives layers inside a clone the names that they have in the original.

    Unnamed layers that a block makes in its constructor are numbered anew in every instance, but
    the path of a weight is to be the same in the clone.
    """
    for theirs, ours in zip(sublayers(old), sublayers(new), strict=False):
        if type(theirs) is type(ours):
            ours.name = theirs.name
            copy_names(theirs, ours)


def build_around(new: Any) -> None:
    """Builds a wrapper around a layer that is built: the call of a block may only trace shapes."""
    waits = isinstance(new, PrunableLayer) and not new.built
    if waits and all(layer.built for layer, _ in walk(new.layer, "")):
        new.build()


def share_initializers(old: Any, new: Any) -> None:
    """Gives the layers of a copy the initializers of the original, seeds included.

    One without a seed draws another with its copy. So it would no longer be known of the copied
    weights that they are what their initializers leave, and have not been trained.
    """
    for (copied, _), (layer, _) in zip(walk(new, ""), walk(old, ""), strict=False):
        if type(copied) is not type(layer):
            return
        for name, value in vars(layer).items():
            given = isinstance(value, keras.initializers.Initializer)
            # Another type is that of a configuration that was changed on purpose.
            if given and type(vars(copied).get(name)) is type(value):
                setattr(copied, name, value)


def unbuilt_copy(layer: Any, scrub: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """A layer by the configuration of another, with the same functions.

    A function that is not registered with Keras has a configuration by which it is not found, or
    is made anew without what it refers to.

    Args:
        layer: A layer, or an operation.
        scrub: What is to be changed in the configuration.
    """
    if type(layer) is keras.layers.Lambda:
        return copy_of_lambda(layer)
    if isinstance(layer, keras.layers.Lambda):
        # Keras refuses Python code in configurations from elsewhere; this one is the user's.
        return type(layer).from_config(layer.get_config(), safe_mode=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The object being serialized includes a `lambda`")
        config = scrub(layer.get_config())
    given = {key: getattr(layer, key, None) for key in config}
    functions = {key: value for key, value in given.items() if _is_unregistered(value)}
    return type(layer).from_config({**config, **functions})


def without_draws(layer: Any) -> Callable[[], None]:
    """Lets a layer that is not built yet start from zeros where it would draw its weights.

    They are those of another layer in the end. What is returned gives the layer its initializers
    back.
    """
    replaced = []
    for inner, _ in walk(layer, ""):
        for name, value in list(vars(inner).items()):
            # Private ones are patterns, of which layers such as MultiHeadAttention make copies.
            public = name.endswith("_initializer") and not name.startswith("_")
            if public and not inner.built and isinstance(value, _DRAWING):
                setattr(inner, name, _ZEROS)
                replaced.append((inner, name, value))
        if isinstance(inner, ScannedStack):
            inner.draws = False
            replaced.append((inner, "draws", True))

    def restore() -> None:
        for inner, name, value in replaced:
            setattr(inner, name, value)

    return restore


def _is_unregistered(value: Any) -> bool:
    """Whether something is a function that Keras would not find by its name."""
    if not isinstance(value, types.FunctionType) or value.__module__.startswith("keras."):
        return False
    return keras.saving.get_registered_object(keras.saving.get_registered_name(value)) is None


making_twins: contextvars.ContextVar[bool] = contextvars.ContextVar("making_twins", default=False)
"""Whether models are being made as their constructors make them, whatever stood in them."""


def twin_of(model: Any) -> Any:
    """The model as the constructor of its class makes it, or `None` if that is not known."""
    token = making_twins.set(True)
    try:
        if is_made_from_layers(model):
            return None
        config = model.plain_config() if hasattr(model, "plain_config") else model.get_config()
        return class_of(model).from_config(config)  # type: ignore[attr-defined]
    except Exception:  # of someone else's class; it may be cloned layer by layer nevertheless
        return None
    finally:
        making_twins.reset(token)
