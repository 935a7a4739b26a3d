"""From a plain Keras model to an unverified LiteRT file, in a worker process."""

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho.export._errors import ExportConversionError
from keras_sparse_ortho.export._process import run_python
from keras_sparse_ortho.export._route import Route
from keras_sparse_ortho.export._signature import Signature
from keras_sparse_ortho.export._trace import write_saved_model

_WORKER = "keras_sparse_ortho.export._convert_worker"


def convert(
    model: keras.Model,
    route: Route,
    signature: Signature,
    output_names: list[str],
    representative: list[np.ndarray] | None,
    folder: Path,
    timeout: float,
) -> Path:
    """Write `model` as a LiteRT file into `folder`.

    Raises:
        ExportConversionError: if the model cannot be rebuilt in the worker, if LiteRT lacks an
            operation, or if the converter fails or dies.
    """
    job: dict[str, Any] = {
        "keras_file": str(folder / "plain.keras"),
        "saved_model": str(folder / "saved_model"),
        "modules": _modules_of_custom_objects(),
        "quantization": route.quantization,
        "inputs": [dataclasses.asdict(spec) for spec in signature.inputs],
        "skeleton": signature.skeleton,
        "output_names": output_names,
        "representative": None,
        "result": str(folder / "model.tflite"),
        "error": str(folder / "error.json"),
    }
    if representative is not None:
        job["representative"] = str(folder / "representative.npz")
        np.savez(job["representative"], *representative)
    error = _save(model, job) or _work(job, folder, timeout)
    if error is not None and error["stage"] == "load":
        if keras.backend.backend() != "tensorflow":
            raise ExportConversionError(
                f"Model '{model.name}' could not be rebuilt on the TensorFlow backend in a new "
                "process. Its custom classes must be importable there (not defined in "
                "`__main__`) and serializable, or export on the TensorFlow backend. "
                f"Received: {error['message']}"
            )
        # The classes exist in this process only, so it has to be the one that traces.
        write_saved_model(
            model, job["inputs"], signature.skeleton, output_names, job["saved_model"]
        )
        job["keras_file"] = None
        Path(job["error"]).unlink(missing_ok=True)
        error = _work(job, folder, timeout)
    if error is None:
        return Path(job["result"])
    if error["missing_ops"]:
        raise ExportConversionError(
            f"Model '{model.name}' needs operations that LiteRT's built-in kernels lack. Replace "
            "the layers that use them before the export. Received: "
            f"operations {', '.join(error['missing_ops'])}"
        )
    raise ExportConversionError(
        f"The LiteRT converter must take model '{model.name}' with "
        f"quantization={route.quantization!r}. Received: {error['message']}"
    )


def _save(model: keras.Model, job: dict[str, Any]) -> dict[str, Any] | None:
    """Save the model for the worker; None if it could be, otherwise what went wrong."""
    try:
        model.save(job["keras_file"])
    except Exception as error:  # of every kind: a custom class may do anything in get_config
        message = f"{type(error).__name__}: {str(error).strip()[:1000]}"
        return {"stage": "load", "message": message, "missing_ops": []}
    return None


def _work(job: dict[str, Any], folder: Path, timeout: float) -> dict[str, Any] | None:
    """Run the worker once; None if it gave a file, otherwise what went wrong."""
    job_file = folder / "convert.json"
    job_file.write_text(json.dumps(job))
    ending = run_python(["-m", _WORKER, str(job_file)], timeout)
    if ending.crash is not None:
        message = f"the converter's process failed: {ending.crash}"
        return {"stage": "convert", "message": message, "missing_ops": []}
    error_file = Path(job["error"])
    if error_file.exists():
        error: dict[str, Any] = json.loads(error_file.read_text())
        return error
    return None


def _modules_of_custom_objects() -> list[str]:
    """Modules that registered something with Keras and that a new process could import."""
    names = {getattr(value, "__module__", None) for value in _registered().values()}
    return sorted(n for n in names if isinstance(n, str) and n != "__main__" and _exists(n))


def _registered() -> dict[str, Any]:
    return dict(keras.saving.get_custom_objects())


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
