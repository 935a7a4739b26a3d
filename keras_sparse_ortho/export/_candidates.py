"""From routes to verified files: convert, encode, run, compare with Keras, check the zeros."""

import contextlib
import dataclasses
import importlib.util
import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._files import disk_full, is_full
from keras_sparse_ortho.export._block_convolutions import as_convolutions
from keras_sparse_ortho.export._compare import (
    Comparison,
    DisagreementError,
    ExportVerificationError,
    compare,
)
from keras_sparse_ortho.export._flatbuffer import stored_weights
from keras_sparse_ortho.export._model import full_batches, weights_in_use
from keras_sparse_ortho.export._process import JobError, Worker, converter_backend
from keras_sparse_ortho.export._record import attach, seal
from keras_sparse_ortho.export._report import RouteOutcome
from keras_sparse_ortho.export._routes import ExportRouteError, Route
from keras_sparse_ortho.export._sparse_encoding import Encoded, encode
from keras_sparse_ortho.export._task import Task
from keras_sparse_ortho.export._tracing import write_traced
from keras_sparse_ortho.export._zeros import find_zeros

_NEAR = 1.05  # bytes of a file over those of the smallest

converter = Worker  # for conversions; tests keep one, as it loads TensorFlow


class ExportConversionError(RuntimeError):
    """The model could not be turned into a LiteRT file: an operation LiteRT lacks, or a crash."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One route and its verified file, or its failure."""

    route: Route
    outcome: RouteOutcome
    file: Path | None = None
    comparison: Comparison | None = None
    failure: Exception | None = None


def candidates(task: Task, routes: Sequence[Route], smallest: bool = False) -> list[Candidate]:
    """Try each route; a failure is part of the result, but a full disk raises OSError.

    With `smallest`, the files are run from the smallest on, until one runs in any interpreter.
    """
    possible = [route for route in routes if task.blocks.found or not route.of_blocks]
    converted = convert(task, list(dict.fromkeys(route.converted_as for route in possible)))
    made = [(route, _encoded(task, route, converted)) for route in routes]
    if smallest:
        made = _by_size(made)
    found: list[Candidate] = []
    for route, encoded in made:
        found.append(_candidate(task, route, encoded))
        if smallest and found[-1].outcome.xnnpack:
            break
    failures = [str(c.failure) for c in found if c.failure is not None]
    if failures and is_full(task.folder, failures):
        raise disk_full(task.folder.parent, failures[0])
    return found


def check_blocks(task: Task, route: Route) -> None:
    """ExportRouteError for a route of blocks if no kernel has whole blocks of zeros."""
    if route.of_blocks and not task.blocks.found:
        reasons = [f"'{path}': {why}" for path, why in list(task.blocks.kept.items())[:5]]
        raise ExportRouteError(
            f"Route '{route.name}' needs a kernel whose zeros are in whole blocks, as drawn with "
            "structure=Block(32, 32, regular=True); use another route. "
            f"Received: {'; '.join(reasons) or 'a model without kernels'}"
        )


def _encoded(
    task: Task, route: Route, converted: dict[str, Path | ExportConversionError]
) -> Encoded | Exception:
    try:
        check_blocks(task, route)
        if task.trained and route.storage.endswith("int8") and route.encoding == "sp":
            raise ExportRouteError(
                f"Route '{route.name}' does not keep the integers of `quantize_aware`; use "
                f"'{route.storage}'. Received: a model with trained integers"
            )
        content = converted[route.converted_as.name]
        if isinstance(content, ExportConversionError):
            return content
        if route.converted_as != route:
            return encode(content.read_bytes(), route.encoding)
    except Exception as error:
        return error
    if route.of_blocks:
        return Encoded(content.read_bytes(), tuple(task.blocks.found), task.blocks.kept)
    return Encoded(content.read_bytes(), (), {})


def _by_size(made: Sequence[tuple[Route, Encoded | Exception]]) -> list[Any]:
    """From the smallest on; before them what the converter failed on, last what has no use here.

    Files within 5% of the smallest keep the order of `ROUTES`: a file that is restored to dense
    weights at load is as fast as the dense one, and `+csr`, a little smaller, is not.
    """
    near = _NEAR * min((len(e.content) for _, e in made if isinstance(e, Encoded)), default=0)

    def key(one: tuple[Route, Encoded | Exception]) -> float:
        if isinstance(one[1], Encoded):
            return max(len(one[1].content), near)
        return math.inf if isinstance(one[1], ExportRouteError) else 0

    return sorted(made, key=key)


