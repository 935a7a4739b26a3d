"""`export_litert` and `export_routes`: a Keras model to LiteRT files, verified."""

import dataclasses
import gzip
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
from rich.console import Console

from keras_sparse_ortho._checks import check_integer
from keras_sparse_ortho._files import path_of, staging
from keras_sparse_ortho._other_names import other_keywords
from keras_sparse_ortho.export._candidates import Candidate, candidates, check_blocks
from keras_sparse_ortho.export._error_source import explained
from keras_sparse_ortho.export._export_warnings import (
    ExportFallbackWarning,
    warn_of_clipping,
    warn_of_integers,
    warn_of_ranges,
    warn_of_routes,
    warn_of_rows,
)
from keras_sparse_ortho.export._flatbuffer import read_weights
from keras_sparse_ortho.export._latency import BenchmarkCase, latencies
from keras_sparse_ortho.export._model import check_model
from keras_sparse_ortho.export._process import converter_backend, is_missing, require
from keras_sparse_ortho.export._record import seal
from keras_sparse_ortho.export._report import (
    ExportReport,
    RouteOutcome,
    installed_versions,
    zstd_size,
)
from keras_sparse_ortho.export._routes import (
    MODES,
    ROUTES,
    ExportRouteError,
    Route,
    checked,
    route_for,
    route_named,
    routes_of,
)
from keras_sparse_ortho.export._sparse_encoding import LEAST_ZEROS
from keras_sparse_ortho.export._task import Task, make_task
from keras_sparse_ortho.quantization import has_trained_ranges

# The speed that is given up for a smaller file; less than 5% is within the noise of the clock.
_NEAR = {"fast": 1.05, "auto": 1.1}


