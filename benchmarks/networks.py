"""The networks of the benchmarks.

`NETWORKS` are those of `methods.py` and `faster.py`: `(shape, classes, options) -> model`. `WHOLE`
are those of `blocks.py step_times`: `gpt2` and `llama` start from embedded tokens, as embedding
tables have no blocks; `hub_gpt2` and `hub_llama` are whole backbones of keras-hub, which must be
installed, with a small vocabulary.
"""

import dataclasses
import functools
import pathlib
import tomllib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho.initializers import KernelLayout, kernel_layouts
from keras_sparse_ortho.kernels import find_kernels
from keras_sparse_ortho.layers import CircularPadding
from keras_sparse_ortho.models import kernel_positions

L = keras.layers


def settings(name: str) -> dict[str, Any]:
    """The networks of a comparison of `methods.toml`, with their settings."""
    file = pathlib.Path(__file__).with_name("methods.toml")
    return tomllib.loads(file.read_text(encoding="utf-8"))[name]


def convolution(filters: int, kernel: int, strides: int, name: str) -> Any:
    """Without a bias, because a normalization follows."""
    return L.Conv2D(
        filters, kernel, strides, padding="same", use_bias=False, name=name
    )


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
    return L.RandomTranslation(
        1 / 8, 1 / 8, "constant", "nearest", seed=1, name="moved"
    )(x)


def mlp(
    shape: tuple[int, ...],
    widths: Sequence[int],
    classes: int | None = 10,
    prefix: str = "hidden_",
) -> keras.Model:
    """Dense layers with ReLU, named by a prefix and their number, and a head for the classes."""
    hidden = [
        L.Dense(width, "relu", name=f"{prefix}{k}")
        for k, width in enumerate(widths)
    ]
    flatten = [L.Flatten()] if len(shape) > 1 else []
    head = [L.Dense(classes, name="head")] if classes else []
    return keras.Sequential([keras.Input(shape), *flatten, *hidden, *head])


def vgg16(
    shape: tuple[int, ...], classes: int, options: dict[str, Any]
) -> keras.Model:
    """Simonyan and Zisserman (2015), D, with batch normalization and one dense layer as head.

    `filters` are those of the five stages of two and three 3x3 convolutions.
    """
    x = inputs = keras.Input(shape)
    x = augmented(x, options)
    for stage, width in enumerate(options["filters"]):
        for block in range(2 if stage < 2 else 3):
            name = f"stage_{stage}_conv_{block}"
            x = L.ReLU()(
                normalization(f"{name}_norm")(convolution(width, 3, 1, name)(x))
            )
        x = L.MaxPooling2D(2, padding="same")(x)
    x = L.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, L.Dense(classes, name="head")(x))


def mobilenet(
    shape: tuple[int, ...], classes: int, options: dict[str, Any]
) -> keras.Model:
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
    x = L.Conv2D(width, options["patch"], options["patch"], name="patches")(
        augmented(x, options)
    )
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
            name="vectors",
            shape=input_shape[1:],
            initializer=keras.initializers.RandomNormal(0.02),
        )

    def call(self, inputs: Any) -> Any:
        """Tokens and positions."""
        return inputs + self.vectors


def cnn(
    shape: tuple[int, ...], classes: int, options: dict[str, Any]
) -> keras.Model:
    """3x3 convolutions with batch normalization, all but the last with stride 2.

    `unit` names another activation than ReLU, and `strides` are others than these.
    """
    unit = options.get("unit")
    filters = options["filters"]
    strides = options.get("strides", [2] * (len(filters) - 1) + [1])
    x = inputs = keras.Input(shape)
    for k, (width, stride) in enumerate(zip(filters, strides, strict=True)):
        x = convolution(width, 3, stride, f"conv_{k}")(x)
        x = L.BatchNormalization(name=f"norm_{k}")(x)
        x = (L.Activation(unit) if unit else L.ReLU())(x)
    x = L.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, L.Dense(classes, name="head")(x))


def resnet(
    shape: tuple[int, ...], classes: int, options: dict[str, Any]
) -> keras.Model:
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


