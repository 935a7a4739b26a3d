"""Layers: `PrunableLayer`, which lets any Keras layer use effective weights; circular padding."""

from keras_sparse_ortho.layers._circular_padding import CircularPadding as CircularPadding
from keras_sparse_ortho.layers._prunable_layer import PrunableLayer as PrunableLayer

__all__ = ["CircularPadding", "PrunableLayer"]