@other_keywords()
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
    threads: int = 1,
    seed: int = 0,
    timeout: float = 600.0,
    verbose: int = 0,
) -> ExportReport:
    """Exports a model as a LiteRT (TFLite) file, verified.

    The model is stripped (to a plain Keras model with its effective weights) and converted with a
    static batch to a float32 file, by TensorFlow or, where that is missing, by JAX and
    litert-converter. ai-edge-quantizer writes integers into it. ai-edge-litert's interpreter runs
    the file with and without XNNPACK, its default, and the outputs are compared with Keras'. The
    file appears at `path` only if it agrees and no zero of a kernel was lost; otherwise an older
    file there is left unchanged. If the converter combines a kernel with other constants (a table
    of positions to which a bias is added), the report names it (`folded`).

    A route is a storage (float32, float16, dynamic_int8, int8), either dense or with one of these
    sparse encodings. `+blocks` (all storages) is for kernels whose zeros leave whole blocks, drawn
    with `Block(32, 32, regular=True)`: the live blocks are gathered, and multiplied by one grouped
    convolution, in Dense, EinsumDense, Conv1D and Conv2D layers. `+csr` (float32) or `+1x16`
    (dynamic_int8; `Block(16, 1)` of a Keras kernel `(in, out)`) give the sparse weights of Dense
    layers to LiteRT's sparse kernel, which saves time at small batches. `+sp` (all but int8) is
    TensorFlow's EXPERIMENTAL_SPARSITY, which makes the file smaller, for unstructured masks as
    well, but mostly saves no time.

    Args:
        model: A built functional, Sequential or subclassed Keras model, with or without our
            wrappers. Every dimension of its inputs but the batch must be known.
        path: Where to write the file, usually `*.tflite`; its folder must exist.
        mode: `None`: the smallest float32 file, with a sparse encoding if the model has zeros for
            one; with a `quantization`, its dense file. `"small"`: the verified route with the
            fewest bytes, whatever its storage. `"fast"`: the least latency on this machine,
            measured; of those within 5% of it the smallest. `"sparse"`: the smallest sparse
            encoding of the given `quantization`. `"auto"`: the smallest of those within 10% of the
            fastest. Or the name of a route, such as `"float32"` (dense) or `"dynamic_int8+1x16"`.
        quantization: With a mode, only routes of this storage are tried (`"float32"` by name);
            `None` is no restriction, and means float32 for `"sparse"`. Without a mode, how the
            weights are stored, densely: `"float32"`; `"float16"`: half the size.
            `"dynamic_int8"`: weights of 1024 and more entries as int8, activations quantized on
            the fly. `"int8"`: weights and activations as int8, with float32 inputs and outputs.
        representative_data: For `"int8"` only, which needs it (modes that choose the storage
            try static int8 only with it), unless the model has ranges from `quantize_aware`:
            arrays of shape `(rows, *input shape)`, nested like the inputs or a dict by input name,
            to calibrate the activations on; `(x, y)` or a data set work as well. 100 to 500 rows of
            real data are usual. From 16 rows on, one in four (at most 32) is held out for the
            comparison, unless there is a `sample`. Rows that do not fill a last batch are left out.
            A warning lists doubts about them: few, equal, or scaled unlike training data.
        batch_size: Rows that one call of the file takes.
        sample: Rows to compare on, nested likewise, or `(x, y)` or batches as for `fit`. Default:
            the rows held out of `representative_data`, its first ones if it has fewer than 16, else
            8 standard normal rows (more for a larger batch). One of the two is needed for integer
            inputs and for subclassed models.
        tolerance: The largest error that passes, in the measure of the route. Let d be
            the difference of one output y. float32: max|d| / max(1, max|y|), default 1e-5. The
            others: sqrt(mean d^2) / sqrt(mean y^2), default 5e-3 for float16, 0.1 for dynamic
            int8, 0.25 for int8; a wrong file has 1 or more.
        threads: Threads of the interpreter for measurements of latency.
        seed: Seed of the random sample.
        timeout: Seconds that the conversion by one route, or one run of a file, may take.
        verbose: 0 is silent; 1 prints each step and the report.

    Returns:
        The `ExportReport`: sizes, zeros of each weight, differences, every route tried.

    Raises:
        ImportError: if ai-edge-litert, ai-edge-quantizer or a converter is missing.
        ExportRouteError: if the named route cannot work, on this model or on any, with the reason.
        ValueError: if an argument does not fit the model, or the model is not built or has dynamic
            dimensions.
        ExportConversionError: if the converter refuses the model (with the operations that LiteRT
            lacks) or crashes.
        ExportVerificationError: if the dense file crashes, disagrees, or lost zeros. The message
            names the layer of a functional model where the difference starts, and what to try. If
            the file of a sparse route does, the dense route of the same storage is taken, with an
            `ExportFallbackWarning`. The same warning says if the file taken runs without XNNPACK
            only, and which routes of a mode gave wrong files.
        OSError: if the file cannot be written, or the disk is full.

    Limits: The whole model must run on LiteRT's built-in operations. Models of mixed or half
    precision are exported, and compared, in float32. In static int8, loops of recurrent layers
    without `unroll=True` compute in floats. In convolutions `+blocks` alone saves time.
    `dynamic_int8+blocks` quantizes the activations of a Dense layer on sequences together for each
    row of the batch, all others one by one. LiteRT Micro lacks the operation DENSIFY of `+sp`
    files. In a dense file zeros are stored like other values, but compress well (`gzip
    model.tflite`, which `load_litert` opens as well). Whether calibration rows are scaled as in
    training is judged by the first BatchNormalization or Normalization layer, whose variance may
    differ by a factor below 64; models without one are doubted only if inputs are far from 1 (below
    1/32 or above 32) and outputs hardly vary or are extreme. On a GPU, Keras may compute in TF32
    and so differ by more than 1e-5; raise `tolerance` there. Custom layers must be importable in a
    new process, except on the TensorFlow backend.

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
    _require_litert()
    check_model(model)
    batch_size = check_integer("batch_size", batch_size)
    threads = check_integer("threads", threads)
    target = check_path(path)
    trained = has_trained_ranges(model)
    has_data = representative_data is not None or trained
    routes = routes_of(mode, quantization, has_data=has_data)
    smallest = mode is None and quantization is None
    single = mode not in MODES
    if single or quantization is not None:
        _check_data(routes[0], representative_data, trained)
    console = Console(quiet=not verbose)
    console.print("Stripping the model and computing Keras' outputs")
    of_blocks = any(route.of_blocks for route in routes)
    task = make_task(
        model, batch_size, sample, representative_data, tolerance, seed, timeout, of_blocks
    )
    warn_of_rows(task)
    warn_of_ranges(task)
    if single and not smallest:
        check_blocks(task, routes[0])
    if smallest and not any(_can_be_encoded(value) for value in task.kernels.values()):
        routes = routes[:1]
    fallback = route_for(routes[0].quantization)

    # On the same file system as the target, so that the last step is one atomic rename.
    with staging(target.parent, target.name) as folder:
        task = dataclasses.replace(task, folder=folder)
        # The fallback of a sparse route is converted with it, so that nothing is converted twice.
        needed = [*routes, *([] if fallback in routes else [fallback])]
        console.print(f"Converting ({', '.join(route.name for route in needed)})")
        tried = candidates(task, needed, smallest)
        wanted = [c for c in tried if c.route in routes]
        # The record of a sparse file says which setting of the interpreter is faster.
        if mode in _NEAR or (single and not smallest and wanted[0].outcome.encoded):
            console.print("Timing the files that agree with Keras")
            wanted = _timed(task, wanted, threads)
        reason = None
        if any(c.file is not None for c in wanted):
            taken = choose(mode, wanted)
        else:
            if len(wanted) == 1 and isinstance(wanted[0].failure, ExportRouteError):
                raise wanted[0].failure
            reason = wanted[0].outcome.reason
            taken = next(c for c in tried if c.route == fallback)
        if taken.file is None:
            raise explained(task, taken.route, taken.failure)
        if reason is not None:
            warnings.warn(
                f"Route '{taken.route.name}' was taken in place of '{routes[0].name}'"
                f"{'' if single else f' (mode={mode!r})'}, whose file did not pass. "
                f"Received: {reason}",
                ExportFallbackWarning,
                stacklevel=2,
            )
        elif not taken.outcome.xnnpack:
            warnings.warn(
                f"The file of route '{taken.route.name}' runs without XNNPACK only, and a default "
                "interpreter crashes on it. Open it with `load_litert`, which reads the setting "
                "from the file.",
                ExportFallbackWarning,
                stacklevel=2,
            )
        if reason is None:
            warn_of_routes(wanted)
        if trained:
            warn_of_integers(task, taken, model)
        else:
            warn_of_clipping(task, taken)
        outcomes = [c.outcome for c in (wanted if taken in wanted else [*wanted, taken])]
        report = _report_on(taken, outcomes, task, target, mode=mode, fallback_reason=reason)
        os.replace(taken.file, target)
    console.print(report)
    return report


@other_keywords()
def export_routes(
    model: keras.Model,
    folder: str | os.PathLike[str],
    routes: Sequence[str] | None = None,
    *,
    representative_data: Any = None,
    batch_size: int = 1,
    sample: Any = None,
    tolerance: float | None = None,
    seed: int = 0,
    timeout: float = 600.0,
) -> dict[str, ExportReport | RouteOutcome]:
    """Exports a model by many routes, each file verified as by `export_litert`.

    Args:
        model: As for `export_litert`.
        folder: An existing folder; the file of a route is `<folder>/<route>.tflite`.
        routes: Names of routes. `None`: all, the static int8 ones only if there is
            `representative_data`.
        representative_data: As for `export_litert`, and so are the others.
        batch_size: Rows of one call.
        sample: Rows to compare on.
        tolerance: The largest error that passes.
        seed: Seed of the random sample.
        timeout: Seconds for each step.

    Returns:
        By the name of the route: the report, or the outcome with the `reason` that there is no
        file.

    Raises:
        ValueError: if an argument does not fit the model, or the folder does not exist.
        OSError: if nothing can be written there, or the disk is full.

    Limits: Latency is not measured; see `latencies`, or `export_litert(mode="fast")`.

    Example:
    >>> import keras, tempfile
    >>> from keras_sparse_ortho.export import export_routes
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    >>> found = export_routes(model, tempfile.mkdtemp(), ["float32", "float32+csr"])
    >>> found["float32"].bytes > 0, found["float32+csr"].reason is None
    (True, False)
    """
    _require_litert()
    check_model(model)
    batch_size = check_integer("batch_size", batch_size)
    target = path_of("folder", folder)
    if not target.is_dir():
        raise ValueError(f"`folder` must exist. Received: folder={str(folder)!r}")
    if routes is None:
        has_data = representative_data is not None or has_trained_ranges(model)
        chosen = [route for route in ROUTES if has_data or not route.needs_data]
        chosen = [route for route in chosen if route.is_there()]
    else:
        chosen = [checked(route_named(name)) for name in routes]
    for route in chosen:
        if route.needs_data:
            _check_data(route, representative_data, has_trained_ranges(model))
    of_blocks = any(route.of_blocks for route in chosen)
    task = make_task(
        model, batch_size, sample, representative_data, tolerance, seed, timeout, of_blocks
    )
    warn_of_rows(task)
    warn_of_ranges(task)
    results: dict[str, ExportReport | RouteOutcome] = {}
    with staging(target, "routes") as stage:
        task = dataclasses.replace(task, folder=stage)
        for candidate in candidates(task, chosen):
            name = candidate.route.name
            results[name] = candidate.outcome
            if candidate.file is not None:
                path = target / f"{name}.tflite"
                results[name] = _report_on(candidate, [candidate.outcome], task, path)
                os.replace(candidate.file, path)
    return results


def choose(mode: str | None, tried: Sequence[Candidate]) -> Candidate:
    """The verified candidate that a mode takes; if possible, one that runs with XNNPACK."""
    good = [c for c in tried if c.file is not None]
    good = [c for c in good if c.outcome.xnnpack] or good
    if mode in _NEAR:

        def ms(one: Candidate) -> float:
            return one.outcome.latency_ms or float("inf")

        near = [c for c in good if ms(c) <= _NEAR[mode] * min(map(ms, good))]
        if mode == "fast":  # no sparse file where a dense one is faster, be it by little
            dense = min((ms(c) for c in good if c.route.encoding == "dense"), default=float("inf"))
            near = [c for c in near if c.route.encoding == "dense" or ms(c) <= dense]
        good = near
    return min(good, key=lambda c: c.outcome.bytes or 0)


def _timed(task: Task, tried: Sequence[Candidate], threads: int) -> list[Candidate]:
    """The candidates with the latency of each file, and the faster setting in its record."""
    rows = task.signature.batch_size
    inputs = {
        spec.name: np.resize(array, (rows, *array.shape[1:]))
        for spec, array in zip(task.signature.inputs, task.sample, strict=True)
    }
    files = {c.route.name: c.file for c in tried if c.file is not None}

    def measured(settings: list[tuple[str, bool]], threads: int) -> dict[tuple[str, bool], float]:
        """Milliseconds by route and setting of XNNPACK."""
        cases = [BenchmarkCase(files[name], inputs, on, threads) for name, on in settings]
        times = latencies(cases, timeout=task.timeout) if cases else []
        return dict(zip(settings, times, strict=True))

    settings = [(c.route.name, True) for c in tried if c.file is not None and c.outcome.xnnpack]
    settings += [
        (c.route.name, False) for c in tried if c.file is not None and c.outcome.without_xnnpack
    ]
    times = measured(settings, threads)
    # Off only where that is clearly faster: users have it on by default.
    chosen = {
        name: min(
            (on for known, on in settings if known == name),
            key=lambda on: times[name, on] * (1.0 if on else 1.05),
        )
        for name in files
    }
    other = 2 if threads == 1 else 1
    possible = other <= (os.cpu_count() or 1)
    others = measured([*chosen.items()], other) if possible else {}
    found = []
    for candidate in tried:
        name = candidate.route.name
        if candidate.file is not None:
            on = chosen[name]
            if on != candidate.outcome.uses_xnnpack:
                candidate.file.write_bytes(seal(candidate.file.read_bytes(), on))
            by_threads = {threads: times[name, on]}
            if possible:
                by_threads[other] = others[name, on]
            outcome = dataclasses.replace(
                candidate.outcome,
                uses_xnnpack=on,
                latency_ms=times[name, on],
                default_ms=times.get((name, True)),
                threads=threads,
                ms_by_threads=dict(sorted(by_threads.items())),
            )
            candidate = dataclasses.replace(candidate, outcome=outcome)
        found.append(candidate)
    return found


def _report_on(
    taken: Candidate,
    outcomes: Sequence[RouteOutcome],
    task: Task,
    target: Path,
    mode: str | None = None,
    fallback_reason: str | None = None,
) -> ExportReport:
    """The report on a verified file that will be moved to `target`."""
    assert taken.file is not None
    assert taken.comparison is not None
    content = taken.file.read_bytes()
    return ExportReport(
        **vars(taken.outcome),
        path=str(target),
        quantization=taken.route.quantization,
        gzip_bytes=len(gzip.compress(content, compresslevel=6)),  # 9 saves 2%, in 9 times the time
        zstd_bytes=zstd_size(content),
        weights=read_weights(content),
        argmax_agreement=taken.comparison.argmax_agreement,
        measure=taken.route.measure,
        sample_rows=len(task.sample[0]),
        compared_on=task.origin,
        versions=installed_versions(),
        mode=mode,
        fallback_reason=fallback_reason,
        routes=tuple(outcomes),
    )


def check_path(path: str | os.PathLike[str]) -> Path:
    """The path of a file to write; ValueError if no LiteRT file can be written there."""
    target = path_of("path", path)
    if not target.name or not target.parent.is_dir():
        raise ValueError(
            "`path` must name a file in a folder that exists; make the folder first. "
            f"Received: path={str(path)!r}"
        )
    if target.suffix in (".h5", ".hdf5", ".keras", ".onnx", ".pb"):
        raise ValueError(
            "`path` is for a LiteRT file, whose name usually ends in `.tflite`; use `model.save` "
            f"or `model.export` for other kinds. Received: path={str(path)!r}"
        )
    try:
        longest = os.pathconf(target.parent, "PC_NAME_MAX")
    except (AttributeError, OSError, ValueError):  # Windows; some network file systems
        longest = 255
    length = len(os.fsencode(target.name))
    if length > longest:
        raise ValueError(
            f"The name of a file may have {longest} bytes there. Received: {length} bytes, "
            f"{target.name[:40]!r}..."
        )
    if target.exists() and not target.is_file():
        kind = "a folder" if target.is_dir() else "a device, pipe or socket"
        raise ValueError(
            f"`path` must name a file, but {kind} has that name; choose another. "
            f"Received: path={str(path)!r}"
        )
    # A symbolic link keeps its target.
    return target.resolve() if target.is_symlink() else target


def _can_be_encoded(kernel: np.ndarray) -> bool:
    """Whether so many entries are zero that a sparse encoding is smaller."""
    return bool(1 - np.count_nonzero(kernel) / kernel.size >= LEAST_ZEROS)


def _check_data(route: Route, data: Any, trained: bool = False) -> None:
    if trained and route.needs_data:
        return  # the ranges of activations are those of training
    if route.needs_data != (data is not None):
        rule = "is needed" if route.needs_data else "is unused"
        raise ValueError(
            f"`representative_data` {rule} with quantization={route.quantization!r}. "
            f"Received: representative_data={'None' if data is None else type(data).__name__}"
        )


def _require_litert() -> None:
    others = ("jax", "litert_converter")
    without = converter_backend() != "tensorflow" and not any(map(is_missing, others))
    require(
        (*(others if without else ("tensorflow",)), "ai_edge_quantizer", "ai_edge_litert"),
        "`export_litert` converts with TensorFlow, or without it with JAX and litert-converter; "
        "ai-edge-quantizer writes integers, and ai-edge-litert runs the file",
        '"keras-sparse-ortho[litert]", or "keras-sparse-ortho[litert-jax]"',
    )