def deep_mlp(
    shape: tuple[int, ...], classes: int, options: dict[str, Any]
) -> keras.Model:
    """A projection, `depth` square layers of `width` units, a head; no normalization."""
    bias = keras.initializers.RandomNormal(stddev=options["bias_std"])
    x = inputs = keras.Input(shape)
    x = L.Flatten()(x)
    x = L.Rescaling((options["width"] / x.shape[-1]) ** 0.5)(x)
    for k in range(options["depth"] + 1):
        dense = L.Dense(
            options["width"], bias_initializer=bias, name=f"dense_{k}"
        )
        x = L.Activation(options["activation"])(dense(x))
    return keras.Model(inputs, L.Dense(classes, name="head")(x))


def stacked_mlp(
    shape: tuple[int, ...], classes: int, options: dict[str, Any]
) -> keras.Model:
    """As `deep_mlp`, with its square layers in one stack, which is traced once."""
    bias = keras.initializers.RandomNormal(stddev=options["bias_std"])
    how = {"activation": options["activation"], "bias_initializer": bias}
    x = inputs = keras.Input(shape)
    x = L.Flatten()(x)
    x = L.Rescaling((options["width"] / x.shape[-1]) ** 0.5)(x)
    x = L.Dense(options["width"], **how, name="stem")(x)
    x = ScannedStack(
        L.Dense(options["width"], **how), options["depth"], name="stack"
    )(x)
    return keras.Model(inputs, L.Dense(classes, name="head")(x))


def deep_cnn(
    shape: tuple[int, ...], classes: int, options: dict[str, Any]
) -> keras.Model:
    """`depth + 1` circular 3x3 convolutions of `width` channels, the first two with stride 2.

    Images are halved and framed, so that 28 x 28 ones have 16 x 16 pixels: both strides are exact.
    """
    bias = keras.initializers.RandomNormal(stddev=options["bias_std"])
    x = inputs = keras.Input(shape)
    x = CircularPadding(1)(L.AveragePooling2D(2)(x))
    for k in range(options["depth"] + 1):
        strides = 2 if k < 2 else 1
        convolution = L.Conv2D(
            options["width"],
            3,
            strides,
            padding="valid",
            bias_initializer=bias,
            name=f"conv_{k}",
        )
        x = L.Activation(options["activation"])(
            convolution(CircularPadding(1)(x))
        )
    x = L.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, L.Dense(classes, name="head")(x))


def stacked_cnn(
    shape: tuple[int, ...], classes: int, options: dict[str, Any]
) -> keras.Model:
    """As `deep_cnn`, with all convolutions but the first two in one stack, which is traced once."""
    bias = keras.initializers.RandomNormal(stddev=options["bias_std"])
    how = {
        "padding": "valid",
        "bias_initializer": bias,
        "activation": options["activation"],
    }

    def circular(strides: int, **name: str) -> list[keras.Layer]:
        return [
            CircularPadding(1),
            L.Conv2D(options["width"], 3, strides, **how, **name),
        ]

    x = inputs = keras.Input(shape)
    x = CircularPadding(1)(L.AveragePooling2D(2)(x))
    for layer in (*circular(2, name="conv_0"), *circular(2, name="conv_1")):
        x = layer(x)
    x = ScannedStack(
        keras.Sequential(circular(1)), options["depth"] - 1, name="stack"
    )(x)
    x = L.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, L.Dense(classes, name="head")(x))


def wide_mlp(
    shape: tuple[int, ...], classes: int, options: dict[str, Any]
) -> keras.Model:
    """A projection to `width` units, `depth` square layers with ReLU, a head."""
    width = options["width"]
    layers = [
        L.Dense(width, activation="relu", name=f"h{k}")
        for k in range(options["depth"])
    ]
    stem = L.Dense(width, activation="relu", name="stem")
    return keras.Sequential(
        [
            keras.Input(shape),
            L.Flatten(),
            stem,
            *layers,
            L.Dense(classes, name="head"),
        ]
    )


