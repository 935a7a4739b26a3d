"""Every route on one model, really run; what LiteRT's kernels cannot do; modes."""

import contextlib
import json
import re
import subprocess
import sys

import keras
import numpy as np
import pytest

from keras_sparse_ortho.export import (
    ExportConversionError,
    ExportFallbackWarning,
    ExportReport,
    ExportRouteError,
    ExportVerificationError,
    RouteOutcome,
    _candidates,
    _sparse_encoding,
    export_litert,
    export_routes,
    load_litert,
)
from keras_sparse_ortho.export._candidates import Candidate
from keras_sparse_ortho.export._export_litert import choose
from keras_sparse_ortho.export._flatbuffer import (
    read_model,
    read_weights,
    stored_weights,
    write_model,
)
from keras_sparse_ortho.export._routes import ROUTES, route_named, routes_of
from keras_sparse_ortho.export._sparse_encoding import Encoded, encode
from tests.export.conftest import block_model, blocks
from tests.export.models import interpret, kernel_zeros, layers, tiny

pytestmark = pytest.mark.tensorflow_only

FLOAT32 = ["float32", "float32+sp", "float32+csr", "float32+blocks"]
OURS = ["float32+csr", "dynamic_int8+1x16"]
UNSUPPORTED = ["float16+csr", "float32+1x4", "dynamic_int8+csr", "int8+sp", "int8+1x16"]
RIGHT_ANYWHERE = ["float32", "float16", "dynamic_int8", "int8", *OURS]


def rms(got, want):
    return np.sqrt(np.mean((got - want) ** 2)) / np.sqrt(np.mean(want**2))


def test_all_routes_were_tried(all_routes):
    assert list(all_routes[4]) == [route.name for route in ROUTES]


@pytest.mark.parametrize("name", RIGHT_ANYWHERE)
def test_any_interpreter_answers_as_keras(all_routes, name):
    _, data, want, folder, found = all_routes
    report = found[name]
    assert isinstance(report, ExportReport)
    assert report.xnnpack
    assert report.routes[0].without_xnnpack
    got = np.concatenate([interpret(folder / f"{name}.tflite", x=x[None])["head"] for x in data])
    if name.startswith("float32"):
        np.testing.assert_allclose(got, want, atol=1e-5)
    assert rms(got, want) < 0.03
    assert report.routes[0].error == pytest.approx(report.error)


@pytest.mark.parametrize("name", OURS)
def test_what_is_encoded_and_what_stays_dense(all_routes, name):
    model, _, _, _, found = all_routes
    weights = {w.shape: w for w in found[name].weights}
    encoding = name.split("+")[1]
    assert {shape: w.encoding for shape, w in weights.items()} == {
        (64, 64): encoding,
        (96, 64): encoding,
        (10, 96): "dense",
    }
    assert found[name].total_zeros >= kernel_zeros(model) > 6000
    dense = {w.shape: w for w in found[name.split("+")[0]].weights}
    for shape, weight in weights.items():
        assert weight.zeros == dense[shape].zeros
        if weight.encoding != "dense":
            assert weight.bytes < 0.6 * dense[shape].bytes
    assert found[name].bytes < found[name.split("+")[0]].bytes
    (outcome,) = found[name].routes
    assert len(outcome.encoded) == 2
    (reason,) = outcome.kept.values()
    assert reason.endswith("are zero") or reason == "it is not stored as int8"


def test_converter_sparsity_on_dynamic_int8_needs_the_setting_in_the_file(all_routes):
    _, data, want, folder, found = all_routes
    report = found["dynamic_int8+sp"]
    assert isinstance(report, ExportReport)
    assert not report.xnnpack
    file = folder / "dynamic_int8+sp.tflite"
    opened = load_litert(file)
    assert not opened.xnnpack
    assert rms(opened.predict(data), want) < 0.03
    script = "\n".join(
        [
            "import sys, numpy as np",
            "from ai_edge_litert.interpreter import Interpreter",
            "r = Interpreter(model_path=sys.argv[1]).get_signature_runner()",
            "want = np.load(sys.argv[2])",
            "got = r(x=want['x'])['head']",
            "sys.exit(0 if np.abs(got - want['y']).max() < 0.2 else 3)",
        ]
    )
    np.savez(folder / "row.npz", x=data[:1], y=want[:1])
    done = subprocess.run(
        [sys.executable, "-c", script, file, folder / "row.npz"], capture_output=True, check=False
    )
    assert done.returncode != 0, "XNNPACK runs this file now: drop the setting"


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_route_that_cannot_work_is_refused_with_the_way_out(name, tmp_path):
    with pytest.raises(ExportRouteError, match=r"cannot work: .*use '.*Received: ") as caught:
        export_litert(block_model(), tmp_path / "m.tflite", mode=name)
    for offered in str(caught.value).split("use ")[1].split("'")[1::2]:
        assert offered in [name, *(route.name for route in ROUTES)]


