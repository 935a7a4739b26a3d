import contextlib
import io
import json
from pathlib import Path

import keras
import numpy as np
import pytest

from keras_sparse_ortho.export import export_litert
from tests.export.models import cnn, interpret, kernel_zeros, layers, mlp, thin_out

pytestmark = pytest.mark.tensorflow_only


def dtypes(report):
    return {weight.dtype for weight in report.weights}


@pytest.fixture(scope="module")
def float32(tmp_path_factory):
    """A model with negative zeros, as products with masks leave; its report; what was printed."""
    model = mlp()
    for variable in model.trainable_weights:
        value = np.array(keras.ops.convert_to_numpy(variable.value))
        variable.assign(np.where(value == 0, np.float32(-0.0), value))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        path = tmp_path_factory.mktemp("float32") / "m.tflite"
        report = export_litert(model, path, mode="float32", verbose=1)
    return model, report, printed.getvalue()


def test_float32_keeps_every_zero_and_no_more(float32):
    model, report, _ = float32
    assert report.total_zeros == kernel_zeros(model) > 0
    assert report.total_weights == 32 * 64 + 64 * 64 + 64 * 10
    assert report.bytes == Path(report.path).stat().st_size
    assert report.zstd_bytes < report.gzip_bytes < report.bytes / 2  # 90% of it is zero
    assert report.sample_rows == 8


def test_report_as_text_and_json(float32):
    _, report, printed = float32
    assert "Converting (float32)" in printed
    assert f"{report.bytes:,} bytes" in printed
    data = json.loads(report.to_json())
    assert data == json.loads(json.dumps(report.to_dict()))
    assert data["weights"][0]["zeros"] == report.weights[0].zeros
    assert set(data["versions"]) == {"keras", "tensorflow", "ai-edge-litert"}
    text = str(report)
    assert f"{report.bytes:,} bytes" in text
    assert f"{report.total_zeros:,}" in text


def test_no_negative_zero_goes_into_the_file(float32):
    """Their signs would be noise to a compressor."""
    model, report, _ = float32
    content = Path(report.path).read_bytes()
    assert content.count(np.float32(-0.0).tobytes()) < 20  # by chance, of about 6000 zeros
    assert np.signbit(np.array(model.weights[0])).sum() > 1000  # the user's model is left alone


def test_float16_of_a_model_trained_in_mixed_precision(tmp_path):
    keras.config.set_dtype_policy("mixed_float16")
    model = mlp()
    report = export_litert(model, tmp_path / "m.tflite", quantization="float16")
    assert dtypes(report) == {"float16"}
    assert report.total_zeros >= kernel_zeros(model)
    assert 0 < report.error < 1e-3
    x = np.random.default_rng(3).standard_normal((1, 32)).astype("float32")
    (got,) = interpret(tmp_path / "m.tflite", x=x).values()
    np.testing.assert_allclose(got, keras.ops.convert_to_numpy(model(x)), atol=0.02)


def test_dynamic_int8(tmp_path, capfd):
    model = cnn()
    report = export_litert(model, tmp_path / "m.tflite", quantization="dynamic_int8")
    assert capfd.readouterr().out == ""  # quiet unless asked
    assert "int8" in dtypes(report)
    assert report.total_zeros >= kernel_zeros(model)
    assert 1e-4 < report.error < 0.05


def test_int8_with_an_embedding_and_a_loop(tmp_path):
    image = keras.Input((8, 8, 2), name="image")
    tokens = keras.Input((6,), dtype="int32", name="tokens")
    words = layers.Embedding(60, 16)(tokens)
    x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(8, 3)(image)))
    x = layers.Concatenate()([layers.Flatten()(x), layers.LSTM(8)(words)])
    model = thin_out(keras.Model([image, tokens], [layers.Dense(5)(x), layers.Dense(2)(x)]))
    rng = np.random.default_rng(0)
    data = [rng.normal(size=(300, 8, 8, 2)), rng.integers(0, 60, (300, 6))]
    report = export_litert(
        model, tmp_path / "m.tflite", quantization="int8", representative_data=data
    )
    assert {one.dtype for one in report.weights if one.size > 256} == {"int8"}
    assert report.total_zeros >= kernel_zeros(model)
    assert report.folded == ()
    assert 1e-4 < report.error < 0.25
    assert report.sample_rows == 32  # of the representative data: tokens cannot be drawn
