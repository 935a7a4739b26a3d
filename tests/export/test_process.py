"""Worker processes: several jobs in one, crashes, and how they end."""

import signal
import subprocess
import sys
import textwrap
import time

import keras
import numpy as np
import pytest

from keras_sparse_ortho.export import RouteOutcome, _process, export_routes
from keras_sparse_ortho.export._process import JobError, Worker
from tests.export.models import tiny

pytestmark = pytest.mark.tensorflow_only


@pytest.fixture
def file(all_routes):
    return str(all_routes[3] / "float32.tflite")


def pid(worker):
    return worker._process.pid


def ended(number):
    """Whether a process has ended, within ten seconds; a zombie has."""
    for _ in range(200):
        state = subprocess.run(
            ["ps", "-o", "stat=", "-p", str(number)], capture_output=True, text=True, check=False
        ).stdout.strip()
        if not state or state.startswith("Z"):
            return True
        time.sleep(0.05)
    return False


def test_one_process_does_several_jobs_and_survives_an_exception(file):
    with Worker() as worker:
        record = worker.run("inspect", 60, file=file, xnnpack=True)
        assert (record["inputs"][0]["name"], record["outputs"][0]["name"]) == ("x", "head")
        first = pid(worker)
        with pytest.raises(JobError, match=r"^FileNotFoundError: .*none\.tflite"):
            worker.run("inspect", 60, file="none.tflite", xnnpack=True)
        assert worker.run("inspect", 60, file=file, xnnpack=False)["xnnpack"] is False
        assert pid(worker) == first
    assert ended(first)


def test_job_after_a_crash_is_done_by_a_new_process(file, monkeypatch, tmp_path):
    dies = tmp_path / "dies.py"
    dies.write_text("import os, signal; input(); os.kill(os.getpid(), signal.SIGSEGV)")
    with Worker() as worker:
        with monkeypatch.context() as patch:
            patch.setattr(_process, "_SCRIPT", dies)
            with pytest.raises(JobError, match=signal.SIGSEGV.name):
                worker.run("inspect", 60, file=file, xnnpack=True)
        assert worker.run("inspect", 60, file=file, xnnpack=True)["xnnpack"]


def test_last_line_of_a_process_that_could_not_start_is_told(monkeypatch, tmp_path):
    script = tmp_path / "raises.py"
    script.write_text("print('noise'); raise ValueError('no such thing')")
    monkeypatch.setattr(_process, "_SCRIPT", script)
    with Worker() as worker, pytest.raises(JobError, match=r"^ValueError: no such thing$"):
        worker.run("inspect", 60, file="m.tflite", xnnpack=True)


def test_job_after_one_that_took_too_long_gets_its_own_answer(file, monkeypatch, tmp_path):
    sleeps = tmp_path / "sleeps.py"
    sleeps.write_text("import time; time.sleep(60)")
    with Worker() as worker:
        with monkeypatch.context() as patch:
            patch.setattr(_process, "_SCRIPT", sleeps)
            with pytest.raises(JobError, match=r"within 0\.2 seconds"):
                worker.run("inspect", 0.2, file=file, xnnpack=True)
        assert worker.run("inspect", 60, file=file, xnnpack=True)["xnnpack"]


def test_changed_module_path_takes_a_new_process(file, monkeypatch, tmp_path):
    """A class whose module has become importable here must be so there."""
    with Worker() as worker:
        worker.run("inspect", 60, file=file, xnnpack=True)
        first = pid(worker)
        monkeypatch.syspath_prepend(tmp_path)
        worker.run("inspect", 60, file=file, xnnpack=True)
        assert pid(worker) != first
    assert ended(first)


@pytest.mark.parametrize("calls", [0, 10**9], ids=["idle", "at work"])
def test_worker_ends_when_its_parent_is_killed(file, calls, tmp_path):
    np.savez(tmp_path / "x.npz", np.ones((1, 64), "float32"))
    code = f"""
        import runpy, time
        worker = runpy.run_path({_process.__file__!r})["Worker"]()
        job = dict(file={file!r}, xnnpack=True, threads=1, input_names=["x"])
        job |= dict(inputs={str(tmp_path / "x.npz")!r})
        worker.run("bench", 60, **job, calls=0)
        print(worker._process.pid, flush=True)
        if {calls}:
            worker.submit("bench", **job, calls={calls})
        time.sleep(60)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        text=True,
    )
    number = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    assert ended(number)


def test_crash_on_one_route_leaves_the_others(
    tiny_file, cold, monkeypatch, tmp_path, tmp_path_factory
):
    keras.utils.set_random_seed(1)
    model = tiny()
    script = tmp_path_factory.mktemp("script") / "worker.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import os, runpy, shutil, signal
            worker = runpy.run_path({str(_process._SCRIPT)!r})

            def convert(route, result, **_):
                if route == "float16":
                    os.kill(os.getpid(), signal.SIGSEGV)
                shutil.copy({str(tiny_file)!r}, result)

            worker["TASKS"] |= dict(trace=lambda **_: None, convert=convert)
            worker["serve"]()
            """
        )
    )
    monkeypatch.setattr(_process, "_SCRIPT", script)
    results = export_routes(model, tmp_path, ["float32", "float16", "dynamic_int8"])
    assert isinstance(results["float16"], RouteOutcome)
    assert signal.SIGSEGV.name in results["float16"].reason
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "dynamic_int8.tflite",
        "float32.tflite",
    ]