@pytest.mark.parametrize(("storage", "block"), [("float32", 16), ("int8", 1), ("dynamic_int8", 4)])
def test_the_refused_encodings_really_fail(all_routes, storage, block, tmp_path, monkeypatch):
    """The kernel refuses the file, or answers wrongly."""
    _, data, want, folder, _ = all_routes
    stored = ("FLOAT32", "<f4") if storage == "float32" else ("INT8", "i1")
    monkeypatch.setitem(_sparse_encoding._ENCODINGS, "other", (block, *stored))
    found = encode((folder / f"{storage}.tflite").read_bytes(), "other")
    (tmp_path / "m.tflite").write_bytes(found.content)
    if storage == "dynamic_int8":
        got = interpret(tmp_path / "m.tflite", x=data[:1])["head"]
        assert not np.abs(got - want[:1]).max() < 0.2
    else:
        with pytest.raises(RuntimeError, match="Unsupported sparse fully-connected weight format"):
            interpret(tmp_path / "m.tflite", x=data[:1])


def test_data_of_every_buffer_is_aligned(all_routes):
    content = (all_routes[3] / "dynamic_int8+1x16.tflite").read_bytes()
    from ai_edge_litert import schema_py_generated as schema

    model = schema.Model.GetRootAs(content, 0)
    whole = np.frombuffer(content, np.uint8)
    for k in range(model.BuffersLength()):
        if model.Buffers(k).DataLength():
            data = model.Buffers(k).DataAsNumpy()
            start = data.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
            assert start % 16 == 0


def rewritten(content, change):
    """The float32 file with the weight (96, 64) changed before it is encoded."""
    model = read_model(content)
    (tensor,) = [t for t in model.subgraphs[0].tensors if list(t.shape) == [96, 64]]
    change(model, tensor)
    return write_model(model)


def test_weights_that_the_kernel_would_misread_stay_dense(all_routes):
    def odd(model, tensor):  # 62 inputs; the file does not have to run
        tensor.shape = np.array([96, 62], np.int32)
        buffer = model.buffers[tensor.buffer]
        buffer.data = buffer.data[: 96 * 62]

    content = (all_routes[3] / "dynamic_int8.tflite").read_bytes()
    kept = encode(rewritten(content, odd), "1x16").kept.values()
    assert any("62 inputs are not divisible by 16" in why for why in kept)
    content = (all_routes[3] / "float32.tflite").read_bytes()

    def shared(model, tensor):
        graph = model.subgraphs[0]
        graph.outputs = np.array([graph.tensors.index(tensor)], np.int32)

    kept = encode(rewritten(content, shared), "csr").kept.values()
    assert "other operations use it as well" in kept


@pytest.mark.parametrize(("blocks_in_a_row", "fits"), [(255, True), (256, False)])
def test_limit_of_the_int8_kernel(all_routes, blocks_in_a_row, fits):
    content = (all_routes[3] / "dynamic_int8.tflite").read_bytes()

    def wide(model, tensor):
        value = np.zeros((6, 256, 16), np.int8)
        value[0, :blocks_in_a_row] = 1
        tensor.shape = np.array([6, 4096], np.int32)
        model.buffers[tensor.buffer].data = value.view(np.uint8).ravel()

    found = encode(rewritten(content, wide), "1x16")
    assert any("255" in why for why in found.kept.values()) != fits
    assert len(found.encoded) == 1 + fits


@pytest.mark.parametrize("last", [255, 256, 65_535, 65_536])
def test_indices_take_the_type_that_holds_the_largest(all_routes, last):
    content = (all_routes[3] / "float32.tflite").read_bytes()
    value = np.zeros((2, last + 1), np.float32)
    value[:, [0, last]] = [[1, 2], [3, 4]]

    def wide(model, tensor):
        tensor.shape = np.array(value.shape, np.int32)
        model.buffers[tensor.buffer].data = value.view(np.uint8).ravel()

    found = encode(rewritten(content, wide), "csr")
    (stored,) = [w for w in stored_weights(found.content) if w.about.shape == value.shape]
    assert stored.about.encoding == "csr"
    np.testing.assert_array_equal(stored.values, value)


