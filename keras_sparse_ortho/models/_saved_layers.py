"""Which layers the configuration of a model has, and how layers of ours elsewhere are saved."""

import functools
from typing import Any

import keras

from keras_sparse_ortho._checks import as_text, check_config
from keras_sparse_ortho._keras_internals import (
    become,
    body_of,
    is_built_in_calls,
    is_graph,
    maybe_build,
    restored,
    sublayers,
    track_layers,
    track_parameters_anew,
)
from keras_sparse_ortho._types import Config
from keras_sparse_ortho.kernels import (
    LayerWrapper,
    is_sparse_layer,
    is_wrapper,
    walk,
)
from keras_sparse_ortho.layers import PrunableLayer


def is_clonable(model: keras.Model) -> bool:
    of_keras = type(model).__module__.partition(".")[0] == "keras"
    return of_keras and (isinstance(model, keras.Sequential) or is_graph(model))


def is_graph_of_class(model: keras.Model) -> bool:
    return is_graph(model) and not is_clonable(model)


def is_made_from_layers(model: keras.Model) -> bool:
    """Whether a graph is made again from the layers in its configuration, not by a constructor."""
    if isinstance(model, keras.Sequential):
        kind: Any = class_of(model)
        return (
            kind.from_config.__func__ is keras.Sequential.from_config.__func__
        )
    config = class_of(model).get_config(model)  # type: ignore[attr-defined]
    return {"layers", "input_layers", "output_layers"} <= set(config)


def lists_its_layers(layer: keras.layers.Layer) -> bool:
    """Whether the configuration of a layer or model has those of the layers inside it."""
    if isinstance(layer, keras.layers.Wrapper | keras.layers.RNN):
        return True
    return is_clonable(layer) or (
        is_graph_of_class(layer) and is_made_from_layers(layer)
    )


def class_of(layer: keras.layers.Layer) -> type:
    """The class of a layer or model as it was written, not one derived from it to save it."""
    return getattr(type(layer), "saved_as", type(layer))


def save_with_layers(layer: keras.layers.Layer) -> None:
    """Derives classes that save layers of ours inside, and takes them back when none is left."""
    for inner, _ in walk(layer, ""):
        if isinstance(inner, SavedWithLayers) and not _holds_ours(inner):
            inner.__class__ = class_of(inner)
        track_layers(inner)
    _mark(layer)


def _mark(layer: keras.layers.Layer) -> None:
    if not _holds_ours(layer):
        return
    try:
        listed = lists_its_layers(layer)
    except NotImplementedError:
        return  # it could not be saved before
    if listed or _is_ours(layer):
        for inner in sublayers(layer):
            _mark(inner)
    else:
        layer.__class__ = _derived_class(class_of(layer))


def _is_ours(layer: keras.layers.Layer) -> bool:
    """Whether a layer is a wrapper, or has live blocks, or is a stack of such layers."""
    return is_wrapper(layer) or is_sparse_layer(layer)


def _holds_ours(layer: keras.layers.Layer) -> bool:
    return any(
        _is_ours(inner) for inner, _ in walk(layer, "") if inner is not layer
    )


@keras.saving.register_keras_serializable(
    package="keras_sparse_ortho", name="Rebuilt"
)
class SavedWithLayers:
    """A layer or model with layers inside that its constructor does not make."""

    def get_config(self) -> Config:
        """The layer as its constructor makes it, and the layers that stand in it instead."""
        kind = class_of(self)
        layers = _named(self)
        return {
            "model": {
                "module": kind.__module__,
                "class_name": kind.__name__,
                "config": super().get_config(),  # type: ignore[misc]
                "registered_name": keras.saving.get_registered_name(kind),
            },
            "build_config": self.get_build_config(),
            "names": [layer.name for layer, _ in layers],
            "layers": {
                path: _described(layer)
                for layer, path in layers
                if _is_ours(layer)
            },
        }

    @classmethod
    def from_config(cls, config: Config, custom_objects: Any = None) -> Any:
        """The layer as its class makes it, with wrappers in their places."""
        _check_saved(config)
        # Layers inside are made as their classes make them, whatever stood in them.
        layer = restored(_with_plain_layers(config["model"]), custom_objects)
        if not isinstance(layer, keras.layers.Layer):
            raise ValueError(
                "The configuration of a layer with others inside must name its class. "
                f"Received: model={as_text(config['model'])}"
            )
        if (
            isinstance(layer, keras.Sequential)
            and not layer.built
            and config.get("build_config")
        ):
            layer.build_from_config(config["build_config"])  # without an Input
        # Other layers are there once it is built, or called.
        if is_graph_of_class(layer):
            return _with_layers(layer, config, custom_objects)
        if config["layers"]:
            layer.__class__ = _derived_class(class_of(layer))
            # not for Keras to track
            vars(layer)["_layers_to_come"] = (
                config,
                custom_objects,
            )
        return layer

    def get_build_config(self) -> dict[str, Any] | None:
        if not isinstance(self, keras.Model) and is_built_in_calls(self):
            return None
        return super().get_build_config()  # type: ignore[misc]

    def build_from_config(self, config: Config) -> None:
        super().build_from_config(config)  # type: ignore[misc]
        if "_layers_to_come" in vars(self) and (
            isinstance(self, keras.Model)
            or all(layer.built for layer, _ in walk(self, ""))
        ):
            _with_layers(self, *vars(self).pop("_layers_to_come"))

    def _maybe_build(self, call_spec: Any) -> None:
        if "_layers_to_come" in vars(self):
            description = vars(self).pop("_layers_to_come")
            maybe_build(self, call_spec)
            _with_layers(self, *description)
        super()._maybe_build(call_spec)  # type: ignore[misc]