def _candidate(task: Task, route: Route, encoded: Encoded | Exception) -> Candidate:
    rows = task.signature.batch_size
    allowed = route.tolerance if task.tolerance is None else task.tolerance
    try:
        if isinstance(encoded, Exception):
            raise encoded
        record = {
            "route": route.name,
            "model": task.model.name,
            "inputs": [dataclasses.asdict(spec) for spec in task.signature.inputs],
            "outputs": [
                {"name": name, "shape": [rows, *want.shape[1:]]}
                for name, want in zip(task.names, task.want, strict=True)
            ],
            "measure": route.measure,
            "tolerance": allowed,
        }
        content = attach(encoded.content, record)
        file = task.folder / f"{route.name}.verified.tflite"
        file.write_bytes(content)
        good: dict[bool, tuple[Comparison, int | None]] = {}
        failed: dict[bool, ExportVerificationError] = {}
        with Worker() as worker:
            for xnnpack in (True, False):
                try:
                    got, load_bytes = litert_outputs(worker, file, task, xnnpack)
                    good[xnnpack] = _verify(task, got, route.measure, allowed), load_bytes
                except ExportVerificationError as error:
                    failed[xnnpack] = error
                    worker.close()  # the next run measures its memory in a fresh process
        # A default interpreter, with XNNPACK, must run a dense file. A sparse file may need it off,
        # which its record tells `load_litert`.
        if True in failed and (not good or route.encoding == "dense"):
            raise failed[True]
        with_xnnpack = True in good
        comparison, load_bytes = good[with_xnnpack]
        folded = _check_zeros(task, content, route)
        file.write_bytes(seal(content, with_xnnpack))
    except Exception as error:
        failure = error
        if not isinstance(
            error, ExportConversionError | ExportVerificationError | ExportRouteError
        ):
            failure = ExportVerificationError(  # the schema's reader cannot follow the file
                f"The converted file must be readable. Received: {type(error).__name__}: {error}"
            )
        return Candidate(route, RouteOutcome(route.name, rows, str(failure)), failure=failure)
    outcome = RouteOutcome(
        route.name,
        rows,
        bytes=file.stat().st_size,
        tolerance=allowed,
        **{name: getattr(comparison, name) for name in ("error", "max_abs_diff", "mean_abs_diff")},
        xnnpack=with_xnnpack,
        without_xnnpack=False in good,
        uses_xnnpack=with_xnnpack,
        load_bytes=load_bytes,
        encoded=encoded.encoded,
        kept=encoded.kept,
        folded=folded,
    )
    return Candidate(route, outcome, file, comparison)


def convert(task: Task, routes: Sequence[Route]) -> dict[str, Path | ExportConversionError]:
    """An unverified file, or an error, for each route; raises if the model cannot be rebuilt."""
    inputs = [dataclasses.asdict(spec) for spec in task.signature.inputs]
    representative = None
    if task.representative is not None:
        representative = str(task.folder / "representative.npz")
        np.savez(representative, *task.representative)
    files: dict[str, Path | ExportConversionError] = {}
    with converter() as worker, contextlib.ExitStack() as stack:
        folder = str(task.folder)
        if set("*?[\\") & set(task.folder.as_posix()):  # TensorFlow takes the path for a glob
            folder = stack.enter_context(tempfile.TemporaryDirectory())
        traced: dict[str, Any] = {}
        for route in routes:
            form = {"of_blocks": route.of_blocks, "rows_apart": route.rows_apart}
            form["marked"] = task.has_ranges and route.needs_data
            saved_model = os.path.join(
                folder, "_".join(key for key in form if form[key]) or "plain"
            )
            if saved_model not in traced:
                traced[saved_model] = _trace(worker, task, inputs, saved_model, form)
            file = task.folder / f"{route.name}.tflite"
            failure = traced[saved_model] or _run_job(
                worker,
                "convert",
                task.timeout,
                route=route.name,
                traced=saved_model,
                inputs=inputs,
                representative=representative,
                result=str(file),
            )
            files[route.name] = file
            if failure is not None:
                text = (
                    f"The LiteRT converter failed on model '{task.model.name}' by route "
                    f"'{route.name}'. Received: {failure['message']}"
                )
                if failure.get("missing_ops"):
                    text = (
                        f"Model '{task.model.name}' needs operations that LiteRT's built-in "
                        "kernels lack. Replace the layers that use them before the export. "
                        f"Received: operations {', '.join(failure['missing_ops'])}"
                    )
                files[route.name] = ExportConversionError(text)
    return files


