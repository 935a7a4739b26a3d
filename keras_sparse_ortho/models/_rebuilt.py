"""Models with a class of their own whose layers are not those that it makes: how they are saved."""

import functools
from collections.abc import Iterator
from typing import Any

import keras

from keras_sparse_ortho._keras_internals import layers_in_attributes
from keras_sparse_ortho.layers import BlockSparseLayer, PrunableLayer
from keras_sparse_ortho.models._copying import Copy, build_around, making_twins
from keras_sparse_ortho.models._kinds import class_of, is_graph_of_class, is_made_from_layers
from keras_sparse_ortho.models._rewriter import Replacement, Rewriter


def mark(model: Any) -> None:
    """Lets a model be saved with the layers of ours in it, if its class does not make them.

    The class of the model becomes one that is derived from its own; and that again, when no such
    layer is left.
    """
    if not any(_is_ours(layer) for layer, _ in _outer(model, "")):
        if isinstance(model, Rebuilt):
            model.__class__ = class_of(model)
        return
    try:
        if is_made_from_layers(model):
            return
    except NotImplementedError:
        return  # it could not be saved before
    how = Rebuilt if is_graph_of_class(model) else Rewrapped
    model.__class__ = _derived_class(class_of(model), how)


@keras.saving.register_keras_serializable(package="keras_sparse_ortho", name="Rebuilt")
class Rebuilt:
    """A functional model some of whose layers are not those that its constructor makes.

    The classes of such models are derived from this one and from their own: they have the methods
    and attributes of their own, and are saved with the layers.
    """

    def plain_config(self) -> dict[str, Any]:
        """The configuration of the class as it was written."""
        return super().get_config()  # type: ignore[misc]

    def get_config(self) -> dict[str, Any]:
        """The model as its constructor makes it, and the layers that stand in it instead."""
        kind = class_of(self)
        layers = list(_outer(self, ""))
        return {
            "model": {
                "module": kind.__module__,
                "class_name": kind.__name__,
                "config": self.plain_config(),
                "registered_name": keras.saving.get_registered_name(kind),
            },
            "build_config": self.get_build_config(),  # type: ignore[attr-defined]
            "names": [layer.name for layer, _ in layers],
            "layers": {path: _described(layer) for layer, path in layers if _is_ours(layer)},
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """The reverse of `get_config`."""

        def restore(value: dict[str, Any]) -> Any:
            return keras.saving.deserialize_keras_object(value, custom_objects=custom_objects)

        inside = making_twins.set(True)
        try:
            model = restore(config["model"])
        finally:
            making_twins.reset(inside)
        return cls._restored(model, config, custom_objects)

    @classmethod
    def _restored(cls, model: Any, config: dict[str, Any], custom_objects: Any) -> Any:
        """The model with the layers that its constructor does not make."""
        if not model.built and config.get("build_config"):
            model.build_from_config(config["build_config"])  # Sequential without an Input
        return _with_layers(model, config, custom_objects)


@keras.saving.register_keras_serializable(package="keras_sparse_ortho", name="Rewrapped")
class Rewrapped(Rebuilt):
    """A model written as a class, in which layers of ours stand.

    Its layers are there, and their paths known, only when the model is built.
    """

    @classmethod
    def _restored(cls, model: Any, config: dict[str, Any], custom_objects: Any) -> Any:
        if not making_twins.get():
            model.__class__ = _derived_class(class_of(model), Rewrapped)
            vars(model)["_layers_to_come"] = config, custom_objects  # not for Keras to track
        return model

    def build_from_config(self, config: dict[str, Any]) -> None:
        """Builds the model as its class does, then puts the layers in."""
        super().build_from_config(config)  # type: ignore[misc]
        if (kept := vars(self).pop("_layers_to_come", None)) is not None:
            _with_layers(self, *kept)


def _with_layers(model: Any, config: dict[str, Any], custom_objects: Any) -> Any:
    """A model with the layers of a configuration in it, and the names; changed, or a new one."""
    layers = [layer for layer, _ in _outer(model, "")]
    names = config["names"]
    if len(layers) != len(names):
        raise ValueError(
            f"The class of '{model.name}' makes other layers than those that the file was saved "
            "with. Make the model, call it, make it sparse as before, and call "
            f"`model.load_weights(path)`. There were: {names}. "
            f"Received: {[layer.name for layer in layers]}"
        )
    for layer, name in zip(layers, names, strict=True):
        layer.name = name
    if making_twins.get():
        return model
    # Not by the path at which a layer is met first: others may hold it as well.
    found = {
        id(layer): config["layers"].get(path)
        for layer, path in _outer(model, "")
        if not _is_ours(layer)  # in the configuration of the class, which takes it
    }

    def replace(layer: Any, path: str, copy: Copy) -> Replacement | None:
        described = found.get(id(layer))
        if described is None:
            return None
        if "class_name" in described:
            new = keras.saving.deserialize_keras_object(described, custom_objects=custom_objects)
            return Replacement(new, lambda: None)
        wrapper = PrunableLayer.from_config({**described, "layer": copy(layer)}, custom_objects)
        return Replacement(wrapper, lambda: build_around(wrapper))

    rewriter = Rewriter(model, replace, lambda kept: kept)
    if is_graph_of_class(model):
        rewriter.reuse(model, model)
    new = rewriter.model(model, "")
    rewriter.finish()
    for rebuilt in rewriter.rebuilt:
        mark(rebuilt)
    return new


def _is_ours(layer: Any) -> bool:
    return isinstance(layer, PrunableLayer | BlockSparseLayer)


def _described(layer: Any) -> dict[str, Any]:
    """A layer of ours; a wrapper without the layer inside, which the constructor makes."""
    if not isinstance(layer, PrunableLayer):
        described: dict[str, Any] = keras.saving.serialize_keras_object(layer)
        return described
    return layer.wrapper_config()


@functools.cache
def _derived_class(kind: type, how: type[Rebuilt]) -> type:
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    made = type(kind.__name__, (how, kind), {**names, "rebuilt_from": kind})
    keras.saving.register_keras_serializable("keras_sparse_ortho", name=how.__name__)(made)
    return made


def _outer(model: Any, prefix: str) -> Iterator[tuple[Any, str]]:
    """The layers that models hold, and those in attributes, but none inside a layer, with paths."""
    layers = {id(layer): layer for layer in model.layers}
    if is_graph_of_class(model):
        layers |= {id(layer): layer for layer in layers_in_attributes(model) if layer.weights}
    for layer in layers.values():
        if isinstance(layer, keras.layers.InputLayer):
            continue  # a copy of a graph has others
        yield layer, f"{prefix}{layer.name}"
        if isinstance(layer, keras.Model):
            yield from _outer(layer, f"{prefix}{layer.name}/")
