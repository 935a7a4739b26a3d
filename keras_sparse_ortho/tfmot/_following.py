"""The calls in tf_keras models, by which the gains of kernels are chosen."""

from collections.abc import Sequence

import keras

from keras_sparse_ortho._keras_internals import GraphCall
from keras_sparse_ortho._types import AnyLayer, Tensor
from keras_sparse_ortho.pruning import (
    CallWatch,
    Inside,
    Role,
    WatchedCalls,
    role,
    role_by_name,
    role_of_layer,
    watch_calls,
)
from keras_sparse_ortho.tfmot._tf_keras_internals import (
    PruneLowMagnitude,
    calls_alone,
    calls_inside,
    graph_calls,
    is_graph,
    operation_name,
    sublayers,
    tf_keras,
    was_called,
)
from keras_sparse_ortho.tfmot._weights import find_kernels, walk

# Names of TensorFlow's functions, and those of the same operations in `keras.ops`.
_OPERATIONS = {
    "add": "Add",
    "cast": "Cast",
    "concat": "Concatenate",
    "einsum": "Einsum",
    "matmul": "Matmul",
    "reduce_max": "Max",
    "reduce_mean": "Mean",
    "reshape": "Reshape",
    "subtract": "Subtract",
    "transpose": "Transpose",
}


class _Watch(CallWatch):
    """Collects the calls in a tf_keras model."""

    def layers_in(self, layer: AnyLayer) -> list[AnyLayer]:
        return [inner for inner, _ in walk(layer, "")]

    def is_opened(self, layer: AnyLayer) -> bool:
        if isinstance(layer, tf_keras.Model):
            return True
        is_of_tf_keras = type(layer).__module__.startswith("tf_keras.")
        if (
            is_of_tf_keras
            or isinstance(layer, PruneLowMagnitude)
            or not sublayers(layer)
        ):
            return False
        kernels = find_kernels(layer, "")
        return all(kernel.owner is not layer for kernel in kernels)

    def graph(
        self, layer: AnyLayer, inputs: Sequence[Tensor] = ()
    ) -> Inside | None:
        if not isinstance(layer, tf_keras.Model) or not is_graph(layer):
            return None
        pairs = list(zip(inputs, layer.inputs, strict=False))
        return Inside(graph_calls(layer), pairs, layer.outputs)

    def inside(self, call: GraphCall) -> Inside:
        return Inside(*calls_inside(call))

    def alone(self, model: AnyLayer) -> Inside:
        if not was_called(model):
            raise ValueError("its inputs are not known")
        try:
            calls, outputs = calls_alone(model)
        # The model's code on symbols may raise anything.
        except Exception as error:
            raise ValueError(type(error).__name__) from error
        return Inside(calls, [], outputs)


def register_calls() -> None:
    """Lets `sparsify`'s gains see what follows the layers of tf_keras models."""

    @watch_calls.register(tf_keras.layers.Layer)
    def _(model: AnyLayer) -> WatchedCalls:
        return _Watch(model).calls

    @role.register(tf_keras.layers.Layer)
    def _(layer: AnyLayer) -> Role:
        name = operation_name(layer)
        if name is not None:
            activation: AnyLayer = getattr(keras.activations, name, layer)
            return role_by_name(_OPERATIONS.get(name, name), activation)
        is_of_tf_keras = type(layer).__module__.startswith("tf_keras.")
        role_in_model = role_of_layer(
            layer,
            holds_kernels=bool(find_kernels(layer, "")),
            is_plain=is_of_tf_keras and not layer.weights,
        )
        if role_in_model.activation is layer:
            return Role(role_in_model.kind, _layer_of_keras(layer))
        return role_in_model


def _layer_of_keras(layer: AnyLayer) -> AnyLayer:
    """The activation layer of Keras 3 that computes what one of tf_keras does."""
    kind = getattr(keras.layers, type(layer).__name__)
    config = layer.get_config()
    if kind is keras.layers.LeakyReLU:
        config["negative_slope"] = config.pop("alpha")
    config.pop("dtype", None)
    return kind.from_config(config)
