"""What several modules of this folder share: one converter, and files of one model."""

import keras
import numpy as np
import pytest

from tests.export.models import layers, thin_out, tiny

ROUTES = ["float32", "float16", "dynamic_int8", "float32+sp", "float16+sp"]


def shared_model():
    """Two Dense layers, one of them used twice, and a head: a tenth of the weights is live."""
    keras.utils.set_random_seed(3)
    x = keras.Input((64,), name="x")
    shared = layers.Dense(64, activation="relu", name="shared")
    wide = layers.Dense(96, activation="relu", name="wide")
    model = keras.Model(
        x, layers.Dense(10, name="head")(wide(shared(shared(x)))), name="shared"
    )
    return thin_out(model, seed=3)


@pytest.fixture(scope="session")
def all_routes(tmp_path_factory):
    """The model, rows and Keras' outputs on them, the folder of the files, and their reports."""
    import keras_sparse_ortho as kso

    model, folder = shared_model(), tmp_path_factory.mktemp("routes")
    data = np.random.default_rng(0).standard_normal((40, 64)).astype("float32")

    def export(route, **rows):
        return kso.export_litert(
            model, folder / f"{route}.tflite", mode=route, sample=data, **rows
        )

    reports = {route: export(route) for route in ROUTES}
    reports["int8"] = export("int8", representative_data=data)
    return model, data, keras.ops.convert_to_numpy(model(data)), folder, reports


@pytest.fixture(scope="session")
def tiny_file(tmp_path_factory):
    """A file of `tiny` with the weights of seed 1."""
    from keras_sparse_ortho.export import export_litert

    keras.utils.set_random_seed(1)
    path = tmp_path_factory.mktemp("tiny") / "tiny.tflite"
    export_litert(tiny(), path)
    return path