def test_equal_weights_share_a_buffer_until_one_is_encoded(all_routes):
    content = (all_routes[3] / "float32.tflite").read_bytes()

    def same(model, tensor):
        (other,) = [t for t in model.subgraphs[0].tensors if list(t.shape) == [64, 64]]
        tensor.shape, tensor.buffer = other.shape, other.buffer

    before = rewritten(content, same)
    (one,) = [w for w in read_weights(before) if w.shape == (64, 64)]
    after = [w for w in read_weights(encode(before, "csr").content) if w.shape == (64, 64)]
    assert [(w.encoding, w.zeros) for w in after] == [("csr", one.zeros)]  # still one buffer
    assert len(encode(before, "csr").encoded) == 2


def test_sparse_weights_are_decoded(all_routes):
    """Ours and the converter's, elementwise and in blocks."""
    folder, results = all_routes[3:]

    def weights(route):
        return stored_weights((folder / f"{route}.tflite").read_bytes())

    seen = set()
    for route in (name for name, made in results.items() if isinstance(made, ExportReport)):
        dense = {w.about.shape: w.values for w in weights(route.partition("+")[0])}
        assert results[route].folded == ()
        for weight in weights(route):
            seen.add(weight.about.encoding.removeprefix("densify "))
            np.testing.assert_allclose(weight.values, dense[weight.about.shape], rtol=1e-6)
    assert seen == {"dense", "csr", "1x4", "1x16"}


# --- what is taken, and the fallback -------------------------------------------------------------


@pytest.fixture
def converted(all_routes, monkeypatch):
    """Exports of the model take the file that was converted for `all_routes`."""

    def convert(task, routes):
        return {route.name: all_routes[3] / f"{route.name}.tflite" for route in routes}

    monkeypatch.setattr(_candidates, "convert", convert)
    return all_routes


def test_wrong_sparse_file_falls_back_to_dense_and_says_why(converted, monkeypatch, tmp_path):
    real = _sparse_encoding._compress

    def wrong(schema, weight, block):
        sparsity, values = real(schema, weight, block)
        return sparsity, values[::-1]

    monkeypatch.setattr(_sparse_encoding, "_compress", wrong)
    model, data, want, _, _ = converted
    with pytest.warns(ExportFallbackWarning, match=r"'float32' was taken .*'float32\+csr'.*agree"):
        report = export_litert(model, tmp_path / "m.tflite", mode="float32+csr", sample=data)
    assert report.route == "float32"
    assert "must agree with Keras" in report.fallback_reason
    got = interpret(tmp_path / "m.tflite", x=data[:1])["head"]
    np.testing.assert_allclose(got, want[:1], atol=1e-5)


def test_crash_of_a_sparse_file_falls_back_to_dense(converted, monkeypatch, tmp_path):
    """With any version but 8, XNNPACK takes the sparse data for dense."""
    model, data, _, _, _ = converted
    real = _candidates.litert_outputs

    def crash(worker, file, task, xnnpack):
        if "+" in file.name:
            raise ExportVerificationError("Received: it was ended by signal SIGSEGV")
        return real(worker, file, task, xnnpack)

    monkeypatch.setattr(_candidates, "litert_outputs", crash)
    with pytest.warns(ExportFallbackWarning, match="SIGSEGV"):
        report = export_litert(
            model, tmp_path / "m.tflite", mode="dynamic_int8+1x16", sample=data[:1]
        )
    assert report.route == "dynamic_int8"


def test_fast_takes_the_least_latency_that_it_measured(converted, tmp_path):
    model, data, _, _, _ = converted
    report = export_litert(
        model, tmp_path / "m.tflite", mode="fast", quantization="dynamic_int8", sample=data[:2]
    )
    times = {one.route: one.latency_ms for one in report.routes if one.xnnpack}
    assert set(times) == {"dynamic_int8", "dynamic_int8+1x16"}
    near = [one for one in report.routes if times.get(one.route, 1e9) <= 1.05 * min(times.values())]
    near = [one for one in near if times[one.route] <= times["dynamic_int8"]]
    assert report.route == min(near, key=lambda one: one.bytes).route
    assert all(value > 0 for value in times.values())
    assert report.load_bytes > 0
    assert f"{times[report.route]:.3g} ms" in str(report)
    assert json.loads(report.to_json())["routes"][0]["latency_ms"] > 0


