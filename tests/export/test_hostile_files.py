"""Files that are made to harm: names with commands, few bytes of a large size."""

import copy
import gzip
import os
import pickle

import numpy as np
import pytest

from keras_sparse_ortho import _files
from keras_sparse_ortho.errors import LiteRTFileError
from keras_sparse_ortho.export import (
    c_array,
    load_litert,
    read_model,
    write_model,
)
from tests.faults import graphs

pytestmark = pytest.mark.tensorflow_only

NAMES = ["x\nint y = 1; //", "x\x1b]0;title\x07", "x\u2028y", "\u202e"]


def file_with(folder, name, file="m.tflite"):
    """A file with integers at its input, which has this name, in the signature as well."""
    model = read_model(graphs.absolute())
    for signature in model.signatureDefs:
        signature.inputs[0].name = name.encode()
    tensor = model.subgraphs[0].tensors[0]
    tensor.name = name.encode()
    tensor.type = 9
    tensor.quantization = graphs._made(
        "QuantizationParameters",
        scale=np.array([0.5], np.float32),
        zeroPoint=np.array([3]),
    )
    (folder / file).write_bytes(write_model(model))
    return folder / file


@pytest.mark.parametrize("name", NAMES)
def test_no_name_becomes_code(tmp_path, name):
    """The name of a tensor, and that of the file."""
    ends = tmp_path / "m.h"
    for path in (
        file_with(tmp_path, name),
        file_with(tmp_path, "x", f"{name.replace(chr(47), chr(95))}.tflite"),
    ):
        c_array(path, ends)
        lines = ends.read_text(encoding="utf-8").splitlines()
        comments = [line for line in lines if line.startswith("//")]
        assert lines[: len(comments)] == comments
        assert lines[len(comments)] == "#pragma once"
        assert all(line.isprintable() for line in lines)


def test_a_header_says_how_integers_are_made(tmp_path):
    c_array(file_with(tmp_path, "größe"), tmp_path / "m.h")
    assert "// größe: int8 = round(x / 0.5) + 3\n" in (
        tmp_path / "m.h"
    ).read_text(encoding="utf-8")


def test_files_of_old_tools_have_the_operator_in_another_field(tmp_path):
    model = read_model(graphs.absolute())
    code = model.operatorCodes[0]
    code.deprecatedBuiltinCode, code.builtinCode = code.builtinCode, 0
    (tmp_path / "m.tflite").write_bytes(write_model(model))
    assert c_array(tmp_path / "m.tflite", tmp_path / "m.h") == ("Abs",)


def test_a_graph_without_its_tensors_is_refused(tmp_path):
    (tmp_path / "m.tflite").write_bytes(graphs.with_tensors([0], [1]))
    model = read_model((tmp_path / "m.tflite").read_bytes())
    model.subgraphs[0].inputs = np.array([7], np.int32)
    (tmp_path / "m.tflite").write_bytes(write_model(model))
    with pytest.raises(LiteRTFileError, match="no flatbuffer of one"):
        c_array(tmp_path / "m.tflite", tmp_path / "m.h")


@pytest.mark.parametrize("link", [None, os.symlink, os.link])
def test_a_header_does_not_replace_the_file(tmp_path, link):
    path = file_with(tmp_path, "x")
    target = path if link is None else tmp_path / "m.h"
    if link is not None:
        link(path, target)
    before = path.read_bytes()
    with pytest.raises(
        ValueError, match="`path` must name another file than `file`"
    ):
        c_array(path, target)
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", ["model", "outputs"])
def test_names_of_a_file_are_printable(tmp_path, name, place):
    changed = (
        {"model": name} if place == "model" else {"outputs": [{"name": name}]}
    )
    output = name if place == "outputs" else "y"
    path = tmp_path / "m.tflite"
    path.write_bytes(
        graphs.sealed(graphs.absolute(name=output), graphs.RECORD | changed)
    )
    with pytest.raises(LiteRTFileError) as caught:
        load_litert(path)
    assert "must be printable" in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("size", [1000, 5000])
def test_a_packed_file_of_a_hundred_times_its_size_is_refused(
    tmp_path, monkeypatch, size
):
    """After a few pieces: nobody asks for all of it."""
    monkeypatch.setattr(_files, "ALWAYS_UNPACKED", 1 << 12)
    monkeypatch.setattr(
        "keras_sparse_ortho.export._load_litert._PIECE", 1 << 12
    )
    path = tmp_path / "m.tflite.gz"
    path.write_bytes(gzip.compress(graphs.absolute() + bytes(1000 * size)))
    with pytest.raises(
        LiteRTFileError, match=r"decompress it first.*or more"
    ) as caught:
        load_litert(path)
    received = int(str(caught.value).split("holds ")[-1].split()[0])
    assert received <= 100 * path.stat().st_size + (1 << 13)


def test_a_packed_file_is_as_the_plain_one(tmp_path):
    (tmp_path / "m.tflite.gz").write_bytes(
        gzip.compress(graphs.sealed(graphs.absolute()))
    )
    file = load_litert(tmp_path / "m.tflite.gz")
    np.testing.assert_array_equal(file.predict(np.full((3, 4), -2.0)), 2.0)


def test_an_open_file_can_be_pickled_and_copied(tmp_path):
    (tmp_path / "m.tflite").write_bytes(graphs.sealed(graphs.absolute()))
    file = load_litert(tmp_path / "m.tflite", threads=2)
    for other in (pickle.loads(pickle.dumps(file)), copy.deepcopy(file)):
        assert repr(other) == repr(file)
        np.testing.assert_array_equal(other.predict(np.full((3, 4), -2.0)), 2.0)
