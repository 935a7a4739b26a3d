"""`c_array`: the header, and LiteRT Micro's interpreter, here a fake one that prints as it does."""

import gzip
import re
import textwrap

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.export import (
    ExportRouteError,
    ExportVerificationError,
    LiteRTFileError,
    c_array,
    export_litert,
)
from keras_sparse_ortho.export._flatbuffer import (
    flat,
    read_model,
    read_weights,
    stored_weights,
    write_model,
)
from tests.export.models import layers

pytestmark = pytest.mark.tensorflow_only


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Live blocks as static int8."""
    keras.utils.set_random_seed(0)
    dense = keras.Sequential([keras.Input((64,), name="x"), layers.Dense(64, name="hidden")])
    structure = kso.Block(16, 16, regular=True)
    model = kso.sparsify(dense, 0.25, structure=structure, storage="blocks", seed=0)
    rows = np.random.default_rng(0).standard_normal((20, 64)).astype("float32")
    path = tmp_path_factory.mktemp("micro") / "blocks.tflite"
    export_litert(model, path, mode="int8+blocks", representative_data=rows)
    return path


def bytes_in(header, name):
    body = header.partition(f"{name}[] = {{")[2].partition("}")[0]
    return bytes(map(int, re.findall(r"\d+", body)))


def test_header_has_the_file_and_its_operators(file, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tflite_micro", None)
    found = c_array(file, tmp_path / "blocks.h", name="blocks")
    header = (tmp_path / "blocks.h").read_text()
    assert bytes_in(header, "blocks") == file.read_bytes()
    assert found.operators == ("Conv2D", "Dequantize", "Gather", "Quantize", "Reshape")
    assert "MicroMutableOpResolver<5>" in header
    assert "resolver.AddConv2D();" in header
    assert f"blocks_size = {found.bytes};" in header
    assert found.arena_bytes is None
    assert "not known" in header
    packed = tmp_path / "packed.tflite.gz"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    assert c_array(packed, tmp_path / "again.h").operators == found.operators
    assert bytes_in((tmp_path / "again.h").read_text(), "model_data") == file.read_bytes()


def behind(content):
    """The file with its largest buffer behind the flatbuffer, as ai-edge-quantizer writes it."""
    model = read_model(content)
    buffer = max(model.buffers, key=lambda one: 0 if one.data is None else len(one.data))
    data, buffer.data = bytes(buffer.data), None
    buffer.offset = buffer.size = len(data)
    start = -(-len(write_model(model)) // 16) * 16
    buffer.offset = start
    return write_model(model).ljust(start, b"\0") + data


def test_weights_behind_the_flatbuffer_are_read_and_written_into_it(file, tmp_path):
    model = read_model(file.read_bytes())
    model.buffers[model.metadata[-1].buffer].data = None  # the record: as of another tool
    model.metadata = model.metadata[:-1]
    plain = write_model(model)
    other = behind(plain)
    assert len(other) > len(plain) - 64
    assert read_weights(other) == read_weights(plain)
    for one, two in zip(stored_weights(other), stored_weights(plain), strict=True):
        np.testing.assert_array_equal(one.values, two.values)
    assert write_model(read_model(other)) == plain
    assert flat(plain, "m.tflite") is plain
    (tmp_path / "m.tflite").write_bytes(other)
    found = c_array(tmp_path / "m.tflite", tmp_path / "m.h", name="m")
    assert bytes_in((tmp_path / "m.h").read_text(), "m") == plain
    assert found.bytes == len(plain)


@pytest.fixture
def micro(tmp_path, monkeypatch):
    """Writes a package tflite_micro whose interpreter runs the given lines in a call."""

    def write(*lines):
        folder = tmp_path / "packages/tflite_micro/python/tflite_micro"
        folder.mkdir(parents=True, exist_ok=True)
        text = """
            class Interpreter:
                @staticmethod
                def from_file(path):
                    assert open(path, "rb").read()[4:8] == b"TFL3"
                    return Interpreter()
                def invoke(self):
                    {}
                def print_allocations(self):
                    print("Arena allocation total 11408 bytes")
        """
        (folder / "runtime.py").write_text(textwrap.dedent(text).format("; ".join(lines)))
        monkeypatch.syspath_prepend(tmp_path / "packages")

    return write


def test_arena_is_what_the_interpreter_tells(file, tmp_path, micro):
    micro("pass")
    assert c_array(file, tmp_path / "blocks.h").arena_bytes == 11408
    assert "Tensor arena: 11408 bytes" in (tmp_path / "blocks.h").read_text()


def test_a_file_that_does_not_run_is_not_written(file, tmp_path, micro):
    micro("print('Hybrid models are not supported')", "raise RuntimeError('no tensors')")
    with pytest.raises(ExportVerificationError, match=r"must run the file.*no tensors"):
        c_array(file, tmp_path / "blocks.h")
    assert not (tmp_path / "blocks.h").exists()


def test_refusals(file, tmp_path):
    model = keras.Sequential([keras.Input((32,), name="x"), layers.Dense(32, name="hidden")])
    other = tmp_path / "other.tflite"
    export_litert(model, other, mode="dynamic_int8")
    with pytest.raises(ExportRouteError, match=r"Received: .*'dynamic_int8'"):
        c_array(other, tmp_path / "other.h")
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    other.write_bytes(damaged)
    with pytest.raises(LiteRTFileError):
        c_array(other, tmp_path / "other.h")
    with pytest.raises(ValueError, match="C identifier"):
        c_array(file, tmp_path / "other.h", name="2nd")
    assert not (tmp_path / "other.h").exists()


def test_a_file_that_is_no_flatbuffer(tmp_path):
    (tmp_path / "noise.tflite").write_bytes(b"\x1c\0\0\0TFL3" + bytes(range(256)))
    with pytest.raises(LiteRTFileError, match="no flatbuffer"):
        c_array(tmp_path / "noise.tflite", tmp_path / "noise.cc")
