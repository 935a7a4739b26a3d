"""Clones of layers: what they are made by, and what is carried over to them."""

import contextvars
from typing import Any, Protocol

import keras

from keras_sparse_ortho._keras_internals import sublayers
from keras_sparse_ortho.kernels import walk
from keras_sparse_ortho.layers import PrunableLayer
from keras_sparse_ortho.models._kinds import class_of


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


making_twins: contextvars.ContextVar[bool] = contextvars.ContextVar("making_twins", default=False)
"""Whether models are being made as their constructors make them, whatever stood in them."""


def twin_of(model: Any) -> Any:
    """The model as the constructor of its class makes it, or `None` if that is not known."""
    token = making_twins.set(True)
    try:
        config = model.plain_config() if hasattr(model, "plain_config") else model.get_config()
        if "input_layers" in config:
            return None  # the configuration of the graph, by those of the layers
        return class_of(model).from_config(config)  # type: ignore[attr-defined]
    except Exception:  # of someone else's class; it may be cloned layer by layer nevertheless
        return None
    finally:
        making_twins.reset(token)
