"""Start a worker process and say how it ended."""

import dataclasses
import os
import signal
import subprocess
import sys


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a worker ended: `crash` is None if it returned 0, otherwise why, in words."""

    crash: str | None
    stderr: str


def run_python(arguments: list[str], timeout: float) -> Ending:
    """Run this Python with `arguments`, on CPU, with the TensorFlow backend and our `sys.path`.

    Args:
        arguments: What follows `python` on the command line.
        timeout: Seconds until the worker is killed.
    """
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            env=worker_environment(),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Ending(f"it did not end within {timeout:g} seconds", "")
    if done.returncode == 0:
        return Ending(None, done.stderr)
    if done.returncode < 0:
        return Ending(ending_of(done.returncode), done.stderr)
    lines = done.stderr.strip().splitlines()
    return Ending(lines[-1] if lines else ending_of(done.returncode), done.stderr)


def worker_environment() -> dict[str, str]:
    """The environment of a worker: on CPU, with the TensorFlow backend and our `sys.path`."""
    return dict(
        os.environ,
        KERAS_BACKEND="tensorflow",
        # A visible GPU would make Keras trace its recurrent layers to cuDNN, which LiteRT lacks.
        CUDA_VISIBLE_DEVICES="-1",
        TF_CPP_MIN_LOG_LEVEL="3",
        PYTHONPATH=os.pathsep.join(path or os.getcwd() for path in sys.path),
    )


def ending_of(status: int) -> str:
    """An exit status in words."""
    if status < 0:
        return f"it was ended by {_signal_name(-status)}"
    return f"exit status {status}"


def _signal_name(number: int) -> str:
    try:
        return f"signal {signal.Signals(number).name}"
    except ValueError:
        return f"signal {number}"
