"""Files opened again: settings, prediction, C arrays, and files that are not what they seem."""

import concurrent.futures
import gzip
import inspect
import os
import pathlib
import pickle
import re
import sys
import tracemalloc

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import ExportRouteError, LiteRTFileError
from keras_sparse_ortho.export import (
    Worker,
    _load_litert,
    c_array,
    export_litert,
    interpreter_of,
    latencies,
    load_litert,
    read_model,
    write_model,
)
from tests.export.models import interpret, layers
from tests.faults import graphs
from tests.helpers import assert_same, run_python

pytestmark = pytest.mark.tensorflow_only


@pytest.fixture
def content(all_routes):
    return (all_routes[3] / "float32.tflite").read_bytes()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "m.tflite"


def as_foreign(content):
    """A file without our record, as of another tool."""
    for mark in (b"keras_sparse_ortho", b"_sparse_ortho/1"):
        content = content.replace(mark, b"x" * len(mark))
    return content


def refused(path, content, message, **options):
    path.write_bytes(content)
    with pytest.raises(LiteRTFileError, match=message):
        load_litert(path, **options)


def test_predict_of_any_number_of_rows(all_routes):
    _, data, want, folder, _ = all_routes
    file = load_litert(folder / "float32.tflite")
    assert (file.route, file.model_name) == ("float32", "shared")
    assert (file.batch_size, file.output_names) == (1, ["head"])
    np.testing.assert_allclose(file.predict(data), want, atol=1e-5)
    np.testing.assert_allclose(
        file.predict({"x": data[:3]}), want[:3], atol=1e-5
    )
    np.testing.assert_allclose(
        file.predict(data.astype("float64")), want, atol=1e-5
    )
    assert "float32[1, 64]" in repr(file)


def test_standard_error_stays_that_of_the_process(all_routes, monkeypatch):
    """Other threads and child processes write to it while a file is opened."""
    folder, seen = all_routes[3], []
    before = os.fstat(2).st_ino

    def opened(**options):
        interpreter = interpreter_of(**options)
        allocate = interpreter.allocate_tensors

        def allocate_tensors():
            seen.append(os.fstat(2).st_ino)
            allocate()

        interpreter.allocate_tensors = allocate_tensors
        return interpreter

    monkeypatch.setattr(_load_litert, "interpreter_of", opened)
    load_litert(folder / "float32.tflite")
    assert seen == [before]


def test_wrong_input(all_routes):
    file = load_litert(all_routes[3] / "float32.tflite")
    for shape in ((2, 63), ()):
        with pytest.raises(
            ValueError, match=rf"`x`.*\(rows, 64\).*{re.escape(str(shape))}"
        ):
            file.predict(np.ones(shape))


def test_several_inputs_and_outputs_by_name(tmp_path):
    """The record gives the order; the batch of two is filled up."""
    inputs = [
        keras.Input((3,), name="b"),
        keras.Input((3,), name="a", dtype="int32"),
    ]
    total = inputs[0] + keras.ops.cast(inputs[1], "float32")
    model = keras.Model(inputs, {"sum": total, "twice": 2.0 * inputs[0]})
    b = np.arange(15, dtype="float32").reshape(5, 3)
    a = np.ones((5, 3), "int64")
    export_litert(model, tmp_path / "two.tflite", batch_size=2, sample=[b, a])
    file = load_litert(tmp_path / "two.tflite")
    assert [spec.name for spec in file.inputs] == ["b", "a"]
    for x in ({"a": a, "b": b}, [b, a]):
        found = file.predict(x)
        assert list(found) == ["sum", "twice"]
        np.testing.assert_array_equal(found["sum"], b + 1)
        np.testing.assert_array_equal(found["twice"], 2 * b)
    with pytest.raises(ValueError, match="input `a` must be of dtype int32"):
        file.predict({"a": b, "b": b})


@pytest.mark.parametrize("keep", [0, 3, 7, 8, 100, 5_000, -1])
def test_truncated_file(content, keep, path):
    refused(path, content[:keep], "Received: ")


