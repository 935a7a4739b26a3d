"""`PrunableLayer`: the wrapper that makes any Keras layer use effective weights."""

from keras_sparse_ortho.layers._prunable_layer import PrunableLayer as PrunableLayer

__all__ = ["PrunableLayer"]
