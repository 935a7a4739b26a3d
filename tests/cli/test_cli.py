"""`kso` as a shell runs it, in this process for speed."""

import contextlib
import dataclasses
import gzip
import io
import json
import os
import re
import resource
import runpy
import shutil
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho import shrinking
from keras_sparse_ortho.cli import main
from keras_sparse_ortho.errors import ExportVerificationError
from keras_sparse_ortho.export import load_litert
from tests.helpers import array

pytestmark = pytest.mark.tensorflow_only


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("cli") / "m.keras"
    dense = keras.Sequential(
        [keras.Input((32,), name="x"), keras.layers.Dense(16, name="d")]
    )
    kso.sparsify(dense, 0.25, seed=0).save(path)
    return path


@pytest.fixture(scope="module")
def exported(model_file):
    """A file that the command wrote, with what it printed as JSON."""
    path, rows = (
        model_file.with_name("m.tflite"),
        model_file.with_name("rows.npy"),
    )
    np.save(rows, np.random.default_rng(0).standard_normal((5, 32)))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert (
            main(
                [
                    "export",
                    str(model_file),
                    str(path),
                    "--sample",
                    str(rows),
                    "--json",
                ]
            )
            == 0
        )
    return path, json.loads(printed.getvalue())


def test_report(model_file, capsys):
    assert main(["report", str(model_file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["live"], found["size"]) == (128, 512)
    assert main(["report", str(model_file)]) == 0
    assert "d/kernel" in capsys.readouterr().out


@pytest.fixture(scope="module")
def trained_file(tmp_path_factory):
    """A dense network with channels to remove, and rows."""
    folder = tmp_path_factory.mktemp("trained")
    layers = [
        keras.layers.Dense(32, "relu", name="hidden"),
        keras.layers.Dense(4, name="head"),
    ]
    keras.Sequential([keras.Input((8,)), *layers]).save(folder / "m.keras")
    rows = np.random.default_rng(0).standard_normal((128, 8))
    np.savez(folder / "rows.npz", x=rows.astype("float32"))
    return folder


def test_narrow_writes_a_narrower_model(trained_file, tmp_path, capsys):
    out, page = tmp_path / "small.keras", tmp_path / "widths.html"
    command = ["narrow", str(trained_file / "m.keras")]
    options = ["--data", str(trained_file / "rows.npz"), "--out", str(out)]
    assert main([*command, "0.6", *options, "--html", str(page)]) == 0
    printed_text = capsys.readouterr().out
    assert "hidden: 16 of 32 channels" in printed_text
    assert "212 of 420 parameters" in printed_text
    small = keras.saving.load_model(out)
    assert small.get_layer("hidden").units == 16
    assert "Widths" in page.read_text()
    for arguments, said in (
        ([*command, "0.001", *options], "share"),
        ([*command, "0.6", *options[:-1], "m.txt"], "--out"),
        ([*command, "0.6", *options, "--html", str(out)], "--html"),
    ):
        assert main(arguments) == 2
        assert said in capsys.readouterr().err


def test_sensitivity_prints_a_table(trained_file, tmp_path, capsys):
    page = tmp_path / "page.html"
    command = ["sensitivity", str(trained_file / "m.keras")]
    command += ["--data", str(trained_file / "rows.npz")]
    options = ["--densities", "0.5", "0.25", "--html", str(page)]
    assert main([*command, *options]) == 0
    printed_text = capsys.readouterr().out
    assert re.search(r"error at\s+0.5\s+0.25\s+int8\s+int4", printed_text)
    assert "head/kernel" in printed_text
    assert "data:image/svg+xml" in page.read_text()
    assert main([*command, "--densities", "2"]) == 2
    assert "--densities" in capsys.readouterr().err
    assert main([*command, "--html", str(trained_file / "rows.npz")]) == 2
    assert "--html" in capsys.readouterr().err


def test_export(exported, model_file):
    path, report = exported
    assert (report["route"], report["sample_rows"]) == ("float32+sp", 5)
    assert report["total_zeros"] >= 512 - 128
    x, model = np.ones((3, 32), "float32"), keras.saving.load_model(model_file)
    np.testing.assert_allclose(
        load_litert(path).predict(x), array(model(x)), atol=1e-5
    )


def test_bench(exported, tmp_path, capsys):
    path, _ = exported
    packed = tmp_path / "m.tflite.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    arguments = [
        "bench",
        str(path),
        str(packed),
        "--threads",
        "1",
        "2",
        "--seconds",
        "0.2",
    ]
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
        (
            ["export", "hdf.keras", "out.tflite"],
            3,
            "they may hold code that Keras would run",
        ),
        (["report", "RENAMED"], 3, "must end in .keras"),
        (["report", "broken.keras"], 3, "Keras must be able to load"),
        (["report", "damaged.keras"], 3, "Keras must be able to load"),
        (["bench", "text.keras"], 3, "TFL3"),
        (["bench", "."], 3, "must name a LiteRT file"),
        (
            ["export", "MODEL", "out.tflite", "--sample", "MODEL"],
            3,
            "Pass rows as",
        ),
        (
            ["export", "MODEL", "out.tflite", "--data", "empty.keras"],
            3,
            "Pass rows as",
        ),
        (["bench", "text.keras", "--threads", "0"], 2, "--threads"),
        (["bench", "text.keras", "--threads", "1", "0"], 2, "--threads"),
        (
            ["export", "MODEL", "out.tflite", "--mode", "quick"],
            2,
            "mode='quick'",
        ),
        (
            ["export", "MODEL", "out.tflite", "--sample", "text.keras"],
            3,
            "Pass rows as",
        ),
        (
            ["export", "MODEL", "none/out.tflite"],
            2,
            "Received: output='none/out.tflite'",
        ),
        (
            ["export", "MODEL", "out.tflite", "--mode", "int8"],
            2,
            "`--data` is needed with",
        ),
        (
            ["export", "MODEL", "out.tflite", "--batch-size", "0"],
            2,
            "`--batch-size` must be",
        ),
        (
            ["export", "MODEL", "out.tflite", "--tolerance", "-1"],
            2,
            "`--tolerance` must be",
        ),
        (
            ["export", "MODEL", "out.tflite", "--sample", "rows.npy"],
            2,
            "`--sample` for input `x`",
        ),
    ],
)
def test_what_goes_wrong(
    model_file, tmp_path, monkeypatch, capsys, arguments, status, message
):
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
def test_messages_of_every_kind_name_options(
    model_file, monkeypatch, capsys, kind
):
    """Warnings and failed verifications as well, which are no ValueErrors."""

    def export(*_, **__):
        warnings.warn("not by `mode`, see `batch_size=`", stacklevel=2)
        raise kind(
            "see `tolerance`, put `sample` in. Received: representative_data=None, path=''"
        )

    monkeypatch.setattr(kso.export, "export_litert", export)
    with warnings.catch_warnings(action="always"):
        status = main(["export", str(model_file), "m.tflite"])
    assert status == (2 if kind is ValueError else 1)
    [warned, failed] = capsys.readouterr().err.splitlines()
    assert warned == "kso: warning: not by `--mode`, see `--batch-size`"
    assert (
        failed
        == "kso: see `--tolerance`, put `sample` in. Received: --data=None, output=''"
    )


