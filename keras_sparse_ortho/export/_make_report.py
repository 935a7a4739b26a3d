"""The report of the route that was taken."""

from collections.abc import Sequence
from pathlib import Path

from keras_sparse_ortho.export._candidates import Candidate, Task
from keras_sparse_ortho.export._outcome import RouteOutcome
from keras_sparse_ortho.export._report import ExportReport
from keras_sparse_ortho.export._requirements import versions
from keras_sparse_ortho.export._sidecar import sidecar_path
from keras_sparse_ortho.export._sizes import gzip_size, zstd_size
from keras_sparse_ortho.export._weights import read_weights


def report_on(
    taken: Candidate,
    outcomes: Sequence[RouteOutcome],
    task: Task,
    target: Path,
    sidecar: str | None = None,
    mode: str | None = None,
    fallback_reason: str | None = None,
) -> ExportReport:
    """Measure the sizes of a verified file and put all figures together.

    Args:
        taken: A candidate with a file.
        outcomes: Of every route that was tried.
        task: What the routes share.
        target: Where the file will stand.
        sidecar: Compression of the file beside it, or None.
        mode: As asked for.
        fallback_reason: Why another route was taken than asked for, or None.
    """
    if taken.file is None or taken.comparison is None:
        raise ValueError(f"There must be a file. Received: {taken.outcome.reason}")
    content = taken.file.read_bytes()
    result = taken.comparison
    return ExportReport(
        path=str(target),
        quantization=taken.route.quantization,
        batch_size=task.signature.batch_size,
        bytes=len(content),
        gzip_bytes=gzip_size(content),
        zstd_bytes=zstd_size(content),
        weights=read_weights(content),
        max_abs_diff=result.max_abs_diff,
        mean_abs_diff=result.mean_abs_diff,
        argmax_agreement=result.argmax_agreement,
        error=result.error,
        tolerance=task.allowed(taken.route),
        measure=taken.route.measure,
        sample_rows=len(task.sample[0]),
        versions=versions(),
        route=taken.route.name,
        mode=mode,
        xnnpack=taken.outcome.xnnpack,
        setting=taken.outcome.setting,
        load_bytes=taken.outcome.load_bytes,
        sidecar=None if sidecar is None else str(sidecar_path(target, sidecar)),
        fallback_reason=fallback_reason,
        routes=tuple(outcomes),
    )
