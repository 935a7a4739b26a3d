"""From routes to verified files: convert, run, compare with Keras, check the zeros."""

import contextlib
import dataclasses
import importlib.util
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_sparse_ortho._files import disk_full, is_full
from keras_sparse_ortho._text import printable
from keras_sparse_ortho.errors import (
    ExportConversionError,
    ExportRouteError,
    ExportVerificationError,
)
from keras_sparse_ortho.export._flatbuffer import operations_in_floats
from keras_sparse_ortho.export._process import JobError, converter_backend, shared_worker
from keras_sparse_ortho.export._record import with_record
from keras_sparse_ortho.export._routes import Route, RouteOutcome
from keras_sparse_ortho.export._task import Task, full_batches
from keras_sparse_ortho.export._tracing import write_traced
from keras_sparse_ortho.export._weight_zeros import WeightZeros, read_weights

_KNOWN = ("__main__", "keras", "keras_sparse_ortho")  # modules that workers need not import
_LOST = 0.01  # of a kernel's zeros: a tensor that lacks more is not the kernel


class Comparison(NamedTuple):
    """The difference of two lists of outputs; `error` is the largest, that of `worst_output`."""

    max_abs_diff: float
    argmax_agreement: float | None
    error: float
    worst_output: str


@dataclasses.dataclass
class Candidate:
    """One route and its verified file, or its failure."""

    route: Route
    outcome: RouteOutcome
    file: Any = None
    failure: Any = None


def candidates(
    task: Task, routes: Sequence[Route], size: Callable[[bytes], int] | None = None
) -> list[Candidate]:
    """Tries each route; with a `size` the smallest file first, until one agrees. Keeps failures."""
    found, made = [], {}
    fitting = [route for route in routes if task.blocks.found or not route.of_blocks]
    for route, file in convert(task, fitting).items() if fitting else ():
        if isinstance(file, Path):
            made[route] = file
        else:
            found.append(_failed(route, file))
    for route in sorted(made, key=lambda one: size(made[one].read_bytes()) if size else 0):
        with task.timed(route, "compared"):
            try:
                found.append(_candidate(task, route, made[route]))
            except ExportVerificationError as failure:
                found.append(_failed(route, failure))
        if size and found[-1].file is not None:
            break
    for one in found:
        one.outcome = dataclasses.replace(one.outcome, seconds=task.seconds[one.route.name])
    failures = [str(c.failure) for c in found if c.failure is not None]
    if failures and is_full(task.folder, failures):
        raise disk_full(task.folder.parent, failures[0])
    return found or [_failed(routes[0], _no_blocks(task, routes[0]))]


def _failed(route: Route, failure: Exception, error: float | None = None) -> Candidate:
    return Candidate(route, RouteOutcome(route.name, str(failure), error=error), None, failure)


def _no_blocks(task: Task, route: Route) -> ExportRouteError:
    reasons = [f"{path!r}: {why}" for path, why in list(task.blocks.kept.items())[:5]]
    return ExportRouteError(
        f"Route {route.name!r} needs a kernel whose zeros are in whole blocks, as drawn with "
        "structure=Block(32, 32, regular=True); use another route. "
        f"Received: {'; '.join(reasons) or 'a model without kernels'}"
    )


def _candidate(task: Task, route: Route, converted: Path) -> Candidate:
    allowed = task.allowed(route)
    file = task.folder / f"{route.name}.verified.tflite"
    record = {
        "route": route.name,
        "model": printable(task.model.name),
        "inputs": task.signature.specs,
        "outputs": [{"name": name} for name in task.names],
    }
    try:
        content = with_record(converted.read_bytes(), record)
        weights = read_weights(content)
    except Exception as error:  # of the schema's reader
        text = f"The converted file must be readable. Received: {type(error).__name__}: {error}"
        raise ExportVerificationError(text) from None
    file.write_bytes(content)
    found = compare(task.names, task.want, litert_outputs(file, task), route.measure)
    if not found.error <= allowed:
        text = (
            f"The file must agree with Keras to {allowed:g} ({route.measure} error, see "
            f"`tolerance`). Received: error={found.error:.3g} at output `{found.worst_output}`, "
            f"maximal difference {found.max_abs_diff:.3g}, on {len(task.sample[0])} rows "
            f"({task.origin})"
        )
        return _failed(route, ExportVerificationError(text), found.error)
    # The file lacks the zeros between blocks.
    blocks, kept = task.blocks if route.of_blocks else ({}, {})
    kernels = {path: value for path, value in task.kernels.items() if path not in blocks}
    outcome = RouteOutcome(
        route.name,
        bytes=len(content),
        error=found.error,
        tolerance=allowed,
        max_abs_diff=found.max_abs_diff,
        argmax_agreement=found.argmax_agreement,
        kept=kept,
        left_out=sum(task.kernels[path].size - own.stored for path, own in blocks.items()),
        folded=find_zeros(kernels, weights),
        in_floats=operations_in_floats(content) if route.needs_data else (),
    )
    return Candidate(route, outcome, file)


