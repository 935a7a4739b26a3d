"""Times one LiteRT file in a process of its own, a few calls whenever it is asked.

Run by its path, as `_run_worker.py` is, on a file that was verified before. A process for each
file, because they are not independent: after XNNPACK has run int8 layers in a process, LiteRT's
built-in kernels are up to three times slower there (measured on an AVX-512 machine: 0.048 ms
alone, 0.148 ms in turn with a file that XNNPACK runs).
"""

import json
import sys
from pathlib import Path


def main(job_file: str) -> None:
    """Load the file and say so; then, for each number that comes in, time as many calls."""
    import time

    import numpy as np
    from ai_edge_litert.interpreter import Interpreter, OpResolverType

    job = json.loads(Path(job_file).read_text())
    resolver = (
        OpResolverType.AUTO if job["xnnpack"] else OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    )
    interpreter = Interpreter(
        model_path=job["path"], num_threads=job["threads"], experimental_op_resolver_type=resolver
    )
    interpreter.allocate_tensors()
    found = interpreter.get_signature_runner().get_input_details()
    with np.load(job["inputs"]) as data:
        for k, name in enumerate(job["input_names"]):
            interpreter.set_tensor(found[name]["index"], data[f"arr_{k}"])
    for _ in range(3):
        interpreter.invoke()
    print("ready", flush=True)
    for line in sys.stdin:
        taken = []
        interpreter.invoke()  # the rivals have used the caches meanwhile
        for _ in range(int(line)):
            start = time.perf_counter()
            interpreter.invoke()
            taken.append(1e3 * (time.perf_counter() - start))
        print(json.dumps(taken), flush=True)


if __name__ == "__main__":
    sys.path.pop(0)  # private names of the package, see `_run_worker.py`
    main(sys.argv[1])
