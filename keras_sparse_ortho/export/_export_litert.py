"""A Keras model to a LiteRT file that was run and compared before it is handed over."""

import dataclasses
import os
import warnings
from typing import Any

import keras
from rich.console import Console

from keras_sparse_ortho._workplace import workplace
from keras_sparse_ortho.export._arguments import (
    MODES,
    accepted,
    check_path,
    check_positive,
    make_task,
    require_litert,
    routes_of,
)
from keras_sparse_ortho.export._candidates import Candidate, candidates, choose, timed
from keras_sparse_ortho.export._errors import (
    ExportFallbackWarning,
    ExportRouteError,
    ExportVerificationError,
)
from keras_sparse_ortho.export._report import ExportReport, gzip_size, report_on, zstd_size
from keras_sparse_ortho.export._routes import Route, route_for
from keras_sparse_ortho.export._sidecar import check_sidecar, write_sidecar


def export_litert(
    model: keras.Model,
    path: str | os.PathLike[str],
    *,
    mode: str | None = None,
    quantization: str | None = None,
    representative_data: Any = None,
    batch_size: int = 1,
    sample: Any = None,
    tolerance: float | None = None,
    sidecar: str | None = None,
    threads: int = 1,
    seed: int = 0,
    timeout: float = 600.0,
    verbose: int = 0,
) -> ExportReport:
    """Export a model as a LiteRT (TFLite) file, verified.

    The model is stripped (to a plain Keras model with its effective weights), converted with a
    static batch, and the file is run by ai-edge-litert's interpreter with and without XNNPACK,
    its default, and compared with Keras on sample data. The file appears at `path` only if it
    agrees and no zero of a kernel was lost; otherwise what stood there before stays as it was.
    A kernel that the converter computes together with other constants (a table of positions to
    which a bias is added) is in no tensor of the file, and the report names it (`folded`).

    A route is a storage (float32, float16, dynamic_int8, int8), by itself dense, or with one of
    these sparse encodings: `+csr` (float32) and `+1x4` (float32), `+1x16` (both int8) hand the
    sparse weights of Dense layers to LiteRT's kernel, where they save time; `+sp` is what the
    converter's own EXPERIMENTAL_SPARSITY makes, which mostly saves bytes of the file only. A
    block of 1x16 is `Block(16, 1)` of a Keras kernel `(in, out)`.

    Conversion and run happen in subprocesses, on CPU, because both are known to crash. The
    conversion rebuilds the model on the TensorFlow backend, whatever backend is in use.

    Args:
        model: A built functional, Sequential or subclassed Keras model, with or without our
            wrappers. Every dimension of its inputs but the batch must be known.
        path: Where to write the file, by custom ending in `.tflite`; its folder must exist.
        mode: `None`: dense, as `quantization` says. `"small"`: the verified route of the fewest
            bytes (under the sidecar's compression, if one is asked for). `"fast"`: of the least
            latency on this machine, measured; of those within 5% of it the smallest. `"sparse"`:
            the smallest sparse encoding of the given `quantization`. `"auto"`: the smallest of
            those within 10% of the fastest.
            Or the name of a route, such as `"dynamic_int8+1x16"`.
        quantization: With a mode, only routes of this storage are tried (`"float32"` by name);
            `None` is no restriction, and means float32 for `"sparse"`. Without one, how the
            weights are stored. `None`: float32. `"float16"`: half the size.
            `"dynamic_int8"`: weights of 1024 and more entries as int8, activations quantized on
            the fly. `"int8"`: weights and activations as int8, with float32 inputs and outputs.
        representative_data: For `"int8"` only, and needed there (modes that choose the storage
            try static int8 only with it): arrays of shape
            `(rows, *input shape)`, nested like the inputs or a dict by input name, to calibrate
            the activations on. 100 to 500 rows of real data are usual. Rows that do not fill a
            last batch are left out. `(x, y)` or a data set will do as well.
        batch_size: Rows that one call of the file takes.
        sample: Arrays of shape `(rows, *input shape)` to compare on, nested likewise; `(x, y)` or
            batches, as `fit` takes them, of which the inputs are used. Default:
            the first rows of `representative_data`, else 8 standard normal rows (more for a
            larger batch). Needed where an input is of integers, and for subclassed models.
        tolerance: The largest error that is let through, in the measure of the route. Let d be
            the difference of one output y. float32: max|d| / max(1, max|y|), default 1e-5. The
            others: sqrt(mean d^2) / sqrt(mean y^2), the error relative to the output as a whole,
            default 5e-3 for float16, 0.1 for dynamic int8, 0.25 for int8. On MLPs, CNNs,
            LSTMs and transformers at density 0.1 we measured at most 6e-4, 0.014 and 0.12; a
            wrong file has 1 or more.
        sidecar: `"zstd"` or `"gzip"`: also write the compressed file, at `path` with `.zst` or
            `.gz` added, which `load_litert` opens as well.
        threads: Threads of the interpreter where latency is measured.
        seed: Seed of the random sample.
        timeout: Seconds that the conversion by one route, or one run of a file, may take.
        verbose: 0 is silent; 1 says each step and prints the report.

    Returns:
        The `ExportReport`: sizes, zeros of each weight, differences, every route tried.

    Raises:
        ImportError: if TensorFlow or ai-edge-litert is missing.
        ExportRouteError: if the named route cannot work, on this model or on any, with the reason.
        ValueError: if an argument does not fit the model, the model is not built or has dynamic
            dimensions, or the route is known to fail on it.
        ExportConversionError: if the converter refuses the model (with the operations that LiteRT
            lacks) or crashes.
        ExportVerificationError: if the dense file crashes, disagrees, or lost zeros. If the file
            of a sparse route does, the dense route of the same storage is taken, with an
            `ExportFallbackWarning` that says why.
        OSError: if nothing can be written where the file is to stand, or the disk is full.

    Limits: The whole model must run on LiteRT's built-in operations; there is no fallback to
    TensorFlow operations, since a plain interpreter cannot run those (`keras.Model.export` with
    `format="litert"` takes converter options for that). Models of mixed or half precision are
    exported, and compared, in float32. A model written as a class is to be stripped first, since
    that changes it in place. Full int8 needs recurrent layers with `unroll=True`.
    Sparse encodings save time in Dense layers only: LiteRT has no sparse convolutions on x86. In
    a dense file zeros are stored like other values, and show in its compressed size. Latencies
    are of this machine, while it does whatever else it does. On a GPU, Keras may compute in
    TF32 and so differ by more than 1e-5; raise `tolerance` there. Custom layers must be
    importable in a new process, except on the TensorFlow backend.

    Example:
    >>> import keras, tempfile, pathlib
    >>> from keras_sparse_ortho.export import export_litert
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "tiny.tflite"
    >>> report = export_litert(model, path)
    >>> report.total_weights, report.max_abs_diff < 1e-5, path.stat().st_size == report.bytes
    (8, True, True)

    Reference:
        [LiteRT: post-training quantization](
        https://ai.google.dev/edge/litert/models/post_training_quantization)
    """
    require_litert()
    batch_size = check_positive("batch_size", batch_size)
    threads = check_positive("threads", threads)
    if sidecar is not None:
        check_sidecar(sidecar)
    target = check_path(path, sidecar)
    routes = routes_of(mode, quantization, has_data=representative_data is not None)
    single = mode not in MODES
    if single:
        routes[0].check(model)
    console = Console(quiet=not verbose)
    console.print("Stripping, and asking Keras for the outputs to compare with")
    task = make_task(
        model,
        batch_size,
        sample,
        representative_data,
        data_for=routes[0] if single or quantization is not None else None,
        tolerance=tolerance,
        seed=seed,
        timeout=timeout,
    )
    routes = routes if single else accepted(routes, model)
    fallback = route_for(routes[0].quantization)

    # Aside, but on the same file system, so that the last step is one atomic rename.
    with workplace(target.parent, target.name) as folder:
        task = dataclasses.replace(task, folder=folder)
        # With what a named sparse route falls back to, so that nothing is converted twice.
        needed = [*routes, *([] if fallback in routes else [fallback])]
        console.print(f"Converting ({', '.join(route.name for route in needed)})")
        tried = candidates(task, needed)
        wanted = [c for c in tried if c.route in routes]
        # The record of a sparse file says which setting of the interpreter is the faster one.
        if mode in ("fast", "auto") or (single and wanted[0].outcome.encoded):
            console.print("Timing the files that agree with Keras")
            wanted = timed(task, wanted, threads)
        if mode == "small" and sidecar is not None:
            wanted = [_packed(c) for c in wanted]
        reason = None
        if any(c.file is not None for c in wanted):
            taken = choose(mode or "", wanted, sidecar)
        else:
            taken = _fall_back(wanted, tried, fallback)
            reason = wanted[0].outcome.reason
        if taken.file is None or taken.comparison is None:
            raise taken.failure or ExportVerificationError("There is no file.")
        _warn(taken, reason, routes, mode)
        outcomes = [c.outcome for c in (wanted if taken in wanted else [*wanted, taken])]
        report = report_on(
            taken, outcomes, task, target, sidecar, mode=mode, fallback_reason=reason
        )
        if sidecar is not None:
            write_sidecar(taken.file, target, sidecar)
        os.replace(taken.file, target)
    console.print(report)
    return report


