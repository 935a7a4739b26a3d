"""`keeps_range`: whether the outputs of a layer have the range of its inputs."""

import functools

import keras


@functools.singledispatch
def keeps_range(layer: keras.layers.Layer) -> bool:
    """Whether the outputs of a layer have the range of its inputs, perhaps with zeros beside.

    So it is for layers that move entries about or drop them, as `Reshape`, `Dropout` and
    `MaxPooling2D` do. `quantize_aware` rounds the outputs of others in a range of their own, which
    is right for any layer; LiteRT has one range for both sides of an operation that moves entries.
    Dispatches on the class of `layer`, subclasses included. Register a layer of your own, by
    `register_layer` or here:

    >>> class Shuffled(keras.layers.Layer):
    ...     def call(self, inputs):
    ...         return keras.ops.flip(inputs, axis=-1)
    >>> keeps_range(Shuffled())
    False
    >>> _ = keeps_range.register(Shuffled, lambda layer: True)
    >>> keeps_range(Shuffled())
    True
    """
    return False
