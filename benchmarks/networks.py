"""The networks of methods.py, deep.py and contemporary.py: `(shape, classes, options) -> model`."""

from collections.abc import Callable
from typing import Any

import keras
from contemporary_networks import mobilenet, vgg16, vision_transformer
from network_parts import augmented, convolution, normalization

from keras_sparse_ortho.contrib import ScannedStack
from keras_sparse_ortho.layers import CircularPadding

L = keras.layers


def cnn(shape: tuple[int, ...], classes: int, options: dict[str, Any]) -> keras.Model:
    """3x3 convolutions with batch normalization, all but the last with stride 2."""
    filters = options["filters"]
    x = inputs = keras.Input(shape)
    for k, width in enumerate(filters):
        x = convolution(width, 3, 1 if k == len(filters) - 1 else 2, f"conv_{k}")(x)
        x = L.ReLU()(L.BatchNormalization(name=f"norm_{k}")(x))
    x = L.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, L.Dense(classes, name="head")(x))


def resnet(shape: tuple[int, ...], classes: int, options: dict[str, Any]) -> keras.Model:
    """He et al. (2016), section 4.2, with projections where the width changes.

    `blocks` is their n: 3 for ResNet-20, 5 for ResNet-32.
    """
    filters = options["filters"]
    x = inputs = keras.Input(shape)
    x = convolution(filters[0], 3, 1, "stem")(augmented(x, options))
    x = L.ReLU()(normalization("stem_norm")(x))
    for stage, width in enumerate(filters):
        for block in range(options["blocks"]):
            strides = 2 if stage and not block else 1
            name = f"stage_{stage}_block_{block}"
            y = convolution(width, 3, strides, f"{name}_a")(x)
            y = L.ReLU()(normalization(f"{name}_a_norm")(y))
            y = convolution(width, 3, 1, f"{name}_b")(y)
            y = normalization(f"{name}_b_norm")(y)
            if x.shape[-1] != width:
                x = convolution(width, 1, strides, f"{name}_project")(x)
            x = L.ReLU()(L.Add()([x, y]))
    x = L.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, L.Dense(classes, name="head")(x))


def deep_mlp(shape: tuple[int, ...], classes: int, options: dict[str, Any]) -> keras.Model:
    """A projection, `depth` square layers of `width` units, a head; no normalization."""
    bias = keras.initializers.RandomNormal(stddev=options["bias_std"])
    x = inputs = keras.Input(shape)
    x = L.Flatten()(x)
    x = L.Rescaling((options["width"] / x.shape[-1]) ** 0.5)(x)
    for k in range(options["depth"] + 1):
        dense = L.Dense(options["width"], bias_initializer=bias, name=f"dense_{k}")
        x = L.Activation(options["activation"])(dense(x))
    return keras.Model(inputs, L.Dense(classes, name="head")(x))


def stacked_mlp(shape: tuple[int, ...], classes: int, options: dict[str, Any]) -> keras.Model:
    """As `deep_mlp`, with its square layers in one stack, which is traced once."""
    bias = keras.initializers.RandomNormal(stddev=options["bias_std"])
    how = {"activation": options["activation"], "bias_initializer": bias}
    x = inputs = keras.Input(shape)
    x = L.Flatten()(x)
    x = L.Rescaling((options["width"] / x.shape[-1]) ** 0.5)(x)
    x = L.Dense(options["width"], **how, name="stem")(x)
    x = ScannedStack(L.Dense(options["width"], **how), options["depth"], name="stack")(x)
    return keras.Model(inputs, L.Dense(classes, name="head")(x))


def deep_cnn(shape: tuple[int, ...], classes: int, options: dict[str, Any]) -> keras.Model:
    """`depth + 1` circular 3x3 convolutions of `width` channels, the first two with stride 2.

    Images are halved and framed, so that 28 x 28 ones have 16 x 16 pixels: both strides are exact.
    """
    bias = keras.initializers.RandomNormal(stddev=options["bias_std"])
    x = inputs = keras.Input(shape)
    x = CircularPadding(1)(L.AveragePooling2D(2)(x))
    for k in range(options["depth"] + 1):
        strides = 2 if k < 2 else 1
        convolution = L.Conv2D(
            options["width"], 3, strides, padding="valid", bias_initializer=bias, name=f"conv_{k}"
        )
        x = L.Activation(options["activation"])(convolution(CircularPadding(1)(x)))
    x = L.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, L.Dense(classes, name="head")(x))


def stacked_cnn(shape: tuple[int, ...], classes: int, options: dict[str, Any]) -> keras.Model:
    """As `deep_cnn`, with all convolutions but the first two in one stack, which is traced once."""
    bias = keras.initializers.RandomNormal(stddev=options["bias_std"])
    how = {"padding": "valid", "bias_initializer": bias, "activation": options["activation"]}

    def circular(strides: int, **name: str) -> list[keras.Layer]:
        return [CircularPadding(1), L.Conv2D(options["width"], 3, strides, **how, **name)]

    x = inputs = keras.Input(shape)
    x = CircularPadding(1)(L.AveragePooling2D(2)(x))
    for layer in (*circular(2, name="conv_0"), *circular(2, name="conv_1")):
        x = layer(x)
    x = ScannedStack(keras.Sequential(circular(1)), options["depth"] - 1, name="stack")(x)
    x = L.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, L.Dense(classes, name="head")(x))


def wide_mlp(shape: tuple[int, ...], classes: int, options: dict[str, Any]) -> keras.Model:
    """A projection to `width` units, `depth` square layers with ReLU, a head."""
    width = options["width"]
    layers = [L.Dense(width, activation="relu", name=f"h{k}") for k in range(options["depth"])]
    stem = L.Dense(width, activation="relu", name="stem")
    return keras.Sequential(
        [keras.Input(shape), L.Flatten(), stem, *layers, L.Dense(classes, name="head")]
    )


def wide_cnn(shape: tuple[int, ...], classes: int, options: dict[str, Any]) -> keras.Model:
    """Patches of 4 x 4 pixels, then `depth` 3x3 convolutions, the first with stride 2."""
    width = options["width"]
    x = inputs = keras.Input(shape)
    x = L.ReLU()(normalization("stem_norm")(convolution(width, 4, 4, "stem")(x)))
    for k in range(options["depth"]):
        x = convolution(width, 3, 1 if k else 2, f"h{k}")(x)
        x = L.ReLU()(normalization(f"norm_{k}")(x))
    x = L.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, L.Dense(classes, name="head")(x))


Network = Callable[[tuple[int, ...], int, dict[str, Any]], keras.Model]

NETWORKS: dict[str, Network] = {
    "cnn": cnn,
    "resnet20": resnet,
    "resnet32": resnet,
    "vgg16": vgg16,
    "mobilenet": mobilenet,
    "vit": vision_transformer,
    "deep_mlp": deep_mlp,
    "deep_mlp_relu": deep_mlp,
    "deep_cnn": deep_cnn,
    "thousand_mlp": stacked_mlp,
    "circular_cnn": stacked_cnn,
    "wide_mlp": wide_mlp,
    "wide_cnn": wide_cnn,
}
