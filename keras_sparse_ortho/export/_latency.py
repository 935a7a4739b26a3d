"""How long one call of a file takes, measured among rivals."""

import contextlib
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from keras_sparse_ortho.export import _bench_worker
from keras_sparse_ortho.export._errors import ExportVerificationError
from keras_sparse_ortho.export._process import ending_of, worker_environment

_CALLS = 5  # of one file before the next has its turn


@dataclasses.dataclass(frozen=True)
class Rival:
    """A verified file to time.

    Attributes:
        path: Where it stands.
        inputs: One full batch by input name.
        xnnpack: Whether the interpreter uses XNNPACK, its default.
        threads: Threads of the interpreter.
    """

    path: Path
    inputs: dict[str, np.ndarray]
    xnnpack: bool = True
    threads: int = 1


def latencies(
    rivals: Sequence[Rival], rounds: int = 60, seconds: float = 10.0, timeout: float = 600.0
) -> list[float]:
    """Median milliseconds of one call of each file, each in a process of its own, in turn.

    Args:
        rivals: What to time; no file may crash, or there is no figure for any.
        rounds: At most so many rounds, of five calls of each file.
        seconds: No new round starts after this time (but for the first three).
        timeout: Seconds until all is given up.

    Raises:
        ExportVerificationError: if a process dies, or the time is up.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workers = [stack.enter_context(_Worker(r, folder, k)) for k, r in enumerate(rivals)]
        watchdog = threading.Timer(timeout, _kill_all, [workers])
        watchdog.start()
        stack.callback(watchdog.cancel)
        for worker in workers:
            worker.answer()  # it has loaded its file
        times: list[list[float]] = [[] for _ in workers]
        end = time.monotonic() + seconds
        for k in range(rounds):
            if k >= 3 and time.monotonic() > end:
                break
            for taken, worker in zip(times, workers, strict=True):
                worker.ask(_CALLS)
                taken += json.loads(worker.answer())
    return [statistics.median(taken) for taken in times]


def _kill_all(workers: "list[_Worker]") -> None:
    for worker in workers:
        worker.kill()


class _Worker:
    """A process that times one file."""

    def __init__(self, rival: Rival, folder: Path, number: int) -> None:
        self.path = rival.path
        inputs = folder / f"{number}.npz"
        np.savez(inputs, *rival.inputs.values())
        job = {
            "path": str(rival.path),
            "inputs": str(inputs),
            "input_names": list(rival.inputs),
            "xnnpack": rival.xnnpack,
            "threads": rival.threads,
        }
        job_file = folder / f"{number}.json"
        job_file.write_text(json.dumps(job))
        self.process = subprocess.Popen(
            [sys.executable, _bench_worker.__file__, str(job_file)],
            env=worker_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def __enter__(self) -> "_Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.process.communicate()

    def kill(self) -> None:
        self.process.kill()

    def ask(self, calls: int) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `answer` says why
            self.process.stdin.write(f"{calls}\n")
            self.process.stdin.flush()

    def answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise ExportVerificationError(
                "Every file must run while it is timed. Received: "
                f"{self.path.name}, {ending_of(self.process.wait())}"
            )
        return line
