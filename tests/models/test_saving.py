"""Sparse models whose layers are built by calls, or make layers late: saved, and loaded again.

Every layer that a test makes moves Keras' automatic numbers on, so that a model that is loaded here
has other ones than it was saved with, as in a fresh process.
"""

import warnings

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from tests.helpers import array

L = keras.layers
ops = keras.ops
register = keras.saving.register_keras_serializable(package="tests")


@register
class Tokens(L.Layer):
    """Of keras.io: no `build`, no names, no `get_config`; integers come in."""

    def __init__(self, count=50, dim=16, **kwargs):
        super().__init__(**kwargs)
        self.tokens, self.positions = L.Embedding(count, dim), L.Embedding(8, dim)

    def call(self, x):
        return self.tokens(x) + self.positions(ops.arange(0, ops.shape(x)[-1]))


@register
class Unnamed(L.Layer):
    """With a `build`; the layers have no names."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.layers_inside = [L.Dense(16), L.Dense(16)]

    def build(self, input_shape):
        for layer in self.layers_inside:
            layer.build(input_shape)

    def call(self, x):
        for layer in self.layers_inside:
            x = layer(x)
        return x


@register
class HalfBuilt(Unnamed):
    """Its `build` leaves the layers to their own calls."""

    def build(self, input_shape):
        self.scale = self.add_weight(shape=(), name="scale", initializer="ones")

    def call(self, x):
        return super().call(x) * self.scale


@register
class Projection(L.Layer):
    """Makes a layer in its `build`."""

    def build(self, input_shape):
        self.inner = L.Dense(16)
        self.inner.build(input_shape)

    def call(self, x):
        return self.inner(x)


@register
class HoldsProjection(L.Layer):
    """Holds a layer that makes a layer in its `build`, as Gemma does."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.projection = Projection(name="projection")

    def build(self, input_shape):
        self.projection.build(input_shape)

    def call(self, x):
        return self.projection(x)


BLOCKS = [Unnamed, HalfBuilt, Projection, HoldsProjection]


def model_with_all():
    ids = keras.Input((8,), dtype="int32")
    x = Tokens()(ids)
    for kind in BLOCKS:
        x = kind()(x)
    return keras.Model(ids, L.Dense(2)(x))


IDS = np.random.default_rng(0).integers(0, 50, (4, 8)).astype("int32")


@pytest.mark.core
@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_the_whole_way(storage, tmp_path):
    model = model_with_all()
    sparse = kso.sparsify(model, 0.4, seed=0, storage=storage)
    paths = [weight.path for weight in kso.prunable_weights(sparse)]
    assert paths == [weight.path for weight in kso.prunable_weights(model)]
    expected = array(sparse(IDS))
    sparse.save(tmp_path / "sparse.keras")
    loaded = keras.saving.load_model(tmp_path / "sparse.keras")
    np.testing.assert_array_equal(array(loaded(IDS)), expected)
    again = {weight.path: weight.live for weight in kso.prunable_weights(loaded)}
    assert again == {weight.path: weight.live for weight in kso.prunable_weights(sparse)}
    other = kso.sparsify(model_with_all(), 0.4, seed=1, storage=storage)
    if storage == "masked":  # files of compact weights are for masks of the same counts
        sparse.save_weights(tmp_path / "sparse.weights.h5")
        other.load_weights(tmp_path / "sparse.weights.h5")
        np.testing.assert_array_equal(array(other(IDS)), expected)
    plain = kso.strip(loaded)
    np.testing.assert_allclose(array(plain(IDS)), expected, atol=1e-6)
    assert [weight.path for weight in kso.prunable_weights(plain)] == paths
    plain.save(tmp_path / "plain.keras")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras', of any `Tokens` that it loads
        loaded = keras.saving.load_model(tmp_path / "plain.keras")
    np.testing.assert_array_equal(array(loaded(IDS)), array(plain(IDS)))


@register
class Late(keras.Model):
    """Written as a class: nested models, a list, and a layer that is made in `build`."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        x = keras.Input((16,))
        self.encoder = keras.Model(x, L.Dense(12)(Unnamed()(x)))
        self.towers = [keras.Sequential([L.Dense(8)]), Projection()]

    def build(self, input_shape):
        self.head = L.Dense(3)
        self.towers[0].build((None, 12))
        self.towers[1].build((None, 8))
        self.head.build((None, 16))

    def call(self, x):
        x = self.encoder(x)
        for tower in self.towers:
            x = tower(x)
        return self.head(x)


def loaded_in_another_place(path):
    L.Dense(1)  # moves the numbers on
    return keras.saving.load_model(path)


@pytest.mark.core
def test_a_model_written_as_a_class(tmp_path):
    x = np.ones((2, 16), "float32")
    model = Late(name="late")
    model(x)
    model = kso.sparsify(model, 0.4, seed=0)
    paths = [weight.path for weight in kso.prunable_weights(model)]
    assert len(paths) == 6
    expected = array(model(x))
    model.save(tmp_path / "late.keras")
    loaded = loaded_in_another_place(tmp_path / "late.keras")
    assert isinstance(loaded, Late)
    np.testing.assert_array_equal(array(loaded(x)), expected)
    weights = kso.prunable_weights(loaded)
    assert [weight.path for weight in weights] == paths
    assert sum(weight.live for weight in weights) == round(0.4 * sum(w.size for w in weights))
    loaded.save(tmp_path / "again.keras")
    again = loaded_in_another_place(tmp_path / "again.keras")
    np.testing.assert_array_equal(array(again(x)), expected)
    inputs = keras.Input((16,))
    outer = keras.Model(inputs, again(inputs))
    outer.save(tmp_path / "outer.keras")
    outer = loaded_in_another_place(tmp_path / "outer.keras")
    np.testing.assert_array_equal(array(outer(x)), expected)
    assert len(kso.prunable_weights(outer)) == 6

    plain = kso.strip(loaded)
    assert type(plain) is Late
    plain.save(tmp_path / "plain.keras")
    plain = loaded_in_another_place(tmp_path / "plain.keras")
    assert type(plain) is Late
    np.testing.assert_array_equal(array(plain(x)), expected)
