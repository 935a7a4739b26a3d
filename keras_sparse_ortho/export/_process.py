"""Worker processes for the converters and the interpreter, all of which can crash."""

import atexit
import contextlib
import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from keras_sparse_ortho._text import printable, printable_lines

_MARK = b"\x1e"  # before each answer, the separator of JSON texts of RFC 7464
_PIECE = 1 << 16  # bytes that are read at once
_LAST_WORDS = 4096  # bytes of standard error that are kept
_MOMENT = 5.0  # seconds for the last words of a process that has ended


class JobError(RuntimeError):
    """A job of a worker process failed, or the process died of it; the message says how."""

    def __init__(self, message: str) -> None:
        super().__init__(printable_lines(message))


class Worker(contextlib.AbstractContextManager["Worker"]):
    """A Python process for the tasks of `_worker.py`; threads wait for each other.

    It starts with its first job, again after one that killed it, and ends with the `with` block or
    this process, even if that is killed. Jobs have numbers, and an answer has that of its job. A
    process whose last job was not answered, as Ctrl-C came or an argument was wrong, is not used
    again. A child of `fork` leaves the process to its parent, and starts one of its own.
    """

    script = Path(__file__).with_name("_worker.py")  # that a process runs

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: Iterator[bytes] = iter(())
        self._settings: tuple[str, ...] = ()
        self._numbers = itertools.count(1)
        self._has_answered = False  # whether the process waits for its next job
        self._lock = threading.Lock()
        self._last_words = _LastWords()
        _workers.add(self)

    def run(self, task: str, timeout: float, **job: Any) -> Any:
        """Returns the result of a task; raises JobError if it raised, died or took too long.

        Args:
            task: str. A function of `_worker.py`.
            timeout: float. Seconds until the process is killed.
            job: Arguments of the task, values that JSON has.
        """
        with self._lock:
            try:
                return self._run(task, timeout, job)
            finally:
                # It died, or Ctrl-C or a wrong argument came before its answer.
                if not self._has_answered:
                    self._end()

    def _run(self, task: str, timeout: float, job: dict[str, Any]) -> Any:
        """Sends a job to the process, and waits for its answer."""
        number = next(self._numbers)
        text = json.dumps({"number": number, "task": task, "arguments": job})
        end = time.monotonic() + timeout
        process = self._running()
        timer = threading.Timer(
            min(timeout, threading.TIMEOUT_MAX), process.kill
        )
        timer.daemon = True
        self._has_answered = False
        try:
            timer.start()
            # The process has died; see below.
            with contextlib.suppress(BrokenPipeError):
                _write(process, f"{text}\n".encode())
            answer = self._answer_to(number)
        finally:
            timer.cancel()
        if time.monotonic() >= end:
            self._end()
            raise JobError(f"it did not end within {timeout:g} seconds")
        if answer is None:
            raise JobError(self._cause_of_death(process.wait()))
        self._has_answered = True
        if "error" in answer:
            raise JobError(answer["error"])
        return answer["answer"]

    def _answer_to(self, number: int) -> dict[str, Any] | None:
        """The answer with this number; None if the process has ended without it."""
        for line in self._answers:
            # Other lines were printed while Python started, by a `sitecustomize`.
            if not line.startswith(_MARK):
                continue
            answer: dict[str, Any] = json.loads(line.removeprefix(_MARK))
            if answer["number"] == number:
                return answer
        return None

    def close(self, *_: object) -> None:
        """Ends the process once it has answered; the next job starts a new one."""
        with self._lock:
            self._end()

    __exit__ = close

    def _end(self) -> None:
        """Kills the process. If this is interrupted, the next call goes on with it."""
        self._has_answered = False
        process = self._process
        if process is None:
            return
        process.kill()
        process.wait()
        self._last_words.wait()
        _close(process.stdin, process.stdout)
        self._process = None

    def _running(self) -> "subprocess.Popen[bytes]":
        """The process if it can take a job with our module path and backend, or a new one."""
        environment, process = _environment(), self._process
        settings = (
            environment["PYTHONPATH"],
            environment["KERAS_BACKEND"],
            str(self.script),
        )
        is_fit = self._has_answered and settings == self._settings
        if process is not None and is_fit and process.poll() is None:
            return process
        self._end()
        self._settings = settings
        self._process = process = subprocess.Popen(
            [sys.executable, "-P", str(self.script)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,  # a child of `fork` closes its copies, and a buffer would be written then
        )
        self._answers = _lines_of(process.stdout)
        self._last_words = _LastWords(process.stderr)
        return process

    def _cause_of_death(self, status: int) -> str:
        if status < 0:
            names = {
                known_signal.value: known_signal.name
                for known_signal in signal.Signals
            }
            return f"it was killed by signal {names.get(-status, -status)}"
        lines = self._last_words.wait()
        return lines[-1] if status > 0 and lines else f"exit status {status}"

    def forget(self) -> None:
        """Leaves the process to the parent of this one, which is a child by `fork`."""
        process, self._process = self._process, None
        self._has_answered = False
        self._lock = threading.Lock()  # a thread of the parent may have held it
        self._last_words = _LastWords()
        if process is not None:
            process.returncode = (
                0  # not a child of this process: nothing to wait for
            )
            _close(process.stdin, process.stdout, process.stderr)


class _LastWords:
    """The end of a process' standard error, read all the time: a full pipe would block it."""

    def __init__(self, stream: Any = None) -> None:
        self._text = b""
        self._thread = threading.Thread(
            target=self._read, args=(stream,), daemon=True
        )
        if stream is not None:
            self._thread.start()

    def _read(self, stream: Any) -> None:
        with stream:
            while piece := stream.read(_PIECE):
                self._text = (self._text + piece)[-_LAST_WORDS:]

    def wait(self) -> list[str]:
        """The lines at the end; processes that this one left behind may keep the pipe open."""
        if self._thread.is_alive():
            self._thread.join(_MOMENT)
        lines = self._text.decode(errors="replace").splitlines()
        return [printable(line.strip()) for line in lines if line.strip()]


_workers: "weakref.WeakSet[Worker]" = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    for worker in list(_workers):
        worker.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_all_to_parent)

