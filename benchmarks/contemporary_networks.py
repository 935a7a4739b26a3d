"""VGG-16, MobileNetV1 and a vision transformer for small images; the others are in networks.py."""

from typing import Any

import keras
from network_parts import augmented, convolution, normalization

L = keras.layers


def vgg16(shape: tuple[int, ...], classes: int, options: dict[str, Any]) -> keras.Model:
    """Simonyan and Zisserman (2015), D, with batch normalization and one dense layer as head.

    `filters` are those of the five stages of two and three 3x3 convolutions.
    """
    x = inputs = keras.Input(shape)
    x = augmented(x, options)
    for stage, width in enumerate(options["filters"]):
        for block in range(2 if stage < 2 else 3):
            name = f"stage_{stage}_conv_{block}"
            x = L.ReLU()(normalization(f"{name}_norm")(convolution(width, 3, 1, name)(x)))
        x = L.MaxPooling2D(2, padding="same")(x)
    x = L.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, L.Dense(classes, name="head")(x))


def mobilenet(shape: tuple[int, ...], classes: int, options: dict[str, Any]) -> keras.Model:
    """Howard et al. (2017), its width times `alpha`, with a first stride of 1, for small images.

    Depthwise 3x3 and pointwise convolutions in turn, each normalized.
    """
    widths = (64, *(128,) * 2, *(256,) * 2, *(512,) * 6, *(1024,) * 2)
    alpha = options["alpha"]
    x = inputs = keras.Input(shape)
    x = convolution(round(32 * alpha), 3, 1, "stem")(augmented(x, options))
    x = L.ReLU()(normalization("stem_norm")(x))
    before = widths[0]
    for k, width in enumerate(widths):
        name, strides = f"block_{k}", 1 if width == before else 2
        depthwise = L.DepthwiseConv2D(
            3, strides, padding="same", use_bias=False, name=f"{name}_depthwise"
        )
        x = L.ReLU()(normalization(f"{name}_depthwise_norm")(depthwise(x)))
        x = convolution(round(width * alpha), 1, 1, f"{name}_pointwise")(x)
        x = L.ReLU()(normalization(f"{name}_pointwise_norm")(x))
        before = width
    x = L.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, L.Dense(classes, name="head")(x))


def vision_transformer(
    shape: tuple[int, ...], classes: int, options: dict[str, Any]
) -> keras.Model:
    """Dosovitskiy et al. (2021): square patches, `depth` pre-norm blocks of `width` units.

    The two dense layers of each block's MLP are `mlp_*_wide` and `mlp_*_narrow`. Tokens are
    averaged for the head.
    """
    width = options["width"]
    x = inputs = keras.Input(shape)
    x = L.Conv2D(width, options["patch"], options["patch"], name="patches")(augmented(x, options))
    tokens = x.shape[1] * x.shape[2]
    x = L.Reshape((tokens, width))(x)
    x = Positions(name="positions")(x)
    for k in range(options["depth"]):
        y = L.LayerNormalization(name=f"attention_norm_{k}")(x)
        attention = L.MultiHeadAttention(
            options["heads"], width // options["heads"], name=f"attention_{k}"
        )
        x = L.Add()([x, attention(y, y)])
        y = L.LayerNormalization(name=f"mlp_norm_{k}")(x)
        y = L.Dense(4 * width, activation="gelu", name=f"mlp_{k}_wide")(y)
        x = L.Add()([x, L.Dense(width, name=f"mlp_{k}_narrow")(y)])
    x = L.GlobalAveragePooling1D()(L.LayerNormalization(name="last_norm")(x))
    return keras.Model(inputs, L.Dense(classes, name="head")(x))


@keras.saving.register_keras_serializable(package="benchmarks")
class Positions(keras.Layer):
    """Adds a learnt vector for each position to the tokens `(batch, tokens, width)`."""

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Creates them."""
        self.vectors = self.add_weight(
            name="vectors", shape=input_shape[1:], initializer=keras.initializers.RandomNormal(0.02)
        )

    def call(self, inputs: Any) -> Any:
        """Tokens and positions."""
        return inputs + self.vectors
