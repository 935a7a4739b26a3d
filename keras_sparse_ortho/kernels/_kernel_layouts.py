"""The registry: which weights of a layer are kernels, and what their axes mean."""

import dataclasses
import functools
from typing import Any

import keras

from keras_sparse_ortho._keras_internals import ConvLSTMCell
from keras_sparse_ortho.kernels._layers_of_others import known_by_name
from keras_sparse_ortho.orthogonal import KernelLayout

L = keras.layers


@functools.singledispatch
def kernel_layouts(layer: Any) -> dict[str, KernelLayout | None]:
    """Names the kernels among a layer's own weights, each with its layout.

    Dispatches on the class of `layer`, subclasses included. Keras' layers are registered, and
    those of keras-hub known by name. For any other layer the weights called `kernel` or `*_kernel`
    and `embeddings` count, if they are matrices at least, with the default layout
    `(*spatial, in, out)` (`None`). A custom layer whose kernels are named or shaped otherwise
    registers them, and `{}` if it is to stay dense:

    >>> import keras
    >>> class Bilinear(keras.layers.Layer):
    ...     def build(self, input_shape):
    ...         self.form = self.add_weight(shape=(input_shape[-1], 4, 4), name="form")
    >>> _ = kernel_layouts.register(
    ...     Bilinear, lambda layer: {"form": KernelLayout(inputs=(0,), outputs=(1, 2))})
    >>> kernel_layouts(Bilinear())
    {'form': KernelLayout(inputs=(0,), outputs=(1, 2), ...)}

    Args:
        layer: A layer. Its sublayers are asked one by one.

    Returns:
        A dict from weight name (`variable.name`) to layout.
    """
    names = [v.name for v in layer.weights if len(v.shape) >= 2]
    found: dict[str, KernelLayout | None] = {
        name: None for name in names if name in ("kernel", "embeddings") or name.endswith("_kernel")
    }
    return {**found, **known_by_name(layer)}


def are_kernels_told(layer: Any) -> bool:
    """Whether it has been said which weights of a layer are kernels, so that no other one is."""
    told = hasattr(layer, "get_prunable_weights") or hasattr(layer, "stored_kernels")
    if told or hasattr(layer, "transparent_path") or _is_of_keras(type(layer)):
        return True
    registered = [k for k in type(layer).__mro__ if k is not object and not _is_of_keras(k)]
    return any(kind in kernel_layouts.registry for kind in registered)


def _is_of_keras(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "keras"


@kernel_layouts.register(L.Dense)
@kernel_layouts.register(L.Embedding)
def _dense(layer: keras.layers.Layer) -> dict[str, KernelLayout | None]:
    return dict.fromkeys(("kernel", "embeddings", "reverse_embeddings"), KernelLayout.dense())


@kernel_layouts.register(L.Conv1D)
@kernel_layouts.register(L.Conv2D)
@kernel_layouts.register(L.Conv3D)
def _convolution(layer: Any) -> dict[str, KernelLayout | None]:
    return {"kernel": KernelLayout.convolution(layer.groups, layer.strides)}


@kernel_layouts.register(L.Conv1DTranspose)
@kernel_layouts.register(L.Conv2DTranspose)
@kernel_layouts.register(L.Conv3DTranspose)
def _transposed_convolution(layer: Any) -> dict[str, KernelLayout | None]:
    return {"kernel": KernelLayout.transposed_convolution(layer.strides)}


@kernel_layouts.register(L.DepthwiseConv1D)
@kernel_layouts.register(L.DepthwiseConv2D)
def _depthwise_convolution(layer: Any) -> dict[str, KernelLayout | None]:
    return {"kernel": KernelLayout.depthwise(layer.strides)}


@kernel_layouts.register(L.SeparableConv1D)
@kernel_layouts.register(L.SeparableConv2D)
def _separable_convolution(layer: Any) -> dict[str, KernelLayout | None]:
    return {
        "depthwise_kernel": KernelLayout.depthwise(layer.strides),
        "pointwise_kernel": KernelLayout.convolution(),
    }


@kernel_layouts.register(L.EinsumDense)
def _einsum_dense(layer: Any) -> dict[str, KernelLayout | None]:
    return {"kernel": KernelLayout.einsum(layer.equation)}


def _gated(gates: int) -> dict[str, KernelLayout | None]:
    return dict.fromkeys(("kernel", "recurrent_kernel"), KernelLayout.recurrent(gates))


@kernel_layouts.register(L.SimpleRNNCell)
def _simple_rnn_cell(layer: keras.layers.Layer) -> dict[str, KernelLayout | None]:
    return _gated(1)


@kernel_layouts.register(L.GRUCell)
def _gru_cell(layer: keras.layers.Layer) -> dict[str, KernelLayout | None]:
    return _gated(3)


@kernel_layouts.register(L.LSTMCell)
def _lstm_cell(layer: keras.layers.Layer) -> dict[str, KernelLayout | None]:
    return _gated(4)


@kernel_layouts.register(ConvLSTMCell)
def _conv_lstm_cell(layer: Any) -> dict[str, KernelLayout | None]:
    # Convolutions with four gates, of which only that of the input has strides.
    plain = KernelLayout.recurrent(4)
    strided = dataclasses.replace(plain, strides=layer.strides)
    return {"kernel": strided, "recurrent_kernel": plain}
