"""What tf_keras and TFMOT must know of this package, and this package of their layers."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_sparse_ortho.initializers import (
    AttentionLayout,
    ExactOrthogonal,
    KernelLayout,
    RandomSparse,
)
from keras_sparse_ortho.kernels import kernel_layouts
from keras_sparse_ortho.tfmot._tf_keras_internals import KeepsDepthwiseZeros, tf_keras, tfmot

L = tf_keras.layers
Layouts = dict[str, KernelLayout | None]


def register_initializers() -> Any:
    """Registers the initializers with tf_keras, so that models with them can be loaded.

    Each class is registered as `keras_sparse_ortho>Name`, as in Keras 3, for `.keras` files and
    `clone_model`, and under its bare name, for `.h5` files. Importing `keras_sparse_ortho.tfmot`
    does this, and registers the wrappers.

    Returns:
        The module `tf_keras`.
    """
    register = tf_keras.saving.register_keras_serializable(package="keras_sparse_ortho")
    known = tf_keras.saving.get_custom_objects()
    for initializer in (ExactOrthogonal, RandomSparse, AttentionLayout):
        register(initializer)
        known[initializer.__name__] = initializer
    return tf_keras


def _same(layout: KernelLayout, *names: str) -> Callable[[Any], Layouts]:
    return lambda layer: dict.fromkeys(names, layout)


def register_layouts() -> None:
    """Registers the layouts of tf_keras' kernels, by attribute name, in `kernel_layouts`."""
    depthwise, plain = KernelLayout.depthwise(), KernelLayout.convolution()
    table: dict[Callable[[Any], Layouts], list[Any]] = {
        _same(KernelLayout.dense(), "kernel"): [L.Dense],
        _same(KernelLayout.dense(), "embeddings"): [L.Embedding],
        lambda layer: {"kernel": KernelLayout.convolution(groups=layer.groups)}: [
            L.Conv1D,
            L.Conv2D,
            L.Conv3D,
        ],
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
        lambda layer: {"kernel": KernelLayout.einsum(layer.equation)}: [L.EinsumDense],
        _same(KernelLayout.recurrent(1), "kernel", "recurrent_kernel"): [L.SimpleRNNCell],
        _same(KernelLayout.recurrent(3), "kernel", "recurrent_kernel"): [L.GRUCell],
        _same(KernelLayout.recurrent(4), "kernel", "recurrent_kernel"): [L.LSTMCell],
    }
    for layouts, classes in table.items():
        for kind in classes:
            kernel_layouts.register(kind, layouts)


def layouts_of(layer: Any) -> Layouts:
    """The attributes of a tf_keras layer that hold kernels, each with its layout."""
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


class PrunePreserveQuantizeScheme(
    tfmot.experimental.combine.Default8BitPrunePreserveQuantizeScheme
):
    """TFMOT's prune-preserving scheme, extended to DepthwiseConv2D.

    TFMOT does not prune DepthwiseConv2D, and its `Default8BitPrunePreserveQuantizeScheme` does not
    preserve zeros there. The wrappers of this package do prune it, so this scheme also multiplies
    its kernel by the mask of its nonzeros before it is quantized. The rest is TFMOT's.

    Limits: TFMOT does not quantize a layer directly followed by a ReLU layer, so no zeros are
    preserved in it: give the layer `activation="relu"`, or put a BatchNormalization between.

    Example:

    >>> import keras_sparse_ortho as kso
    >>> tf_keras = kso.tfmot.register_initializers()
    >>> import tensorflow_model_optimization as tfmot
    >>> plain = tf_keras.Sequential([
    ...     tf_keras.Input((8, 8, 4)), tf_keras.layers.DepthwiseConv2D(3, name="depth")])
    >>> annotated = tfmot.quantization.keras.quantize_annotate_model(plain)
    >>> scheme = kso.tfmot.PrunePreserveQuantizeScheme()
    >>> tfmot.quantization.keras.quantize_apply(annotated, scheme).layers[-1].name
    'quant_depth'
    """

    def get_quantize_registry(self) -> Any:
        """Which layers are quantized, and how."""
        return KeepsDepthwiseZeros()
