"""Files that this package did not write: tried in a subprocess before they are opened here."""

import json
from pathlib import Path
from typing import Any

from keras_sparse_ortho.export import _inspect_worker
from keras_sparse_ortho.export._errors import LiteRTFileError
from keras_sparse_ortho.export._process import run_python


def inspect_foreign(content: bytes, path: str, folder: Path, timeout: float) -> dict[str, Any]:
    """What is needed to open the file, found by running it on zeros.

    Raises:
        LiteRTFileError: if it cannot be read or crashes, with and without XNNPACK.
    """
    file, result = folder / "foreign.tflite", folder / "record.json"
    file.write_bytes(content)
    reasons = []
    for xnnpack in (True, False):
        job = folder / "job.json"
        job.write_text(json.dumps({"file": str(file), "xnnpack": xnnpack, "result": str(result)}))
        ending = run_python([_inspect_worker.__file__, str(job)], timeout)
        if ending.crash is None:
            record: dict[str, Any] = json.loads(result.read_text())
            return record
        reasons.append(ending.crash)
    raise LiteRTFileError(
        "The file must run in ai-edge-litert's interpreter, which was tried in a subprocess: it "
        f"is corrupted, truncated, or no LiteRT file with a signature. Received: {path!r}; with "
        f"XNNPACK: {reasons[0]}; without: {reasons[1]}"
    )
