"""Latency of LiteRT files, several of them measured in interleaved rounds."""

import contextlib
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keras_sparse_ortho.export._compare import ExportVerificationError
from keras_sparse_ortho.export._load_litert import read_packed
from keras_sparse_ortho.export._process import JobError, Worker

_CALLS = 5  # of one file before the next one's turn


@dataclasses.dataclass(frozen=True)
class BenchmarkCase:
    """A verified file to time, and how.

    Attributes:
        path: A `.tflite` file, or a compressed one: `.tflite.zst` or `.tflite.gz`.
        inputs: One full batch by input name.
        xnnpack: Whether the interpreter uses XNNPACK, its default.
        threads: Threads of the interpreter.
    """

    path: Path
    inputs: dict[str, np.ndarray]
    xnnpack: bool = True
    threads: int = 1


def latencies(
    cases: Sequence[BenchmarkCase],
    rounds: int = 60,
    seconds: float = 10.0,
    timeout: float = 600.0,
) -> list[float]:
    """Median milliseconds of one call of each file, measured in turn, each in its own process.

    Args:
        cases: What to time; if one file crashes, there is no result for any.
        rounds: The largest number of rounds, of five calls of each file.
        seconds: No new round starts after this time (except for the first three).
        timeout: Seconds until the measurement is aborted.

    Raises:
        ExportVerificationError: if a process dies, or the timeout is over.
    """
    last = time.monotonic() + timeout
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        jobs: list[dict[str, Any]] = []
        for k, case in enumerate(cases):
            inputs, file = folder / f"{k}.npz", case.path
            np.savez(inputs, *case.inputs.values())
            if file.suffix in (".gz", ".zst"):
                file = folder / f"{k}.tflite"
                file.write_bytes(read_packed(case.path))
            job = {"file": str(file.absolute()), "xnnpack": case.xnnpack, "threads": case.threads}
            jobs.append({**job, "inputs": str(inputs), "input_names": list(case.inputs)})
        workers = [stack.enter_context(Worker()) for _ in cases]

        def measure(k: int) -> list[float]:
            try:
                return list(workers[k].result(max(last - time.monotonic(), 0.0)))
            except JobError as error:
                raise ExportVerificationError(
                    "Every file must run while it is timed. Received: "
                    f"{cases[k].path.name}, {error}"
                ) from None

        for worker, job in zip(workers, jobs, strict=True):
            worker.submit("bench", **job, calls=0)  # all load their files at the same time
        for k in range(len(cases)):
            measure(k)
        taken: list[list[float]] = [[] for _ in cases]
        end = time.monotonic() + seconds
        for k in range(rounds):
            if k >= 3 and time.monotonic() > end:
                break
            for position, job in enumerate(jobs):
                workers[position].submit("bench", **job, calls=_CALLS)
                taken[position] += measure(position)
    return [statistics.median(times) for times in taken]
