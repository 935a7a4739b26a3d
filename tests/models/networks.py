"""Models of every structure that whole-model functions are tested with."""

import keras
import pytest

import keras_sparse_ortho as kso

L = keras.layers
SHAPE = (8, 8, 3)


def sequential():
    return keras.Sequential(
        [
            keras.Input(SHAPE),
            L.Conv2D(8, 3, activation="relu"),
            L.BatchNormalization(),
            L.Flatten(),
            L.Dense(16, activation="relu"),
            L.Dense(4, name="head"),
        ]
    )


def residual():
    inputs = keras.Input(SHAPE)
    x = L.Conv2D(8, 3, padding="same")(inputs)
    y = L.BatchNormalization()(x)
    y = L.SeparableConv2D(8, 3, padding="same")(L.ReLU()(y))
    x = L.Add()([x, y]) * 2.0  # an operation, no layer
    return keras.Model(inputs, L.Dense(4, name="head")(L.GlobalAveragePooling2D()(x)))


def nested():
    encoder = keras.Sequential([L.Dense(12, activation="tanh"), L.Dense(12)], name="encoder")
    inputs = keras.Input(SHAPE)
    x = encoder(encoder(L.Dense(12, name="lift")(L.Flatten()(inputs))))
    return keras.Model(inputs, L.Dense(4, name="head")(x))


def nested_and_shared():
    """One layer in two models, which Keras itself can clone, but not load from a file."""
    encoder = keras.Sequential([L.Dense(12, activation="tanh"), L.Dense(12)], name="encoder")
    inputs = keras.Input(SHAPE)
    x = L.Dense(12, name="lift")(L.Flatten()(inputs))
    shared = L.Dense(12, name="shared")
    inner_in = keras.Input((12,))
    inner = keras.Model(inner_in, encoder(shared(inner_in)), name="inner")
    x = shared(inner(inner(x)))
    return keras.Model(inputs, L.Dense(4, name="head")(x))


@keras.saving.register_keras_serializable(package="tests")
class Block(keras.layers.Layer):
    """A layer written as a class, that holds layers."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.hidden = [L.Dense(units, activation="tanh"), L.Dense(units)]
        self.norm = L.LayerNormalization()

    def build(self, input_shape):
        for layer in self.hidden:
            layer.build(input_shape)
            input_shape = (*input_shape[:-1], self.units)
        self.norm.build(input_shape)

    def call(self, inputs):
        for layer in self.hidden:
            inputs = layer(inputs)
        return self.norm(inputs)

    def get_config(self):
        return {**super().get_config(), "units": self.units}


def composite():
    inputs = keras.Input(SHAPE)
    x = Block(12)(L.Flatten()(inputs))
    return keras.Model(inputs, L.Dense(4, name="head")(x))


def recurrent_and_attention():
    inputs = keras.Input(SHAPE)
    x = L.Reshape((8, 24))(inputs)
    x = L.Bidirectional(L.LSTM(6, return_sequences=True))(x)
    x = L.MultiHeadAttention(3, 4)(x, x)
    x = L.TimeDistributed(L.Dense(6))(x)
    return keras.Model(inputs, L.Dense(4, name="head")(L.GRU(6)(x)))


class Written(keras.Model):
    """A model written as a class: layers in attributes, lists and dicts, and a nested model."""

    def __init__(self):
        super().__init__()
        self.flatten = L.Flatten()
        self.first = L.Dense(12, activation="relu")
        self.blocks = [L.Dense(12), Block(12)]
        self.heads = {"main": L.Dense(4, name="head")}
        self.inner = keras.Sequential([L.Dense(12)], name="inner")

    def call(self, inputs):
        x = self.first(self.flatten(inputs))
        for block in self.blocks:
            x = block(x)
        return self.heads["main"](self.inner(x))


def written():
    model = Written()
    model(keras.ops.zeros((1, *SHAPE)))
    return model


class EmbeddingHead(L.Layer):
    """Projects by a layer of its own, and by an embedding that it is given."""

    def __init__(self, embedding, **kwargs):
        super().__init__(**kwargs)
        self.embedding = embedding
        self.project = L.Dense(embedding.output_dim, name="project")

    def build(self, input_shape):
        self.project.build(input_shape)

    def call(self, x):
        return keras.ops.matmul(self.project(x), keras.ops.transpose(self.embedding.embeddings))


MODELS = {
    f.__name__: f
    for f in (
        sequential,
        residual,
        nested,
        nested_and_shared,
        composite,
        recurrent_and_attention,
        written,
    )
}

# For tests that trace or differentiate the whole network: on JAX one is enough in every run.
_HEAVY = ("nested", "composite", "recurrent_and_attention")
HEAVY_ARE_SLOW_ON_JAX = [
    pytest.param(name, marks=pytest.mark.slow)
    if keras.backend.backend() == "jax" and name in _HEAVY
    else name
    for name in MODELS
]


def wrappers(model):
    """All wrappers in a model, however deep."""
    return [
        layer
        for layer in model._flatten_layers(include_self=False)
        if isinstance(layer, kso.PrunableLayer)
    ]
