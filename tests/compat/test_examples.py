"""Models with the traits by which examples of keras.io once broke; nothing here is their code.

The traits: constructors without `**kwargs`, configurations that lack an argument or do not exist,
cropping inside the model, random numbers in calls, weights of no known name, a class without a
`call`. They are made sparse by one line, trained, and kept as the examples keep them.
"""

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_sparse_ortho as kso
from tests.helpers import array, assert_same
from tests.models.test_whole_way import outputs, whole_way

pytestmark = [
    pytest.mark.core,
    # Of matrices of layers that are not registered; Keras' own, of augmentation that is not jitted.
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


ROWS, SIDE, WIDTH, CLASSES = 4, 12, 16, 5


class Patches(layers.Layer):
    """Takes no name, though its configuration has one, and has no weights."""

    def __init__(self, size):
        super().__init__()
        self.size = size

    def call(self, images):
        patches = ops.image.extract_patches(images, size=self.size)
        return ops.reshape(
            patches, (ops.shape(images)[0], -1, patches.shape[-1])
        )

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


class Tokenizer(layers.Layer):
    """A Sequential model without an Input, which the first call builds."""

    def __init__(self, filters=(8, WIDTH), **kwargs):
        super().__init__(**kwargs)
        self.body = keras.Sequential()
        for count in filters:
            self.body.add(
                layers.Conv2D(count, 3, use_bias=False, activation="relu")
            )
            self.body.add(layers.ZeroPadding2D(1))
            self.body.add(layers.MaxPooling2D(3, 2, "same"))

    def call(self, images):
        x = self.body(images)
        return ops.reshape(x, (-1, x.shape[1] * x.shape[2], x.shape[3]))


class Positions(layers.Layer):
    """A table of its own, added to what comes in."""

    def __init__(self, length, initializer="glorot_uniform", **kwargs):
        super().__init__(**kwargs)
        self.length, self.initializer = (
            length,
            keras.initializers.get(initializer),
        )

    def build(self, input_shape):
        self.table = self.add_weight(
            shape=(self.length, input_shape[-1]),
            initializer=self.initializer,
            name="embeddings",
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


def transformer(augmentation, embed, pool):
    """On images: an encoder block, with an activation that is a function."""
    inputs = keras.Input((SIDE, SIDE, 3))
    x = embed(keras.Sequential(augmentation, name="augmentation")(inputs))
    normal = layers.LayerNormalization(epsilon=1e-6)(x)
    attended = layers.MultiHeadAttention(2, 8, dropout=0.1)(normal, normal)
    x = layers.Add()([x, StochasticDepth(0.1)(attended)])
    branch = layers.Dense(WIDTH, activation=ops.gelu)(
        layers.LayerNormalization()(x)
    )
    x = pool(
        layers.Add()([x, StochasticDepth(0.1)(layers.Dropout(0.1)(branch))])
    )
    return keras.Model(inputs, layers.Dense(CLASSES, activation="softmax")(x))


def vision_transformer():
    normalization = layers.Normalization()
    normalization.adapt(images())
    augmentation = [
        *(
            normalization,
            layers.Resizing(16, 16),
            layers.RandomFlip("horizontal"),
        ),
        *(layers.RandomRotation(0.02), layers.RandomZoom(0.2, 0.2)),
    ]
    encoder = lambda x: PatchEncoder(16, WIDTH)(Patches(4)(x))  # noqa: E731
    return transformer(augmentation, encoder, layers.Flatten())


def compact_transformer():
    augmentation = [layers.Rescaling(1 / 255), layers.RandomCrop(SIDE, SIDE)]
    return transformer(
        augmentation, lambda x: Positions(9)(Tokenizer()(x)), SequencePooling()
    )


class BagAttention(layers.Layer):
    """A share for each instance; no configuration, and weights of names that say nothing."""

    def __init__(self, width, regularizer=None, **kwargs):
        super().__init__(**kwargs)
        self.width, self.regularizer = (
            width,
            keras.regularizers.get(regularizer),
        )

    def build(self, input_shape):
        inside = (input_shape[0][1], self.width)
        for name, shape in (
            ("v", inside),
            ("w", (self.width, 1)),
            ("u", inside),
        ):
            weight = self.add_weight(
                shape=shape, regularizer=self.regularizer, name=name
            )
            setattr(self, name, weight)

    def call(self, instances):
        shares = ops.softmax(
            ops.stack([self.score(one) for one in instances]), axis=0
        )
        return [shares[place] for place in range(len(instances))]

    def score(self, one):
        gate = ops.sigmoid(ops.matmul(one, self.u))
        return ops.matmul(ops.tanh(ops.matmul(one, self.v)) * gate, self.w)


def multiple_instances():
    hidden = layers.Dense(WIDTH, activation="relu")
    bag = [keras.Input((8, 8)) for _ in range(3)]
    features = [hidden(layers.Flatten()(one)) for one in bag]
    shares = BagAttention(24, keras.regularizers.L2(0.01), name="shares")(
        features
    )
    weighted = [
        layers.multiply(pair) for pair in zip(shares, features, strict=True)
    ]
    x = layers.concatenate(weighted, axis=1)
    return keras.Model(bag, layers.Dense(CLASSES, activation="softmax")(x))


class Sampling(layers.Layer):
    """Draws in inference as well, with TensorFlow's own generator, of which Keras knows nothing."""

    def call(self, inputs):
        import tensorflow as tf

        mean, log_variance = inputs
        return mean + tf.exp(0.5 * log_variance) * tf.random.normal(
            tf.shape(mean)
        )


class Autoencoder(keras.Model):
    """Trains two models in a step of TensorFlow. It has no `call`, and is never built."""

    def __init__(self, encoder, decoder, **kwargs):
        super().__init__(**kwargs)
        self.encoder, self.decoder = encoder, decoder

    def train_step(self, images):
        import tensorflow as tf

        with tf.GradientTape() as tape:
            mean, log_variance, code = self.encoder(images)
            loss = tf.reduce_mean(tf.square(images - self.decoder(code)))
            loss += tf.reduce_mean(
                tf.square(mean) + tf.exp(log_variance) - 1 - log_variance
            )
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(
            zip(gradients, self.trainable_weights, strict=True)
        )
        return {"loss": loss}


def autoencoder():
    image, code = keras.Input((8, 8, 1)), keras.Input((2,))
    x = layers.Flatten()(
        layers.Conv2D(8, 3, 2, padding="same", activation="relu")(image)
    )
    moments = (
        layers.Dense(2, name="mean")(x),
        layers.Dense(2, name="variance")(x),
    )
    encoder = keras.Model(
        image, [*moments, Sampling()(moments)], name="encoder"
    )
    x = layers.Reshape((8, 8, 2))(layers.Dense(128, activation="relu")(code))
    x = layers.Conv2DTranspose(1, 3, padding="same")(x)
    return Autoencoder(encoder, keras.Model(code, x, name="decoder"))


def images():
    return (
        np.random.default_rng(0)
        .uniform(0, 255, (ROWS, SIDE, SIDE, 3))
        .astype("float32")
    )


def bags():
    return list(
        np.random.default_rng(0).uniform(size=(3, ROWS, 8, 8)).astype("float32")
    )


# Models with a `call`, and their data.
EXAMPLES = {
    "vision transformer": (vision_transformer, images),
    "compact convolutional transformer": (compact_transformer, images),
    "attention over instances": (multiple_instances, bags),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_one_line(name, tmp_path):
    make, data = EXAMPLES[name]
    x = data()
    sparse, plain = whole_way(make(), x)
    # Other masks, until the file's come; and a dense model.
    for kept, other in ((sparse, kso.sparsify(make(), 0.4)), (plain, make())):
        kept.save_weights(tmp_path / "kept.weights.h5")
        other.load_weights(tmp_path / "kept.weights.h5")
        np.testing.assert_array_equal(outputs(other, x), outputs(sparse, x))


@pytest.mark.tensorflow_only
def test_a_training_step_around_two_models(tmp_path):
    images = (
        np.random.default_rng(0).uniform(size=(4, 8, 8, 1)).astype("float32")
    )
    codes = np.ones((2, 2), "float32")

    def answers(encoder, decoder):
        *moments, _ = encoder(images)  # but for the code, which is drawn
        return [array(value) for value in (*moments, decoder(codes))]

    model = kso.sparsify(autoencoder(), 0.2)
    model.compile("adam", jit_compile=False)
    assert np.isfinite(
        model.fit(images, batch_size=2, verbose=0).history["loss"]
    ).all()
    for weight in kso.prunable_weights(model):
        assert not weight.raw_value()[
            ~weight.parametrization.mask_value()
        ].any(), weight.path
    assert kso.report(model).density == pytest.approx(0.2, abs=1e-3)
    expected = answers(model.encoder, model.decoder)
    plain = kso.strip(model)
    for kept in (plain, kso.sparsify(autoencoder(), 0.2)):
        loaded = []
        for part in (kept.encoder, kept.decoder):
            part.save(tmp_path / "part.keras")
            custom = {"Sampling": Sampling}
            loaded.append(
                keras.saving.load_model(tmp_path / "part.keras", custom)
            )
        assert_same(answers(*loaded), answers(kept.encoder, kept.decoder))
    assert_same(answers(plain.encoder, plain.decoder), expected)
