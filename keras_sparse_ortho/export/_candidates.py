"""From routes to verified files: convert, encode, run with and without XNNPACK, count zeros."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho.export._comparison import Comparison, compare
from keras_sparse_ortho.export._conversion import convert
from keras_sparse_ortho.export._errors import (
    ExportConversionError,
    ExportRouteError,
    ExportVerificationError,
)
from keras_sparse_ortho.export._execution import litert_outputs
from keras_sparse_ortho.export._latency import Rival, latencies
from keras_sparse_ortho.export._metadata import attach, seal
from keras_sparse_ortho.export._outcome import RouteOutcome
from keras_sparse_ortho.export._route import Route
from keras_sparse_ortho.export._signature import Signature
from keras_sparse_ortho.export._weights import lost_zeros, read_weights, sparse_kernels

Failure = ExportConversionError | ExportVerificationError | ExportRouteError


@dataclasses.dataclass(frozen=True)
class Task:
    """What all routes of an export share.

    Attributes:
        model: The plain float32 model.
        signature: Its inputs.
        names: Names of its outputs.
        want: Keras' outputs on `sample`.
        sample: Rows to compare on, one array an input.
        representative: Rows to calibrate on, or None.
        tolerance: The user's, or None for each route's own.
        folder: Where the files are made.
        timeout: Seconds for each subprocess.
    """

    model: keras.Model
    signature: Signature
    names: list[str]
    want: list[np.ndarray]
    sample: list[np.ndarray]
    representative: list[np.ndarray] | None
    tolerance: float | None
    folder: Path
    timeout: float

    def allowed(self, route: Route) -> float:
        """The largest error that is let through."""
        return route.tolerance if self.tolerance is None else self.tolerance


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One route and its verified file, or its failure."""

    route: Route
    outcome: RouteOutcome
    file: Path | None = None
    comparison: Comparison | None = None
    failure: Failure | None = None


def candidates(task: Task, routes: Sequence[Route]) -> list[Candidate]:
    """Try each route; a failure is part of the result, not raised."""
    needed = {route.converted_as.name: route.converted_as for route in routes}
    converted = convert(
        task.model,
        list(needed.values()),
        task.signature,
        task.names,
        task.representative,
        task.folder,
        task.timeout,
    )
    return [_candidate(task, route, converted[route.converted_as.name]) for route in routes]


def timed(task: Task, found: Sequence[Candidate], threads: int) -> list[Candidate]:
    """The same candidates with the latency of each verified file."""
    rows = task.signature.batch_size
    inputs = {
        spec.name: np.resize(array, (rows, *array.shape[1:]))
        for spec, array in zip(task.signature.inputs, task.sample, strict=True)
    }
    cases = [
        (c.route.name, c.file, setting)
        for c in found
        if c.file is not None
        for setting, verified in ((True, c.outcome.xnnpack), (False, c.outcome.plain))
        if verified
    ]
    rivals = [Rival(file, inputs, setting, threads) for _, file, setting in cases]
    measured = latencies(rivals, timeout=task.timeout) if rivals else []
    times: dict[str, dict[bool, float]] = {}
    for (name, _, setting), ms in zip(cases, measured, strict=True):
        times.setdefault(name, {})[setting] = ms
    return [_with_latency(c, times[c.route.name], threads) if c.file else c for c in found]


def _with_latency(candidate: Candidate, times: dict[bool, float], threads: int) -> Candidate:
    """The candidate with its figures, and the faster setting in the record of its file."""
    # Without XNNPACK only where that is clearly faster: the other is what users have by default.
    setting = min(times, key=lambda key: times[key] * (1.0 if key else 1.05))
    if candidate.file is not None and setting != candidate.outcome.setting:
        candidate.file.write_bytes(seal(candidate.file.read_bytes(), setting))
    outcome = dataclasses.replace(
        candidate.outcome,
        setting=setting,
        latency_ms=times[setting],
        default_ms=times.get(True),
        threads=threads,
    )
    return dataclasses.replace(candidate, outcome=outcome)