_shared = Worker()
# A thread that waits for an answer may hold the lock.
atexit.register(_shared._end)


def shared_worker() -> Worker:
    """The worker of all exports, which keeps what it has loaded."""
    return _shared


def _write(process: "subprocess.Popen[bytes]", text: bytes) -> None:
    """Writes all of it: a signal may stop a write in the middle."""
    assert process.stdin is not None
    unwritten = memoryview(text)
    while unwritten:
        unwritten = unwritten[process.stdin.write(unwritten) :]


def _lines_of(stream: Any) -> Iterator[bytes]:
    """Whole lines of a pipe, as they come."""
    unfinished = b""
    while piece := stream.read(_PIECE):
        *lines, unfinished = (unfinished + piece).split(b"\n")
        yield from lines


def _close(*streams: Any) -> None:
    for stream in streams:
        with contextlib.suppress(OSError):
            stream.close()


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
    working_folder = []
    # The current folder was removed.
    with contextlib.suppress(FileNotFoundError):
        # Last: its modules hide no package.
        working_folder = [os.getcwd()] if "" in sys.path else []
    return dict(
        os.environ,
        KERAS_BACKEND=converter_backend(),
        JAX_PLATFORMS="cpu",
        # A visible GPU would make Keras trace its recurrent layers to cuDNN, which LiteRT lacks.
        CUDA_VISIBLE_DEVICES="-1",
        TF_CPP_MIN_LOG_LEVEL="3",
        PYTHONPATH=os.pathsep.join(
            [path for path in sys.path if path] + working_folder
        ),
    )
