"""How long one call of a file takes, measured among rivals."""

import dataclasses
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from keras_sparse_ortho.export import _bench_worker
from keras_sparse_ortho.export._errors import ExportVerificationError
from keras_sparse_ortho.export._process import run_python


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
    rivals: Sequence[Rival], rounds: int = 200, seconds: float = 10.0, timeout: float = 600.0
) -> list[float]:
    """Median milliseconds of one call of each file, in interleaved rounds of one subprocess.

    Args:
        rivals: What to time; no file may crash, or there is no figure for any.
        rounds: At most so many calls of each, after a warm-up.
        seconds: No new round starts after this time.
        timeout: Seconds until the process is given up.

    Raises:
        ExportVerificationError: if the process dies.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for k, rival in enumerate(rivals):
            inputs = Path(folder) / f"{k}.npz"
            np.savez(inputs, *rival.inputs.values())
            files.append(
                {
                    "path": str(rival.path),
                    "inputs": str(inputs),
                    "input_names": list(rival.inputs),
                    "xnnpack": rival.xnnpack,
                    "threads": rival.threads,
                }
            )
        result = Path(folder) / "result.json"
        job = {"files": files, "rounds": rounds, "seconds": seconds, "result": str(result)}
        job_file = Path(folder) / "job.json"
        job_file.write_text(json.dumps(job))
        ending = run_python([_bench_worker.__file__, str(job_file)], timeout)
        if ending.crash is not None:
            raise ExportVerificationError(
                f"Every file must run while it is timed. Received: {ending.crash}"
            )
        return [float(value) for value in json.loads(result.read_text())]
