"""From routes to files that are not verified yet, by the converters in the worker."""

import contextlib
import importlib.util
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import keras
import numpy as np

from keras_sparse_ortho.errors import ExportConversionError
from keras_sparse_ortho.export._layer_outputs import (
    write_kernels,
    write_layer_outputs,
)
from keras_sparse_ortho.export._process import (
    converter_backend,
    shared_worker,
)
from keras_sparse_ortho.export._routes import Route, fuses_lstms
from keras_sparse_ortho.export._signature import full_batches
from keras_sparse_ortho.export._task import Task, Workspace
from keras_sparse_ortho.export._tracing import write_traced

Job: TypeAlias = dict[str, Any]
"""Arguments of a task of the worker, by name."""

# Workers have these.
_WITHOUT_CUSTOM_OBJECTS = (
    "__main__",
    "keras",
    "keras_sparse_ortho",
)
_TITLES = {"tensorflow": "TensorFlow", "jax": "JAX"}


def measured_errors(task: Task, workspace: Workspace) -> dict[str, Any]:
    """The errors of tensors in an int8 file, as `named_errors` has them."""
    with tempfile.TemporaryDirectory() as folder:
        return _Converter(task, workspace, Path(folder)).measured()


def convert(
    task: Task, routes: Sequence[Route], workspace: Workspace
) -> dict[Route, Path | ExportConversionError]:
    """An unverified file, or an error, for each route."""
    files: dict[Route, Path | ExportConversionError] = {}
    # TensorFlow takes other names for patterns.
    with tempfile.TemporaryDirectory() as folder:
        converter = _Converter(task, workspace, Path(folder))
        for route in routes:
            with workspace.timed(route, "converted"):
                files[route] = converter.file_of(route)
    return files


class _Converter:
    """Converts a model by one route after the other; routes share what was traced.

    Args:
        task: `Task`. The model.
        workspace: `Workspace`. The folder of the files.
        folder: Path. The folder of traced models.
    """

    def __init__(self, task: Task, workspace: Workspace, folder: Path) -> None:
        self._task = task
        self._workspace = workspace
        self._folder = folder
        self._failures: dict[Path, Exception] = {}  # by path, if tracing failed
        self._job: Job = {
            "inputs": task.signature.specs,
            "ends": task.ends,
        }
        self._calibrating: Job = {}
        if task.rows.calibrating is not None:
            file = workspace.folder / "representative.npz"
            np.savez(file, *task.rows.calibrating)
            self._calibrating["representative"] = str(file)
        self._choice = self._chosen_on_rows()

    def _chosen_on_rows(self) -> Job:
        """The arguments of the worker for the remedies of static integers, if there are any."""
        remedy = self._task.remedy
        job: Job = {}
        if self._task.rows.choosing is not None:
            job["choosing"] = self._saved("choosing", self._task.rows.choosing)
        if remedy.fits_ranges or remedy.floats is not None:
            layers = None
            if isinstance(remedy.floats, list):
                layers = self._layer_outputs()
            job["choice"] = {
                "layers": layers,
                "fits_ranges": remedy.fits_ranges,
                "floats": remedy.floats,
                "tolerance": self._task.tolerance,
            }
        return job

    def _saved(self, name: str, rows: list[np.ndarray]) -> str:
        """The file of rows, in whole batches."""
        file = self._workspace.folder / f"{name}.npz"
        batches = full_batches(rows, self._task.signature.batch_size)
        arrays = [np.concatenate(parts) for parts in zip(*batches, strict=True)]
        np.savez(file, *arrays)
        return str(file)

    def _layer_outputs(self) -> str:
        """The file of all layers' outputs on one batch."""
        layers = self._workspace.folder / "layers.npz"
        write_layer_outputs(self._task, layers)
        return str(layers)

    def measured(self) -> dict[str, Any]:
        """The errors of tensors in an int8 file."""
        path = self._folder / "plain"
        form: Job = {
            "path": str(path),
            "of_blocks": False,
            "rows_apart": False,
            "marked": False,
            "fused": False,
        }
        kernels = self._workspace.folder / "kernels.npz"
        try:
            _trace(self._task, self._workspace.folder, form)
            write_kernels(kernels, self._task.kernels)
            job = {
                **self._job,
                **self._calibrating,
                "held": self._saved("held", self._task.rows.compared),
                "layers": self._layer_outputs(),
                "path": str(path),
                "kernels": str(kernels),
            }
            timeout = self._task.timeout
            return dict(shared_worker().run("measure", timeout, **job))
        except Exception as error:  # any: a layer may do anything
            raise _conversion_error(self._task, Route("int8"), error) from None

    def file_of(self, route: Route) -> Path | ExportConversionError:
        """The file of a route, or the error that says why there is none."""
        form = {
            "of_blocks": route.of_blocks,
            "rows_apart": route.rows_apart,
            "marked": self._task.has_ranges and route.needs_data,
            "fused": False,
        }
        if self._task.lstms.quarters and fuses_lstms(route):
            file = self._file_in_form(route, {**form, "fused": True})
            if route.of_lstms or isinstance(file, Path):
                return file
        return self._file_in_form(route, form)

    def _file_in_form(
        self, route: Route, form: Job
    ) -> Path | ExportConversionError:
        """The file of a route by way of a model traced in a form, or an error."""
        name = "_".join(key for key, is_set in form.items() if is_set)
        path = self._folder / (name or "plain")
        try:
            return self._converted(route, form, path)
        except Exception as error:  # any: a layer may do anything
            if not path.exists():
                self._failures[path] = error
            return _conversion_error(self._task, route, error)

    def _converted(self, route: Route, form: Job, path: Path) -> Path:
        """The file of a route by way of a traced model at `path`."""
        if path in self._failures:
            raise self._failures[path]
        if not path.exists():
            _trace(
                self._task,
                self._workspace.folder,
                {**form, "path": str(path)},
            )
        file = self._workspace.folder / f"{route.name}.tflite"
        job = {
            **self._job,
            "path": str(path),
            "storage": route.storage,
            "sparse": route.encoding == "sp",
            "result": str(file),
        }
        # Trained ranges need no rows, but for the states inside of LSTMs.
        if not self._task.has_ranges or fuses_lstms(route):
            job |= self._calibrating
        if route.needs_data:
            job |= self._choice
        timeout = self._task.timeout
        marks = shared_worker().run("convert", timeout, **job)
        if marks:
            job["path"] = f"{path}_apart"
            form = {**form, "path": job["path"], "marks_apart": marks}
            _trace(self._task, self._workspace.folder, form)
            shared_worker().run("convert", timeout, **job)
        return file