def convert(task: Task, routes: Sequence[Route]) -> dict[Route, Path | ExportConversionError]:
    """An unverified file, or an error, for each route."""
    common: dict[str, Any] = {"inputs": task.signature.specs, "ends": task.ends}
    if task.calibrating is not None:
        common["representative"] = str(task.folder / "representative.npz")
        np.savez(common["representative"], *task.calibrating)
    files: dict[Route, Path | ExportConversionError] = {}
    failed: dict[str, Exception] = {}  # by path, if tracing failed
    with tempfile.TemporaryDirectory() as folder:  # TensorFlow takes other names for patterns
        for route in routes:
            form: dict[str, Any] = {"of_blocks": route.of_blocks, "rows_apart": route.rows_apart}
            form["marked"] = task.has_ranges and route.needs_data
            path = os.path.join(folder, "_".join(key for key in form if form[key]) or "plain")
            file = task.folder / f"{route.name}.tflite"
            job = common | {"path": path, "storage": route.storage, "result": str(file)}
            with task.timed(route, "converted"):
                try:
                    if path in failed:
                        raise failed[path]
                    if not os.path.exists(path):
                        _trace(task, path, form)
                    job["sparse"] = route.encoding == "sp"
                    marks = shared_worker().run("convert", task.timeout, **job)
                    if marks:
                        job["path"] = f"{path}_apart"
                        _trace(task, job["path"], form | {"marks_apart": marks})
                        shared_worker().run("convert", task.timeout, **job)
                    files[route] = file
                except Exception as error:  # any: a layer may do anything
                    if not os.path.exists(path):
                        failed[path] = error
                    files[route] = _conversion_error(task, route, error)
    return files


def _trace(task: Task, path: str, form: dict[str, Any]) -> None:
    """Writes what the converter takes; in the worker for another backend, or on several devices."""
    traced = {"inputs": task.signature.specs, "nesting": task.signature.nesting}
    traced |= {"output_names": task.names, "path": path, **form}
    own = converter_backend()
    if keras.backend.backend() == own and keras.distribution.distribution() is None:
        write_traced(task.model, **traced)
        return
    saved, modules = task.folder / "plain.keras", _modules_of_custom_objects()
    try:
        if not saved.exists():
            task.model.save(saved)
            if modules:
                shared_worker().close()  # which may have imported them before they were edited
        job = {"keras_file": str(saved), "modules": modules, **traced}
        shared_worker().run("trace", task.timeout, **job)
    except Exception as error:  # any: a custom class may do anything in get_config
        title = {"tensorflow": "TensorFlow", "jax": "JAX"}[own]
        raise ExportConversionError(
            f"Model {task.model.name!r} could not be rebuilt on the {title} backend in a new "
            "process. Its custom classes must be importable there (not defined in "
            f"`__main__`) and serializable; otherwise export on the {title} backend. "
            f"Received: {str(error)[:1000]}"
        ) from None


def _conversion_error(task: Task, route: Route, failure: Exception) -> ExportConversionError:
    if isinstance(failure, ExportConversionError):
        return failure
    missing = re.findall(r"(?:TF Select|Custom) ops: (.+)", str(failure))
    if missing:
        return ExportConversionError(
            f"Model {task.model.name!r} needs operations that LiteRT's built-in kernels lack. "
            "Replace the layers that use them before the export. Received: operations "
            f"{', '.join(sorted({op for line in missing for op in line.split(', ')}))}"
        )
    return ExportConversionError(
        f"The LiteRT converter failed on model {task.model.name!r} by route "
        f"{route.name!r}. Received: {str(failure)[:1000]}"
    )


