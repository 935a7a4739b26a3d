"""`PrunePreserveQuantizeScheme`: quantization-aware training that keeps all zeros."""

from typing import Any

from keras_sparse_ortho.tfmot._imports import tfmot
from keras_sparse_ortho.tfmot._tf_keras_internals import KeepsDepthwiseZeros


class PrunePreserveQuantizeScheme(
    tfmot.experimental.combine.Default8BitPrunePreserveQuantizeScheme
):
    """TFMOT's prune-preserving scheme, for DepthwiseConv2D as well.

    TFMOT does not prune DepthwiseConv2D, and its `Default8BitPrunePreserveQuantizeScheme` does not
    keep zeros there. Our wrappers do prune it. This scheme multiplies its kernel by the mask of its
    nonzeros too, before it is quantized. All else is TFMOT's.

    Limits: TFMOT does not quantize a layer that a ReLU layer follows directly, and so keeps no
    zeros in it: give the layer `activation="relu"`, or put a BatchNormalization between the two.

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
