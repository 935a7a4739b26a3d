"""The rows of docs/exports.md that need other packages: ONNX and OpenVINO, run by their runtimes."""

import keras
import numpy as np
import pytest

from tests.export.storages import STORAGES, X, stored
from tests.helpers import array

pytestmark = [
    pytest.mark.core,
    pytest.mark.parametrize("storage", STORAGES),
    pytest.mark.filterwarnings("ignore"),  # of the exporters, about themselves
]


def exported(storage, path, form):
    """The model, after Keras has exported it."""
    model = stored(storage)
    spec = [keras.InputSpec(shape=X.shape, dtype="float32")]
    model.export(str(path), format=form, input_signature=spec, verbose=False)
    return model


def test_onnx(storage, tmp_path):
    import onnxruntime

    model = exported(storage, tmp_path / "model.onnx", "onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    (answer,) = session.run(None, {session.get_inputs()[0].name: X})
    np.testing.assert_allclose(answer, array(model(X)), atol=1e-5)


def test_openvino(storage, tmp_path):
    import openvino

    model = exported(storage, tmp_path / "model.xml", "openvino")
    exact = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(str(tmp_path / "model.xml"), "CPU", exact)
    np.testing.assert_allclose(compiled(X)[0], array(model(X)), atol=1e-5)