def wide_cnn(
    shape: tuple[int, ...], classes: int, options: dict[str, Any]
) -> keras.Model:
    """Patches of 4 x 4 pixels, then `depth` 3x3 convolutions, the first with stride 2."""
    width = options["width"]
    x = inputs = keras.Input(shape)
    x = L.ReLU()(
        normalization("stem_norm")(convolution(width, 4, 4, "stem")(x))
    )
    for k in range(options["depth"]):
        x = convolution(width, 3, 1 if k else 2, f"h{k}")(x)
        x = L.ReLU()(normalization(f"norm_{k}")(x))
    x = L.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, L.Dense(classes, name="head")(x))


@keras.saving.register_keras_serializable(package="benchmarks")
class FastGRNNCell(L.Layer):
    """`h' = (zeta (1 - z) + nu) tanh(W x + U h + b_h) + z h`, `z = sigmoid(W x + U h + b_z)`.

    Kusupati et al. (NeurIPS 2018): one `W` and one `U` for gate and candidate.
    """

    def __init__(
        self,
        units: int,
        recurrent_initializer: str = "orthogonal",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.units = self.state_size = self.output_size = units
        self.recurrent_initializer = recurrent_initializer

    def build(self, shape: tuple) -> None:
        """Kernels, two biases, and two scalars behind a sigmoid."""
        add = self.add_weight
        self.kernel = add(name="kernel", shape=(shape[-1], self.units))
        self.recurrent_kernel = add(
            name="recurrent_kernel",
            shape=(self.units, self.units),
            initializer=self.recurrent_initializer,
        )
        self.gate = add(
            name="gate_bias", shape=(self.units,), initializer="ones"
        )
        self.bias = add(name="bias", shape=(self.units,), initializer="zeros")
        start = keras.initializers.Constant
        self.zeta = add(name="zeta_bias", shape=(1,), initializer=start(1.0))
        self.nu = add(name="nu_bias", shape=(1,), initializer=start(-4.0))

    def call(self, inputs: Any, states: Any) -> tuple[Any, Any]:
        """One step."""
        ops, before = keras.ops, states[0]
        total = ops.matmul(inputs, self.kernel) + ops.matmul(
            before, self.recurrent_kernel
        )
        z = ops.sigmoid(total + self.gate)
        zeta, nu = ops.sigmoid(self.zeta), ops.sigmoid(self.nu)
        after = (zeta * (1 - z) + nu) * ops.tanh(total + self.bias) + z * before
        return after, [after]


def _two_matrices(_: Any) -> dict[str, Any]:
    return dict.fromkeys(
        ("kernel", "recurrent_kernel"), KernelLayout.recurrent(1)
    )


kernel_layouts.register(FastGRNNCell, _two_matrices)

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
    "hundred_mlp_relu": stacked_mlp,
    "deep_cnn": deep_cnn,
    "deep_cnn_relu": deep_cnn,
    "thousand_mlp": stacked_mlp,
    "circular_cnn": stacked_cnn,
    "wide_mlp": wide_mlp,
    "wide_cnn": wide_cnn,
}

WIDTH, DEPTH, TOKENS, HEADS, VOCABULARY = 512, 4, 128, 8, 1024


def gpt2(
    width: int = WIDTH,
    depth: int = DEPTH,
    tokens: int = TOKENS,
    heads: int = HEADS,
) -> keras.Model:
    """Radford et al. (2019): pre-norm decoder blocks with GELU, 512 wide, 4 deep, 128 tokens."""
    x = inputs = keras.Input((tokens, width))
    for k in range(depth):
        y = L.LayerNormalization(name=f"attention_norm_{k}")(x)
        attention = L.MultiHeadAttention(
            heads, width // heads, name=f"attention_{k}"
        )
        x = L.Add()([x, attention(y, y, use_causal_mask=True)])
        y = L.LayerNormalization(name=f"mlp_norm_{k}")(x)
        y = L.Dense(4 * width, activation="gelu", name=f"mlp_{k}_wide")(y)
        x = L.Add()([x, L.Dense(width, name=f"mlp_{k}_narrow")(y)])
    return keras.Model(inputs, L.LayerNormalization(name="last_norm")(x))