def test_hdf5_files_are_not_opened_and_old_keras_is_left_out(tmp_path, capsys):
    """Keras before 3.11.3 ran the code in them, though asked not to (CVE-2025-9905)."""
    keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)]).save(
        tmp_path / "m.h5"
    )
    for command in (["report"], ["export", "m.tflite"]):
        assert main([command[0], str(tmp_path / "m.h5"), *command[1:]]) == 3
        assert "HDF5 files (.h5) are refused" in capsys.readouterr().err
    text = (Path(kso.__file__).parents[1] / "pyproject.toml").read_text()
    [bound] = re.findall(r'"keras>=([\d.]+)"', text)
    assert tuple(map(int, bound.split("."))) >= (3, 11, 3)


COMMAND = (sys.executable, "-m", "keras_sparse_ortho_command")


def printed(*arguments):
    """Exit status, standard output and standard error of `kso` in a process of its own."""
    tree = Path(kso.__file__).parents[1]
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "TF_CPP_MIN_LOG_LEVEL": "0",
    }
    options = {
        "capture_output": True,
        "text": True,
        "env": environment,
        "check": False,
    }
    done = subprocess.run([*COMMAND, *map(str, arguments)], **options)
    return done.returncode, done.stdout, done.stderr


def test_help_comes_at_once():
    """Without Keras, a backend or NumPy, each of which takes seconds of a processor."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    for arguments in (["--help"], ["shrink", "--help"], ["--version"]):
        status, out, err = printed(*arguments)
        assert (status, err) == (0, "")
        assert "kso" in out
    seconds = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    assert seconds < 3.0  # of three commands


@pytest.mark.slow  # each command starts TensorFlow
def test_no_command_shows_lines_of_a_log(model_file, exported):
    status, out, err = printed("report", model_file)
    assert (status, err) == (0, "")
    assert "d/kernel" in out
    status, out, err = printed("bench", exported[0], "--seconds", "0.1")
    assert (status, err) == (0, "")
    assert "ms a call" in out
    status, out, err = printed("report", "none.keras")
    assert (status, out) == (3, "")
    assert err.startswith("kso: There is no such file")
    assert err.count("\n") == 1


def test_version_and_exit_codes(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"kso {kso.__version__}\n"
    assert main(["--help"]) == 0
    assert "exit status" in capsys.readouterr().out


def test_missing_package_is_a_failure(
    model_file, tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, "ai_edge_litert", None)
    assert main(["export", str(model_file), str(tmp_path / "m.tflite")]) == 1
    assert "keras-sparse-ortho[litert]" in capsys.readouterr().err


def test_as_a_module(model_file, monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "argv", ["kso", "report", str(model_file), "--json"]
    )
    with pytest.raises(SystemExit) as end:
        runpy.run_module("keras_sparse_ortho", run_name="__main__")
    assert not end.value.code
    assert json.loads(capsys.readouterr().out)["live"] == 128


@pytest.mark.parametrize("given", [["r.npy", "--labels", "l.npy"], ["r.npz"]])
def test_shrink_takes_rows_as_they_are_saved(
    model_file, tmp_path, monkeypatch, given
):
    taken = []
    monkeypatch.setattr(
        shrinking,
        "shrink",
        lambda model, data, out, **_: taken.append((data, out)),
    )
    monkeypatch.chdir(tmp_path)
    rows, labels = np.ones((4, 32)), np.arange(4)
    np.save("r.npy", rows)
    np.save("l.npy", labels)
    np.savez("r.npz", x=rows, y=labels)
    assert (
        main(
            [
                "shrink",
                str(model_file),
                "--out",
                "small.tflite",
                "--data",
                *given,
            ]
        )
        == 0
    )
    (((x, y), out),) = taken
    assert out == "small.tflite"
    np.testing.assert_array_equal(x, rows)
    np.testing.assert_array_equal(y, labels)


def one_line(capsys):
    """The only line that was printed to standard error."""
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kso: ")
    assert "\x1b" not in line
    return line


@pytest.mark.parametrize("minutes", ["inf", "nan", "-1"])
def test_wrong_minutes_end_in_one_line(minutes, model_file, tmp_path, capsys):
    rows = tmp_path / "rows.npy"
    np.save(rows, np.ones((40, 32), "float32"))
    options = [
        "--data",
        str(rows),
        "--out",
        str(tmp_path / "m.tflite"),
        f"--minutes={minutes}",
    ]
    assert main(["shrink", str(model_file), *options]) == 2
    assert "`--minutes` must be" in one_line(capsys)


def test_microcontrollers_need_a_limit(model_file, tmp_path, capsys):
    rows = tmp_path / "rows.npy"
    np.save(rows, np.ones((40, 32), "float32"))
    options = ["--data", str(rows), "--out", str(tmp_path / "m.h")]
    options += ["--target", "micro", "--minutes=0"]
    assert main(["shrink", str(model_file), *options]) == 2
    assert "`--max-flash` and `--max-ram`" in one_line(capsys)


def test_rows_of_another_shape_end_in_one_line(model_file, tmp_path, capsys):
    rows = tmp_path / "rows.npy"
    np.save(rows, np.random.default_rng(0).normal(size=(40, 31)))
    options = [
        "--data",
        str(rows),
        "--out",
        str(tmp_path / "m.tflite"),
        "--minutes=0",
    ]
    assert main(["shrink", str(model_file), *options]) == 2
    assert "must have the shape (rows, 32)" in one_line(capsys)


def test_an_error_of_any_kind_ends_in_one_line(
    model_file, tmp_path, capsys, monkeypatch
):
    def failing(*_, **__):
        raise OverflowError("\x1b[1mfar too much\x1b[0m\n\nof it")

    monkeypatch.setattr(shrinking, "shrink", failing)
    rows = tmp_path / "rows.npy"
    np.save(rows, np.ones((40, 32)))
    options = ["--data", str(rows), "--out", str(tmp_path / "m.tflite")]
    assert main(["shrink", str(model_file), *options]) == 1
    assert one_line(capsys) == "kso: OverflowError: far too much of it"


def test_shrink_knows_the_loss_of_a_saved_model(tmp_path, monkeypatch):
    losses = []
    monkeypatch.setattr(
        shrinking, "shrink", lambda model, *_, **__: losses.append(model.loss)
    )
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(1, "sigmoid")]
    )
    model.compile("sgd", "mse")
    model.save(tmp_path / "m.keras")
    np.save(tmp_path / "rows.npy", np.ones((40, 4)))
    files = [
        str(tmp_path / name) for name in ("m.keras", "rows.npy", "m.tflite")
    ]
    assert (
        main(["shrink", files[0], "--data", files[1], "--out", files[2]]) == 0
    )
    assert losses == ["mse"]


def test_rows_by_name_of_a_model_with_an_input_y(tmp_path, monkeypatch):
    """Then `y` in the file is rows, and labels come from their own file."""
    taken = []
    monkeypatch.setattr(
        shrinking, "shrink", lambda model, data, out, **_: taken.append(data)
    )
    monkeypatch.chdir(tmp_path)
    inputs = [keras.Input((2,), name=name) for name in ("x", "y")]
    keras.Model(inputs, keras.layers.Add()(inputs)).save("m.keras")
    np.savez("r.npz", x=np.zeros((4, 2)), y=np.ones((4, 2)))
    assert (
        main(["shrink", "m.keras", "--out", "small.tflite", "--data", "r.npz"])
        == 0
    )
    (rows,) = taken
    assert {name: float(array.max()) for name, array in rows.items()} == {
        "x": 0.0,
        "y": 1.0,
    }


def test_options_reach_the_functions(model_file, tmp_path, monkeypatch, capsys):
    seen = {}
    monkeypatch.setattr(
        shrinking, "shrink", lambda *_, **options: seen.update(options)
    )
    rows = tmp_path / "rows.npy"
    np.save(rows, np.ones((4, 32)))
    limits = [
        "--max-drop",
        "0.02",
        "--max-bytes",
        "900",
        "--max-ms",
        "3",
        "--minutes",
        "2",
    ]
    command = [
        "shrink",
        str(model_file),
        "--out",
        "m.tflite",
        "--data",
        str(rows),
    ]
    assert (
        main([*command, *limits, "--metric", "closeness", "--prefer", "ms"])
        == 0
    )
    expected = {
        "max_drop": 0.02,
        "max_bytes": 900,
        "max_ms": 3.0,
        "minutes": 2.0,
    }
    expected |= {"metric": "closeness", "prefer": "ms"}
    expected |= {"target": None, "max_flash": None, "max_ram": None}
    assert seen == {**expected, "decode_code": 0, "verbose": True}
    micro = ["--target", "micro", "--max-flash", "900", "--max-ram", "800"]
    assert main([*command, *micro, "--decode-code", "70"]) == 0
    assert seen["target"] == "micro"
    assert (seen["max_flash"], seen["max_ram"]) == (900, 800)
    assert (seen["max_drop"], seen["decode_code"]) == (None, 70)
    assert main([*command, "--max-drop", "class=.01, box=.05"]) == 0
    assert seen["max_drop"] == {"class": 0.01, "box": 0.05}
    assert main([*command, "--max-drop", "class=little"]) == 2
    message = capsys.readouterr().err
    assert "as class=0.01,box=0.05. Received: 'class=little'" in message
    assert main([*command, "--target", "arm64"]) == 0
    assert seen["target"] == "arm64"
    seen.clear()

    def export_litert(*_, **options):
        seen.update(options)

    monkeypatch.setattr(kso.export, "export_litert", export_litert)
    options = [
        "--mode",
        "fast",
        "--target",
        "arm64",
        "--tolerance",
        "0.5",
        "--batch-size",
        "2",
    ]
    assert main(["export", str(model_file), "m.tflite", *options]) == 0
    assert (seen["mode"], seen["target"]) == ("fast", "arm64")
    assert (seen["tolerance"], seen["batch_size"]) == (0.5, 2)


def test_the_seconds_of_bench_are_for_all_threads(
    exported, monkeypatch, capsys
):
    asked = []

    def latencies(files, threads, seconds):
        asked.append((threads, seconds))
        return [1.0 for _ in files]

    monkeypatch.setattr(kso.export, "latencies", latencies)
    assert (
        main(
            ["bench", str(exported[0]), "--threads", "1", "4", "--seconds", "3"]
        )
        == 0
    )
    assert asked == [(1, 1.5), (4, 1.5)]


def test_report_without_orthogonality(model_file, capsys):
    errors = []
    for flags in ([], ["--no-orthogonality"]):
        assert main(["report", str(model_file), "--json", *flags]) == 0
        (row,) = json.loads(capsys.readouterr().out)["weights"]
        errors.append(row["orthogonality_error"])
    assert errors[0] is not None
    assert errors[1] is None


def test_models_are_loaded_without_their_losses(tmp_path):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])

    def unregistered(y_true, y_pred):
        return keras.ops.mean(y_pred - y_true)

    model.compile("adam", unregistered)
    model.save(tmp_path / "m.keras")
    assert main(["report", str(tmp_path / "m.keras")]) == 0


class Payload:
    """Makes a file where it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_rows_are_not_unpickled(model_file, tmp_path, capsys):
    rows, made = tmp_path / "rows.npy", tmp_path / "made"
    np.save(rows, np.array([Payload(made)], dtype=object), allow_pickle=True)
    assert (
        main(["export", str(model_file), "m.tflite", "--sample", str(rows)])
        == 3
    )
    assert "Pass rows as" in capsys.readouterr().err
    assert not made.exists()


