"""Files of every route, really run; what a mode takes; models with our wrappers in them."""

import json
from pathlib import Path

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import ExportConversionError
from keras_sparse_ortho.export import c_array, export_litert, load_litert
from keras_sparse_ortho.initializers import ExactOrthogonal
from tests.export import models
from tests.export.models import (
    interpret,
    kernel_zeros,
    layers,
    mlp,
    rms,
    thin_out,
    tiny,
)
from tests.helpers import Chain, array, assert_same

pytestmark = pytest.mark.tensorflow_only


def assert_answers_as(model, path, atol, **rows):
    (got,), (x,) = interpret(path, **rows).values(), rows.values()
    np.testing.assert_allclose(got, array(model(x)), atol=atol)


@pytest.mark.parametrize(
    "name", ["float32", "float16", "dynamic_int8", "int8", "float32+sp"]
)
def test_any_interpreter_answers_as_keras(all_routes, name):
    model, data, want, folder, found = all_routes
    report = found[name]
    assert (report.route, report.mode) == (name, name)
    got = np.concatenate(
        [interpret(folder / f"{name}.tflite", x=x[None])["head"] for x in data]
    )
    if name.startswith("float32"):
        np.testing.assert_allclose(got, want, atol=1e-5)
    assert rms(got, want) < 0.03
    assert report.folded == ()
    assert report.total_zeros >= kernel_zeros(model) > 6000
    storage = name.partition("+")[0]
    stored = {
        one.shape: one.dtype for one in report.weights if one.size >= 1024
    }
    assert {*stored.values()} == {
        {"dynamic_int8": "int8"}.get(storage, storage)
    }
    assert {one.sparse for one in report.weights} == {name.endswith("+sp")}
    if name.endswith("+sp"):
        dense = found[storage]
        assert report.bytes < 0.5 * dense.bytes
        zeros = [
            sorted((w.shape, w.zeros) for w in one.weights)
            for one in (report, dense)
        ]
        assert zeros[0] == zeros[1]


def test_data_of_every_buffer_is_aligned(all_routes):
    content = (all_routes[3] / "float16+sp.tflite").read_bytes()
    from ai_edge_litert import schema_py_generated as schema

    model = schema.Model.GetRootAs(content, 0)
    whole = np.frombuffer(content, np.uint8)
    for k in range(model.BuffersLength()):
        if model.Buffers(k).DataLength():
            data = model.Buffers(k).DataAsNumpy()
            start = (
                data.__array_interface__["data"][0]
                - whole.__array_interface__["data"][0]
            )
            assert start % 16 == 0


# --- modes ---------------------------------------------------------------------------------------


def test_fast_takes_the_least_latency_that_it_measured(
    all_routes, tmp_path, monkeypatch, capsys
):
    model, data, *_ = all_routes
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    options = {"mode": "fast", "target": "arm64", "sample": data[:2]}
    report = export_litert(model, tmp_path / "m.tflite", **options)
    assert "without AMX" in report.assumed
    assert report.assumed in str(report)
    said = capsys.readouterr().err
    assert "float16: converted, " in said
    assert "float16: compared, " in said
    assert all(one.seconds > 0 for one in report.routes)
    marks = {text.get_text().strip(): text.xy for text in report.plot().texts}
    times = {
        one.route: one.latency_ms for one in report.routes if one.reason is None
    }
    assert {*times} >= {"float32", "float16", "dynamic_int8"}
    assert marks == {
        one.route: (one.bytes, one.latency_ms)
        for one in report.routes
        if one.reason is None
    }
    assert (
        0
        < report.latency_ms
        == times[report.route]
        <= 1.05 * min(times.values())
    )
    assert f"{report.latency_ms:.3g} ms a call" in str(report)
    assert json.loads(report.to_json())["latency_ms"] == report.latency_ms


