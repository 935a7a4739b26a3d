"""Converts in a process of its own: TensorFlow's converter can die, and takes the process along.

Run as `python -m keras_sparse_ortho.export._convert_worker job.json` on the TensorFlow backend,
whatever the backend of the caller is, so that there is one path for all.
"""

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho.export._registry import route_named
from keras_sparse_ortho.export._trace import write_saved_model


def main(job_file: str) -> None:
    """Do the job; an expected failure is written to an `error` file, not raised."""
    job = json.loads(Path(job_file).read_text())
    try:
        if job["keras_file"] is not None:
            try:
                model = _load(job["keras_file"], job["modules"])
            except Exception as error:
                _fail(job["error"], "load", error)
                return
            write_saved_model(
                model, job["inputs"], job["skeleton"], job["output_names"], job["saved_model"]
            )
        batches = (lambda: _batches(job)) if job["representative"] else None
    except Exception as error:
        _fail(job["error"], "convert", error)
        return
    for route in job["routes"]:
        try:
            content = route_named(route["name"]).convert(job["saved_model"], batches)
        except Exception as error:
            _fail(route["error"], "convert", error)
            continue
        part = Path(route["result"] + ".part")  # a crash while writing must not look like a file
        part.write_bytes(content)
        part.rename(route["result"])


def _load(keras_file: str, modules: list[str]) -> Any:
    try:
        return keras.saving.load_model(keras_file, compile=False, safe_mode=False)
    except Exception:
        # Registered objects are found once their module is imported, which is done only where
        # it is needed: importing a user's module may have effects.
        for name in modules:
            importlib.import_module(name)
        return keras.saving.load_model(keras_file, compile=False, safe_mode=False)


def _batches(job: dict[str, Any]) -> Iterator[dict[str, np.ndarray]]:
    with np.load(job["representative"]) as data:
        arrays = [data[f"arr_{i}"] for i in range(len(job["inputs"]))]
    rows = job["inputs"][0]["shape"][0]
    for start in range(0, len(arrays[0]) - rows + 1, rows):
        yield {
            spec["name"]: array[start : start + rows]
            for spec, array in zip(job["inputs"], arrays, strict=True)
        }


def _fail(file: str, stage: str, error: Exception) -> None:
    text = str(error)
    missing = re.findall(r"(?:TF Select|Custom) ops: (.+)", text)
    Path(file).write_text(
        json.dumps(
            {
                "stage": stage,
                "message": f"{type(error).__name__}: {text[:1000]}",
                "missing_ops": sorted({op for line in missing for op in line.split(", ")}),
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
