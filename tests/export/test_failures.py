"""What goes wrong after the arguments were accepted: what is said, and that it leaves no trace."""

import inspect
import os
import re
import signal
import subprocess
import sys
import threading
import time

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho import _files
from keras_sparse_ortho.errors import (
    ExportConversionError,
    ExportVerificationError,
)
from keras_sparse_ortho.export import (
    JobError,
    Worker,
    _candidates,
    export_litert,
    load_litert,
)
from tests.export.models import exported, interpret, layers, mlp, tiny
from tests.helpers import array

pytestmark = pytest.mark.tensorflow_only

DEATH = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)\n"


@pytest.fixture
def target(tmp_path):
    """A file of an earlier export; nothing else may stand beside it after a failure."""
    path = tmp_path / "model.tflite"
    path.write_bytes(b"earlier export")
    yield path
    assert path.read_bytes() == b"earlier export"
    assert os.listdir(tmp_path) == ["model.tflite"]


@pytest.fixture
def convert_to(monkeypatch, tiny_file):
    """A function that lets every route make the `tiny_file`, or what is damaged in it."""

    def replace(damage=bytes):
        def convert(task, routes, workspace):
            (workspace.folder / "model.tflite").write_bytes(
                damage(tiny_file.read_bytes())
            )
            return {
                route: workspace.folder / "model.tflite" for route in routes
            }

        monkeypatch.setattr(_candidates, "convert", convert)

    return replace


def tiny_with(change=lambda kernel: kernel, seed=1):
    """The model of `tiny_file`, with another kernel."""
    keras.utils.set_random_seed(seed)
    model = tiny()
    (kernel, _) = model.trainable_weights
    kernel.assign(change(np.array(kernel)))
    return model