def llama() -> keras.Model:
    """Touvron et al. (2023), without rotations: RMS norms, two key heads, SwiGLU of 1536 units."""
    x = inputs = keras.Input((TOKENS, WIDTH))
    for k in range(DEPTH):
        y = L.RMSNormalization(name=f"attention_norm_{k}")(x)
        attention = L.GroupQueryAttention(
            WIDTH // HEADS, HEADS, 2, use_bias=False, name=f"attention_{k}"
        )
        x = L.Add()([x, attention(y, y, use_causal_mask=True)])
        y = L.RMSNormalization(name=f"mlp_norm_{k}")(x)
        options: dict[str, Any] = {"use_bias": False}
        gate = L.Dense(
            3 * WIDTH, activation="silu", name=f"mlp_{k}_gate", **options
        )(y)
        y = L.Multiply()(
            [gate, L.Dense(3 * WIDTH, name=f"mlp_{k}_wide", **options)(y)]
        )
        x = L.Add()([x, L.Dense(WIDTH, name=f"mlp_{k}_narrow", **options)(y)])
    return keras.Model(inputs, L.RMSNormalization(name="last_norm")(x))


def hub_gpt2() -> keras.Model:
    """keras-hub's GPT-2 of the same size, with its dropout."""
    import keras_hub

    return keras_hub.models.GPT2Backbone(
        VOCABULARY, DEPTH, HEADS, WIDTH, 4 * WIDTH, max_sequence_length=TOKENS
    )


def hub_llama() -> keras.Model:
    """keras-hub's Llama of the same size, with rotations and causal attention."""
    import keras_hub

    return keras_hub.models.LlamaBackbone(
        vocabulary_size=VOCABULARY,
        num_layers=DEPTH,
        num_query_heads=HEADS,
        hidden_dim=WIDTH,
        intermediate_dim=3 * WIDTH,
        num_key_value_heads=2,
    )


def vit() -> keras.Model:
    """A vision transformer, 256 wide, 6 deep, of 64 patches of 4 x 4 pixels."""
    return vision_transformer(
        (32, 32, 3), 10, {"width": 256, "depth": 6, "heads": 4, "patch": 4}
    )


def vgg() -> keras.Model:
    """The first ten convolutions of VGG-16, with batch normalization, for images of 32 x 32.

    The last three, of 512 channels at 2 x 2, stay out: XLA computes them at a hundredth of the
    usual speed on processors, an unfair rival.
    """
    return vgg16((32, 32, 3), 10, {"filters": (64, 128, 256, 512)})


def lstm(units: int) -> keras.Model:
    """A layer on 64 steps of as many features."""
    return keras.Sequential(
        [keras.Input((64, units)), L.LSTM(units, name="lstm")]
    )


WHOLE = {
    **{"gpt2": gpt2, "llama": llama, "vit256": vit, "vgg": vgg},
    **{f"lstm{units}": functools.partial(lstm, units) for units in (512, 1024)},
    **{"hub_gpt2": hub_gpt2, "hub_llama": hub_llama},
}


# --- a thousand equal layers in a row, of which one is traced -------------------------------------
#
# Keras traces every layer of a model, so the networks of `thousand_mlp` and `circular_cnn` would
# take hours to compile. The package has no such layer: only these two networks need one.


