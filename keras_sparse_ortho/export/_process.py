"""Worker processes: TensorFlow's converter and the interpreter can crash, and do so there."""

import collections
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_SCRIPT = Path(__file__).with_name("_worker.py")
_MARK = "\x1e"  # before each answer, the separator of JSON texts of RFC 7464


class WorkerError(RuntimeError):
    """A job failed, or the process died of it; the message says how."""


class Worker:
    """A Python process that does jobs of `_worker.py`, one after the other.

    It starts with its first job, on CPU and with the TensorFlow backend, is started anew for the
    job after one that killed it, and ends with the `with` block, or with this process, however
    that ends. Not for several threads at once.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._path = ""
        self._complaints: collections.deque[str] = collections.deque(maxlen=5)
        self._listener = threading.Thread()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, task: str, timeout: float, **job: Any) -> Any:
        """The answer to a job.

        Args:
            task: Name of a task of `_worker.py`.
            timeout: Seconds until the process is killed.
            job: The arguments of the task, such as JSON can hold.

        Raises:
            WorkerError: if the task raised, the process died, or the time is up.
        """
        self.submit(task, **job)
        return self.result(timeout)

    def submit(self, task: str, **job: Any) -> None:
        """Hand over a job; `result` is to be asked before the next one."""
        process = self._running()
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `result` says why
            process.stdin.write(json.dumps(job | {"task": task}) + "\n")
            process.stdin.flush()

    def result(self, timeout: float) -> Any:
        """The answer to the job that was submitted, as by `run`."""
        process = self._process
        assert process is not None
        assert process.stdout is not None
        late = threading.Event()

        def give_up() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(timeout, give_up)
        timer.start()
        try:
            # Whatever else stands there was printed while Python started, by a `sitecustomize`.
            line = next((line for line in process.stdout if line.startswith(_MARK)), "")
        except BaseException:  # Ctrl-C: an answer that comes later must not be the next job's
            self.close()
            raise
        finally:
            timer.cancel()
        if late.is_set():
            self.close()
            raise WorkerError(f"it did not end within {timeout:g} seconds")
        if not line.endswith("\n"):
            raise WorkerError(self._cause_of_death(process.wait()))
        answer = json.loads(line.removeprefix(_MARK))
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer["answer"]

    def close(self) -> None:
        """End the process; another job would start a new one."""
        if self._process is not None:
            self._process.kill()
            self._listener.join()
            self._process.communicate()
            self._process = None

    def _running(self) -> "subprocess.Popen[str]":
        """The process, if it is alive and finds the same modules as this one; else a new one."""
        environment = _environment()
        process, path = self._process, environment["PYTHONPATH"]
        if process is not None and process.poll() is None and self._path == path:
            return process
        self.close()
        self._path = path
        self._complaints.clear()
        self._process = process = subprocess.Popen(
            [sys.executable, "-P", str(_SCRIPT)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        # A full pipe would stop the process, so somebody has to read all the time.
        self._listener = threading.Thread(
            target=self._complaints.extend, args=(process.stderr,), daemon=True
        )
        self._listener.start()
        return process

    def _cause_of_death(self, status: int) -> str:
        self._listener.join()
        if status < 0:
            return f"it was ended by {_signal_name(-status)}"
        lines = [line.strip() for line in self._complaints if line.strip()]
        return lines[-1] if status > 0 and lines else f"exit status {status}"


_kept: Worker | None = None


@contextlib.contextmanager
def converter() -> Iterator[Worker]:
    """A worker for conversions: one that is kept, or a new one for the block."""
    if _kept is not None:
        yield _kept
        return
    with Worker() as worker:
        yield worker


@contextlib.contextmanager
def kept_converter() -> Iterator[Worker]:
    """Within the block all exports convert in one process, and TensorFlow is loaded once."""
    global _kept
    outer = _kept
    with Worker() as worker:
        _kept = worker
        try:
            yield worker
        finally:
            _kept = outer


def _environment() -> dict[str, str]:
    """The environment of a worker: on CPU, with the TensorFlow backend and our `sys.path`."""
    # The current directory comes last: classes in it are found, but nothing in it hides a package.
    here = [os.getcwd()] if "" in sys.path else []
    return dict(
        os.environ,
        KERAS_BACKEND="tensorflow",
        # A visible GPU would make Keras trace its recurrent layers to cuDNN, which LiteRT lacks.
        CUDA_VISIBLE_DEVICES="-1",
        TF_CPP_MIN_LOG_LEVEL="3",
        PYTHONPATH=os.pathsep.join([path for path in sys.path if path] + here),
    )


def _signal_name(number: int) -> str:
    try:
        return f"signal {signal.Signals(number).name}"
    except ValueError:
        return f"signal {number}"
