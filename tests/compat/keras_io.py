"""Layers as the examples of keras.io write them, and models made of them, in small.

A file that is loaded in a fresh process needs these classes: nothing here imports this package.
"""

import keras
from keras import layers, ops

registered = keras.saving.register_keras_serializable(package="keras_io")


@registered
class TokenAndPosition(layers.Layer):
    """Text classification with Transformer: no `build`, no `get_config` of the sizes' kind."""

    def __init__(self, length=8, vocabulary=50, width=16, **kwargs):
        super().__init__(**kwargs)
        self.token = layers.Embedding(vocabulary, width)
        self.position = layers.Embedding(length, width)

    def call(self, x):
        return self.token(x) + self.position(ops.arange(0, ops.shape(x)[-1]))


@registered
class TransformerBlock(layers.Layer):
    def __init__(self, width=16, heads=2, hidden=32, **kwargs):
        super().__init__(**kwargs)
        self.attention = layers.MultiHeadAttention(
            num_heads=heads, key_dim=width // heads
        )
        self.feed_forward = keras.Sequential(
            [layers.Dense(hidden, activation="relu"), layers.Dense(width)]
        )
        self.norm_1 = layers.LayerNormalization(epsilon=1e-6)
        self.norm_2 = layers.LayerNormalization(epsilon=1e-6)
        self.dropout_1 = layers.Dropout(0.1)
        self.dropout_2 = layers.Dropout(0.1)

    def call(self, x, training=None):
        x = self.norm_1(
            x + self.dropout_1(self.attention(x, x), training=training)
        )
        return self.norm_2(
            x + self.dropout_2(self.feed_forward(x), training=training)
        )


@registered
class Patches(layers.Layer):
    """Image classification with MLP-Mixer."""

    def __init__(self, size=4, **kwargs):
        super().__init__(**kwargs)
        self.size = size

    def call(self, images):
        patches = ops.image.extract_patches(images, size=self.size)
        _, rows, columns, channels = patches.shape
        return ops.reshape(patches, (-1, rows * columns, channels))


@registered
class Attention(layers.Layer):
    """Bahdanau's, of the tutorial on translation: layers of its own, two inputs."""

    def __init__(self, units=16, **kwargs):
        super().__init__(**kwargs)
        self.query, self.key = layers.Dense(units), layers.Dense(units)
        self.score = layers.Dense(1)

    def call(self, query, values):
        together = ops.expand_dims(self.query(query), 2) + ops.expand_dims(
            self.key(values), 1
        )
        weights = ops.softmax(self.score(ops.tanh(together))[..., 0])
        return ops.matmul(weights, values)


@registered
class MixtureOfExperts(layers.Layer):
    """A list of expert layers and a router, as in Switch Transformer, with dense routing."""

    def __init__(self, experts=3, width=16, **kwargs):
        super().__init__(**kwargs)
        self.experts = [
            keras.Sequential(
                [
                    layers.Dense(2 * width, activation="relu"),
                    layers.Dense(width),
                ]
            )
            for _ in range(experts)
        ]
        self.router = layers.Dense(experts, activation="softmax")

    def call(self, x):
        shares = self.router(x)
        parts = [
            shares[..., k : k + 1] * expert(x)
            for k, expert in enumerate(self.experts)
        ]
        return sum(parts[1:], start=parts[0])


@registered
class MaskedLanguageHead(layers.Layer):
    """A head that multiplies by the embedding it is handed."""

    def __init__(self, embedding, width=16, **kwargs):
        super().__init__(**kwargs)
        self.embedding = embedding
        self.dense = layers.Dense(width, activation="gelu")

    def call(self, x):
        return ops.matmul(
            self.dense(x), ops.transpose(self.embedding.embeddings)
        )

    def get_config(self):
        embedding = keras.saving.serialize_keras_object(self.embedding)
        return {**super().get_config(), "embedding": embedding}

    @classmethod
    def from_config(cls, config):
        embedding = keras.saving.deserialize_keras_object(
            config.pop("embedding")
        )
        return cls(embedding=embedding, **config)


@registered
class Sampling(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, mean, log_variance, training=None):
        if not training:
            return mean
        noise = keras.random.normal(ops.shape(mean), seed=self.seed_generator)
        return mean + ops.exp(0.5 * log_variance) * noise


