"""The guest wing: our initializers in tf_keras models."""

from keras_sparse_ortho.tfmot._registration import register_initializers as register_initializers

__all__ = ["register_initializers"]

register_initializers()
