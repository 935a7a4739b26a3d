"""Our initializers in tf_keras' registry."""

from typing import Any

from keras_sparse_ortho.initializers import AttentionLayout, ExactOrthogonal, RandomSparse
from keras_sparse_ortho.tfmot._imports import tf_keras


def register_initializers() -> Any:
    """Makes our initializers known to tf_keras, so that its models with them can be loaded.

    Registers each class as `keras_sparse_ortho>Name`, as in Keras 3, for `.keras` files and
    `clone_model`, and under its bare name, which `.h5` files hold. Importing
    `keras_sparse_ortho.tfmot` does it, and registers the wrappers.

    Returns:
        The module `tf_keras`.
    """
    register = tf_keras.saving.register_keras_serializable(package="keras_sparse_ortho")
    known = tf_keras.saving.get_custom_objects()
    for initializer in (ExactOrthogonal, RandomSparse, AttentionLayout):
        register(initializer)
        known[initializer.__name__] = initializer
    return tf_keras
