"""Functional models with a class of their own, as all of keras-hub are: alone and nested."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from tests.helpers import array, slow_on_jax
from tests.models.networks import EmbeddingHead

L = keras.layers
register = keras.saving.register_keras_serializable(package="tests")
IDS = np.random.default_rng(0).integers(0, 50, (8, 6)).astype("int32")


@register
class Mixing(L.Layer):
    """A block whose configuration does not make it again: only the backbone's does."""

    def __init__(self, width, **kwargs):
        super().__init__(**kwargs)
        self.inner = L.Dense(width, name="inner")

    def build(self, input_shape):
        self.inner.build(input_shape)

    def call(self, x):
        return x + self.inner(x)

    def get_config(self):
        return {**super().get_config(), "wide": self.inner.units}


@register
class ReverseHead(EmbeddingHead):
    """Its configuration does not say which embedding it reads."""


@register
class Backbone(keras.Model):
    """Keeps its layers, and tensors of its graph, in attributes."""

    def __init__(self, width=16, **kwargs):
        embedding = L.Embedding(50, width, name="embedding")
        blocks = [Mixing(width, name="mixing"), L.Dense(width)]
        ids = keras.Input((6,), dtype="int32", name="ids")
        x, levels = embedding(ids), {}
        for block in blocks:
            x = block(x)
            levels[block.name] = x
        super().__init__(inputs={"ids": ids}, outputs=x, **kwargs)
        self.width, self.levels = width, levels
        self._embedding, self.blocks = embedding, blocks
        self.mixer = blocks[0].inner  # in the graph only inside another layer, as OPT's embedding

    @property
    def embedding(self):
        return self._embedding

    def get_config(self):
        return {"name": self.name, "width": self.width}

    @classmethod
    def from_config(cls, config):
        return cls(**config)

    def embed(self, ids):
        return self._embedding(ids)


@register
class Task(keras.Model):
    """A model on a backbone, tied to its embedding, with a preprocessor."""

    def __init__(self, backbone, preprocessor=None, **kwargs):
        head, inputs = ReverseHead(backbone.embedding, name="head"), backbone.input
        super().__init__(inputs=inputs, outputs=head(backbone(inputs)), **kwargs)
        self.backbone, self.preprocessor, self.head = backbone, preprocessor, head

    def get_config(self):
        backbone = keras.saving.serialize_keras_object(self.backbone)
        return {"name": self.name, "backbone": backbone}

    @classmethod
    def from_config(cls, config):
        backbone = keras.saving.deserialize_keras_object(config["backbone"])
        return cls(backbone, name=config["name"])

    def predict_text(self, text):
        return self(self.preprocessor(text))


def encode(text):
    return {"ids": np.resize(np.frombuffer(text.encode(), "uint8") % 50, (1, 6)).astype("int32")}


MODELS = {
    "backbone": (Backbone, lambda model: model),
    "task": (lambda: Task(Backbone(name="bone"), encode), lambda model: model.backbone),
}


@pytest.mark.core
@pytest.mark.parametrize("storage", ["masked", "compact"])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_whole_way(name, storage, tmp_path):
    make, backbone_of = MODELS[name]
    model = make()
    before = array(model({"ids": IDS}))
    paths = [weight.path for weight in kso.prunable_weights(model)]
    sparse = kso.sparsify(model, 0.4, seed=0, storage=storage)
    np.testing.assert_array_equal(array(model({"ids": IDS})), before)
    assert isinstance(sparse, type(model))
    weights = kso.prunable_weights(sparse)
    assert sorted(weight.path for weight in weights) == sorted(paths)
    for weight in weights if storage == "masked" else []:
        assert not weight.raw_value()[~weight.parametrization.mask_value()].any()
        assert weight.parametrization.is_as_drawn(), weight.path
    live, size = (sum(getattr(w, key) for w in weights) for key in ("live", "size"))
    assert live == round(0.4 * size)
    assert len(sparse.weights) == len(model.weights) + len(weights)
    bone = backbone_of(sparse)
    assert bone.embedding is bone.get_layer("embedding")
    assert bone.blocks[0] is bone.get_layer("mixing")
    assert isinstance(bone.mixer, kso.PrunableLayer)
    levels = keras.Model(bone.input, bone.levels)({"ids": IDS})
    np.testing.assert_array_equal(array(levels["mixing"]), array(bone.blocks[0](bone.embed(IDS))))

    sparse.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    sparse.train_on_batch({"ids": IDS}, np.zeros_like(before))
    for weight in kso.prunable_weights(sparse):
        assert not weight.value[~weight.parametrization.mask_value()].any()
    expected = array(sparse({"ids": IDS}))
    sparse.save(tmp_path / "sparse.keras")
    loaded = keras.saving.load_model(tmp_path / "sparse.keras")
    assert isinstance(loaded, type(model))
    np.testing.assert_array_equal(array(loaded({"ids": IDS})), expected)
    assert [weight.path for weight in kso.prunable_weights(loaded)] == [w.path for w in weights]

    plain = kso.strip(loaded)
    assert type(plain) is type(model)
    assert backbone_of(plain).mixer is backbone_of(plain).blocks[0].inner
    np.testing.assert_allclose(array(plain({"ids": IDS})), expected, atol=1e-6)
    plain.save(tmp_path / "plain.keras")
    again = keras.saving.load_model(tmp_path / "plain.keras")
    np.testing.assert_array_equal(array(again({"ids": IDS})), array(plain({"ids": IDS})))
    assert len(again.weights) == len(model.weights)