def test_each_part_of_the_file_is_under_the_checksum(content, path):
    rng = np.random.default_rng(0)
    start = content.index(b'"sha256": "')
    places = [
        0,
        9,
        len(content) - 1,
        start + 15,
        *rng.integers(start + 80, len(content), 20),
    ]
    for place in places:
        damaged = bytearray(content)
        damaged[place] ^= 0x55
        refused(path, damaged, "corrupted, truncated, or was edited")


def test_a_damaged_record_does_not_make_it_the_file_of_somebody_else(
    content, path
):
    start = content.index(b'{"format": "keras_sparse_ortho/1"')
    for place in range(start, start + 60):
        for bit in range(8):
            damaged = bytearray(content)
            damaged[place] ^= 1 << bit
            refused(path, damaged, r"damaged|corrupted")


def resealed(content, changes):
    """A file whose record was changed by somebody who renewed the digest."""
    if isinstance(changes, dict):
        record = (
            graphs.RECORD
            | {"inputs": [X], "outputs": [{"name": "head"}]}
            | changes
        )
        return graphs.sealed(
            content, {k: v for k, v in record.items() if v is not ...}
        )
    return graphs.with_digest(
        content.replace(b'"route": "float32"', changes.ljust(18), 1)
    )


X = {"name": "x", "shape": [1, 64], "dtype": "float32"}


@pytest.mark.parametrize(
    "changes",
    [
        *(
            {key: value}
            for key in ("inputs", "outputs")
            for value in (..., None, 1, "a")
        ),
        *({"inputs": value} for value in ([], ["x"], [{}], {}, [X, X])),
        *({"inputs": [X | {"name": name}]} for name in (1, None, ["x"], "y")),
        *({"outputs": value} for value in ([], [{"name": "y", "shape": [1]}])),
        {"route": 1},
        {"model": ["m"]},
        b"}",
        b"no JSON",
    ],
    ids=lambda changes: str(changes)[:40],
)
def test_a_record_that_was_resealed(content, changes, path):
    refused(
        path,
        resealed(content, changes),
        r"The record in the file must.*Received: ",
    )


def test_what_was_not_changed_is_resealed_well(content, path):
    """Or the test above would say nothing."""
    path.write_bytes(resealed(content, {}))
    assert load_litert(path).route == "float32"


def test_threads_may_share_a_file(all_routes):
    file = load_litert(all_routes[3] / "float32.tflite")
    rng = np.random.default_rng(0)
    inputs = [
        rng.normal(size=(6, *file.inputs[0].shape[1:])).astype("float32")
        for _ in range(32)
    ]
    expected = [file.predict(x) for x in inputs]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert_same(pool.map(file.predict, inputs * 4), expected * 4)


def test_little_is_unpacked_of_what_is_no_litert_file(
    content, tmp_path, monkeypatch
):
    path = tmp_path / "m.tflite.gz"
    zeros = bytes(64 * 2**20)
    monkeypatch.setattr(_load_litert, "_LARGEST", 4 * 2**20)
    monkeypatch.setattr(_load_litert, "_PIECE", 2**20)
    for bomb in (zeros, content[:8] + zeros):
        packed = gzip.compress(bomb)
        tracemalloc.start()
        refused(path, packed, "'TFL3' in bytes 4 to 7, and less than")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 16 * 2**20
    path.write_bytes(gzip.compress(content))
    assert load_litert(path).route == "float32"


def test_no_litert_file(tmp_path, path):
    with pytest.raises(FileNotFoundError, match="Received: path="):
        load_litert(path)
    refused(
        path, b"PK\x03\x04 a zip file, for example", "'TFL3' in bytes 4 to 7"
    )
    for damaged in (gzip.compress(b"1234TFL3" * 100)[:-9], b"no gzip"):
        refused(
            tmp_path / "m.tflite.gz",
            damaged,
            "decompress the file: it is corrupted",
        )