def test_small_and_the_default_take_the_fewest_bytes_that_agree(
    all_routes, tmp_path
):
    model, data, want, _, found = all_routes
    path = tmp_path / "m.tflite"
    report = export_litert(model, path, sample=data)
    assert (report.route, report.mode) == ("float32+sp", None)
    assert report.bytes == found["float32+sp"].bytes
    # Nothing else was run.
    assert [one.route for one in report.routes] == [report.route]
    np.testing.assert_allclose(load_litert(path).predict(data), want, atol=1e-5)
    report = export_litert(model, path, mode="small", sample=data)
    tried = {one.route: one for one in report.routes}
    assert report.route == "float16+sp"
    assert all(
        one.bytes <= report.bytes or one.reason for one in tried.values()
    )
    assert [p.name for p in tmp_path.iterdir()] == ["m.tflite"]
    assert rms(load_litert(path).predict(data), want) < 0.03
    fewest = report.gzip_bytes
    assert (
        export_litert(model, path, mode="gzip", sample=data).gzip_bytes < fewest
    )
    assert export_litert(model, path, mode="float32").route == "float32"
    assert export_litert(tiny(), path).route == "float32"  # no zeros


# --- reports -------------------------------------------------------------------------------------


def test_a_report_in_all_forms_and_no_negative_zero(tmp_path):
    """Products with masks leave -0.0, whose signs would be noise to a compressor."""
    model = thin_out(mlp())
    for variable in model.trainable_weights:
        value = np.array(array(variable.value))
        variable.assign(np.where(value == 0, np.float32(-0.0), value))
    report = export_litert(model, tmp_path / "m.tflite", mode="float32")
    assert report.total_zeros == kernel_zeros(model) > 0
    assert report.total_weights == 32 * 64 + 64 * 64 + 64 * 10
    with pytest.raises(ValueError, match="Only mode='fast'"):
        report.plot()
    assert report.bytes == Path(report.path).stat().st_size
    assert report.gzip_bytes < report.bytes / 2  # 90% of it is zero
    assert report.sample_rows == 8
    content = Path(report.path).read_bytes()
    # By chance, of about 6000 zeros.
    assert content.count(np.float32(-0.0).tobytes()) < 20
    # The user's model is left alone.
    assert np.signbit(np.array(model.weights[0])).sum() > 1000
    data = json.loads(report.to_json())
    assert data == json.loads(json.dumps(report.to_dict()))
    assert data["weights"][0]["zeros"] == report.weights[0].zeros
    assert (data["route"], data["bytes"]) == ("float32", report.bytes)
    assert set(data["versions"]) == {
        "keras",
        "tensorflow",
        "ai-edge-quantizer",
        "ai-edge-litert",
    }
    for figure in (f"{report.bytes:,} bytes", f"{report.total_zeros:,} zeros"):
        assert figure in str(report)


def test_float16_of_a_model_trained_in_mixed_precision(tmp_path):
    keras.config.set_dtype_policy("mixed_float16")
    model = thin_out(mlp())
    report = export_litert(model, tmp_path / "m.tflite", mode="float16")
    assert {weight.dtype for weight in report.weights} == {"float16"}
    assert report.total_zeros >= kernel_zeros(model)
    assert 0 < report.error < 1e-3
    x = np.random.default_rng(3).standard_normal((1, 32)).astype("float32")
    assert_answers_as(model, tmp_path / "m.tflite", 0.02, x=x)


def test_dynamic_int8_of_convolutions(tmp_path, capfd):
    model = thin_out(models.cnn())
    report = export_litert(model, tmp_path / "m.tflite", mode="dynamic_int8")
    assert capfd.readouterr().out == ""
    assert "int8" in {weight.dtype for weight in report.weights}
    assert report.total_zeros >= kernel_zeros(model)
    assert 1e-4 < report.error < 0.05


def test_only_dense_layers_have_kernels_of_4_bits(tmp_path):
    model = thin_out(models.cnn())
    rows = (
        np.random.default_rng(0)
        .normal(size=(64, *model.input_shape[1:]))
        .astype("float32")
    )
    options = {"mode": "int4", "representative_data": rows, "tolerance": 1.0}
    report = export_litert(model, tmp_path / "m.tflite", **options)
    kinds = {
        (len(one.shape), one.dtype) for one in report.weights if one.size >= 256
    }
    assert kinds == {(4, "int8"), (2, "int4")}
    convolution = keras.Sequential(
        [keras.Input(rows.shape[1:]), layers.Conv2D(16, 3)]
    )
    with pytest.raises(
        ExportConversionError,
        match="stored in fewer than 8 bits: the model has none",
    ):
        export_litert(convolution, tmp_path / "m.tflite", **options)


