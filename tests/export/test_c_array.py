"""`c_array`: the header with a file, and the operators in it."""

import gzip
import re

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import ExportRouteError, LiteRTFileError
from keras_sparse_ortho.export import c_array, export_litert
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


def test_header_has_the_file_and_its_operators(file, tmp_path):
    operators = c_array(file, tmp_path / "blocks.h", name="blocks")
    header = (tmp_path / "blocks.h").read_text()
    assert bytes_in(header, "blocks") == file.read_bytes()
    assert operators == ("Conv2D", "Dequantize", "Gather", "Quantize", "Reshape")
    assert "MicroMutableOpResolver<5>" in header
    assert "resolver.AddConv2D();" in header
    assert f"blocks_size = {file.stat().st_size};" in header
    packed = tmp_path / "packed.tflite.gz"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    assert c_array(packed, tmp_path / "again.h") == operators
    assert bytes_in((tmp_path / "again.h").read_text(), "model_data") == file.read_bytes()


def test_refusals(file, tmp_path, all_routes):
    target = tmp_path / "other.h"
    with pytest.raises(ExportRouteError, match=r"Received: .*'dynamic_int8'"):
        c_array(all_routes[3] / "dynamic_int8.tflite", target)
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    noise = b"\x1c\0\0\0TFL3" + bytes(range(256))
    for content, message in ((damaged, "corrupted"), (noise, "no flatbuffer")):
        (tmp_path / "other.tflite").write_bytes(content)
        with pytest.raises(LiteRTFileError, match=message):
            c_array(tmp_path / "other.tflite", target)
    with pytest.raises(ValueError, match="C identifier"):
        c_array(file, target, name="2nd")
    assert not target.exists()
