"""What the tests of whole models share."""

import keras
import numpy as np

import keras_sparse_ortho as kso
from tests.helpers import data

L = keras.layers


def fit(model, epochs=2):
    """The losses of a few epochs, in a fixed order of batches."""
    x, y = data(model, 3)
    options = {"batch_size": 8, "shuffle": False, "verbose": 0}
    return model.fit(x, y, epochs=epochs, **options).history["loss"]


def assert_equal_kernels(one, other, **tolerance):
    for a, b in zip(
        kso.prunable_weights(one), kso.prunable_weights(other), strict=True
    ):
        assert (a.path, a.shape, a.live) == (b.path, b.shape, b.live)
        np.testing.assert_array_equal(a.mask, b.mask)
        np.testing.assert_allclose(
            a.value, b.value, **(tolerance or {"rtol": 0})
        )


@keras.saving.register_keras_serializable(package="tests")
class Mixer(L.Layer):
    """Three matrices in one weight, with a bias each, and a token: a vector of rank 3."""

    def __init__(self, mix_initializer="glorot_uniform", **kwargs):
        super().__init__(**kwargs)
        self.mix_initializer = keras.initializers.get(mix_initializer)

    def build(self, input_shape):
        size = input_shape[-1]
        self.mix = self.add_weight(
            (3, size, 8), self.mix_initializer, name="mix"
        )
        self.biases = self.add_weight((3, 8), "zeros", name="mix_bias")
        self.token = self.add_weight((1, 1, 8), "ones", name="token")
        self.positions = self.add_weight(
            (8, 8), "ones", trainable=False, name="positions"
        )

    def call(self, x):
        mixed = keras.ops.einsum("bi,eij->ebj", x * self.token[0], self.mix)
        return keras.ops.mean(mixed + self.biases[:, None], 0)

    def get_config(self):
        initializer = keras.initializers.serialize(self.mix_initializer)
        return {**super().get_config(), "mix_initializer": initializer}


def with_mixer(**options):
    keras.utils.set_random_seed(1)
    layers = [
        L.Dense(8, name="lift"),
        Mixer(name="mixer", **options),
        L.Dense(10, name="head"),
    ]
    return keras.Sequential([keras.Input((8,)), *layers], name="net")
