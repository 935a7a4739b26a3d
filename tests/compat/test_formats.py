"""The rows of docs/exports.md that need other packages: ONNX and OpenVINO."""

import keras
import numpy as np
import pytest

from tests.export.storages import X, stored
from tests.helpers import array

pytestmark = [
    pytest.mark.core,
    pytest.mark.parametrize(
        "storage", ["masked", "compact", "blocks", "blocks, to_masked", "stripped"]
    ),
    pytest.mark.filterwarnings("ignore"),  # of the exporters, about themselves
]


def exported(storage, path, form):
    """The model, after Keras has exported it."""
    model = stored(storage)
    spec = [keras.InputSpec(shape=X.shape, dtype="float32")]
    model.export(str(path), format=form, input_signature=spec, verbose=False)
    return model


def onnx_answer(storage, folder):
    import onnxruntime

    model = exported(storage, folder / "model.onnx", "onnx")
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
    (answer,) = session.run(None, {session.get_inputs()[0].name: X})
    return answer, array(model(X))


def openvino_answer(storage, folder):
    import openvino

    model = exported(storage, folder / "model.xml", "openvino")
    exact = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(str(folder / "model.xml"), "CPU", exact)
    return compiled(X)[0], array(model(X))


def test_onnx(storage, tmp_path):
    if keras.backend.backend() == "torch" and storage == "blocks":
        with pytest.raises(Exception, match=r"(?s)onnx|ONNX"):
            onnx_answer(storage, tmp_path)
        return
    np.testing.assert_allclose(*onnx_answer(storage, tmp_path), atol=1e-5)


def test_openvino(storage, tmp_path):
    if keras.backend.backend() == "jax":  # as of a plain model: what Keras makes is not converted
        with pytest.raises(Exception, match="XlaCallModule"):
            openvino_answer(storage, tmp_path)
    elif keras.backend.backend() == "torch" and storage == "blocks":
        with pytest.raises(RuntimeError, match="BlockSparse"):
            openvino_answer(storage, tmp_path)
    else:
        np.testing.assert_allclose(*openvino_answer(storage, tmp_path), atol=1e-5)
