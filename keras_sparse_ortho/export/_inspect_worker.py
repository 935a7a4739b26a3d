"""Reads and runs a LiteRT file of unknown origin, in a process of its own.

Run by its path, as `_run_worker.py` is.
"""

import json
import sys
from pathlib import Path


def main(job_file: str) -> None:
    """Check that all data lie in the file, run it once on zeros, and write down its signature."""
    import numpy as np
    from ai_edge_litert import schema_py_generated as schema
    from ai_edge_litert.interpreter import Interpreter, OpResolverType

    job = json.loads(Path(job_file).read_text())
    content = Path(job["file"]).read_bytes()
    model = schema.Model.GetRootAs(content, 0)
    for k in range(model.BuffersLength()):
        buffer = model.Buffers(k)
        if buffer.DataLength():
            buffer.DataAsNumpy()  # raises where the data would end beyond the file
        if buffer.Offset() + buffer.Size() > len(content):
            raise ValueError(f"buffer {k} ends beyond the file")
    resolver = (
        OpResolverType.AUTO if job["xnnpack"] else OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    )
    interpreter = Interpreter(model_path=job["file"], experimental_op_resolver_type=resolver)
    runner = interpreter.get_signature_runner()
    inputs = runner.get_input_details()
    outputs = runner(**{n: np.zeros(d["shape"], d["dtype"]) for n, d in inputs.items()})
    record = {
        "xnnpack": job["xnnpack"],
        "inputs": [
            {"name": n, "shape": d["shape"].tolist(), "dtype": np.dtype(d["dtype"]).name}
            for n, d in inputs.items()
        ],
        "outputs": [{"name": n, "shape": list(a.shape)} for n, a in outputs.items()],
    }
    Path(job["result"]).write_text(json.dumps(record))


if __name__ == "__main__":
    sys.path.pop(0)  # private names of the package, see `_run_worker.py`
    main(sys.argv[1])
