"""`kso` as a shell runs it, in this process for speed."""

import contextlib
import dataclasses
import gzip
import io
import json
import re
import runpy
import shutil
import sys
import warnings
import zipfile
from pathlib import Path

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho import export
from keras_sparse_ortho.cli import main
from keras_sparse_ortho.errors import ExportVerificationError
from keras_sparse_ortho.export import load_litert
from tests.helpers import array

pytestmark = pytest.mark.tensorflow_only


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("cli") / "m.keras"
    dense = keras.Sequential([keras.Input((32,), name="x"), keras.layers.Dense(16, name="d")])
    kso.sparsify(dense, 0.25, seed=0).save(path)
    return path


@pytest.fixture(scope="module")
def exported(model_file):
    """A file that the command wrote, with what it printed as JSON."""
    path, rows = model_file.with_name("m.tflite"), model_file.with_name("rows.npy")
    np.save(rows, np.random.default_rng(0).standard_normal((5, 32)))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["export", str(model_file), str(path), "--sample", str(rows), "--json"]) == 0
    return path, json.loads(printed.getvalue())


def test_report(model_file, capsys):
    assert main(["report", str(model_file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["live"], found["size"]) == (128, 512)
    assert main(["report", str(model_file)]) == 0
    assert "d/kernel" in capsys.readouterr().out


def test_export(exported, model_file):
    path, report = exported
    assert (report["route"], report["sample_rows"]) == ("float32+sp", 5)
    assert report["total_zeros"] >= 512 - 128
    x, model = np.ones((3, 32), "float32"), keras.saving.load_model(model_file)
    np.testing.assert_allclose(load_litert(path).predict(x), array(model(x)), atol=1e-5)


def test_bench(exported, tmp_path, capsys):
    path, _ = exported
    packed = tmp_path / "m.tflite.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    arguments = ["bench", str(path), str(packed), "--threads", "1", "2", "--seconds", "0.2"]
    assert main([*arguments, "--json"]) == 0
    timings = json.loads(capsys.readouterr().out)
    assert [(one["file"], one["threads"]) for one in timings] == [
        (str(file), threads) for threads in (1, 2) for file in (path, packed)
    ]
    assert {one["route"] for one in timings} == {"float32+sp"}
    assert min(one["latency_ms"] for one in timings) > 0
    assert main(arguments) == 0
    assert "ms a call" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([], 2, "required"),
        (["export", "m.keras"], 2, "output"),
        (["report", "none.keras"], 3, "There is no such file"),
        (["report", "text.keras"], 3, "This is not a Keras model"),
        (["report", "."], 3, "this is a folder"),
        (["report", "a.weights.h5"], 3, "has weights only"),
        (["export", "hdf.keras", "out.tflite"], 3, "they may hold code that Keras would run"),
        (["report", "RENAMED"], 3, "must end in .keras"),
        (["report", "broken.keras"], 3, "Keras must be able to load"),
        (["report", "damaged.keras"], 3, "Keras must be able to load"),
        (["bench", "text.keras"], 3, "TFL3"),
        (["bench", "."], 3, "must name a LiteRT file"),
        (["export", "MODEL", "out.tflite", "--sample", "MODEL"], 3, "Pass rows as"),
        (["export", "MODEL", "out.tflite", "--data", "empty.keras"], 3, "Pass rows as"),
        (["bench", "text.keras", "--threads", "0"], 2, "--threads"),
        (["export", "MODEL", "out.tflite", "--mode", "quick"], 2, "mode='quick'"),
        (["export", "MODEL", "out.tflite", "--sample", "text.keras"], 3, "Pass rows as"),
        (["export", "MODEL", "none/out.tflite"], 2, "Received: output='none/out.tflite'"),
        (["export", "MODEL", "out.tflite", "--mode", "int8"], 2, "`--data` is needed with"),
        (["export", "MODEL", "out.tflite", "--batch-size", "0"], 2, "`--batch-size` must be"),
        (["export", "MODEL", "out.tflite", "--tolerance", "-1"], 2, "`--tolerance` must be"),
        (["export", "MODEL", "out.tflite", "--sample", "rows.npy"], 2, "`--sample` for input `x`"),
    ],
)
def test_what_goes_wrong(model_file, tmp_path, monkeypatch, capsys, arguments, status, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.keras").write_text("no model at all")
    (tmp_path / "empty.keras").touch()
    for name in ("a.weights.h5", "hdf.keras"):
        (tmp_path / name).write_bytes(b"\x89HDF\r\n\x1a\n and so on")
    with zipfile.ZipFile(tmp_path / "broken.keras", "w") as archive:
        archive.writestr("config.json", "{}")
    damaged = model_file.read_bytes().replace(b"PK\x01\x02", b"PK\x01\x03")
    (tmp_path / "damaged.keras").write_bytes(damaged)
    shutil.copy(model_file, tmp_path / "model.zip")
    np.save(tmp_path / "rows.npy", np.ones((2, 5)))
    places = {"MODEL": str(model_file), "RENAMED": "model.zip"}
    arguments = [places.get(one, one) for one in arguments]
    assert main(arguments) == status
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""


@pytest.mark.parametrize("kind", [ValueError, ExportVerificationError])
def test_messages_of_every_kind_name_options(model_file, monkeypatch, capsys, kind):
    """Warnings and failed verifications as well, which are no ValueErrors."""

    def export(*_, **__):
        warnings.warn("not by `mode`, see `batch_size=`", stacklevel=2)
        raise kind("see `tolerance`, put `sample` in. Received: representative_data=None, path=''")

    monkeypatch.setattr(kso.export, "export_litert", export)
    with warnings.catch_warnings(action="always"):
        status = main(["export", str(model_file), "m.tflite"])
    assert status == (2 if kind is ValueError else 1)
    [warned, failed] = capsys.readouterr().err.splitlines()
    assert warned == "kso: warning: not by `--mode`, see `--batch-size`"
    assert failed == "kso: see `--tolerance`, put `sample` in. Received: --data=None, output=''"


def test_hdf5_files_are_not_opened_and_old_keras_is_left_out(tmp_path, capsys):
    """Keras before 3.11.3 ran the code in them, though asked not to (CVE-2025-9905)."""
    keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)]).save(tmp_path / "m.h5")
    for command in (["report"], ["export", "m.tflite"]):
        assert main([command[0], str(tmp_path / "m.h5"), *command[1:]]) == 3
        assert "HDF5 files (.h5) are refused" in capsys.readouterr().err
    text = (Path(kso.__file__).parents[1] / "pyproject.toml").read_text()
    [bound] = re.findall(r'"keras>=([\d.]+)"', text)
    assert tuple(map(int, bound.split("."))) >= (3, 11, 3)