def _packed(candidate: Candidate) -> Candidate:
    if candidate.file is None:
        return candidate
    content = candidate.file.read_bytes()
    outcome = dataclasses.replace(
        candidate.outcome, gzip_bytes=gzip_size(content), zstd_bytes=zstd_size(content)
    )
    return dataclasses.replace(candidate, outcome=outcome)


def _fall_back(wanted: list[Candidate], tried: list[Candidate], fallback: Route) -> Candidate:
    """The dense file in place of the sparse one, unless the route can never work on the model."""
    first = wanted[0]
    if isinstance(first.failure, ExportRouteError) and len(wanted) == 1:
        raise first.failure
    (dense,) = [c for c in tried if c.route is fallback]
    return dense


def _warn(taken: Candidate, reason: str | None, routes: list[Route], mode: str | None) -> None:
    if reason is not None:
        warnings.warn(
            f"Route '{taken.route.name}' was taken in place of '{routes[0].name}'"
            f"{f' (mode={mode!r})' if mode in MODES else ''}, whose file did not pass. "
            f"Received: {reason}",
            ExportFallbackWarning,
            stacklevel=3,
        )
    elif not taken.outcome.xnnpack:
        warnings.warn(
            f"The file of route '{taken.route.name}' runs without XNNPACK only, and a default "
            "interpreter crashes on it: open it with `load_litert`, which reads the setting from "
            "the file.",
            ExportFallbackWarning,
            stacklevel=3,
        )