def test_small_takes_the_fewest_bytes(converted, tmp_path):
    model, data, want, _, _ = converted
    path = tmp_path / "m.tflite"
    report = export_litert(model, path, mode="small", quantization="dynamic_int8", sample=data)
    sizes = {one.route: one.bytes for one in report.routes if one.xnnpack}
    assert report.route == min(sizes, key=sizes.get) == "dynamic_int8+1x16"
    assert [p.name for p in tmp_path.iterdir()] == ["m.tflite"]
    assert rms(load_litert(path).predict(data), want) < 0.03


def test_the_default_is_the_smallest_file_that_equals_keras(converted, tmp_path):
    model, data, want, _, found = converted
    path = tmp_path / "m.tflite"
    report = export_litert(model, path, sample=data)
    assert "whole blocks" in found["float32+blocks"].reason
    sizes = {name: found[name].bytes for name in FLOAT32[:-1]}
    assert report.bytes <= 1.05 * min(sizes.values()) < 0.5 * sizes["float32"]
    assert [one.route for one in report.routes] == [report.route]  # nothing else was run
    np.testing.assert_allclose(load_litert(path).predict(data), want, atol=1e-5)
    dense = export_litert(model, path, sample=data, mode="float32")
    assert dense.route == export_litert(model, path, quantization="float32").route == "float32"


def test_the_default_tells_of_the_other_modes_without_trying_them(converted, tmp_path):
    model, data, _, _, found = converted
    text = str(export_litert(model, tmp_path / "m.tflite", sample=data))
    [line] = [line for line in text.splitlines() if line.startswith("other modes")]
    (said,) = re.findall(r'"small" .* about ([\d,]+) bytes or fewer; "fast" ', line)
    rounded = min(found[name].bytes for name in ("float16", "dynamic_int8"))
    assert int(said.replace(",", "")) == pytest.approx(rounded, rel=0.15)
    assert "other modes" not in str(found["dynamic_int8"])
    assert "other modes" not in str(
        export_litert(model, tmp_path / "m.tflite", mode="float32+csr", sample=data)
    )


@pytest.mark.parametrize("wrong", ["+sp", "+sp +csr"])
def test_the_default_takes_the_next_file_if_a_smaller_one_is_wrong(
    converted, monkeypatch, tmp_path, wrong
):
    real = _candidates.litert_outputs

    def outputs(worker, file, task, xnnpack):
        got, memory = real(worker, file, task, xnnpack)
        return [one + file.name.endswith(ends) for one in got], memory

    ends = tuple(f"{one}.verified.tflite" for one in wrong.split())
    monkeypatch.setattr(_candidates, "litert_outputs", outputs)
    warned = contextlib.nullcontext()  # the converter's own sparsity is known to fail
    if "csr" in wrong:
        warned = pytest.warns(ExportFallbackWarning, match=r"refused.*float32\+csr: error=")
    with warned:
        report = export_litert(converted[0], tmp_path / "m.tflite", sample=converted[1])
    *failed, taken = report.routes
    assert taken.route == report.route == ("float32+csr" if wrong == "+sp" else "float32")
    assert [one.route for one in failed][:1] == ["float32+sp"]
    assert all("must agree with Keras" in one.reason for one in failed)


def test_a_dense_model_is_exported_dense_in_silence(tiny_file, monkeypatch, tmp_path):
    tried = []

    def convert(task, routes):
        tried.extend(route.name for route in routes)
        return {"float32": tiny_file}

    monkeypatch.setattr(_candidates, "convert", convert)
    keras.utils.set_random_seed(1)
    assert export_litert(tiny(), tmp_path / "m.tflite").route == "float32"
    assert tried == ["float32"]


def test_order_of_the_default():
    def order(**sizes):
        made = [
            (route_named(f"float32{end}"), Encoded(bytes(size), (), {}) if size else lost)
            for end, size in zip(("", "+sp", "+csr"), sizes.values(), strict=True)
        ]
        return [route.name.removeprefix("float32") for route, _ in _candidates._by_size(made)]

    lost = ExportRouteError("nothing to encode")
    assert order(dense=1000, sp=103, csr=100) == ["+sp", "+csr", ""]
    assert order(dense=1000, sp=300, csr=100) == ["+csr", "+sp", ""]
    assert order(dense=1000, sp=103, csr=None) == ["+sp", "", "+csr"]
    lost = ExportConversionError("a crash of the converter")  # which the report tells
    assert order(dense=1000, sp=None, csr=100) == ["+sp", "+csr", ""]