@pytest.mark.parametrize(
    ("model", "damage", "message"),
    [
        (
            lambda: tiny_with(seed=2),
            bytes,
            r"must agree with Keras to 1e-05.*difference \d",
        ),
        (mlp, bytes, r"input x .*\[1, 32\].*\[1, 4\]"),
        (tiny, lambda content: content[: len(content) // 2], "Received: "),
        (tiny, lambda _: b"no flatbuffer" * 9, "Received: "),
    ],
)
def test_a_file_of_another_model_or_none(
    convert_to, target, model, damage, message
):
    convert_to(damage)
    with pytest.raises(ExportVerificationError, match=message):
        export_litert(model(), target)


def test_tolerance_is_what_decides(convert_to, tmp_path):
    convert_to()
    model = tiny_with(lambda kernel: kernel + 1e-3)
    with pytest.raises(ExportVerificationError):
        export_litert(model, tmp_path / "m.tflite", tolerance=1e-4)
    report = export_litert(model, tmp_path / "m.tflite", tolerance=1e-2)
    assert 1e-4 < report.error < report.tolerance == 1e-2


def test_lost_zeros(convert_to, target):
    """The outputs cannot show that a zero became a tiny value; the count does."""
    convert_to()
    model = tiny_with(lambda kernel: kernel * (np.arange(12).reshape(4, 3) > 0))
    with pytest.raises(
        ExportVerificationError, match=r"keep every zero.*1 zeros of 12"
    ):
        export_litert(model, target, tolerance=10.0)


@pytest.fixture
def worker_that(monkeypatch, tmp_path_factory):
    """A function that puts a script in place of the workers'."""

    def replace(script):
        path = tmp_path_factory.mktemp("script") / "worker.py"
        path.write_text(script)
        monkeypatch.setattr(Worker, "script", path)

    return replace


def test_crash_of_the_interpreter_names_the_signal(
    convert_to, target, worker_that
):
    worker_that(DEATH)
    convert_to()
    with pytest.raises(ExportVerificationError, match=signal.SIGSEGV.name):
        export_litert(tiny(), target)


@pytest.mark.parametrize(
    ("script", "seconds", "message"),
    [
        (DEATH, 600, "SIGSEGV"),
        ("import time; time.sleep(60)", 0.3, r"within 0\.3 seconds"),
    ],
)
def test_converter_that_crashes_or_hangs(
    target, worker_that, script, seconds, message
):
    worker_that(script)
    with pytest.raises(ExportConversionError, match=message):
        export_litert(tiny(), target, timeout=seconds)


def test_operation_that_litert_lacks_is_named(target):
    model = keras.Sequential(
        [keras.Input((4, 4, 4, 1)), layers.AveragePooling3D(2)]
    )
    with pytest.raises(
        ExportConversionError, match=r"Received: operations AvgPool3D$"
    ):
        export_litert(model, target, mode="float32")


def test_class_that_no_other_process_can_import(tmp_path):
    class Halve(keras.layers.Layer):
        def call(self, x):
            return x / 2

    model = keras.Sequential(
        [keras.Input((4,), name="x"), layers.Dense(3), Halve()]
    )
    export_litert(model, tmp_path / "m.tflite")
    x = np.ones((1, 4), "float32")
    (got,) = interpret(tmp_path / "m.tflite", x=x).values()
    np.testing.assert_allclose(got, array(model(x)), atol=1e-6)


def test_a_full_disk_is_an_error_of_the_system(target):
    """No file of this process may be longer than 2 kB: neither TensorFlow's nor HDF5's error."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        with pytest.raises(
            OSError, match=r"Not enough disk|File too large"
        ) as caught:
            export_litert(tiny(), target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not isinstance(caught.value, FileNotFoundError)


def test_what_a_killed_export_left_is_removed_by_the_next(tmp_path, tiny_file):
    code = """if True:
        import pathlib, runpy, sys, os, signal
        staging = runpy.run_path(sys.argv[2])['staging']
        with staging(pathlib.Path(sys.argv[1]), 'model.tflite') as folder:
            os.kill(os.getpid(), signal.SIGKILL)
    """
    command = [sys.executable, "-c", code, str(tmp_path), str(_files.__file__)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    [left] = tmp_path.iterdir()
    foreign = tmp_path / ".model.tflite-kso-abc"
    foreign.mkdir()
    with _files.staging(tmp_path, "model.tflite") as folder:
        assert not left.exists()
        with _files.staging(tmp_path, "model.tflite"):
            assert folder.exists()  # it is alive
    assert list(tmp_path.iterdir()) == [foreign]


@pytest.mark.parametrize(
    "place", ["caf\udcc3\udca9/m.tflite", "caf\udcc3\udca9.tflite"]
)
def test_names_that_the_locale_cannot_decode(tmp_path, place):
    """As "café" is under LC_ALL=C: the remedy is in the message, and nothing is left there."""
    path = tmp_path / place
    path.parent.mkdir(exist_ok=True)
    with pytest.raises(
        ValueError, match=r"PYTHONUTF8=1.*Received: .*udcc3.*read as utf-8"
    ):
        export_litert(tiny(), path)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("place", ["m[1].tflite", "a[*?\\/m{,}.tflite"])
def test_names_that_tensorflow_takes_for_patterns(tmp_path, place):
    path = tmp_path / place
    path.parent.mkdir(exist_ok=True)
    export_litert(tiny(), path)
    assert list(path.parent.iterdir()) == [path]
    assert load_litert(path).route == "float32"


# --- where an error starts -----------------------------------------------------------------------


def test_a_refused_file_names_the_layer_and_what_to_try(tmp_path):
    rng = np.random.default_rng(0)  # channels of unlike variance
    x = (rng.normal(size=(64, 64, 16)) * np.logspace(-2.5, 0, 16)).astype(
        "float32"
    )
    dense = [
        layers.Conv1D(16, 1, name="first"),
        layers.LayerNormalization(axis=1, name="norm"),
        layers.Conv1D(32, 5, activation="gelu", name="conv"),
        layers.GlobalMaxPooling1D(),
        layers.Dense(8, name="head"),
    ]
    model = keras.Sequential([keras.Input((64, 16)), *dense])
    model.get_layer("first").kernel.assign(np.eye(16)[None])
    with pytest.raises(ExportVerificationError) as caught:
        export_litert(
            model, tmp_path / "m.tflite", mode="int8", representative_data=x
        )
    message = str(caught.value)
    assert re.search(
        r"starts at layer 'norm' \(LayerNormalization\): error 0\.\d+", message
    )
    for part in (
        'mode="dynamic_int8"',
        "quantize_aware(model)",
        "`exclude`",
        "statistics",
    ):
        assert part in message
    assert re.search(
        r"Received: error=.*on 16 rows \(rows held out of", message
    )
    assert not list(tmp_path.iterdir())
    path, trained = tmp_path / "m.tflite", kso.quantize_aware(model)
    assert (
        export_litert(model, path, mode="dynamic_int8", sample=x[:8]).error
        < 0.1
    )
    trained(x, training=True)
    report = exported(trained, path, sample=x)
    assert report.error < 0.01
    assert report.in_floats


def test_a_mode_leaves_out_a_wrong_file(
    convert_to, monkeypatch, tmp_path, tiny_file
):
    """`tiny_file` has other weights than this model: as if the converter had made it of them."""
    plain = _candidates.convert

    def convert(task, routes, workspace):
        files = plain(task, routes, workspace)
        (wrong,) = (
            file for route, file in files.items() if route.name == "float16"
        )
        wrong.write_bytes(tiny_file.read_bytes()[:-8])
        return files

    monkeypatch.setattr(_candidates, "convert", convert)
    model, path = tiny_with(seed=2), tmp_path / "m.tflite"
    report = export_litert(model, path, mode="fast")
    assert report.route != "float16"
    (reason,) = (one.reason for one in report.routes if one.route == "float16")
    assert reason.startswith("The ")
    convert_to()
    with pytest.raises(
        ExportVerificationError, match=r"to 0\.005.*Try mode=None"
    ):
        export_litert(model, path, mode="float16")
    with pytest.raises(
        ExportVerificationError, match=r"Try mode=\"float16\"\. Received: error"
    ):
        export_litert(model, path, mode="float16+sp")


# --- worker processes ----------------------------------------------------------------------------


def ended(number):
    """Whether a process has ended, within ten seconds; a zombie has."""
    command = ["ps", "-o", "stat=", "-p", str(number)]
    for _ in range(200):
        state = subprocess.run(
            command, capture_output=True, check=False
        ).stdout.strip()
        if not state or state.startswith(b"Z"):
            return True
        time.sleep(0.05)
    return False


def test_one_process_does_several_jobs_and_survives_an_exception(
    tiny_file, monkeypatch, tmp_path
):
    job = {"file": str(tiny_file)}
    with Worker() as worker:
        record = worker.run("inspect", 60, **job)
        assert record["input_names"] == ["x"]
        first = worker._process.pid
        with pytest.raises(
            JobError, match=r"^FileNotFoundError: .*none\.tflite"
        ):
            worker.run("inspect", 60, file="none.tflite")
        assert worker.run("inspect", 60, **job) == record
        assert worker._process.pid == first
        # A class whose module has become importable here must be so there.
        monkeypatch.syspath_prepend(tmp_path)
        worker.run("inspect", 60, **job)
        assert worker._process.pid != first
        assert ended(first)
        first = worker._process.pid
    assert ended(first)


@pytest.mark.parametrize(
    ("script", "seconds", "message"),
    [
        ("input(); " + DEATH, 60, "signal SIGSEGV"),
        (
            "print('noise'); raise ValueError('no such thing')",
            60,
            r"^ValueError: no such thing$",
        ),
        ("import time; time.sleep(60)", 0.2, r"within 0\.2 seconds"),
    ],
)
def test_a_job_after_one_that_failed_is_done_by_a_new_process(
    tiny_file, worker_that, monkeypatch, script, seconds, message
):
    job = {"file": str(tiny_file)}
    with Worker() as worker:
        worker_that(script)
        with pytest.raises(JobError, match=message):
            worker.run("inspect", seconds, **job)
        monkeypatch.undo()
        assert worker.run("inspect", 60, **job)["input_names"] == ["x"]


# Answers with the arguments of each job, without NumPy, which takes its time.
ECHO = """if True:
    import json, sys, time
    for line in sys.stdin:
        job = json.loads(line)
        time.sleep(job["arguments"].get("seconds", 0))
        answer = {"number": job["number"], "answer": job["arguments"]}
        print("\\x1e" + json.dumps(answer), flush=True)
"""


@pytest.fixture
def echo(worker_that):
    worker_that(ECHO)
    with Worker() as worker:
        yield worker


@pytest.mark.parametrize(
    ("timeout", "arguments"),
    [
        ("60", {}),
        (None, {}),
        (60, {"x": np.float32(1)}),
        (60, {"x": b"bytes"}),
        (60, {"x": {1, 2}}),
    ],
)
def test_a_wrong_argument_does_not_shift_the_answers(echo, timeout, arguments):
    assert echo.run("any", 60, x=1) == {"x": 1}
    with pytest.raises(TypeError):
        echo.run("any", timeout, **arguments)
    for k in range(3):
        assert echo.run("any", 60, x=k) == {"x": k}


def test_an_answer_is_that_of_its_job(worker_that):
    """A process that answers twice, or another job, answers nothing."""
    first = 'print("\\x1e" + json.dumps({"number": 10**6, "answer": "another"}), flush=True)'
    worker_that(ECHO.replace("time.sleep", f"{first}; time.sleep"))
    with Worker() as worker:
        for k in range(3):
            assert worker.run("any", 60, x=k) == {"x": k}


def interrupted_at(line_number, work):
    """Runs some work with Ctrl-C at the n-th line of `_process.py`; says if there is one."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        # Python itself keeps signals from coming between a lock and its `with`; a trace does not.
        if frame.f_code.co_name in ("run", "close"):
            return None
        if frame.f_code.co_filename != inspect.getfile(Worker):
            return None
        if event == "line":
            count += 1
            if count == line_number:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return count >= line_number


def test_the_worker_survives_an_interrupt_at_any_line(echo):
    """Every seventh line of a job, from its start to its answer; then those of the end."""
    number = 1
    while interrupted_at(number, lambda: echo.run("any", 60, x="interrupted")):
        assert echo.run("any", 60, x=number) == {"x": number}
        number += 7
    assert number > 20
    number = 1
    while interrupted_at(number, echo.close):
        assert echo.run("any", 60, x=number) == {"x": number}
        number += 3


def test_a_process_with_an_open_job_is_not_used_again(echo, monkeypatch):
    """Ctrl-C came while it worked, and again before it was ended."""
    echo.run("any", 60)
    first = echo._process.pid

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(echo, "_answer_to", interrupted)
        patch.setattr(echo, "_end", interrupted)
        with pytest.raises(KeyboardInterrupt):
            echo.run("any", 60, seconds=2.0)
    assert echo.run("any", 60, x=1) == {"x": 1}
    assert echo._process.pid != first


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*fork:RuntimeWarning")
def test_a_child_of_fork_has_its_own_process(echo, tmp_path):
    """While a thread of the parent waits for an answer, and holds the lock."""
    echo.run("any", 60)
    first = echo._process.pid
    thread = threading.Thread(
        target=echo.run, args=("any", 60), kwargs={"seconds": 1.0}
    )
    thread.start()
    time.sleep(0.2)
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # it would wait for ever for a lock of its parent
        try:
            answers = [echo.run("any", 60, x=k)["x"] for k in range(3)]
            (tmp_path / "child").write_text(
                f"{answers} {echo._process.pid != first}"
            )
            echo.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    thread.join()
    assert (tmp_path / "child").read_text() == "[0, 1, 2] True"
    assert echo.run("any", 60, x=4) == {"x": 4}
    assert echo._process.pid == first


@pytest.mark.skipif(
    not hasattr(signal, "pthread_sigmask"), reason="there are no masks"
)
def test_blocked_signals_are_not_those_of_the_worker(worker_that):
    """The process is started by whatever thread has the first job."""
    worker_that(f"""if True:
        import runpy
        worker = runpy.run_path({str(Worker.script)!r})
        worker["TASKS"]["any"] = lambda x: x
        worker["serve"]()
    """)
    with Worker() as worker:
        before = signal.pthread_sigmask(
            signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT]
        )
        try:
            worker.run("any", 60, x=0)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        first = worker._process.pid
        # As a terminal sends it to the parent, too.
        os.kill(first, signal.SIGINT)
        assert worker.run("any", 60, x=1) == 1
        assert worker._process.pid == first
        os.kill(first, signal.SIGTERM)
        assert worker._process.wait(60) == -signal.SIGTERM


@pytest.mark.parametrize("timeout", ["60", None, float("nan"), float("inf")])
def test_a_timeout_is_a_number(timeout, target):
    with pytest.raises(ValueError, match=r"`timeout` must be a finite number"):
        export_litert(tiny(), target, timeout=timeout)


@pytest.mark.parametrize(
    "calls",
    [
        pytest.param(0, id="idle", marks=pytest.mark.slow),
        pytest.param(10**9, id="at work"),
    ],
)
def test_worker_ends_when_its_parent_is_killed(tiny_file, calls):
    code = f"""if True:
        import runpy, threading, time
        worker = runpy.run_path({inspect.getfile(Worker)!r})["Worker"]()
        job = dict(file={str(tiny_file)!r}, threads=1)
        worker.run("bench", 60, **job, calls=0)
        print(worker._process.pid, flush=True)
        worker.run("bench", 60, **job, calls={calls})
        time.sleep(60)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    )
    number = int(parent.stdout.readline())
    time.sleep(0.2)
    parent.kill()
    parent.communicate()
    assert ended(number)


def test_crash_on_one_route_leaves_the_others(tiny_file, worker_that, tmp_path):
    script = f"""if True:
        import os, runpy, shutil, signal
        worker = runpy.run_path({str(Worker.script)!r})

        def convert(storage, result, **_):
            if storage == "float16":
                os.kill(os.getpid(), signal.SIGSEGV)
            shutil.copy({str(tiny_file)!r}, result)

        worker["TASKS"] |= dict(convert=convert)
        worker["serve"]()
    """
    worker_that(script)
    report = export_litert(tiny_with(), tmp_path / "m.tflite", mode="small")
    outcomes = {one.route: one for one in report.routes}
    assert signal.SIGSEGV.name in outcomes["float16"].reason
    assert report.reason is None
    assert [path.name for path in tmp_path.iterdir()] == ["m.tflite"]