def test_only_warnings_for_users_are_shown_and_the_disk_is_a_failure(
    model_file, monkeypatch, capsys
):
    def export(*_, **__):
        warnings.warn("of a library", DeprecationWarning, stacklevel=2)
        raise OSError("the disk is full")

    monkeypatch.setattr(kso.export, "export_litert", export)
    with warnings.catch_warnings(action="always"):
        assert main(["export", str(model_file), "m.tflite"]) == 1
    assert capsys.readouterr().err == "kso: the disk is full\n"


@pytest.mark.parametrize("link", [None, "symlink_to", "hardlink_to"])
@pytest.mark.parametrize("command", ["shrink", "export"])
def test_an_output_that_is_an_input_is_refused(
    model_file, tmp_path, capsys, command, link
):
    rows = tmp_path / "rows.npy"
    np.save(rows, array((40, 16)))
    before = rows.read_bytes()
    target = rows
    if link is not None:
        target = tmp_path / "m.tflite"
        getattr(target, link)(rows)
    arguments = {
        "shrink": [
            "shrink",
            str(model_file),
            "--data",
            str(rows),
            "--out",
            str(target),
        ],
        "export": [
            "export",
            str(model_file),
            str(target),
            "--sample",
            str(rows),
        ],
    }[command]
    assert main(arguments) == 2
    assert "must name another file than" in capsys.readouterr().err
    assert rows.read_bytes() == before


