"""What tf_keras and TFMOT must know of this package, and this package of their layers."""

from typing import Any

import keras
import tensorflow as tf

from keras_sparse_ortho.initializers import (
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
    for initializer in (ExactOrthogonal, RandomSparse):
        register(initializer)
        known[initializer.__name__] = initializer
    return tf_keras


def register_layouts() -> None:
    """Registers tf_keras' kernels, most as those of Keras' layers of one name."""
    names = ["Dense", "Embedding", "EinsumDense", "SeparableConv1D", "SeparableConv2D"]
    names += [f"Conv{n}D{suffix}" for n in (1, 2, 3) for suffix in ("", "Transpose")]
    for name in names:
        layouts = kernel_layouts.dispatch(getattr(keras.layers, name))
        kernel_layouts.register(getattr(L, name), layouts)
    for kind in (L.DepthwiseConv1D, L.DepthwiseConv2D):
        kernel_layouts.register(kind, lambda _: {"depthwise_kernel": KernelLayout.depthwise()})
    cells = ((L.SimpleRNNCell, KernelLayout.recurrent(1)), (L.GRUCell, KernelLayout.recurrent(3)))
    for kind, layout in (*cells, (L.LSTMCell, KernelLayout.recurrent(4))):
        own = dict.fromkeys(("kernel", "recurrent_kernel"), layout)
        kernel_layouts.register(kind, lambda _, own=own: own)


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
