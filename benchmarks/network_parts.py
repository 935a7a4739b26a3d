"""Parts that several networks of the benchmarks share."""

from typing import Any

import keras

L = keras.layers


def convolution(filters: int, kernel: int, strides: int, name: str) -> Any:
    """Without a bias, because a normalization follows."""
    return L.Conv2D(filters, kernel, strides, padding="same", use_bias=False, name=name)


def normalization(name: str) -> Any:
    """Batch normalization."""
    # Keras' 0.99 is too slow for runs of one epoch whose weights shrink in the middle: the moving
    # averages would still be those of the dense network.
    return L.BatchNormalization(momentum=0.9, name=name)


def augmented(x: Any, options: dict[str, Any]) -> Any:
    """In training, images mirrored and moved by up to an eighth, where the options ask for it."""
    if not options.get("augment"):
        return x
    x = L.RandomFlip("horizontal", seed=0, name="mirrored")(x)
    return L.RandomTranslation(1 / 8, 1 / 8, "constant", "nearest", seed=1, name="moved")(x)