def _modules_of_custom_objects() -> list[str]:
    """Modules that registered objects with Keras and that a new process could import."""
    registered = keras.saving.get_custom_objects().values()
    found = []
    for name in sorted({str(getattr(value, "__module__", "")) for value in registered}):
        with contextlib.suppress(ImportError, ValueError):  # an empty name, for example
            if name.partition(".")[0] not in _KNOWN and importlib.util.find_spec(name):
                found.append(name)
    return found


def litert_outputs(file: Path, task: Task) -> list[np.ndarray]:
    batches = full_batches(task.sample, task.signature.batch_size)
    rows, result = file.with_suffix(".sample.npz"), file.with_suffix(".outputs.npz")
    np.savez(rows, *[np.concatenate(pieces) for pieces in zip(*batches, strict=True)])
    job = {"file": str(file), "sample": str(rows), "result": str(result)}
    named = {"inputs": task.signature.specs, "output_names": task.names}
    try:
        shared_worker().run("run", task.timeout, **job, **named)
    except JobError as error:
        raise ExportVerificationError(
            f"The file must run in ai-edge-litert's interpreter, in a subprocess. Received: {error}"
        ) from None
    with np.load(result) as data:
        return [data[f"arr_{i}"][: len(task.sample[0])] for i in range(len(task.names))]


def compare(
    names: list[str], want: list[np.ndarray], got: list[np.ndarray], measure: str
) -> Comparison:
    """Compares Keras' outputs with those of a file; the error is infinite if any is not finite."""
    diffs, errors, agreements = [], [], []
    for name, y, z in zip(names, want, got, strict=True):
        if y.shape != z.shape:
            raise ExportVerificationError(
                f"Output `{name}` of the file must have the shape that Keras gives, {y.shape}. "
                f"Received: shape={z.shape}"
            )
        y, z = y.astype(np.float64), z.astype(np.float64)
        diff = np.abs(z - y)
        diffs.append(float(diff.max()))
        if not np.all(np.isfinite(diff)):
            errors.append(float("inf"))
        elif measure == "max":
            errors.append(float(diff.max() / max(1.0, np.abs(y).max())))
        else:
            scale = float(np.sqrt(np.mean(y**2)))
            errors.append(float(np.sqrt(np.mean(diff**2))) / (scale or 1.0))
        if y.ndim == 2 and y.shape[1] > 1:
            agreements.append(float(np.mean(y.argmax(1) == z.argmax(1))))
    worst = int(np.argmax(errors))
    agreement = min(agreements) if agreements else None
    return Comparison(max(diffs), agreement, errors[worst], names[worst])


def find_zeros(kernels: dict[str, np.ndarray], weights: Iterable[WeightZeros]) -> tuple[str, ...]:
    """Returns the kernels whose zeros no tensor of a file has; raises if one has lost some."""
    zeros = {path: value.size - int(np.count_nonzero(value)) for path, value in kernels.items()}
    tensors: dict[int, list[int]] = {}
    for weight in weights:
        tensors.setdefault(weight.size, []).append(weight.zeros)
    left = []  # of kernels that find no tensor of their size with as many zeros or more
    for path in sorted((path for path in kernels if zeros[path]), key=lambda path: -zeros[path]):
        of_size = tensors.setdefault(kernels[path].size, [])
        enough = [found for found in of_size if found >= zeros[path]]
        if enough:
            of_size.remove(min(enough))
        else:
            left.append(path)
    for path in left:
        lost = zeros[path] - max(tensors[kernels[path].size], default=-math.inf)
        if lost <= max(1, _LOST * zeros[path]):
            raise ExportVerificationError(
                "The conversion must keep every zero. Received: "
                f"kernel {path!r} has {zeros[path]} zeros of {kernels[path].size}, of which {lost} "
                "are not zero in the file"
            )
    return tuple(left)
