"""From routes to verified files: convert, encode, run with and without XNNPACK, count zeros."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keras_sparse_ortho._workplace import is_full, no_room
from keras_sparse_ortho.export._arguments import Task
from keras_sparse_ortho.export._conversion import convert
from keras_sparse_ortho.export._errors import (
    ExportConversionError,
    ExportRouteError,
    ExportVerificationError,
)
from keras_sparse_ortho.export._kernels_in_file import find_kernels_in_file
from keras_sparse_ortho.export._latency import BenchmarkCase, latencies
from keras_sparse_ortho.export._litert_file import attach, seal, stored_weights
from keras_sparse_ortho.export._outcome import RouteOutcome
from keras_sparse_ortho.export._process import Worker
from keras_sparse_ortho.export._routes import Route
from keras_sparse_ortho.export._verification import (
    Comparison,
    litert_outputs,
    paths_in_use,
    sparse_kernels,
    verify,
)

Failure = ExportConversionError | ExportVerificationError | ExportRouteError

# So much speed is given up for a smaller file; 5% cannot be told from the noise of the clock.
_NEAR = {"fast": 1.05, "auto": 1.1}


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One route and its verified file, or its failure."""

    route: Route
    outcome: RouteOutcome
    file: Path | None = None
    comparison: Comparison | None = None
    failure: Failure | None = None


def candidates(task: Task, routes: Sequence[Route]) -> list[Candidate]:
    """Try each route; a failure is part of the result, not raised, but for a full disk.

    Raises:
        OSError: if there is no room for the files.
    """
    needed = {route.converted_as.name: route.converted_as for route in routes}
    converted = convert(task, list(needed.values()))
    found = [_candidate(task, route, converted[route.converted_as.name]) for route in routes]
    failures = [str(c.failure) for c in found if c.failure is not None]
    if failures and is_full(task.folder, failures):
        raise no_room(task.folder.parent, failures[0])  # no fault of a route
    return found


def timed(task: Task, tried: Sequence[Candidate], threads: int) -> list[Candidate]:
    """The same candidates with the latency of each verified file."""
    rows = task.signature.batch_size
    inputs = {
        spec.name: np.resize(array, (rows, *array.shape[1:]))
        for spec, array in zip(task.signature.inputs, task.sample, strict=True)
    }
    cases = [
        (c.route.name, BenchmarkCase(c.file, inputs, xnnpack, threads))
        for c in tried
        if c.file is not None
        for xnnpack, verified in ((True, c.outcome.xnnpack), (False, c.outcome.without_xnnpack))
        if verified
    ]
    measured = latencies([case for _, case in cases], timeout=task.timeout) if cases else []
    times: dict[str, dict[bool, float]] = {}
    for (name, case), ms in zip(cases, measured, strict=True):
        times.setdefault(name, {})[case.xnnpack] = ms
    return [_with_latency(c, times[c.route.name], threads) if c.file else c for c in tried]


def choose(mode: str, tried: Sequence[Candidate], sidecar: str | None) -> Candidate:
    """The candidate that a mode takes, of at least one verified.

    Files that only run without XNNPACK are taken where there is no other: a plain interpreter
    would crash on them.
    """
    good = [c for c in tried if c.file is not None]
    good = [c for c in good if c.outcome.xnnpack] or good

    def size(c: Candidate) -> int:
        packed = {"gzip": c.outcome.gzip_bytes, "zstd": c.outcome.zstd_bytes}.get(sidecar or "")
        return packed or c.outcome.bytes or 0

    def latency(c: Candidate) -> float:
        return c.outcome.latency_ms or float("inf")

    if mode in _NEAR:
        least = min(map(latency, good))
        good = [c for c in good if latency(c) <= _NEAR[mode] * least]
    return min(good, key=size)


def _candidate(task: Task, route: Route, converted: Path | ExportConversionError) -> Candidate:
    rows = task.signature.batch_size
    try:
        if isinstance(converted, ExportConversionError):
            raise converted
        encoded = route.finish(converted.read_bytes())
        content = attach(encoded.content, _record(task, route))
        file = task.folder / f"{route.name}.verified.tflite"
        file.write_bytes(content)
        with Worker() as worker:
            runs = [_run(worker, task, route, file, xnnpack) for xnnpack in (True, False)]
        good = [run for run in runs if not isinstance(run, ExportVerificationError)]
        # What a plain interpreter does with a dense file must be right; the sparse encodings of
        # the converter have routes that run only without XNNPACK, and those carry the setting.
        first = runs[0]
        if isinstance(first, ExportVerificationError) and (not good or route.encoding == "dense"):
            raise first
        comparison, load_bytes = good[0]
        folded = _check_zeros(task, content)
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
        without_xnnpack=not isinstance(runs[1], ExportVerificationError),
        uses_xnnpack=with_xnnpack,
        load_bytes=load_bytes,
        encoded=encoded.encoded,
        kept=encoded.kept,
        folded=folded,
    )
    return Candidate(route, outcome, file, comparison)


def _check_zeros(task: Task, content: bytes) -> tuple[str, ...]:
    """Paths of the kernels that are in use, but in no tensor of the file.

    Raises:
        ExportVerificationError: if a tensor has lost zeros of the kernel that it holds.
    """
    kernels = sparse_kernels(task.model.weights)
    if all(value.all() for _, value in kernels):
        return ()
    found = find_kernels_in_file(kernels, stored_weights(content))
    if found.lost is not None:
        raise ExportVerificationError(
            f"The conversion must keep every zero. Received: {found.lost}"
        )
    if not found.absent:
        return ()
    return paths_in_use(task.model, task.signature, task.sample, found.absent)


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
    worker: Worker, task: Task, route: Route, file: Path, xnnpack: bool
) -> tuple[Comparison, int | None] | ExportVerificationError:
    try:
        got, load_bytes = litert_outputs(
            worker, file, task.signature, task.names, task.sample, task.timeout, xnnpack
        )
        return verify(task.names, task.want, got, route.measure, task.allowed(route)), load_bytes
    except ExportVerificationError as error:
        worker.close()  # the next run is to be one in a fresh process, its memory counted anew
        return error


def _with_latency(candidate: Candidate, times: dict[bool, float], threads: int) -> Candidate:
    """The candidate with its figures, and the faster setting in the record of its file."""
    # Without XNNPACK only where that is clearly faster: the other is what users have by default.
    xnnpack = min(times, key=lambda key: times[key] * (1.0 if key else 1.05))
    if candidate.file is not None and xnnpack != candidate.outcome.uses_xnnpack:
        candidate.file.write_bytes(seal(candidate.file.read_bytes(), xnnpack))
    outcome = dataclasses.replace(
        candidate.outcome,
        uses_xnnpack=xnnpack,
        latency_ms=times[xnnpack],
        default_ms=times.get(True),
        threads=threads,
    )
    return dataclasses.replace(candidate, outcome=outcome)