class _Inside:
    """A layer that Keras does not track: a call gives it the weights of one layer after another."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.stacked: list[Any] = []


class ScannedStack(keras.layers.Layer):
    """`x_(k + 1) = layer(x_k; w_k)` for `k = 0 ... depth - 1`, each with its own weights.

    Every weight `w` of the layer is one variable of shape `(depth, *w.shape)`; a kernel of the
    stack is `depth` matrices. All weights of the layer are trained; it has no state, no seeds and
    no losses. The stack cannot be saved to a `.keras` file.

    Args:
        layer: The unbuilt layer, whose output has the shape of its input.
        depth: Number of layers.
        **kwargs: As for `keras.layers.Layer`.
    """

    def __init__(
        self, layer: keras.layers.Layer, depth: int, **kwargs: Any
    ) -> None:
        super().__init__(autocast=False, dtype=layer.variable_dtype, **kwargs)
        self.depth = depth
        # what follows its kernels
        self.activation = getattr(layer, "activation", None)
        self._inside = _Inside(layer)

    @property
    def layer(self) -> Any:
        """The layer that is repeated. Its own weights are not those of any layer in the stack."""
        return self._inside.layer

    def build(self, input_shape: Any) -> None:
        """Draws the weights of all layers."""
        config = self.layer.get_config()
        layers = [
            self.layer,
            *(
                type(self.layer).from_config(config)
                for _ in range(1, self.depth)
            ),
        ]
        for layer in layers:
            layer.build(input_shape)
        for k, variable in enumerate(self.layer.trainable_variables):
            drawn = np.stack(
                [
                    keras.ops.convert_to_numpy(one.trainable_variables[k])
                    for one in layers
                ]
            )
            weight = self.add_weight(
                name=variable.name,
                shape=drawn.shape,
                initializer=lambda shape, dtype=None, drawn=drawn: (
                    keras.ops.convert_to_tensor(drawn, dtype)
                ),
                autocast=False,
            )
            self._inside.stacked.append(weight)
            setattr(self, variable.name, weight)

    def call(self, inputs: Any) -> Any:
        variables = self.layer.trainable_variables
        weights = [weight.value for weight in self._inside.stacked]

        def body(x: Any, own: list[Any]) -> Any:
            with keras.StatelessScope(
                state_mapping=zip(variables, own, strict=True)
            ):
                return keras.ops.cast(self.layer(x), inputs.dtype)

        return _scan(body, inputs, weights, self.depth)

    def compute_output_spec(self, inputs: Any) -> Any:
        return self.layer.compute_output_spec(inputs)


def _scan(body: Any, x: Any, weights: list[Any], depth: int) -> Any:
    """`x = body(x, weights[k])` for all k. TensorFlow: `keras.ops.scan` has no gradient in XLA."""
    if keras.backend.backend() == "jax":
        import jax

        return jax.lax.scan(
            lambda own, rows: (body(own, rows), None), x, weights
        )[0]
    if keras.backend.backend() == "torch":
        for rows in zip(
            *(keras.ops.unstack(weight, depth) for weight in weights),
            strict=True,
        ):
            x = body(x, list(rows))
        return x
    import tensorflow as tf

    # A slice would have a gradient as large as the whole.
    arrays = [
        tf.TensorArray(w.dtype, depth, element_shape=w.shape[1:]).unstack(w)
        for w in weights
    ]

    def step(k: Any, own: Any) -> tuple[Any, Any]:
        return k + 1, body(own, [array.read(k) for array in arrays])

    start = (tf.constant(0), x)
    return tf.while_loop(
        lambda k, _: k < depth, step, start, maximum_iterations=depth
    )[1]


@kernel_layouts.register(ScannedStack)
def _stack(stack: ScannedStack) -> dict[str, KernelLayout | None]:
    kernels = {
        id(found.variable): found for found in find_kernels(stack.layer, "")
    }
    pairs = zip(
        stack.layer.trainable_variables, stack._inside.stacked, strict=False
    )
    return {
        weight.name: _stacked(kernels[id(variable)].layout, len(variable.shape))
        for variable, weight in pairs
        if id(variable) in kernels
    }


def _stacked(layout: KernelLayout | None, rank: int) -> KernelLayout:
    """The layout of kernels that are stacked along a new first axis."""
    layout = KernelLayout.convolution() if layout is None else layout
    inputs, outputs = (
        tuple(axis % rank + 1 for axis in axes)
        for axes in (layout.inputs, layout.outputs)
    )
    return dataclasses.replace(
        layout, inputs=inputs, outputs=outputs, batch=(0,)
    )


@kernel_positions.register(ScannedStack)
def _positions(stack: ScannedStack, inputs: Any, outputs: Any) -> int | None:
    (owner,) = {
        id(found.owner): found.owner for found in find_kernels(stack.layer, "")
    }.values()
    return kernel_positions(owner, inputs, outputs)
