"""The answers for each kind of layer: `register_layer`, and a file a family."""

from keras_sparse_ortho.families._register_layer import register_layer

__all__ = ["register_layer"]
