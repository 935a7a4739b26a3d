"""Models with the traits by which examples of keras.io once broke; nothing here is their code.

The traits: constructors without `**kwargs`, configurations that lack an argument or do not exist,
cropping inside the model, random numbers in calls, weights of no known name, a class without a
`call`. Sizes are small.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers, ops

ROWS, SIDE, WIDTH, CLASSES = 4, 12, 16, 5
rng = np.random.default_rng(0)


def dense_pair(x, hidden):
    """The feed-forward part of a transformer, with an activation that is a function."""
    x = layers.Dropout(0.1)(layers.Dense(hidden, activation=ops.gelu)(x))
    return layers.Dropout(0.1)(layers.Dense(WIDTH, activation=ops.gelu)(x))


def encoder_block(x, between=lambda branch: branch):
    normal = layers.LayerNormalization(epsilon=1e-6)(x)
    x = layers.Add()([x, between(layers.MultiHeadAttention(2, 8, dropout=0.1)(normal, normal))])
    branch = dense_pair(layers.LayerNormalization(epsilon=1e-6)(x), 2 * WIDTH)
    return layers.Add()([x, between(branch)])


# --- vision transformer ---------------------------------------------------------------------------


class Patches(layers.Layer):
    """Takes no name, though its configuration has one, and has no weights."""

    def __init__(self, size):
        super().__init__()
        self.size = size

    def call(self, images):
        rows, height, width, channels = ops.shape(images)
        count = (height // self.size) * (width // self.size)
        patches = ops.image.extract_patches(images, size=self.size)
        return ops.reshape(patches, (rows, count, self.size**2 * channels))

    def get_config(self):
        return {**super().get_config(), "size": self.size}


class PatchEncoder(layers.Layer):
    """Takes no name; its configuration lacks `width`."""

    def __init__(self, count, width):
        super().__init__()
        self.count = count
        self.projection = layers.Dense(width)
        self.position = layers.Embedding(count, width)

    def call(self, patches):
        place = ops.expand_dims(ops.arange(self.count), 0)
        return self.projection(patches) + self.position(place)

    def get_config(self):
        return {**super().get_config(), "count": self.count}


def vision_transformer():
    normalization = layers.Normalization()
    normalization.adapt(images())
    augmentation = [
        *(normalization, layers.Resizing(16, 16), layers.RandomFlip("horizontal")),
        *(layers.RandomRotation(0.02), layers.RandomZoom(0.2, 0.2)),
    ]
    inputs = keras.Input((SIDE, SIDE, 3))
    x = keras.Sequential(augmentation, name="augmentation")(inputs)
    x = encoder_block(PatchEncoder(16, WIDTH)(Patches(4)(x)))
    x = layers.Flatten()(layers.LayerNormalization()(x))
    x = dense_pair(layers.Dropout(0.5)(x), 32)
    return keras.Model(inputs, layers.Dense(CLASSES, activation="softmax")(x))


# --- compact convolutional transformer ------------------------------------------------------------


class Tokenizer(layers.Layer):
    """A Sequential model without an Input, which the first call builds."""

    def __init__(self, filters=(8, WIDTH), **kwargs):
        super().__init__(**kwargs)
        self.body = keras.Sequential()
        for count in filters:
            self.body.add(layers.Conv2D(count, 3, use_bias=False, activation="relu"))
            self.body.add(layers.ZeroPadding2D(1))
            self.body.add(layers.MaxPooling2D(3, 2, "same"))

    def call(self, images):
        x = self.body(images)
        return ops.reshape(x, (-1, x.shape[1] * x.shape[2], x.shape[3]))


class Positions(layers.Layer):
    """A table of its own, added to what comes in."""

    def __init__(self, length, initializer="glorot_uniform", **kwargs):
        super().__init__(**kwargs)
        self.length, self.initializer = length, keras.initializers.get(initializer)

    def build(self, input_shape):
        self.table = self.add_weight(
            shape=(self.length, input_shape[-1]), initializer=self.initializer, name="embeddings"
        )

    def call(self, x):
        return x + ops.convert_to_tensor(self.table)


class SequencePooling(layers.Layer):
    """Takes no argument at all."""

    def __init__(self):
        super().__init__()
        self.score = layers.Dense(1)

    def call(self, x):
        shares = ops.softmax(self.score(x), axis=1)
        return ops.squeeze(ops.matmul(ops.transpose(shares, (0, 2, 1)), x), 1)


class StochasticDepth(layers.Layer):
    """Drops the branch of a sample in training, with a seed that is no argument."""

    def __init__(self, rate, **kwargs):
        super().__init__(**kwargs)
        self.rate = rate
        self.seeds = keras.random.SeedGenerator(7)

    def call(self, x, training=None):
        if not training:
            return x
        drawn = keras.random.uniform((ops.shape(x)[0], 1, 1), seed=self.seeds)
        return x / (1 - self.rate) * ops.cast(drawn >= self.rate, x.dtype)


def compact_transformer():
    augmentation = [
        *(layers.Rescaling(1 / 255), layers.RandomCrop(SIDE, SIDE)),
        layers.RandomFlip("horizontal"),
    ]
    inputs = keras.Input((SIDE, SIDE, 3))
    x = Tokenizer()(keras.Sequential(augmentation, name="augmentation")(inputs))
    x = encoder_block(Positions(x.shape[1])(x), lambda branch: StochasticDepth(0.1)(branch))
    x = SequencePooling()(layers.LayerNormalization(epsilon=1e-5)(x))
    return keras.Model(inputs, layers.Dense(CLASSES, activation="softmax")(x))


# --- attention over the instances of a bag --------------------------------------------------------


class BagAttention(layers.Layer):
    """A share for each instance; no configuration, and weights of names that say nothing."""

    def __init__(self, width, regularizer=None, **kwargs):
        super().__init__(**kwargs)
        self.width, self.regularizer = width, keras.regularizers.get(regularizer)

    def build(self, input_shape):
        inside = (input_shape[0][1], self.width)
        for name, shape in (("v", inside), ("w", (self.width, 1)), ("u", inside)):
            weight = self.add_weight(shape=shape, regularizer=self.regularizer, name=name)
            setattr(self, name, weight)

    def call(self, instances):
        shares = ops.softmax(ops.stack([self.score(one) for one in instances]), axis=0)
        return [shares[place] for place in range(len(instances))]

    def score(self, one):
        gate = ops.sigmoid(ops.matmul(one, self.u))
        return ops.matmul(ops.tanh(ops.matmul(one, self.v)) * gate, self.w)


def multiple_instances():
    first, second = layers.Dense(32, activation="relu"), layers.Dense(WIDTH, activation="relu")
    bag = [keras.Input((8, 8)) for _ in range(3)]
    features = [second(first(layers.Flatten()(one))) for one in bag]
    attention = BagAttention(24, keras.regularizers.L2(0.01), name="shares")
    weighted = [
        layers.multiply([share, feature])
        for share, feature in zip(attention(features), features, strict=True)
    ]
    x = layers.concatenate(weighted, axis=1)
    return keras.Model(bag, layers.Dense(CLASSES, activation="softmax")(x))


# --- ConvMixer ------------------------------------------------------------------------------------


def conv_mixer():
    def active(x):
        return layers.BatchNormalization()(layers.Activation("gelu")(x))

    inputs = keras.Input((SIDE, SIDE, 3))
    x = active(layers.Conv2D(WIDTH, 2, 2, name="patches")(layers.Rescaling(1 / 255)(inputs)))
    for place in range(2):
        mixed = layers.DepthwiseConv2D(5, padding="same", name=f"depthwise_{place}")(x)
        x = active(layers.Conv2D(WIDTH, 1)(layers.Add()([active(mixed), x])))
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(CLASSES, activation="softmax")(x))


# --- variational autoencoder ----------------------------------------------------------------------


class Sampling(layers.Layer):
    """Draws in inference as well, with TensorFlow's own generator, of which Keras knows nothing."""

    def call(self, inputs):
        import tensorflow as tf

        mean, log_variance = inputs
        return mean + tf.exp(0.5 * log_variance) * tf.random.normal(tf.shape(mean))


