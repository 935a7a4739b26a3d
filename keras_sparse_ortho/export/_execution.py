"""The outputs to compare: Keras' in this process, the file's in another."""

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho.export import _run_worker
from keras_sparse_ortho.export._errors import ExportVerificationError
from keras_sparse_ortho.export._process import run_python
from keras_sparse_ortho.export._signature import Signature
from keras_sparse_ortho.export._structure import leaves, unique_names


def keras_outputs(
    model: keras.Model, signature: Signature, sample: list[np.ndarray]
) -> tuple[list[str], list[np.ndarray]]:
    """Names and values of the model's outputs on all rows, one batch at a time.

    Raises:
        ValueError: if an output is not finite, as nothing could be compared with it.
    """
    pieces: list[list[np.ndarray]] = []
    keys: list[str | None] = []
    for batch in _full_batches(sample, signature.batch_size):
        inputs = [keras.ops.convert_to_tensor(array) for array in batch]
        found = leaves(model(signature.pack(inputs), training=False))
        keys = [key for key, _ in found]
        pieces.append([np.asarray(keras.ops.convert_to_numpy(tensor)) for _, tensor in found])
    known = getattr(model, "output_names", None) or []
    if len(known) == len(keys):
        keys = [key or name for key, name in zip(keys, known, strict=True)]
    names = unique_names(keys, "output")
    rows = len(sample[0])
    outputs = [np.concatenate(piece)[:rows] for piece in zip(*pieces, strict=True)]
    for name, output in zip(names, outputs, strict=True):
        if not np.all(np.isfinite(output)):
            raise ValueError(
                "Keras' own outputs must be finite on the sample, or nothing can be compared. "
                f"Received: non-finite values in output `{name}` of model '{model.name}'"
            )
    return names, outputs


def litert_outputs(
    file: Path,
    signature: Signature,
    names: list[str],
    sample: list[np.ndarray],
    folder: Path,
    timeout: float,
    xnnpack: bool = True,
) -> tuple[list[np.ndarray], int | None]:
    """The outputs of a LiteRT file on all rows, run by ai-edge-litert in a subprocess.

    Returns:
        The outputs, and the bytes by which loading the file raised the peak of the memory (None
        where the system does not tell).

    Raises:
        ExportVerificationError: if the interpreter refuses the file or dies on it.
    """
    batches = list(_full_batches(sample, signature.batch_size))
    job: dict[str, Any] = {
        "file": str(file),
        "input_names": [spec.name for spec in signature.inputs],
        "output_names": names,
        "batch_size": signature.batch_size,
        "sample": str(folder / "sample.npz"),
        "result": str(folder / "outputs.npz"),
        "memory": str(folder / "memory.txt"),
        "xnnpack": xnnpack,
    }
    np.savez(job["sample"], *[np.concatenate(pieces) for pieces in zip(*batches, strict=True)])
    job_file = folder / "run.json"
    job_file.write_text(json.dumps(job))
    ending = run_python([_run_worker.__file__, str(job_file)], timeout)
    if ending.crash is not None:
        raise ExportVerificationError(
            "The file must run in ai-edge-litert's interpreter, in a subprocess. Received: "
            f"{ending.crash} ({'with' if xnnpack else 'without'} XNNPACK)"
        )
    with np.load(job["result"]) as data:
        outputs = [data[f"arr_{i}"][: len(sample[0])] for i in range(len(names))]
    memory = Path(job["memory"])
    return outputs, int(memory.read_text()) if memory.exists() else None


def _full_batches(sample: list[np.ndarray], rows: int) -> list[list[np.ndarray]]:
    """Batches of the static size; the last one is filled up with copies of the last row."""
    missing = -len(sample[0]) % rows
    full = [np.concatenate([array, *[array[-1:]] * missing]) for array in sample]
    starts = range(0, len(full[0]), rows)
    return [[array[start : start + rows] for array in full] for start in starts]