@pytest.mark.core
def test_methods_attributes_and_nesting():
    task = kso.sparsify(MODELS["task"][0](), 0.4, seed=0)
    assert task.preprocessor is encode
    text = array(task.predict_text("once upon a time"))
    np.testing.assert_array_equal(text, array(task(encode("once upon a time"))))
    assert task.head.embedding is task.backbone.embedding
    inputs = keras.Input((6,), dtype="int32", name="ids")
    outer = keras.Model(inputs, L.Dense(2, name="out")(Backbone(name="bone")({"ids": inputs})))
    sparse = kso.sparsify(outer, 0.4, seed=0)
    assert isinstance(sparse.get_layer("bone"), Backbone)
    copy = type(sparse).from_config(sparse.get_config())
    copy.set_weights(sparse.get_weights())
    np.testing.assert_array_equal(array(copy(IDS)), array(sparse(IDS)))


class WithStep(keras.Model):
    """A class that adds methods only: its constructor takes inputs and outputs."""

    def train_step(self, *args, **kwargs):
        self.steps = getattr(self, "steps", 0) + 1
        return super().train_step(*args, **kwargs)


def test_a_class_that_takes_inputs_and_outputs(tmp_path):
    inputs = keras.Input((6,))
    model = WithStep(inputs, L.Dense(4, name="out")(L.Dense(8, name="hidden")(inputs)))
    sparse = kso.sparsify(model, 0.4, seed=0)
    assert type(sparse) is WithStep
    sparse.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(
        tmp_path / "model.keras", custom_objects={"WithStep": WithStep}
    )
    x = np.ones((2, 6), "float32")
    np.testing.assert_array_equal(array(loaded(x)), array(sparse(x)))


@register
class Stack(keras.Sequential):
    """A class that adds methods only."""

    def halved(self, x):
        return self(x) / 2


@register
class Tower(keras.Sequential):
    """Its constructor makes the layers, which know their input when it is called."""

    def __init__(self, width=8, **kwargs):
        super().__init__([L.Dense(width), L.ReLU(), L.Dense(6, name="out")], **kwargs)
        self.width, self.first, self.parts = width, self.layers[0], {"out": [self.layers[-1]]}

    def call(self, inputs, training=None, mask=None):
        return inputs + super().call(inputs, training=training, mask=mask)

    def get_config(self):
        return {"name": self.name, "width": self.width}

    @classmethod
    def from_config(cls, config):
        return cls(**config)


@pytest.mark.core
@slow_on_jax
def test_sequential_classes(tmp_path):
    x = np.random.default_rng(0).normal(size=(4, 6)).astype("float32")
    stack = Stack([keras.Input((6,)), Tower(name="tower"), L.Dense(3, name="head")])
    before = array(stack(x))
    sparse = kso.sparsify(stack, 0.5, seed=0)
    np.testing.assert_array_equal(array(stack(x)), before)
    tower = sparse.get_layer("tower")
    assert type(sparse) is Stack
    assert isinstance(tower, Tower)
    assert tower.first is tower.layers[0] is not stack.get_layer("tower").first
    assert isinstance(tower.first, kso.PrunableLayer)
    assert tower.parts["out"] == [tower.layers[-1]]
    weights = kso.prunable_weights(sparse)
    assert [w.path for w in weights] == [w.path for w in kso.prunable_weights(stack)]
    assert len(sparse.weights) == len(stack.weights) + 3
    sparse.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    sparse.train_on_batch(x, np.zeros((4, 3)))
    expected = array(sparse.halved(x))
    sparse.save(tmp_path / "sparse.keras")
    loaded = keras.saving.load_model(tmp_path / "sparse.keras")
    np.testing.assert_array_equal(array(loaded.halved(x)), expected)
    for weight in kso.prunable_weights(loaded):
        assert not weight.raw_value()[~weight.parametrization.mask_value()].any()
    plain = kso.strip(loaded)
    assert type(plain.get_layer("tower")) is Tower
    assert type(plain.get_layer("tower").first) is L.Dense
    np.testing.assert_allclose(array(plain.halved(x)), expected, atol=1e-6)
    plain.save(tmp_path / "plain.keras")
    again = keras.saving.load_model(tmp_path / "plain.keras")
    np.testing.assert_array_equal(array(again(x)), array(plain(x)))
