"""What several modules of this folder share: one converter, and every route of one model."""

import keras
import numpy as np
import pytest

from tests.export.models import layers, tiny


@pytest.fixture(scope="session", autouse=True)
def _one_converter(kept_converter):
    """All exports convert in one process; see `cold`."""


@pytest.fixture
def cold(kept_converter, monkeypatch):
    """Exports start converters of their own, as everywhere else."""
    from keras_sparse_ortho.export import _candidates

    monkeypatch.setattr(_candidates, "converter", _candidates.Worker)


def blocks(weight, rng, rows=16, density=0.25):
    """Zero all but a share of the (rows x 1) blocks of a kernel; the rest keeps its scale."""
    value = np.array(keras.ops.convert_to_numpy(weight.value))
    live = rng.random((value.shape[0] // rows, value.shape[1])) < density
    weight.assign(value * np.repeat(live, rows, axis=0) / np.sqrt(density))


def block_model():
    """Two Dense layers in 16x1 blocks, one of them used twice, and a dense head."""
    keras.utils.set_random_seed(3)
    rng = np.random.default_rng(3)
    x = keras.Input((64,), name="x")
    shared = layers.Dense(64, activation="relu", name="shared")
    wide = layers.Dense(96, activation="relu", name="wide")
    model = keras.Model(x, layers.Dense(10, name="head")(wide(shared(shared(x)))), name="blocks")
    for layer in (shared, wide):
        blocks(layer.kernel, rng)
    for layer in model.layers[1:]:
        layer.bias.assign(0.1 * rng.standard_normal(layer.bias.shape))
    return model


@pytest.fixture(scope="session")
def all_routes(tmp_path_factory):
    """The model, rows and Keras' outputs on them, and what `export_routes` gave for all routes."""
    from keras_sparse_ortho.export import export_routes

    model = block_model()
    folder = tmp_path_factory.mktemp("routes")
    data = np.random.default_rng(0).standard_normal((40, 64)).astype("float32")
    results = export_routes(model, folder, representative_data=data, sample=data)
    return model, data, keras.ops.convert_to_numpy(model(data)), folder, results


@pytest.fixture(scope="session")
def tiny_file(tmp_path_factory):
    """A file of `tiny` with the weights of seed 1."""
    from keras_sparse_ortho.export import export_litert

    keras.utils.set_random_seed(1)
    path = tmp_path_factory.mktemp("tiny") / "tiny.tflite"
    export_litert(tiny(), path)
    return path
