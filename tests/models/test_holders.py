"""Weights that are used in several places: masked in all of them, whoever holds the layer."""

import collections

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.parametrizations import CompactMask, FixedMask
from tests.helpers import array
from tests.models.networks import EmbeddingHead

L = keras.layers
IDS = np.random.default_rng(0).integers(0, 50, (4, 3)).astype("int32")
X = np.random.default_rng(1).normal(size=(8, 12)).astype("float32")
Pair = collections.namedtuple("Pair", "first second")


def halves(base, at_the_top):
    """An embedding that is handed to two parts, and may stand in the model as well."""

    class Half(base):
        def __init__(self, embedding, **kwargs):
            super().__init__(**kwargs)
            self.embedding = embedding
            self.out = L.Dense(8, name="out")

        def call(self, ids):
            return self.out(self.embedding(ids))

    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            embedding = L.Embedding(50, 16, name="embedding")
            self.enc, self.dec = Half(embedding, name="enc"), Half(embedding, name="dec")
            if at_the_top:
                self.embedding = embedding

        def call(self, ids):
            return self.enc(ids) + self.dec(ids)

    model = Net()
    model(IDS)
    return model


def check_masked_and_stripped(model, x):
    """Trains a step; dead entries stay zero in the raw weights, and stripping changes nothing."""
    model.compile(keras.optimizers.SGD(1.0), "mse", jit_compile=False)
    model.train_on_batch(x, np.ones_like(array(model(x))))
    for weight in kso.prunable_weights(model):
        dead = ~weight.parametrization.mask_value()
        assert dead.any()
        assert not weight.raw_value()[dead].any(), weight.path
    expected = array(model(x))
    plain = kso.strip(model)
    np.testing.assert_array_equal(array(plain(x)), expected)
    assert all(weight.parametrization is None for weight in kso.prunable_weights(plain))


@pytest.mark.core
@pytest.mark.parametrize("at_the_top", [False, True])
@pytest.mark.parametrize("base", [keras.Model, L.Layer])
def test_an_embedding_that_is_handed_to_two_parts(base, at_the_top):
    model = halves(base, at_the_top)
    before = {weight.path: weight.size for weight in kso.prunable_weights(model)}
    sparse = kso.sparsify(model, 0.2, seed=0)
    after = kso.prunable_weights(sparse)
    assert {weight.path: weight.size for weight in after} == before
    assert sum(weight.live for weight in after) == round(0.2 * sum(before.values()))
    assert sparse.dec.embedding is sparse.enc.embedding
    assert isinstance(sparse.dec.embedding, kso.PrunableLayer)
    check_masked_and_stripped(sparse, IDS)


