"""Times LiteRT files side by side, in a process of its own.

Run by its path, as `_run_worker.py` is, on files that were verified before.
"""

import json
import sys
from pathlib import Path


def main(job_file: str) -> None:
    """Call every file in turn, round by round, so that noise meets all of them alike."""
    import statistics
    import time

    import numpy as np
    from ai_edge_litert.interpreter import Interpreter, OpResolverType

    job = json.loads(Path(job_file).read_text())
    calls = []
    for file in job["files"]:
        resolver = (
            OpResolverType.AUTO
            if file["xnnpack"]
            else OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
        )
        interpreter = Interpreter(
            model_path=file["path"],
            num_threads=file["threads"],
            experimental_op_resolver_type=resolver,
        )
        interpreter.allocate_tensors()
        with np.load(file["inputs"]) as data:
            inputs = [data[f"arr_{i}"] for i in range(len(file["input_names"]))]
        found = interpreter.get_signature_runner().get_input_details()
        for name, array in zip(file["input_names"], inputs, strict=True):
            interpreter.set_tensor(found[name]["index"], array)
        calls.append(interpreter)
    for interpreter in calls:
        for _ in range(3):
            interpreter.invoke()
    times: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + job["seconds"]
    for k in range(job["rounds"]):
        if k >= 3 and time.perf_counter() > end:
            break
        for taken, interpreter in zip(times, calls, strict=True):
            interpreter.invoke()  # the last file's weights are in the cache: warm up again
            start = time.perf_counter()
            interpreter.invoke()
            taken.append(time.perf_counter() - start)
    Path(job["result"]).write_text(json.dumps([1e3 * statistics.median(taken) for taken in times]))


if __name__ == "__main__":
    sys.path.pop(0)  # private names of the package, see `_run_worker.py`
    main(sys.argv[1])
