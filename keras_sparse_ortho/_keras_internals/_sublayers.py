"""The layers that a layer holds, and putting others in their places."""

import functools
from typing import Any

import keras


def sublayers(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    """The layers that `layer` itself holds, in the order of their creation."""
    if isinstance(layer, keras.Model):
        return list(layer.layers)
    return list(layer._flatten_layers(include_self=False, recursive=False))


def own_variables(layer: keras.layers.Layer) -> list[Any]:
    """The variables that a layer itself tracks, without those of the layers that it holds."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def created_trainable(layer: keras.layers.Layer) -> list[Any]:
    """The variables of its own that a layer has made to be trained, frozen now or not."""
    return list(layer._trainable_variables)


def replace_sublayers(
    parent: keras.layers.Layer, replacements: dict[int, keras.layers.Layer]
) -> None:
    """Puts other layers in the place of those whose `id` is a key, in attributes and containers.

    For layers and models whose structure is Python code; functional models are cloned instead.
    """
    tracker = parent._tracker
    locked = tracker.locked
    tracker.unlock()
    try:
        # torch keeps submodules apart from the other attributes.
        attributes = {**vars(parent), **vars(parent).get("_modules", {})}
        own = {name: value for name, value in attributes.items() if not _is_kept_by_keras(name)}
        tracked = parent._layers
        order = {id(replacements.get(id(layer), layer)): k for k, layer in enumerate(tracked)}
        for name, value in own.items():
            replaced = _replace(value, replacements)
            if replaced is not value:
                for old in _layers_in(value):
                    if id(old) in replacements:
                        tracker.untrack(old)
                delattr(parent, name)
                setattr(parent, name, replaced)
        tracked.sort(key=lambda layer: order.get(id(layer), len(order)))
    finally:
        if locked:
            tracker.lock()


class _Plain(keras.Model):
    """A model in which there are no attributes but those of Keras."""


@functools.cache
def _names_of_keras() -> frozenset[str]:
    return frozenset(vars(_Plain(name="plain"))) | {"_functional"}


def _is_kept_by_keras(name: str) -> bool:
    """Whether an attribute is where Keras, or a backend, itself lists layers and variables."""
    return name in _names_of_keras() or name.startswith("_self_")


def _layers_in(value: Any) -> list[keras.layers.Layer]:
    """The layers in an attribute: itself, or those in lists, tuples and dicts."""
    if isinstance(value, keras.layers.Layer):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return [layer for item in value for layer in _layers_in(item)]
    return []


def _replace(value: Any, replacements: dict[int, keras.layers.Layer]) -> Any:
    if isinstance(value, keras.layers.Layer):
        return replacements.get(id(value), value)
    if isinstance(value, list | tuple):
        items = [_replace(item, replacements) for item in value]
        changed = any(a is not b for a, b in zip(items, value, strict=True))
        if not changed or isinstance(value, list):
            return items if changed else value
        # Named tuples take their items one by one.
        return value._make(items) if hasattr(value, "_make") else tuple(items)
    if isinstance(value, set | frozenset):
        members = {_replace(item, replacements) for item in value}
        changed = members != set(value)
        return (members if isinstance(value, set) else frozenset(members)) if changed else value
    if isinstance(value, dict):
        table = {key: _replace(item, replacements) for key, item in value.items()}
        return table if any(table[key] is not item for key, item in value.items()) else value
    return value


def copy_of_lambda(layer: Any) -> Any:
    """A Lambda layer with the same function, which its configuration may not give again."""
    return keras.layers.Lambda(
        layer.function,
        output_shape=layer._output_shape,
        mask=layer.mask,
        arguments=layer.arguments,
        **keras.layers.Layer.get_config(layer),
    )