@pytest.mark.parametrize("kind", ["rows.npz", "model.keras"])
def test_archives_of_far_more_than_their_size_are_refused(
    tmp_path, capsys, monkeypatch, kind
):
    """What the members hold is in the directory of the archive."""
    monkeypatch.setattr("keras_sparse_ortho._files.ALWAYS_UNPACKED", 1 << 12)
    path = tmp_path / kind
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("config.json", bytes(10**7))
    keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)]).save(
        tmp_path / "good.keras"
    )
    if kind == "rows.npz":
        good, out = str(tmp_path / "good.keras"), str(tmp_path / "m.tflite")
        arguments = ["shrink", good, "--data", str(path), "--out", out]
    else:
        arguments = ["report", str(path)]
    assert main(arguments) == 3
    assert "decompress it first" in capsys.readouterr().err


def test_names_that_tensorflow_refuses_are_those_of_the_file(tmp_path, capsys):
    layers = [
        keras.layers.Dense(4, name="conv[bn]"),
        keras.layers.Dense(2, name="b\x1b]0;t\x07"),
    ]
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
        summary = kso.analysis.SparsityReport(
            (dataclasses.replace(row, path=path),), path
        )
        monkeypatch.setattr(
            "keras_sparse_ortho.analysis.report", lambda *_, **__: summary
        )

    return named


def test_names_from_a_file_do_not_reach_the_terminal(
    strange_names, model_file, capsys
):
    strange_names("b[bn]\x1b]0;t\x07\ud800")
    assert main(["report", str(model_file)]) == 0
    printed = capsys.readouterr().out
    assert r"b[bn]\x1b]0;t\x07\ud800" in printed
    assert "\x1b" not in printed


def test_a_terminal_without_a_letter_gets_an_escape(
    strange_names, model_file, monkeypatch
):
    strange_names("größe")
    narrow = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", narrow)
    assert main(["report", str(model_file)]) == 0
    narrow.flush()
    assert rb"gr\xf6\xdfe" in narrow.buffer.getvalue()