def test_version_and_exit_codes(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"kso {kso.__version__}\n"
    assert main(["--help"]) == 0
    assert "exit status" in capsys.readouterr().out


def test_missing_package_is_a_failure(model_file, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ai_edge_litert", None)
    assert main(["export", str(model_file), str(tmp_path / "m.tflite")]) == 1
    assert "keras-sparse-ortho[litert]" in capsys.readouterr().err


def test_as_a_module(model_file, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kso", "report", str(model_file), "--json"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("keras_sparse_ortho", run_name="__main__")
    assert not end.value.code
    assert json.loads(capsys.readouterr().out)["live"] == 128


@pytest.mark.parametrize("given", [["r.npy", "--labels", "l.npy"], ["r.npz"]])
def test_shrink_takes_rows_as_they_are_saved(model_file, tmp_path, monkeypatch, given):
    taken = []
    monkeypatch.setattr(export, "shrink", lambda model, data, out, **_: taken.append((data, out)))
    monkeypatch.chdir(tmp_path)
    rows, labels = np.ones((4, 32)), np.arange(4)
    np.save("r.npy", rows)
    np.save("l.npy", labels)
    np.savez("r.npz", x=rows, y=labels)
    assert main(["shrink", str(model_file), "--out", "small.tflite", "--data", *given]) == 0
    (((x, y), out),) = taken
    assert out == "small.tflite"
    np.testing.assert_array_equal(x, rows)
    np.testing.assert_array_equal(y, labels)


@pytest.mark.parametrize("link", [None, "symlink_to", "hardlink_to"])
@pytest.mark.parametrize("command", ["shrink", "export"])
def test_an_output_that_is_an_input_is_refused(model_file, tmp_path, capsys, command, link):
    rows = tmp_path / "rows.npy"
    np.save(rows, array((40, 16)))
    before = rows.read_bytes()
    target = rows
    if link is not None:
        target = tmp_path / "m.tflite"
        getattr(target, link)(rows)
    arguments = {
        "shrink": ["shrink", str(model_file), "--data", str(rows), "--out", str(target)],
        "export": ["export", str(model_file), str(target), "--sample", str(rows)],
    }[command]
    assert main(arguments) == 2
    assert "must name another file than" in capsys.readouterr().err
    assert rows.read_bytes() == before


@pytest.mark.parametrize("kind", ["rows.npz", "model.keras"])
def test_archives_of_far_more_than_their_size_are_refused(tmp_path, capsys, monkeypatch, kind):
    """What the members hold is in the directory of the archive."""
    monkeypatch.setattr("keras_sparse_ortho._files._ALWAYS_UNPACKED", 1 << 12)
    path = tmp_path / kind
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("config.json", bytes(10**7))
    keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)]).save(tmp_path / "good.keras")
    if kind == "rows.npz":
        good, out = str(tmp_path / "good.keras"), str(tmp_path / "m.tflite")
        arguments = ["shrink", good, "--data", str(path), "--out", out]
    else:
        arguments = ["report", str(path)]
    assert main(arguments) == 3
    assert "decompress it first" in capsys.readouterr().err


def test_names_that_tensorflow_refuses_are_those_of_the_file(tmp_path, capsys):
    layers = [keras.layers.Dense(4, name="conv[bn]"), keras.layers.Dense(2, name="b\x1b]0;t\x07")]
    keras.Sequential([keras.Input((4,)), *layers]).save(tmp_path / "m.keras")
    assert main(["report", str(tmp_path / "m.keras")]) == 3
    said = capsys.readouterr().err
    assert "names of layers that it takes" in said
    assert said.strip().isprintable()


@pytest.fixture
def strange_names(monkeypatch, model_file):
    """Puts a name into what `report` finds; TensorFlow itself refuses such names."""
    row = kso.report(keras.saving.load_model(model_file)).rows[0]

    def named(path):
        summary = kso.analysis.SparsityReport((dataclasses.replace(row, path=path),), path)
        monkeypatch.setattr("keras_sparse_ortho.analysis.report", lambda *_, **__: summary)

    return named


def test_names_from_a_file_do_not_reach_the_terminal(strange_names, model_file, capsys):
    strange_names("b[bn]\x1b]0;t\x07\ud800")
    assert main(["report", str(model_file)]) == 0
    printed = capsys.readouterr().out
    assert r"b[bn]\x1b]0;t\x07\ud800" in printed
    assert "\x1b" not in printed


def test_a_terminal_without_a_letter_gets_an_escape(strange_names, model_file, monkeypatch):
    strange_names("größe")
    narrow = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", narrow)
    assert main(["report", str(model_file)]) == 0
    narrow.flush()
    assert rb"gr\xf6\xdfe" in narrow.buffer.getvalue()