def test_inputs_and_outputs_of_integers(all_routes, tmp_path):
    model, data, want, *_ = all_routes
    ends = {"inference_input_type": "uint8", "inference_output_type": "int8"}
    with pytest.raises(
        ValueError, match=r"with a static integer mode.*mode='dynamic_int8'"
    ):
        export_litert(model, tmp_path / "m.tflite", mode="dynamic_int8", **ends)
    options = ends | {"mode": "int8", "representative_data": data}
    report = export_litert(model, tmp_path / "m.tflite", **options)
    assert "uint8, int8" in str(report)
    file = load_litert(tmp_path / "m.tflite")
    assert file.inputs[0].dtype == "uint8"
    assert rms(file.predict(data), want) < 0.03
    run = models.interpreter_of(tmp_path / "m.tflite")
    (given,) = run.get_output_details()
    assert given["dtype"] == np.int8
    c_array(tmp_path / "m.tflite", tmp_path / "m.h")
    scale, zero = given["quantization"]
    header = (tmp_path / "m.h").read_text()
    name = file.output_names[0]
    assert f"{name}: int8 = round(x / {scale:.9g}) + {zero}\n" in header
    assert "StatefulPartitionedCall" not in header


def test_int8_with_an_embedding_and_a_loop(tmp_path):
    image = keras.Input((8, 8, 2), name="image")
    tokens = keras.Input((6,), dtype="int32", name="tokens")
    words = layers.Embedding(60, 16)(tokens)
    x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(8, 3)(image)))
    x = layers.Concatenate()([layers.Flatten()(x), layers.LSTM(8)(words)])
    model = thin_out(
        keras.Model([image, tokens], [layers.Dense(5)(x), layers.Dense(2)(x)])
    )
    rng = np.random.default_rng(0)
    data = [rng.normal(size=(300, 8, 8, 2)), rng.integers(0, 60, (300, 6))]
    report = models.exported(
        model, tmp_path / "m.tflite", representative_data=data
    )
    assert any("WHILE" in text for text in report.in_floats)
    assert {one.dtype for one in report.weights if one.size > 256} == {"int8"}
    assert report.total_zeros >= kernel_zeros(model)
    assert 1e-4 < report.error < 0.25
    # Of the representative data: tokens cannot be drawn.
    assert report.sample_rows == 32


# --- models --------------------------------------------------------------------------------------


def sparse_layer(units):
    return kso.PrunableLayer(
        layers.Dense(units, kernel_initializer=ExactOrthogonal(0.2, seed=0))
    )


def test_effective_weights_go_into_the_file_and_the_model_stays_wrapped(
    tmp_path,
):
    model = keras.Sequential(
        [keras.Input((16,), name="x"), sparse_layer(12), sparse_layer(6)]
    )
    # Raw weights that the masks have to silence.
    for variable in model.trainable_weights:
        variable.assign(variable + 1.0)
    before = [np.array(value) for value in model.get_weights()]
    report = export_litert(model, tmp_path / "m.tflite")
    # Round(0.2 * size) live.
    assert sorted(w.zeros for w in report.weights) == [
        72 - 14,
        192 - 38,
    ]
    x = np.random.default_rng(0).standard_normal((1, 16)).astype("float32")
    assert_answers_as(model, tmp_path / "m.tflite", 1e-5, x=x)
    assert [type(layer) for layer in model.layers] == [
        kso.PrunableLayer,
        kso.PrunableLayer,
    ]
    assert_same(before, model.get_weights())


def test_a_subclassed_model_takes_its_shapes_from_the_sample_and_stays_as_it_was(
    tmp_path,
):
    x = np.random.default_rng(0).standard_normal((4, 16)).astype("float32")
    for layer in (sparse_layer(6), layers.Dense(3)):
        model = Chain(layer)
        model(x)
        with pytest.raises(
            ValueError, match=r"subclassed.*Received: sample=None"
        ):
            export_litert(model, tmp_path / "m.tflite")
        report = export_litert(
            model, tmp_path / "m.tflite", sample=x, batch_size=3
        )
        assert report.sample_rows == 4
        assert model.parts == [layer]
        assert type(layer) in (kso.PrunableLayer, layers.Dense)
        assert_answers_as(model, tmp_path / "m.tflite", 1e-5, input=x[:3])
