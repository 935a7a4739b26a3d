"""From a plain Keras model to unverified LiteRT files, in a worker process."""

import dataclasses
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho.export._arguments import Task
from keras_sparse_ortho.export._errors import ExportConversionError
from keras_sparse_ortho.export._process import Worker, WorkerError, converter
from keras_sparse_ortho.export._routes import Route
from keras_sparse_ortho.export._signature import leaves, pack

_Failure = dict[str, Any]  # as the worker gives it: "message", "missing_ops", and here a "stage"


def convert(task: Task, routes: Sequence[Route]) -> dict[str, Path | ExportConversionError]:
    """Write the model of a task as a LiteRT file by each route.

    One process does it all if all goes well. Where the converter takes it along, that route is
    given up and a new process goes on with the rest.

    Returns:
        The file in the folder of the task, or what went wrong, by the name of the route.

    Raises:
        ExportConversionError: if the model cannot be rebuilt in the worker.
    """
    representative = None
    if task.representative is not None:
        representative = str(task.folder / "representative.npz")
        np.savez(representative, *task.representative)
    files: dict[str, Path | ExportConversionError] = {}
    with converter() as worker:
        traced = _trace(worker, task)
        for route in routes:
            file = task.folder / f"{route.name}.tflite"
            failure = traced or _ask(
                worker,
                "convert",
                task.timeout,
                route=route.name,
                saved_model=str(task.folder / "saved_model"),
                inputs=[dataclasses.asdict(spec) for spec in task.signature.inputs],
                representative=representative,
                result=str(file),
            )
            files[route.name] = file
            if failure is not None:
                files[route.name] = _error(failure, task.model.name, route.name)
    return files


def write_saved_model(
    model: keras.Model,
    inputs: list[dict[str, Any]],
    nesting: Any,
    output_names: list[str],
    folder: str,
) -> None:
    """Trace `model` for inference, with static shapes; needs the TensorFlow backend.

    Args:
        model: A built Keras model without wrappers of ours.
        inputs: Name, shape (batch first) and dtype of each input.
        nesting: Of the inputs, see `Signature`.
        output_names: A name for each output.
        folder: Where to write the SavedModel.
    """
    import tensorflow as tf

    def serve(*flat: Any) -> dict[str, Any]:
        outputs = model(pack(nesting, flat), training=False)
        return dict(zip(output_names, (tensor for _, tensor in leaves(outputs)), strict=True))

    archive = keras.export.ExportArchive()
    archive.track(model)
    archive.add_endpoint(
        "serving_default",
        serve,
        input_signature=[
            tf.TensorSpec(spec["shape"], spec["dtype"], name=spec["name"]) for spec in inputs
        ],
    )
    archive.write_out(folder, verbose=False)


def _trace(worker: Worker, task: Task) -> _Failure | None:
    """Have the model written as a SavedModel; None, or what went wrong."""
    keras_file = str(task.folder / "plain.keras")
    how = {
        "inputs": [dataclasses.asdict(spec) for spec in task.signature.inputs],
        "nesting": task.signature.nesting,
        "output_names": task.names,
    }
    saved_model = str(task.folder / "saved_model")
    failure = _save(task.model, keras_file) or _ask(
        worker,
        "trace",
        task.timeout,
        keras_file=keras_file,
        modules=_modules_of_custom_objects(),
        saved_model=saved_model,
        **how,
    )
    if failure is None or failure["stage"] != "load":
        return failure
    if keras.backend.backend() != "tensorflow":
        raise ExportConversionError(
            f"Model '{task.model.name}' could not be rebuilt on the TensorFlow backend in a new "
            "process. Its custom classes must be importable there (not defined in "
            "`__main__`) and serializable, or export on the TensorFlow backend. "
            f"Received: {failure['message']}"
        )
    # The classes exist in this process only, so it has to be the one that traces.
    write_saved_model(task.model, **how, folder=saved_model)
    return None


def _save(model: keras.Model, file: str) -> _Failure | None:
    """Save the model for the worker; None if it could be, otherwise what went wrong."""
    try:
        model.save(file)
    except Exception as error:  # of every kind: a custom class may do anything in get_config
        message = f"{type(error).__name__}: {str(error).strip()[:1000]}"
        return {"stage": "load", "message": message, "missing_ops": []}
    return None


def _ask(worker: Worker, kind: str, timeout: float, **job: Any) -> _Failure | None:
    try:
        failure: _Failure | None = worker.run(kind, timeout, **job)
    except WorkerError as error:
        message = f"the converter's process failed: {error}"
        return {"stage": "crash", "message": message, "missing_ops": []}
    return failure


def _error(failure: _Failure, model_name: str, route_name: str) -> ExportConversionError:
    if failure["missing_ops"]:
        return ExportConversionError(
            f"Model '{model_name}' needs operations that LiteRT's built-in kernels lack. Replace "
            "the layers that use them before the export. Received: "
            f"operations {', '.join(failure['missing_ops'])}"
        )
    return ExportConversionError(
        f"The LiteRT converter must take model '{model_name}' by route '{route_name}'. "
        f"Received: {failure['message']}"
    )


def _modules_of_custom_objects() -> list[str]:
    """Modules that registered something with Keras and that a new process could import."""
    registered = dict(keras.saving.get_custom_objects())
    names = {getattr(value, "__module__", None) for value in registered.values()}
    return sorted(n for n in names if isinstance(n, str) and n != "__main__" and _exists(n))


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