def test_a_model_without_zeros_has_no_sparse_route(tiny_file, monkeypatch, tmp_path):
    monkeypatch.setattr(_candidates, "convert", lambda task, routes: {"float32": tiny_file})
    with pytest.raises(ExportRouteError, match=r"needs a weight .*only 0% of its entries are zero"):
        export_litert(tiny(), tmp_path / "m.tflite", mode="float32+csr")
    assert not list(tmp_path.iterdir())


ENCODINGS = ["float32+csr", "dynamic_int8+1x16"]


@pytest.fixture(scope="module")
def with_a_dead_layer(tmp_path_factory):
    """Reports on a model of which a learnt threshold, say, has taken all entries of one kernel."""
    hidden = [layers.Dense(64, activation="relu", name=f"hidden_{k}") for k in range(3)]
    model = keras.Sequential([keras.Input((64,), name="x"), *hidden, layers.Dense(8)])
    rng = np.random.default_rng(0)
    for k, layer in enumerate(hidden):
        kernel = rng.normal(size=(64, 64)) * (rng.random((4, 64)) < 0.25).repeat(16, axis=0)
        layer.kernel.assign(kernel * (k != 1))
        layer.bias.assign(rng.normal(size=64))
    return export_routes(model, tmp_path_factory.mktemp("dead"), ENCODINGS)


@pytest.mark.parametrize("name", ENCODINGS)
def test_a_kernel_that_is_zero_throughout_is_encoded_and_counted(with_a_dead_layer, name):
    report = with_a_dead_layer[name]
    square = [weight for weight in report.weights if weight.shape == (64, 64)]
    assert len(square) == 3
    assert [w.encoding for w in square if w.zeros == w.size] == [name.split("+")[1]]
    assert report.route == name


def fake(name, size, ms, xnnpack=True, reason=None):
    outcome = RouteOutcome(name, 1, reason, bytes=size, latency_ms=ms, xnnpack=xnnpack)
    return Candidate(route_named(name), outcome, None if reason else "file")


def test_choice_of_each_mode():
    found = [
        fake("float32", 100, 10.0),
        fake("dynamic_int8", 50, 1.07),
        fake("dynamic_int8+1x16", 70, 1.0),
        fake("dynamic_int8+sp", 10, 0.1, xnnpack=False),
        fake("float16", 1, 0.01, reason="it crashed"),
    ]
    assert choose("fast", found).route.name == "dynamic_int8+1x16"
    assert choose("auto", found).route.name == "dynamic_int8"
    assert choose("small", found).route.name == "dynamic_int8"
    assert choose("small", found[3:]).route.name == "dynamic_int8+sp"
    # 0.4% of latency is the clock's noise, and no reason for a file five times as large.
    found = [fake("float32", 500, 1.0), fake("dynamic_int8", 100, 1.004)]
    assert choose("fast", found).route.name == "dynamic_int8"
    # A smaller file that is sparse is not taken where a dense one is faster, by 3% here.
    found = [fake("dynamic_int8", 50, 1.0), fake("dynamic_int8+1x16", 20, 1.03)]
    assert choose("fast", found).route.name == "dynamic_int8"
    assert choose("auto", found).route.name == "dynamic_int8+1x16"


def test_routes_of_each_mode():
    def names(*arguments):
        return [route.name for route in routes_of(*arguments)]

    assert names(None, None, True) == FLOAT32
    assert names(None, "float32", True) == ["float32"]
    assert names(None, "int8", True) == ["int8"]
    assert names("float32+csr", None, False) == ["float32+csr"]
    assert names("sparse", None, False) == FLOAT32[1:]
    assert names("sparse", "int8", True) == ["int8+blocks"]
    assert len(names("fast", None, True)) == len(ROUTES)
    assert not [name for name in names("fast", None, False) if name.startswith("int8")]
    assert names("small", "float16", False) == ["float16", "float16+sp", "float16+blocks"]
    with pytest.raises(ValueError, match=r"`mode` must be one of .*Received: mode='quick'"):
        routes_of("quick", None, False)
    with pytest.raises(ValueError, match="leave `quantization` out"):
        routes_of("float32+csr", "int8", False)


@pytest.mark.slow
def test_float16_whose_blocks_crash_the_interpreter(tmp_path):
    model = keras.Sequential([keras.Input((256,), name="x"), layers.Dense(256), layers.Dense(64)])
    for layer in model.layers:
        blocks(layer.kernel, np.random.default_rng(0), rows=4, density=0.1)
    with pytest.warns(ExportFallbackWarning, match="'float16' was taken"):
        report = export_litert(model, tmp_path / "m.tflite", mode="float16+sp")
    assert report.route == "float16"