def _trace(
    worker: Worker,
    task: Task,
    inputs: list[dict[str, Any]],
    saved_model: str,
    form: dict[str, bool],
) -> dict[str, Any] | None:
    """Have the model, or its block convolutions, traced and written; or what went wrong."""
    nesting = task.signature.nesting
    how = {"inputs": inputs, "nesting": nesting, "output_names": task.names}
    keras_file = str(task.folder / "plain.keras")
    try:
        task.model.save(keras_file)
    except Exception as error:  # any: a custom class may do anything in get_config
        message = f"{type(error).__name__}: {str(error).strip()[:1000]}"
        failure: dict[str, Any] | None = {"stage": "load", "message": message}
    else:
        failure = _run_job(
            worker,
            "trace",
            task.timeout,
            keras_file=keras_file,
            modules=_modules_of_custom_objects(),
            path=saved_model,
            **form,
            **how,
        )
    if failure is None or failure["stage"] != "load":
        return failure
    if keras.backend.backend() != converter_backend():
        title = {"tensorflow": "TensorFlow", "jax": "JAX"}[converter_backend()]
        raise ExportConversionError(
            f"Model '{task.model.name}' could not be rebuilt on the {title} backend in a new "
            "process. Its custom classes must be importable there (not defined in "
            f"`__main__`) and serializable; otherwise export on the {title} backend. "
            f"Received: {failure['message']}"
        )
    # The classes exist in this process only, so it has to trace the model itself.
    model = task.model
    if form["of_blocks"]:
        model = as_convolutions(model, form["rows_apart"])
    write_traced(model, **how, path=saved_model, marked=form["marked"])
    return None


def _run_job(worker: Worker, task: str, timeout: float, **job: Any) -> dict[str, Any] | None:
    try:
        failure: dict[str, Any] | None = worker.run(task, timeout, **job)
    except JobError as error:
        return {"stage": "crash", "message": f"the converter's process failed: {error}"}
    return failure


def _modules_of_custom_objects() -> list[str]:
    """Modules that registered something with Keras and that a new process could import."""
    registered = dict(keras.saving.get_custom_objects())
    found = []
    for name in dict.fromkeys(getattr(value, "__module__", None) for value in registered.values()):
        with contextlib.suppress(ImportError, ValueError):
            if isinstance(name, str) and name != "__main__" and importlib.util.find_spec(name):
                found.append(name)
    return sorted(found)


def litert_outputs(
    worker: Worker, file: Path, task: Task, xnnpack: bool
) -> tuple[list[np.ndarray], int | None]:
    """The outputs of a LiteRT file on the sample, and the memory of loading it, see `run`."""
    batches = full_batches(task.sample, task.signature.batch_size)
    rows, result = file.with_suffix(".sample.npz"), file.with_suffix(".outputs.npz")
    np.savez(rows, *[np.concatenate(pieces) for pieces in zip(*batches, strict=True)])
    try:
        load_bytes: int | None = worker.run(
            "run",
            task.timeout,
            file=str(file),
            xnnpack=xnnpack,
            sample=str(rows),
            input_names=[spec.name for spec in task.signature.inputs],
            output_names=task.names,
            batch_size=task.signature.batch_size,
            result=str(result),
        )
    except JobError as error:
        raise ExportVerificationError(
            "The file must run in ai-edge-litert's interpreter, in a subprocess. Received: "
            f"{error} ({'with' if xnnpack else 'without'} XNNPACK)"
        ) from None
    with np.load(result) as data:
        outputs = [data[f"arr_{i}"][: len(task.sample[0])] for i in range(len(task.names))]
    return outputs, load_bytes


def _verify(task: Task, got: list[np.ndarray], measure: str, allowed: float) -> Comparison:
    result = compare(task.names, task.want, got, measure)
    if not result.error <= allowed:
        raise DisagreementError(
            f"The file must agree with Keras to {allowed:g} ({measure} error, see `tolerance`).",
            f"error={result.error:.3g} at output `{result.worst_output}`, maximal difference "
            f"{result.max_abs_diff:.3g}, on {len(task.sample[0])} rows ({task.origin})",
        )
    return result


def _check_zeros(task: Task, content: bytes, route: Route) -> tuple[str, ...]:
    """Paths of the kernels in use that no tensor of the file holds; raises if zeros were lost."""
    # The zeros between blocks are not in the file at all.
    gathered = task.blocks.found if route.of_blocks else {}
    kernels = [(path, value) for path, value in task.kernels.items() if path not in gathered]
    if all(value.all() for _, value in kernels):
        return ()
    lost, absent = find_zeros(kernels, stored_weights(content))
    if lost is not None:
        raise ExportVerificationError(f"The conversion must keep every zero. Received: {lost}")
    return weights_in_use(task.model, task.signature, task.sample, absent) if absent else ()
