"""The layers and variables that a layer itself holds."""

from typing import Any

import keras


def sublayers(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    """The layers that `layer` itself holds, in the order of their creation."""
    return list(layer.layers) if isinstance(layer, keras.Model) else held_layers(layer)


def held_layers(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    """As `sublayers`, with those that a functional model has in attributes but not in its graph."""
    return list(layer._flatten_layers(include_self=False, recursive=False))


def own_variables(layer: keras.layers.Layer) -> list[Any]:
    """The variables that a layer itself tracks, without those of the layers that it holds."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def created_trainable(layer: keras.layers.Layer) -> list[Any]:
    """The variables of its own that a layer has made to be trained, frozen now or not."""
    return list(layer._trainable_variables)
