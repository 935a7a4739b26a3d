"""The networks of methods.py."""

from collections.abc import Sequence
from typing import Any

import keras

L = keras.layers


def _convolution(filters: int, kernel: int, strides: int, name: str) -> Any:
    return L.Conv2D(filters, kernel, strides, padding="same", use_bias=False, name=name)


def _normalization(name: str) -> Any:
    # Keras' 0.99 is too slow for runs of one epoch whose weights shrink in the middle: the moving
    # averages would still be those of the dense network.
    return L.BatchNormalization(momentum=0.9, name=name)


def cnn(shape: tuple[int, ...], classes: int, filters: Sequence[int]) -> keras.Model:
    """3x3 convolutions with batch normalization, all but the last with stride 2."""
    x = inputs = keras.Input(shape)
    for k, width in enumerate(filters):
        x = _convolution(width, 3, 1 if k == len(filters) - 1 else 2, f"conv_{k}")(x)
        x = L.ReLU()(L.BatchNormalization(name=f"norm_{k}")(x))
    x = L.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, L.Dense(classes, name="head")(x))


def resnet20(shape: tuple[int, ...], classes: int, filters: Sequence[int]) -> keras.Model:
    """He et al. (2016), section 4.2 with n = 3, with projections where the width changes."""
    x = inputs = keras.Input(shape)
    x = _convolution(filters[0], 3, 1, "stem")(x)
    x = L.ReLU()(_normalization("stem_norm")(x))
    for stage, width in enumerate(filters):
        for block in range(3):
            strides = 2 if stage and not block else 1
            name = f"stage_{stage}_block_{block}"
            y = _convolution(width, 3, strides, f"{name}_a")(x)
            y = L.ReLU()(_normalization(f"{name}_a_norm")(y))
            y = _convolution(width, 3, 1, f"{name}_b")(y)
            y = _normalization(f"{name}_b_norm")(y)
            if x.shape[-1] != width:
                x = _convolution(width, 1, strides, f"{name}_project")(x)
            x = L.ReLU()(L.Add()([x, y]))
    x = L.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, L.Dense(classes, name="head")(x))


NETWORKS = {"cnn": cnn, "resnet20": resnet20}