def test_foreign_file_is_tried_first(content, path, all_routes):
    path.write_bytes(as_foreign(content))
    file = load_litert(path)
    assert (file.route, file.model_name) == (None, None)
    np.testing.assert_allclose(
        file.predict(all_routes[1]), all_routes[2], atol=1e-5
    )


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_truncated_foreign_file(content, path, share):
    content = as_foreign(content)[: int(share * len(content))]
    refused(path, content, "tried in a subprocess")


@pytest.mark.parametrize(
    "content",
    [
        graphs.with_tensors([7], [1]),
        graphs.with_tensors([0], [2**31 - 1]),
        graphs.forever(),
    ],
    ids=["reads no tensor", "writes no tensor", "never ends"],
)
def test_resealed_graphs_are_tried_first(content, path):
    """What has a record and the right digest can come from anybody."""
    seconds = 3 if content == graphs.forever() else 60
    message = "tried in a subprocess"
    refused(path, graphs.sealed(content), message, timeout=seconds)


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux says what is free"
)
def test_a_graph_takes_half_of_the_free_memory_at_most():
    """What would take all of it would end other processes with its own."""
    worker = inspect.getfile(interpreter_of)
    code = (
        f"import resource, runpy; work = runpy.run_path({worker!r}); "
        "work['_limit_memory'](); print(resource.getrlimit(resource.RLIMIT_AS)[0])"
    )
    found = run_python("-P", "-c", code)
    lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
    (total,) = [
        1024 * int(line.split()[1])
        for line in lines
        if line.startswith("MemTotal")
    ]
    assert 2**20 < int(found) < 0.6 * total


def test_a_file_is_tried_once(path, monkeypatch):
    record = graphs.RECORD | {"outputs": [{"name": "once", "shape": [1, 4]}]}
    path.write_bytes(graphs.sealed(graphs.absolute(name="once"), record))
    load_litert(path)
    fail = lambda *_, **__: pytest.fail("tried again")  # noqa: E731
    monkeypatch.setattr(Worker, "run", fail)
    np.testing.assert_array_equal(
        load_litert(path).predict(np.full((3, 4), -2.0)), 2.0
    )


def test_exported_again_has_one_record(content, path):
    record = {"route": "other", "inputs": [X], "outputs": [{"name": "head"}]}
    path.write_bytes(graphs.sealed(content, record))
    assert path.read_bytes().count(b"keras_sparse_ortho/1") == 1
    assert load_litert(path).route == "other"


def test_files_are_timed(all_routes, tmp_path):
    files = [all_routes[3] / f"{name}.tflite" for name in ("float32", "int8")]
    packed = tmp_path / "m.tflite.gz"
    packed.write_bytes(gzip.compress(files[0].read_bytes()))
    times = latencies([*files, packed], threads=2, seconds=0.01)
    assert len(times) == 3
    # Milliseconds: no machine takes 100 ns.
    assert all(1e-4 < ms < 1000 for ms in times)


def test_times_of_another_target_are_without_amx(all_routes):
    code = f"""if True:
        import ctypes, pathlib, runpy
        read = pathlib.Path.read_text
        pathlib.Path.read_text = lambda path: "amx_int8" if path.name == "cpuinfo" else read(path)
        worker = runpy.run_path({inspect.getfile(interpreter_of)!r})
        file = {str(all_routes[3] / "float32.tflite")!r}
        system = ctypes.CDLL(None, use_errno=True)
        for amx in (True, False):
            worker["bench"](file, 1, 1, amx=amx)
            print(system.prctl(21, 0, 0, 0, 0), system.syscall(158, 0x1023, 18) < 0, end=" ")
        print(ctypes.get_errno())
    """
    filters = run_python("-c", code).split()
    # 22: EINVAL, of the filter.
    assert (filters[0], filters[2:]) == (
        "0",
        ["2", "True", "22"],
    )


