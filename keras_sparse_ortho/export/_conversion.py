"""From a plain Keras model to unverified LiteRT files, in a worker process."""

import dataclasses
import importlib.util
import json
from collections.abc import Sequence
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


Converted = dict[str, Path | ExportConversionError]


def convert(
    model: keras.Model,
    routes: Sequence[Route],
    signature: Signature,
    output_names: list[str],
    representative: list[np.ndarray] | None,
    folder: Path,
    timeout: float,
) -> Converted:
    """Write `model` as a LiteRT file into `folder` by each route, in one worker if all goes well.

    Returns:
        The file, or what went wrong, by the name of the route.

    Raises:
        ExportConversionError: if the model cannot be rebuilt in the worker.
    """
    job: dict[str, Any] = {
        "keras_file": str(folder / "plain.keras"),
        "saved_model": str(folder / "saved_model"),
        "modules": _modules_of_custom_objects(),
        "inputs": [dataclasses.asdict(spec) for spec in signature.inputs],
        "skeleton": signature.skeleton,
        "output_names": output_names,
        "representative": None,
        "error": str(folder / "error.json"),
        "routes": [
            {
                "name": route.name,
                "result": str(folder / f"{route.name}.tflite"),
                "error": str(folder / f"{route.name}.json"),
            }
            for route in routes
        ],
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
    return {
        route["name"]: _outcome(route, error, model.name)
        for route in _after_crashes(job, error, folder, timeout)
    }


def _after_crashes(
    job: dict[str, Any], error: dict[str, Any] | None, folder: Path, timeout: float
) -> list[dict[str, Any]]:
    """All routes of the job, once each has a file or an error.

    A route on which the converter's process died is given up, and a new process goes on with the
    rest.
    """
    routes: list[dict[str, Any]] = job["routes"]
    while error is not None and error["stage"] == "crash":
        open_routes = [route for route in routes if not _is_settled(route)]
        if not open_routes:
            break
        Path(open_routes[0]["error"]).write_text(json.dumps(error | {"stage": "convert"}))
        if not open_routes[1:] or not Path(job["saved_model"]).exists():
            for route in open_routes[1:]:
                Path(route["error"]).write_text(json.dumps(error | {"stage": "convert"}))
            break
        error = _work(job | {"keras_file": None, "routes": open_routes[1:]}, folder, timeout)
    return routes


def _is_settled(route: dict[str, Any]) -> bool:
    return Path(route["result"]).exists() or Path(route["error"]).exists()


def _outcome(
    route: dict[str, Any], error: dict[str, Any] | None, model_name: str
) -> Path | ExportConversionError:
    if Path(route["result"]).exists():
        return Path(route["result"])
    if Path(route["error"]).exists():
        error = json.loads(Path(route["error"]).read_text())
    if error is None:
        error = {"message": "the worker left no file", "missing_ops": []}
    if error["missing_ops"]:
        return ExportConversionError(
            f"Model '{model_name}' needs operations that LiteRT's built-in kernels lack. Replace "
            "the layers that use them before the export. Received: "
            f"operations {', '.join(error['missing_ops'])}"
        )
    return ExportConversionError(
        f"The LiteRT converter must take model '{model_name}' by route '{route['name']}'. "
        f"Received: {error['message']}"
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
        return {"stage": "crash", "message": message, "missing_ops": []}
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
