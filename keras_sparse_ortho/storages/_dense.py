"""The forms that `strip` and `quantize_aware` make: `"dense"`, `"thin"` and `"rounded"`."""

from collections.abc import Mapping

import keras

from keras_sparse_ortho._keras_internals import body_of, maps_one_tensor
from keras_sparse_ortho._values import assign
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.initializers import SparseInitializer
from keras_sparse_ortho.kernels import storages_of
from keras_sparse_ortho.layers import PrunableLayer, plain_layer
from keras_sparse_ortho.parametrizations import LowRankSoftThreshold
from keras_sparse_ortho.storages._storage_form import (
    StorageForm,
    register_storage,
)
from keras_sparse_ortho.storages._target import KernelChange, quantizer_of

L = keras.layers


@register_storage
class DenseForm(StorageForm):
    """The plain layer of Keras with the effective kernels, and without sparse initializers."""

    name = "dense"
    is_choice = False

    def form(
        self, layer: keras.layers.Layer, changes: Mapping[str, KernelChange]
    ) -> keras.layers.Layer:
        layer_of_keras = plain_layer(layer)
        forget_sparse_initializers(layer_of_keras)
        return layer_of_keras


def forget_sparse_initializers(layer: keras.layers.Layer) -> None:
    """Puts Keras' default in the place of a layer's sparse initializers, for files without us."""
    for name, value in list(vars(layer).items()):
        if isinstance(value, SparseInitializer):
            setattr(layer, name, keras.initializers.GlorotUniform())


@register_storage
class ThinForm(StorageForm):
    """`Sequential([Dense(k), layer])` for a kernel that is a product `(m, k) @ (k, n)`."""

    name = "thin"
    is_choice = False

    def why_not(
        self, layer: keras.layers.Layer, changes: Mapping[str, KernelChange]
    ) -> str | None:
        if factored_kernel(layer) is None:
            return "two layers are for smaller factors in layers of one input and one output"
        return None

    def form(
        self, layer: keras.layers.Layer, changes: Mapping[str, KernelChange]
    ) -> keras.layers.Layer:
        """Two thin layers, one behind the other, with the factors of the kernel."""
        product = factored_kernel(layer)
        assert product is not None
        inner = layer.layer
        left_factor, right_factor = product.factors()
        thin = L.Dense(
            left_factor.shape[1],
            use_bias=False,
            name=f"{inner.name}_thin",
            dtype=inner.dtype_policy,
            trainable=layer.trainable,
        )
        second = type(inner).from_config(inner.get_config())
        layers = keras.Sequential(
            [thin, second], name=inner.name, trainable=layer.trainable
        )
        layers.build(inner.get_build_config()["input_shape"])
        assign(thin.kernel, left_factor)
        parametrizations = {
            id(parametrization.layer_variable): parametrization
            for parametrization in layer.parametrizations.values()
        }
        for source, target in zip(
            layer.layer_weights, second.weights, strict=True
        ):
            parametrization = parametrizations.get(id(source))
            value = source.value
            trained_variable = source
            if parametrization is not None:
                value = parametrization.current()
                trained_variable = parametrization.trained_variable
                if parametrization.layer_variable is product.layer_variable:
                    value = right_factor
            # On JAX `fit` frees the arrays of its model.
            assign(target, keras.ops.copy(value))
            target.trainable = trained_variable.trainable
        thin.kernel.trainable = product.trained_variable.trainable
        forget_sparse_initializers(second)
        return layers


def factored_kernel(layer: keras.layers.Layer) -> LowRankSoftThreshold | None:
    """The kernel on the inputs of a wrapped layer, if it is a product of two smaller factors.

    Layers are Dense, LSTM, GRU and SimpleRNN. They must be called with one tensor, without a mask
    or states, which a Sequential model cannot pass on.

    Args:
        layer: Layer of a model, wrapped or not.

    Returns:
        The parametrization of the kernel, or `None`.
    """
    if not isinstance(layer, PrunableLayer):
        return None
    inner = layer.layer
    if type(inner) is L.Dense:
        name = "kernel"
    elif type(inner) in (L.LSTM, L.GRU, L.SimpleRNN):
        if inner.return_state or inner.stateful:
            return None
        name = f"{inner.cell.name}/kernel"
    else:
        return None
    kernel = storages_of(layer).get(name)
    if not isinstance(kernel, LowRankSoftThreshold) or not maps_one_tensor(
        layer
    ):
        return None
    left_factor, right_factor = kernel.factors()
    if 0 < left_factor.size + right_factor.size < kernel.weight.size:
        return kernel
    return None


@register_storage
class RoundedForm(StorageForm):
    """The storage that a layer has, with a quantizer for each of its kernels."""

    name = "rounded"
    is_choice = False

    def form(
        self, layer: keras.layers.Layer, changes: Mapping[str, KernelChange]
    ) -> keras.layers.Layer:
        quantizer = quantizer_of(changes)
        if quantizer is None:
            raise NotPrunableError(
                "A plan that rounds kernels must give their Target a `quantizer`. "
                f"Received: none for {list(changes)} of the layer {layer.name!r}"
            )
        rounded = body_of(layer)
        rounded.set_quantizer(quantizer)
        return rounded