class Autoencoder(keras.Model):
    """Trains two models in a step of TensorFlow. It has no `call`, and is never built."""

    def __init__(self, encoder, decoder, **kwargs):
        super().__init__(**kwargs)
        self.encoder, self.decoder = encoder, decoder
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.tracker]

    def train_step(self, images):
        import tensorflow as tf

        with tf.GradientTape() as tape:
            mean, log_variance, code = self.encoder(images)
            error = keras.losses.binary_crossentropy(images, self.decoder(code))
            divergence = tf.square(mean) + tf.exp(log_variance) - 1 - log_variance
            loss = tf.reduce_mean(tf.reduce_sum(error, axis=(1, 2)))
            loss += tf.reduce_mean(tf.reduce_sum(0.5 * divergence, axis=1))
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


def autoencoder():
    options = {"strides": 2, "padding": "same", "activation": "relu"}
    image = keras.Input((8, 8, 1))
    x = layers.Flatten()(layers.Conv2D(8, 3, **options)(image))
    x = layers.Dense(WIDTH, activation="relu")(x)
    mean, log_variance = layers.Dense(2, name="mean")(x), layers.Dense(2, name="variance")(x)
    outputs = [mean, log_variance, Sampling()([mean, log_variance])]
    encoder = keras.Model(image, outputs, name="encoder")
    code = keras.Input((2,))
    x = layers.Reshape((4, 4, 8))(layers.Dense(128, activation="relu")(code))
    x = layers.Conv2DTranspose(8, 3, **options)(x)
    x = layers.Conv2DTranspose(1, 3, padding="same", activation="sigmoid")(x)
    return Autoencoder(encoder, keras.Model(code, x, name="decoder"))


# --- all with a `call` ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Example:
    """A model, its data, and whether Keras itself loads the whole model from its file."""

    make: Callable[[], keras.Model]
    data: Callable[[], Any]
    loads: bool = False


def images():
    return rng.uniform(0, 255, (ROWS, SIDE, SIDE, 3)).astype("float32")


def bags():
    return [rng.uniform(size=(ROWS, 8, 8)).astype("float32") for _ in range(3)]


EXAMPLES = {
    "vision transformer": Example(vision_transformer, images),
    "compact convolutional transformer": Example(compact_transformer, images),
    "attention over instances": Example(multiple_instances, bags),
    "ConvMixer": Example(conv_mixer, images, loads=True),
}
