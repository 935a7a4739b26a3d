"""What the kernels of tf_keras' layers are called, and what their axes mean."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_sparse_ortho.initializers import KernelLayout
from keras_sparse_ortho.kernels import kernel_layouts
from keras_sparse_ortho.tfmot._imports import tf_keras

L = tf_keras.layers
Layouts = dict[str, KernelLayout | None]


def _same(layout: KernelLayout, *names: str) -> Callable[[Any], Layouts]:
    return lambda layer: dict.fromkeys(names, layout)


def _convolution(layer: Any) -> Layouts:
    return {"kernel": KernelLayout.convolution(groups=layer.groups)}


def _einsum(layer: Any) -> Layouts:
    return {"kernel": KernelLayout.einsum(layer.equation)}


def register_layouts() -> None:
    """Tells `kernel_layouts` of tf_keras' layers; a name is that of the layer's attribute."""
    depthwise, plain = KernelLayout.depthwise(), KernelLayout.convolution()
    table: dict[Callable[[Any], Layouts], list[Any]] = {
        _same(KernelLayout.dense(), "kernel"): [L.Dense],
        _same(KernelLayout.dense(), "embeddings"): [L.Embedding],
        _convolution: [L.Conv1D, L.Conv2D, L.Conv3D],
        _same(KernelLayout.transposed_convolution(), "kernel"): [
            L.Conv1DTranspose,
            L.Conv2DTranspose,
            L.Conv3DTranspose,
        ],
        _same(depthwise, "depthwise_kernel"): [L.DepthwiseConv1D, L.DepthwiseConv2D],
        lambda layer: {"depthwise_kernel": depthwise, "pointwise_kernel": plain}: [
            L.SeparableConv1D,
            L.SeparableConv2D,
        ],
        _einsum: [L.EinsumDense],
        _same(KernelLayout.recurrent(1), "kernel", "recurrent_kernel"): [L.SimpleRNNCell],
        _same(KernelLayout.recurrent(3), "kernel", "recurrent_kernel"): [L.GRUCell],
        _same(KernelLayout.recurrent(4), "kernel", "recurrent_kernel"): [L.LSTMCell],
    }
    for layouts, classes in table.items():
        for kind in classes:
            kernel_layouts.register(kind, layouts)


def layouts_of(layer: Any) -> Layouts:
    """Names of a tf_keras layer's attributes that hold kernels, each with its layout."""
    known = kernel_layouts.dispatch(type(layer))
    if known is not kernel_layouts.dispatch(object):
        return known(layer)
    return {
        name: None
        for name, value in vars(layer).items()
        if (name in ("kernel", "embeddings") or name.endswith("_kernel"))
        and isinstance(value, tf.Variable)
        and len(value.shape) >= 2
    }