class Aliases(keras.Model):
    """Calls its layers by other names than those that they are made by."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (L.Dense(12, name=name) for name in "abc")
        self._chain = [self.first]
        self._table = {"second": (self.second,)}
        self._pair = Pair(self.third, None)

    def call(self, x):
        for layer in self._chain:
            x = layer(x)
        return self._pair.first(self._table["second"][0](x))


@pytest.mark.core
def test_private_aliases_lists_and_dicts():
    model = Aliases()
    model(X)
    sparse = kso.sparsify(model, 0.3, seed=0)
    assert sparse._chain[0] is sparse.first
    assert sparse._pair.first is sparse.third
    assert [layer.name for layer in sparse.layers] == list("abc")
    check_masked_and_stripped(sparse, X)


class Concealed(keras.Model):
    """Calls a layer from a function, which Keras does not look into."""

    def __init__(self):
        super().__init__()
        self.first, self.second = first, second = L.Dense(12, name="a"), L.Dense(4, name="b")
        self.chain = lambda x: second(first(x))

    def call(self, x):
        return self.chain(x)


@pytest.mark.core
@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_layers_that_a_function_calls(storage):
    model = Concealed()
    model(X)
    first, expected = model.first, array(model.first(X))
    sparse = kso.sparsify(model, 0.3, seed=0, storage=storage)
    np.testing.assert_array_equal(array(first(X)), expected)
    check_masked_and_stripped(sparse, X)
    assert "call" not in vars(first)


@keras.saving.register_keras_serializable(package="tests")
class TiedHead(EmbeddingHead):
    """Its configuration has the embedding that it reads."""

    def get_config(self):
        config = super().get_config()
        return {**config, "embedding": keras.saving.serialize_keras_object(self.embedding)}

    @classmethod
    def from_config(cls, config):
        embedding = keras.saving.deserialize_keras_object(config.pop("embedding"))
        return cls(embedding, **config)


def tied():
    ids = keras.Input((3,), dtype="int32")
    embedding = L.Embedding(50, 16, name="embedding")
    hidden = L.Dense(16, name="hidden")(embedding(ids))
    return keras.Model(ids, TiedHead(embedding, name="head")(hidden))


@pytest.mark.core
def test_a_functional_model_stays_tied(tmp_path):
    model = tied()
    expected = array(model(IDS))
    sparse = kso.sparsify(model, 0.3, seed=0)
    paths = [weight.path for weight in kso.prunable_weights(sparse)]
    assert paths == ["embedding/embeddings", "hidden/kernel", "head/project/kernel"]
    assert kso.report(sparse).density == pytest.approx(0.3, abs=1e-3)
    embedding, head = sparse.get_layer("embedding"), sparse.get_layer("head")
    assert head.embedding is embedding
    sparse.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(array(loaded(IDS)), array(sparse(IDS)))
    assert len(loaded.weights) == len(sparse.weights)
    compact = kso.convert(sparse, "compact")
    np.testing.assert_allclose(array(compact(IDS)), array(sparse(IDS)), atol=1e-6)
    np.testing.assert_array_equal(array(kso.strip(compact)(IDS)), array(compact(IDS)))
    check_masked_and_stripped(sparse, IDS)
    np.testing.assert_array_equal(array(model(IDS)), expected)


def test_copies_stay_tied_where_nothing_of_them_is_masked():
    sparse = kso.sparsify(tied(), 0.3, seed=0, include="hidden")
    assert sparse.get_layer("head").embedding is sparse.get_layer("embedding")


class TiedByVariable(keras.Model):
    """Two layers that hold one variable, and no layer that holds both."""

    def __init__(self):
        super().__init__()
        self.first, self.second = L.Dense(12, name="first"), L.Dense(12, name="second")

    def build(self, input_shape):
        self.first.build(input_shape)
        self.second.build(input_shape)
        self.second._tracker.unlock()
        self.second.borrowed = self.first.kernel

    def call(self, x):
        return self.second(self.first(x)) + keras.ops.matmul(x, self.second.borrowed)


@pytest.mark.core
def test_a_variable_that_layers_share_is_refused():
    model = TiedByVariable()
    expected = array(model(X))
    with pytest.raises(NotPrunableError, match=r"'first/kernel' is used by several layers.*second"):
        kso.sparsify(model, 0.3, seed=0)
    np.testing.assert_array_equal(array(model(X)), expected)


@keras.saving.register_keras_serializable(package="tests")
class Growing(L.Layer):
    """Its configuration makes another layer than it is."""

    def __init__(self, count=1, **kwargs):
        super().__init__(**kwargs)
        self.inner = [L.Dense(12, name=f"inner_{k}") for k in range(count)]

    def build(self, input_shape):
        for layer in self.inner:
            layer.build(input_shape)

    def call(self, x):
        return sum(layer(x) for layer in self.inner)

    def get_config(self):
        return {**super().get_config(), "count": 2}


def test_a_layer_whose_configuration_makes_another_one_is_copied_as_it_is():
    inputs = keras.Input((12,))
    model = keras.Model(inputs, L.Dense(4, name="head")(Growing(name="grows")(inputs)))
    before = [weight.path for weight in kso.prunable_weights(model)]
    sparse = kso.sparsify(model, 0.3, seed=0)
    assert [weight.path for weight in kso.prunable_weights(sparse)] == before
    check_masked_and_stripped(sparse, X)


@pytest.mark.core
@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_a_model_is_as_it_was_if_anything_fails(storage, monkeypatch):
    model = halves(L.Layer, at_the_top=True)
    expected, weights = array(model(IDS)), [array(v) for v in model.weights]
    names, held = [v.path for v in model.weights], [model.enc, model.embedding]
    marked = []
    kind = FixedMask if storage == "masked" else CompactMask
    mark_as_drawn = kind.mark_as_drawn

    def fails_at_last(self, *kernel):
        marked.append(self)
        if len(marked) == 3:
            raise RuntimeError("the disk is full")
        mark_as_drawn(self, *kernel)

    monkeypatch.setattr(kind, "mark_as_drawn", fails_at_last)
    with pytest.raises(RuntimeError, match="full"):
        kso.sparsify(model, 0.3, seed=0, storage=storage)
    monkeypatch.undo()
    assert [v.path for v in model.weights] == names
    assert model.enc is held[0]
    assert model.embedding is held[1]
    assert model.dec.embedding is held[1]
    for variable, before in zip(model.weights, weights, strict=True):
        np.testing.assert_array_equal(array(variable), before)
    np.testing.assert_array_equal(array(model(IDS)), expected)
    check_masked_and_stripped(kso.sparsify(model, 0.3, seed=0, storage="masked"), IDS)