@registered
class VariationalAutoencoder(keras.Model):
    """A model written as a class around two functional ones, with a loss added in `call`."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        image = keras.Input((8, 8, 1))
        x = layers.Conv2D(8, 3, 2, padding="same", activation="relu")(image)
        x = layers.Dense(16, activation="relu")(layers.Flatten()(x))
        self.encoder = keras.Model(
            image, [layers.Dense(4)(x), layers.Dense(4)(x)]
        )
        self.sampling = Sampling()
        code = keras.Input((4,))
        x = layers.Reshape((4, 4, 8))(
            layers.Dense(4 * 4 * 8, activation="relu")(code)
        )
        x = layers.Conv2DTranspose(8, 3, 2, padding="same", activation="relu")(
            x
        )
        self.decoder = keras.Model(
            code, layers.Conv2DTranspose(1, 3, padding="same")(x)
        )

    def call(self, images, training=None):
        mean, log_variance = self.encoder(images)
        divergence = -0.5 * (
            1 + log_variance - ops.square(mean) - ops.exp(log_variance)
        )
        self.add_loss(1e-3 * ops.mean(divergence))
        return self.decoder(
            self.sampling(mean, log_variance, training=training)
        )


@registered
class TwoTowers(keras.Model):
    """Retrieval as keras-rs shows it: a class with two Sequential towers."""

    def __init__(self, users=20, items=30, width=8, **kwargs):
        super().__init__(**kwargs)
        self.user = keras.Sequential(
            [layers.Embedding(users, width), layers.Dense(width)]
        )
        self.item = keras.Sequential(
            [layers.Embedding(items, width), layers.Dense(width)]
        )

    def call(self, inputs):
        user, item = self.user(inputs["user"]), self.item(inputs["item"])
        return ops.sum(user * item, axis=-1, keepdims=True)


# --- functional models ----------------------------------------------------------------------------


def text_transformer():
    tokens = keras.Input((8,), dtype="int32")
    x = TransformerBlock()(TokenAndPosition()(tokens))
    x = layers.Dense(20, activation="relu")(layers.GlobalAveragePooling1D()(x))
    return keras.Model(tokens, layers.Dense(2)(x))


def unet():
    def twice(x, filters):
        for _ in range(2):
            x = layers.SeparableConv2D(filters, 3, padding="same")(
                layers.ReLU()(x)
            )
            x = layers.BatchNormalization()(x)
        return x

    images = keras.Input((16, 16, 3))
    kept = [layers.Conv2D(8, 3, padding="same")(images)]
    for filters in (16, 32):
        x = layers.MaxPooling2D(3, 2, padding="same")(twice(kept[-1], filters))
        kept.append(x + layers.Conv2D(filters, 1, 2)(kept[-1]))
    x = kept.pop()
    for filters, skip in ((16, kept[1]), (8, kept[0])):
        x = layers.Conv2DTranspose(filters, 3, 2, padding="same")(x)
        x = twice(layers.Concatenate()([x, skip]), filters)
    return keras.Model(
        images, layers.Conv2D(2, 3, padding="same", activation="softmax")(x)
    )


def siamese():
    image = keras.Input((16, 16, 1))
    x = layers.Conv2D(4, 5, activation="tanh")(
        layers.BatchNormalization()(image)
    )
    x = layers.Conv2D(8, 5, activation="tanh")(layers.AveragePooling2D(2)(x))
    tower = keras.Model(
        image, layers.Dense(10, activation="tanh")(layers.Flatten()(x))
    )
    sides = keras.Input((16, 16, 1)), keras.Input((16, 16, 1))
    distance = layers.Subtract()([tower(side) for side in sides])
    return keras.Model(
        sides, layers.Dense(1)(layers.BatchNormalization()(distance))
    )


def translation():
    """Sequence to sequence: a bidirectional encoder, and a decoder that attends to it."""
    source, target = (keras.Input((8,), dtype="int32") for _ in range(2))
    embedding = layers.Embedding(50, 16, mask_zero=False)
    recurrent = layers.GRU(16, return_sequences=True)
    encoded = layers.Bidirectional(recurrent, merge_mode="sum")(
        embedding(source)
    )
    decoded = layers.LSTM(16, return_sequences=True)(embedding(target))
    context = layers.Concatenate()([decoded, Attention()(decoded, encoded)])
    return keras.Model(
        [source, target], layers.TimeDistributed(layers.Dense(50))(context)
    )


def switch_transformer():
    tokens = keras.Input((8,), dtype="int32")
    x = TokenAndPosition()(tokens)
    x = x + layers.MultiHeadAttention(2, 8)(x, x)
    x = layers.LayerNormalization()(x + MixtureOfExperts()(x))
    return keras.Model(
        tokens, layers.Dense(2)(layers.GlobalAveragePooling1D()(x))
    )


def masked_language_model():
    tokens = keras.Input((8,), dtype="int32")
    embedding = layers.Embedding(50, 16)
    x = TransformerBlock()(embedding(tokens))
    return keras.Model(tokens, MaskedLanguageHead(embedding)(x))


def causal_language_model():
    """Tied by Keras' own layer."""
    tokens = keras.Input((8,), dtype="int32")
    embedding = layers.ReversibleEmbedding(50, 16, tie_weights=True)
    x = TransformerBlock()(embedding(tokens))
    return keras.Model(tokens, embedding(x, reverse=True))


def next_frame():
    frames = keras.Input((4, 8, 8, 1))
    x = layers.ConvLSTM2D(8, 3, padding="same", return_sequences=True)(frames)
    x = layers.ConvLSTM2D(8, 1, padding="same", return_sequences=True)(
        layers.BatchNormalization()(x)
    )
    return keras.Model(
        frames, layers.Conv3D(1, 3, activation="sigmoid", padding="same")(x)
    )


def timeseries_autoencoder():
    series = keras.Input((24, 1))
    x = layers.Conv1D(16, 7, 2, padding="same", activation="relu")(series)
    x = layers.Conv1D(8, 7, 2, padding="same", activation="relu")(
        layers.Dropout(0.2)(x)
    )
    x = layers.Conv1DTranspose(8, 7, 2, padding="same", activation="relu")(x)
    x = layers.Conv1DTranspose(16, 7, 2, padding="same", activation="relu")(x)
    return keras.Model(series, layers.Conv1DTranspose(1, 7, padding="same")(x))


def mlp_mixer():
    images = keras.Input((16, 16, 3))
    x = layers.Dense(16)(Patches()(images))
    for _ in range(2):
        mixed = layers.Permute((2, 1))(layers.LayerNormalization()(x))
        mixed = layers.Dense(16)(layers.Dense(16, activation="gelu")(mixed))
        x = x + layers.Permute((2, 1))(mixed)
        x = x + layers.Dense(16)(
            layers.Dense(32, activation="gelu")(layers.LayerNormalization()(x))
        )
    return keras.Model(
        images, layers.Dense(5)(layers.GlobalAveragePooling1D()(x))
    )