def test_missing_interpreter(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ai_edge_litert", None)
    with pytest.raises(ImportError, match="pip install ai-edge-litert"):
        load_litert(tmp_path / "m.tflite")


@pytest.fixture(scope="module")
def blocks(tmp_path_factory):
    """Live blocks as static int8."""
    keras.utils.set_random_seed(0)
    dense = keras.Sequential(
        [keras.Input((64,), name="x"), layers.Dense(64, name="hidden")]
    )
    structure = kso.Block(16, 16, regular=True)
    model = kso.sparsify(
        dense, 0.25, structure=structure, storage="blocks", seed=0
    )
    rows = np.random.default_rng(0).standard_normal((20, 64)).astype("float32")
    path = tmp_path_factory.mktemp("micro") / "blocks.tflite"
    export_litert(model, path, mode="int8+blocks", representative_data=rows)
    return path


def bytes_in(header, name):
    body = header.partition(f"{name}[] = {{")[2].partition("}")[0]
    return bytes(map(int, re.findall(r"\d+", body)))


def test_header_has_a_lean_file_and_its_operators(blocks, tmp_path):
    operators = c_array(blocks, tmp_path / "blocks.h", name="blocks")
    header = (tmp_path / "blocks.h").read_text()
    array = bytes_in(header, "blocks")
    (tmp_path / "array.tflite").write_bytes(array)
    x = np.random.default_rng(1).standard_normal((1, 64)).astype("float32")
    whole, lean = (
        interpret(path, x=x) for path in (blocks, tmp_path / "array.tflite")
    )
    assert_same(whole.values(), lean.values())
    assert len(array) < 0.85 * blocks.stat().st_size
    model = read_model(array)
    assert model.metadata is None
    graph = model.subgraphs[0]
    named = [
        k for k, tensor in enumerate(graph.tensors) if tensor.name is not None
    ]
    assert named == sorted([*graph.inputs, *graph.outputs])
    assert operators == (
        "Conv2D",
        "Dequantize",
        "Gather",
        "Quantize",
        "Reshape",
    )
    assert "MicroMutableOpResolver<5>" in header
    assert "resolver.AddConv2D();" in header
    assert f"blocks_size = {len(array)};" in header
    packed = tmp_path / "packed.tflite.gz"
    packed.write_bytes(gzip.compress(blocks.read_bytes()))
    assert c_array(packed, tmp_path / "again.h") == operators
    assert bytes_in((tmp_path / "again.h").read_text(), "model_data") == array


def test_c_array_refuses(blocks, tmp_path, all_routes):
    target = tmp_path / "other.h"
    with pytest.raises(ExportRouteError, match=r"Received: .*'dynamic_int8'"):
        c_array(all_routes[3] / "dynamic_int8.tflite", target)
    damaged = bytearray(blocks.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    noise = b"\x1c\0\0\0TFL3" + bytes(range(256))
    for content, message in ((damaged, "corrupted"), (noise, "no flatbuffer")):
        (tmp_path / "other.tflite").write_bytes(content)
        with pytest.raises(LiteRTFileError, match=message):
            c_array(tmp_path / "other.tflite", target)
    with pytest.raises(ValueError, match="C identifier"):
        c_array(blocks, target, name="2nd")
    assert not target.exists()


def without_signature(path, target):
    """A file as other tools write them: no signature, and nothing of ours."""
    model = read_model(path.read_bytes())
    model.signatureDefs, model.metadata = [], []
    target.write_bytes(write_model(model))
    return target


def test_files_without_a_signature_have_the_names_of_their_tensors(
    tiny_file, tmp_path
):
    file = load_litert(without_signature(tiny_file, tmp_path / "a.tflite"))
    x = np.random.default_rng(0).normal(size=(5, 4)).astype("float32")
    np.testing.assert_array_equal(
        file.predict(x), load_litert(tiny_file).predict(x)
    )
    assert file.route is None
    assert [spec.shape for spec in file.inputs] == [(1, 4)]
    again = pickle.loads(pickle.dumps(file))
    np.testing.assert_array_equal(again.predict(x), file.predict(x))
    assert len(latencies([tmp_path / "a.tflite"], seconds=0.1)) == 1
