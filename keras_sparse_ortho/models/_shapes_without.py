"""`shapes_without`: the shapes of weights after `remove_channels`, without making the model."""

from collections.abc import Iterable
from typing import Any

import keras

from keras_sparse_ortho._keras_internals import VariableOverrides
from keras_sparse_ortho.models._channel_rules import SmallerLayer
from keras_sparse_ortho.models._remove_channels import _channel_plan

Shape = tuple[int, ...]


def shapes_without(
    model: keras.Model, values: Iterable[tuple[keras.Variable, Any]]
) -> dict[int, Shape]:
    """The shape of each weight if some kernels had other values, by `id(variable)`.

    Args:
        model: Model, plain, functional or Sequential.
        values: Pairs of a kernel and a tensor, whose zero rows say which channels nothing reads.
            The model keeps its values.
    """
    with VariableOverrides(values):
        changes, _ = _channel_plan(model, exact=True)
    shapes: dict[int, Shape] = {
        id(weight): tuple(weight.shape) for weight in model.weights
    }
    for layer in model.layers:
        change = changes.get(id(layer))
        if isinstance(change, SmallerLayer):
            # A bias that the layer did not have is the last of the new weights.
            for weight, array in zip(
                layer.weights, change.weights, strict=False
            ):
                shapes[id(weight)] = tuple(array.shape)
    return shapes