def _candidate(task: Task, route: Route, converted: Path | ExportConversionError) -> Candidate:
    rows = task.signature.batch_size
    try:
        if isinstance(converted, ExportConversionError):
            raise converted
        encoded = route.finish(converted.read_bytes())
        content = attach(encoded.content, _record(task, route))
        file = task.folder / f"{route.name}.verified.tflite"
        file.write_bytes(content)
        runs = [_run(task, route, file, xnnpack) for xnnpack in (True, False)]
        good = [run for run in runs if not isinstance(run, ExportVerificationError)]
        # What a plain interpreter does with a dense file must be right; the sparse encodings of
        # the converter have routes that run only without XNNPACK, and those carry the setting.
        first = runs[0]
        if isinstance(first, ExportVerificationError) and (not good or route.encoding == "dense"):
            raise first
        comparison, load_bytes = good[0]
        lost = lost_zeros(sparse_kernels(task.model.weights), read_weights(content))
        if lost is not None:
            raise ExportVerificationError(f"The conversion must keep every zero. Received: {lost}")
        with_xnnpack = first is good[0]
        file.write_bytes(seal(content, with_xnnpack))
    except (ExportConversionError, ExportVerificationError, ExportRouteError) as failure:
        return Candidate(route, RouteOutcome(route.name, rows, str(failure)), failure=failure)
    except Exception as error:  # of a file that the schema's reader cannot follow
        failed = ExportVerificationError(
            f"The converted file must be readable. Received: {type(error).__name__}: {error}"
        )
        return Candidate(route, RouteOutcome(route.name, rows, str(failed)), failure=failed)
    outcome = RouteOutcome(
        route.name,
        rows,
        bytes=file.stat().st_size,
        error=comparison.error,
        max_abs_diff=comparison.max_abs_diff,
        mean_abs_diff=comparison.mean_abs_diff,
        xnnpack=with_xnnpack,
        setting=with_xnnpack,
        plain=not isinstance(runs[1], ExportVerificationError),
        load_bytes=load_bytes,
        encoded=encoded.encoded,
        kept=encoded.kept,
    )
    return Candidate(route, outcome, file, comparison)


def _record(task: Task, route: Route) -> dict[str, Any]:
    return {
        "route": route.name,
        "model": task.model.name,
        "inputs": [dataclasses.asdict(spec) for spec in task.signature.inputs],
        "outputs": [
            {"name": name, "shape": [task.signature.batch_size, *want.shape[1:]]}
            for name, want in zip(task.names, task.want, strict=True)
        ],
        "measure": route.measure,
        "tolerance": task.allowed(route),
    }


def _run(
    task: Task, route: Route, file: Path, xnnpack: bool
) -> tuple[Comparison, int | None] | ExportVerificationError:
    try:
        got, load_bytes = litert_outputs(
            file, task.signature, task.names, task.sample, task.folder, task.timeout, xnnpack
        )
        return verify(task.names, task.want, got, route.measure, task.allowed(route)), load_bytes
    except ExportVerificationError as error:
        return error


def verify(
    names: list[str], want: list[np.ndarray], got: list[np.ndarray], measure: str, allowed: float
) -> Comparison:
    """The comparison, if the error is allowed.

    Raises:
        ExportVerificationError: if it is not, or a shape differs.
    """
    try:
        result = compare(names, want, got, measure)
    except ValueError as error:
        raise ExportVerificationError(str(error)) from error
    if not result.error <= allowed:
        raise ExportVerificationError(
            f"The file must agree with Keras to {allowed:g} ({measure} error, see "
            f"`tolerance`). Received: error={result.error:.3g} at output "
            f"`{result.worst_output}`, maximal difference {result.max_abs_diff:.3g}"
        )
    return result
