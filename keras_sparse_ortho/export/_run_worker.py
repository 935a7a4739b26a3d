"""Runs a LiteRT file as a user would, in a process of its own: a bad file can crash it.

Run by its path, so that it starts in a tenth of a second: it needs only NumPy and ai-edge-litert
and must import nothing of this package.
"""

import json
import sys
from pathlib import Path


def main(job_file: str) -> None:
    """Run all rows of the sample through the file, one batch at a time, and save the outputs."""
    import numpy as np
    from ai_edge_litert.interpreter import Interpreter, OpResolverType

    job = json.loads(Path(job_file).read_text())
    names, rows = job["input_names"], job["batch_size"]
    with np.load(job["sample"]) as data:
        arrays = [data[f"arr_{i}"] for i in range(len(names))]
    resolver = (
        OpResolverType.AUTO if job["xnnpack"] else OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    )
    before = _memory(reset=True)
    interpreter = Interpreter(model_path=job["file"], experimental_op_resolver_type=resolver)
    interpreter.allocate_tensors()
    runner = interpreter.get_signature_runner("serving_default")
    peak = _memory()
    details = runner.get_input_details()
    for name, array in zip(names, arrays, strict=True):
        # The interpreter would resize the file's input to whatever it is given, in silence.
        want, shape = [rows, *array.shape[1:]], details[name]["shape"].tolist()
        if want != shape:
            raise ValueError(f"input {name} must have shape {want}. Received: shape={shape}")
    outputs: list[list[np.ndarray]] = [[] for _ in job["output_names"]]
    for start in range(0, len(arrays[0]), rows):
        batch = {n: a[start : start + rows] for n, a in zip(names, arrays, strict=True)}
        found = runner(**batch)
        for collected, name in zip(outputs, job["output_names"], strict=True):
            collected.append(found[name].copy())
    if before is not None and peak is not None:
        Path(job["memory"]).write_text(str(peak - before))
    np.savez(job["result"], *[np.concatenate(collected) for collected in outputs])


def _memory(reset: bool = False) -> int | None:
    """Peak of this process' resident memory in bytes, after `reset` the present one.

    None but on Linux: `getrusage` has the parent's peak in it.
    """
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    (peak,) = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
    return 1024 * int(peak)


if __name__ == "__main__":
    # The folder of this file comes first in sys.path and holds private names of the package.
    sys.path.pop(0)
    main(sys.argv[1])