def _trace(task: Task, folder: Path, form: Job) -> None:
    """Writes what the converter takes; in the worker for another backend, or on several devices.

    Args:
        task: `Task`. The model.
        folder: Path. Where the model is saved for the worker.
        form: Arguments of `write_traced`.
    """
    arguments = {
        "inputs": task.signature.specs,
        "nesting": task.signature.nesting,
        "output_names": task.names,
        **form,
    }
    backend = converter_backend()
    if (
        keras.backend.backend() == backend
        and keras.distribution.distribution() is None
    ):
        write_traced(task.model, **arguments)
        return
    file = folder / "plain.keras"
    modules = _modules_of_custom_objects()
    try:
        if not file.exists():
            task.model.save(file)
            if modules:
                shared_worker().close()  # which may have imported them before they were edited
        job = {
            "keras_file": str(file),
            "modules": modules,
            **arguments,
        }
        shared_worker().run("trace", task.timeout, **job)
    # Any: a custom class may do anything in get_config.
    except Exception as error:
        title = _TITLES[backend]
        raise ExportConversionError(
            f"Model {task.model.name!r} could not be rebuilt on the {title} backend in a new "
            "process. Its custom classes must be importable there (not defined in "
            f"`__main__`) and serializable; otherwise export on the {title} backend. "
            f"Received: {str(error)[:1000]}"
        ) from None


def _conversion_error(
    task: Task, route: Route, failure: Exception
) -> ExportConversionError:
    if isinstance(failure, ExportConversionError):
        return failure
    missing = set()
    for line in re.findall(r"(?:TF Select|Custom) ops: (.+)", str(failure)):
        missing.update(line.split(", "))
    if missing:
        return ExportConversionError(
            f"Model {task.model.name!r} needs operations that LiteRT's built-in kernels lack. "
            "Replace the layers that use them before the export. Received: operations "
            f"{', '.join(sorted(missing))}"
        )
    return ExportConversionError(
        f"The LiteRT converter failed on model {task.model.name!r} by route "
        f"{route.name!r}. Received: {str(failure)[:1000]}"
    )


def _modules_of_custom_objects() -> list[str]:
    """Modules that registered objects with Keras and that a new process could import."""
    names = set()
    for value in keras.saving.get_custom_objects().values():
        names.add(str(getattr(value, "__module__", "")))
    modules = []
    for name in sorted(names):
        if name.partition(".")[0] in _WITHOUT_CUSTOM_OBJECTS:
            continue
        # An empty name, for example.
        with contextlib.suppress(ImportError, ValueError):
            if importlib.util.find_spec(name):
                modules.append(name)
    return modules