def _with_plain_layers(config: Any) -> Any:
    """A configuration in which no class is to hold layers that its constructor does not make."""
    if isinstance(config, list | tuple):
        return type(config)(map(_with_plain_layers, config))
    if not isinstance(config, dict):
        return config
    plain_config = {
        key: _with_plain_layers(value) for key, value in config.items()
    }
    if {"model", "names", "layers"} <= plain_config.keys() and isinstance(
        plain_config["layers"], dict
    ):
        plain_config["layers"] = {}
    return plain_config


def _check_saved(config: Any) -> None:
    check_config("layer with others inside", config, "model", "names", "layers")
    names, layers = config["names"], config["layers"]
    if not (
        isinstance(names, list)
        and all(isinstance(name, str) for name in names)
        and isinstance(layers, dict)
        and all(isinstance(described, dict) for described in layers.values())
    ):
        raise ValueError(
            "The configuration of a layer with others inside holds a list of `names`, and a dict "
            f"of `layers` by path. Received: names={as_text(names)}, layers={as_text(layers)}"
        )


def _with_layers(top: Any, config: Config, custom_objects: Any) -> Any:
    """A layer or model whose inner layers get names, and become those of a configuration."""
    names = config["names"]
    layers = [layer for layer, _ in _named(top)]
    if len(layers) != len(names):
        raise ValueError(
            f"The layers that the class of {top.name!r} makes differ from those in the file. Make "
            "the model, call it, make it sparse as before, and call `model.load_weights(path)`. "
            f"The file has: {names}. Received: {[layer.name for layer in layers]}"
        )
    for layer, name in zip(layers, names, strict=True):
        layer.name = name
    if not config["layers"]:
        return top
    # Inner layers first. Some may be ours: in the configuration of the class, which takes them.
    for layer, path in reversed(_named(top)):
        described = config["layers"].get(path)
        if described is None or _is_ours(layer):
            continue
        described_layer = _made(described, layer, custom_objects)
        if layer.built and not described_layer.built:
            described_layer.build()
        become(layer, described_layer)
    save_with_layers(top)
    track_parameters_anew(top)
    return top


def _described(layer: keras.layers.Layer) -> dict[str, Any]:
    """The configuration of a layer; of a wrapper without the layer inside, which a class makes."""
    if isinstance(layer, PrunableLayer):
        return layer.wrapper_config()
    if not is_wrapper(layer):
        described: dict[str, Any] = keras.saving.serialize_keras_object(layer)
        return described
    return {
        "wrapper": keras.saving.get_registered_name(type(layer)),
        "config": layer.wrapper_config(),
        "inside": _described(layer.layer) if _is_ours(layer.layer) else None,
    }


def _made(
    described: dict[str, Any], layer: keras.layers.Layer, custom_objects: Any
) -> Any:
    """Makes a described layer; a wrapper around the layer that a class has made."""
    if "class_name" in described:
        return restored(described, custom_objects)
    if "wrapper" not in described:
        return PrunableLayer.from_config(
            {**described, "layer": body_of(layer)}, custom_objects
        )
    check_config(
        "wrapper inside a layer", described, "wrapper", "config", "inside"
    )
    kind = keras.saving.get_registered_object(str(described["wrapper"]))
    inside, config = described["inside"], described["config"]
    is_wrapper_class = isinstance(kind, type) and issubclass(kind, LayerWrapper)
    if not (
        is_wrapper_class
        and isinstance(config, dict)
        and isinstance(inside, dict | None)
    ):
        raise ValueError(
            "The configuration of a wrapper inside a layer must name its class, and hold its "
            f"`config` and what is `inside`. Received: {as_text(described)}"
        )
    inner = (
        body_of(layer)
        if inside is None
        else _made(inside, layer, custom_objects)
    )
    return kind.from_config({**config, "layer": inner}, custom_objects)


@functools.cache
def _derived_class(kind: type) -> type:
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    derived = type(
        kind.__name__, (SavedWithLayers, kind), {**names, "saved_as": kind}
    )
    keras.saving.register_keras_serializable(
        "keras_sparse_ortho", name="Rebuilt"
    )(derived)
    return derived


def _named(top: Any) -> list[tuple[Any, str]]:
    """The layers inside a layer or model with their paths, a wrapper for all that it holds."""
    pairs = [pair for pair in walk(top, "") if pair[0] is not top]
    wrapped = {
        id(inner)
        for layer, _ in pairs
        if is_wrapper(layer)
        for inner in sublayers(layer)
    }
    return [
        (layer, path)
        for layer, path in pairs
        # The copy of a graph may have other inputs.
        if id(layer) not in wrapped
        and not isinstance(layer, keras.layers.InputLayer)
    ]
