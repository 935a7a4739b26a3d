"""What goes wrong after the arguments were accepted, and that it leaves no trace."""

import os
import signal
import subprocess
import sys

import keras
import numpy as np
import pytest

from keras_sparse_ortho import _files
from keras_sparse_ortho.export import (
    ExportConversionError,
    ExportVerificationError,
    _candidates,
    _process,
    export_litert,
    load_litert,
)
from tests.export.models import interpret, layers, mlp, tiny

pytestmark = pytest.mark.tensorflow_only

DEATH = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)\n"


@pytest.fixture
def good_file(tiny_file):
    return tiny_file.read_bytes()


@pytest.fixture
def target(tmp_path):
    """A file of an earlier export; nothing else may stand beside it after a failure."""
    path = tmp_path / "model.tflite"
    path.write_bytes(b"earlier export")
    yield path
    assert path.read_bytes() == b"earlier export"
    assert os.listdir(tmp_path) == ["model.tflite"]


def convert_to(monkeypatch, content):
    def convert(task, routes):
        (task.folder / "model.tflite").write_bytes(content)
        return {route.name: task.folder / "model.tflite" for route in routes}

    monkeypatch.setattr(_candidates, "convert", convert)


def test_file_of_another_model_of_equal_shape(monkeypatch, target, good_file):
    convert_to(monkeypatch, good_file)
    keras.utils.set_random_seed(2)
    model = tiny()
    with pytest.raises(ExportVerificationError, match=r"maximal difference \d") as caught:
        export_litert(model, target)
    want = "The file must agree with Keras to 1e-05"
    assert str(caught.value).startswith(want)


def test_tolerance_is_what_decides(monkeypatch, tmp_path, good_file):
    convert_to(monkeypatch, good_file)
    keras.utils.set_random_seed(1)
    model = tiny()
    (kernel, _) = model.trainable_weights
    kernel.assign(kernel + 1e-3)
    with pytest.raises(ExportVerificationError):
        export_litert(model, tmp_path / "m.tflite", tolerance=1e-4)
    report = export_litert(model, tmp_path / "m.tflite", tolerance=1e-2)
    assert 1e-4 < report.error < report.tolerance == 1e-2


def test_file_of_other_shapes(monkeypatch, target, good_file):
    convert_to(monkeypatch, good_file)
    with pytest.raises(ExportVerificationError, match=r"input x .*\[1, 32\].*\[1, 4\]"):
        export_litert(mlp(), target)


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b"no flatbuffer" * 9])
def test_damaged_file(monkeypatch, target, good_file, damage):
    convert_to(monkeypatch, damage(good_file))
    with pytest.raises(ExportVerificationError, match="Received: "):
        export_litert(tiny(), target)


def test_lost_zeros(monkeypatch, target, good_file):
    """The outputs cannot show that a zero became a tiny value; the count does."""
    convert_to(monkeypatch, good_file)
    keras.utils.set_random_seed(1)
    model = tiny()
    (kernel, _) = model.trainable_weights
    value = np.array(kernel)
    value[0, 0] = 0.0
    kernel.assign(value)
    with pytest.raises(ExportVerificationError, match=r"keep every zero.*1 zeros of 12"):
        export_litert(model, target, tolerance=10.0)


@pytest.fixture
def worker_that(cold, monkeypatch, tmp_path_factory):
    """A function that puts a script in place of the workers'."""

    def replace(script):
        path = tmp_path_factory.mktemp("script") / "worker.py"
        path.write_text(script)
        monkeypatch.setattr(_process, "_SCRIPT", path)

    return replace


def test_crash_of_the_interpreter_names_the_signal(monkeypatch, target, good_file, worker_that):
    worker_that(DEATH)
    convert_to(monkeypatch, good_file)
    with pytest.raises(ExportVerificationError, match=signal.SIGSEGV.name):
        export_litert(tiny(), target)


def test_crash_of_the_converter_names_the_signal(target, worker_that):
    worker_that(DEATH)
    with pytest.raises(ExportConversionError, match=signal.SIGSEGV.name):
        export_litert(tiny(), target)


def test_converter_that_hangs(target, worker_that):
    worker_that("import time; time.sleep(60)\n")
    with pytest.raises(ExportConversionError, match=r"within 0\.3 seconds"):
        export_litert(tiny(), target, timeout=0.3)


def test_operation_that_litert_lacks_is_named(target):
    model = keras.Sequential([keras.Input((4, 4, 4, 1)), layers.AveragePooling3D(2)])
    with pytest.raises(ExportConversionError, match=r"Received: operations AvgPool3D$"):
        export_litert(model, target)


def test_class_that_no_other_process_can_import(tmp_path):
    class Halve(keras.layers.Layer):
        def call(self, x):
            return x / 2

    model = keras.Sequential([keras.Input((4,), name="x"), layers.Dense(3), Halve()])
    export_litert(model, tmp_path / "m.tflite")
    x = np.ones((1, 4), "float32")
    (got,) = interpret(tmp_path / "m.tflite", x=x).values()
    np.testing.assert_allclose(got, keras.ops.convert_to_numpy(model(x)), atol=1e-6)


def test_a_full_disk_is_an_error_of_the_system(target):
    """No file of this process may be longer than 2 kB: neither TensorFlow's nor HDF5's error."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        with pytest.raises(OSError, match=r"No room|File too large") as caught:
            export_litert(tiny(), target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not isinstance(caught.value, FileNotFoundError)


def test_what_a_killed_export_left_is_removed_by_the_next(tmp_path, tiny_file):
    code = (
        "import pathlib, runpy, sys, os, signal\n"
        "staging = runpy.run_path(sys.argv[2])['staging']\n"
        "with staging(pathlib.Path(sys.argv[1]), 'model.tflite') as folder:\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path), str(_files.__file__)]
    process = subprocess.run(command, check=False)
    assert process.returncode == -signal.SIGKILL
    [left] = tmp_path.iterdir()
    foreign = tmp_path / ".model.tflite-kso-abc"
    foreign.mkdir()
    with _files.staging(tmp_path, "model.tflite") as folder:
        assert not left.exists()
        with _files.staging(tmp_path, "model.tflite"):
            assert folder.exists()  # it is alive
    assert list(tmp_path.iterdir()) == [foreign]


@pytest.mark.parametrize("place", ["caf\udcc3\udca9/m.tflite", "caf\udcc3\udca9.tflite"])
def test_names_that_the_locale_cannot_decode(tmp_path, place):
    """As "café" is under LC_ALL=C: the remedy is in the message, and nothing is left there."""
    path = tmp_path / place
    path.parent.mkdir(exist_ok=True)
    with pytest.raises(ValueError, match=r"PYTHONUTF8=1.*Received: .*udcc3.*read as utf-8"):
        export_litert(tiny(), path)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("place", ["m[1].tflite", "d[1]/m.tflite", "a*?\\/m{,}.tflite"])
def test_names_that_tensorflow_takes_for_patterns(tmp_path, place):
    path = tmp_path / place
    path.parent.mkdir(exist_ok=True)
    export_litert(tiny(), path)
    assert list(path.parent.iterdir()) == [path]
    assert load_litert(path).route == "float32"
