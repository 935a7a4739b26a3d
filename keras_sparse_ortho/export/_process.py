"""Worker processes for the converters and the interpreter, all of which can crash."""

import atexit
import collections
import contextlib
import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_SCRIPT = Path(__file__).with_name("_worker.py")
_MARK = "\x1e"  # before each answer, the separator of JSON texts of RFC 7464


class JobError(RuntimeError):
    """A job of a worker process failed, or the process died of it; the message says how."""


class Worker(contextlib.AbstractContextManager["Worker"]):
    """A Python process for the tasks of `_worker.py`; threads wait for each other.

    It starts with its first job, again after one that killed it, and ends with the `with` block or
    this process, even if that is killed.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._settings: tuple[str, ...] = ()
        self._lock = threading.Lock()
        self._stderr: collections.deque[str] = collections.deque(maxlen=5)
        self._reader = threading.Thread()

    def run(self, task: str, timeout: float, **job: Any) -> Any:
        """The result of a task; JobError if it raised, died or took too long."""
        with self._lock:
            return self._run(task, timeout, job)

    def _run(self, task: str, timeout: float, job: dict[str, Any]) -> Any:
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # the process has died; see below
            process.stdin.write(json.dumps(job | {"task": task}) + "\n")
            process.stdin.flush()
        end, timer = time.monotonic() + timeout, threading.Timer(timeout, process.kill)
        timer.start()
        try:
            # Other lines were printed while Python started, by a `sitecustomize`.
            line = next((line for line in process.stdout if line.startswith(_MARK)), "")
        except BaseException:  # Ctrl-C: a late answer must not become the next job's
            self.close()
            raise
        finally:
            timer.cancel()
        if time.monotonic() >= end:
            self.close()
            raise JobError(f"it did not end within {timeout:g} seconds")
        if not line.endswith("\n"):
            raise JobError(self._cause_of_death(process.wait()))
        answer = json.loads(line.removeprefix(_MARK))
        if "error" in answer:
            raise JobError(answer["error"])
        return answer["answer"]

    def close(self, *_: object) -> None:
        """Ends the process; the next job starts a new one."""
        if self._process is not None:
            self._process.kill()
            self._reader.join()
            self._process.communicate()
            self._process = None

    __exit__ = close

    def _running(self) -> "subprocess.Popen[str]":
        """The process if it is alive and has our module path and backend, otherwise a new one."""
        environment, process = _environment(), self._process
        settings = environment["PYTHONPATH"], environment["KERAS_BACKEND"], str(_SCRIPT)
        if process is not None and process.poll() is None and settings == self._settings:
            return process
        self.close()
        self._settings = settings
        self._stderr.clear()
        self._process = process = subprocess.Popen(
            [sys.executable, "-P", str(_SCRIPT)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        # A full pipe would block the process, so a thread reads all the time.
        self._reader = threading.Thread(
            target=self._stderr.extend, args=(process.stderr,), daemon=True
        )
        self._reader.start()
        return process

    def _cause_of_death(self, status: int) -> str:
        self._reader.join()
        if status < 0:
            names = {one.value: one.name for one in signal.Signals}
            return f"it was killed by signal {names.get(-status, -status)}"
        lines = [line.strip() for line in self._stderr if line.strip()]
        return lines[-1] if status > 0 and lines else f"exit status {status}"


@functools.cache
def shared_worker() -> Worker:
    """The worker of all exports, which keeps what it has loaded."""
    worker = Worker()
    atexit.register(worker.close)
    return worker


def require(names: Sequence[str], use: str, install: str) -> None:
    """Raises ImportError that says what to install, if a package is missing; imports none."""
    for name in names:
        if is_missing(name):
            raise ImportError(
                f"{use}. Install with: pip install {install}. Received: no module named {name!r}",
                name=name,
            )


def is_missing(name: str) -> bool:
    return importlib.util.find_spec(name) is None


def converter_backend() -> str:
    """The backend on which models are converted: TensorFlow, or JAX where there is none."""
    return "jax" if is_missing("tensorflow") else "tensorflow"


def _environment() -> dict[str, str]:
    """The environment of a worker: on CPU, with the backend of the converter and our `sys.path`."""
    # Last: its modules hide no package.
    here = [os.getcwd()] if "" in sys.path else []
    return dict(
        os.environ,
        KERAS_BACKEND=converter_backend(),
        JAX_PLATFORMS="cpu",
        # A visible GPU would make Keras trace its recurrent layers to cuDNN, which LiteRT lacks.
        CUDA_VISIBLE_DEVICES="-1",
        TF_CPP_MIN_LOG_LEVEL="3",
        PYTHONPATH=os.pathsep.join([path for path in sys.path if path] + here),
    )
