"""Models with our wrappers in them: stripped for the file, left alone otherwise."""

import keras
import numpy as np
import pytest

from keras_sparse_ortho import PrunableLayer, prunable_weights, sparsify
from keras_sparse_ortho.export import export_litert
from keras_sparse_ortho.initializers import ExactOrthogonal
from tests.export.models import interpret, layers

pytestmark = pytest.mark.tensorflow_only


def sparse_layer(units, **kwargs):
    return PrunableLayer(
        layers.Dense(units, kernel_initializer=ExactOrthogonal(0.2, seed=0), **kwargs)
    )


class Classifier(keras.Model):
    """A subclassed model."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def call(self, x):
        return self.layer(x)


def test_effective_weights_go_into_the_file_and_the_model_stays_wrapped(tmp_path):
    model = keras.Sequential([keras.Input((16,), name="x"), sparse_layer(12), sparse_layer(6)])
    for variable in model.trainable_weights:  # raw weights that the masks have to silence
        variable.assign(variable + 1.0)
    before = [np.array(value) for value in model.get_weights()]
    report = export_litert(model, tmp_path / "m.tflite")
    assert sorted(w.zeros for w in report.weights) == [72 - 14, 192 - 38]  # round(0.2 * size) live
    x = np.random.default_rng(0).standard_normal((1, 16)).astype("float32")
    (got,) = interpret(tmp_path / "m.tflite", x=x).values()
    np.testing.assert_allclose(got, keras.ops.convert_to_numpy(model(x)), atol=1e-5)
    assert [type(layer) for layer in model.layers] == [PrunableLayer, PrunableLayer]
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_a_subclassed_model_is_exported_and_stays_wrapped(tmp_path):
    model = Classifier(sparse_layer(6))
    model(np.ones((1, 16), "float32"))
    report = export_litert(model, tmp_path / "m.tflite", sample=np.ones((1, 16), "float32"))
    assert report.max_abs_diff < 1e-5
    assert type(model.layer) is PrunableLayer


def test_plain_subclassed_model_takes_its_shapes_from_the_sample(tmp_path):
    model = Classifier(layers.Dense(3))
    x = np.random.default_rng(0).standard_normal((4, 5)).astype("float32")
    model(x)
    with pytest.raises(ValueError, match=r"subclassed.*Received: sample=None"):
        export_litert(model, tmp_path / "m.tflite")
    report = export_litert(model, tmp_path / "m.tflite", sample=x, batch_size=3)
    assert report.sample_rows == 4
    (got,) = interpret(tmp_path / "m.tflite", input=x[:3]).values()
    np.testing.assert_allclose(got, keras.ops.convert_to_numpy(model(x))[:3], atol=1e-5)


class Pooling(keras.layers.Layer):
    """A second layer of the same size, whose result nobody takes: as a head does with BERT's."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.taken, self.pooled = (layers.Dense(16, name=n) for n in ("taken", "pooled"))

    def build(self, shape):
        self.taken.build(shape)
        self.pooled.build(shape)

    def call(self, x):
        self.pooled(x)
        return self.taken(x)


class Backbone(keras.Model):
    """A functional model with a class of its own."""

    def __init__(self, name="backbone"):
        x = keras.Input((16,), name="x")
        super().__init__(x, Pooling(name="block")(x), name=name)

    def get_config(self):
        return {"name": self.name}


def test_a_kernel_that_no_output_needs_is_not_missed(tmp_path):
    budget = {"block/taken": 0.5, "block/pooled": 0.25}
    sparse = sparsify(Backbone(), budget=budget, initializer="random_sparse", seed=0)
    report = export_litert(sparse, tmp_path / "m.tflite")
    assert [weight.zeros for weight in report.weights] == [128]
    assert [weight.live for weight in prunable_weights(sparse)] == [128, 64]
