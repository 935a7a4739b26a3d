"""`export_litert`: a Keras model to a LiteRT file, verified."""

import dataclasses
import gzip
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._checks import (
    check_integer,
    check_number,
    other_keywords,
)
from keras_sparse_ortho._files import path_of, staging
from keras_sparse_ortho._foreign_names import for_value
from keras_sparse_ortho._keras_internals import computes_its_graph, graph_calls
from keras_sparse_ortho._types import Nested
from keras_sparse_ortho.export._candidates import (
    Candidate,
    candidates,
)
from keras_sparse_ortho.export._explain import (
    explained,
    warn_of_floats,
    warn_of_rows,
)
from keras_sparse_ortho.export._load_litert import latencies
from keras_sparse_ortho.export._process import (
    converter_backend,
    is_missing,
    require,
)
from keras_sparse_ortho.export._remedies import tried_remedies, with_remedy
from keras_sparse_ortho.export._routes import (
    ENDS,
    MODES,
    RANGES,
    TARGETS,
    ExportReport,
    Route,
    fuses_lstms,
    installed_versions,
    routes_of,
)
from keras_sparse_ortho.export._task import (
    STRETCH,
    Remedy,
    Steps,
    Task,
    Workspace,
    task_of,
)
from keras_sparse_ortho.export._weight_zeros import read_weights
from keras_sparse_ortho.quantization import has_trained_ranges

# Models and data: a slip would replace the given ones.
_OTHER_KINDS = {
    ".h5",
    ".hdf5",
    ".keras",
    ".onnx",
    ".pb",
    ".npy",
    ".npz",
    ".csv",
    ".json",
    ".zip",
}
# The speed that "fast" gives up for a smaller file, within the noise of the clock.
_SPEED_MARGIN = 1.05
_LEAST_ZEROS = (
    0.3  # of a kernel: below this the indices cost more than the zeros save
)


@other_keywords
def export_litert(
    model: keras.Model,
    path: str | os.PathLike[str],
    *,
    mode: str | None = None,
    representative_data: Any = None,
    batch_size: int = 1,
    sample: Any = None,
    tolerance: float | None = None,
    timeout: float = 600.0,
    inference_input_type: str = "float32",
    inference_output_type: str = "float32",
    target: str | None = None,
    ranges: str = "measured",
    equalize: bool = False,
    floats: Sequence[str] | str | None = None,
    max_loss: float | None = None,
) -> ExportReport:
    """Exports a model as a LiteRT (TFLite) file, verified.

    The stripped model is converted with a static batch to a float32 file, by TensorFlow or, where
    that is missing, by JAX and litert-converter. ai-edge-quantizer writes integers into it.
    ai-edge-litert's interpreter runs the file with XNNPACK, and the outputs are compared with
    Keras'. The file appears at `path` only if it agrees and no zero of a kernel was lost; otherwise
    an older file stays.

    A route is a storage (float32, float16, dynamic_int8, dynamic_int4, int8, int4), dense or with
    an encoding. `+blocks` (all but int4) is for kernels whose zeros leave whole blocks, drawn with
    `Block(32, 32, regular=True)`; `+sp` (float32, float16) is TensorFlow's EXPERIMENTAL_SPARSITY,
    for unstructured masks as well: mostly no faster. `+lstm` (all but int4) has each
    `keras.layers.LSTM` as LiteRT's fused operator in place of a loop, for microcontrollers. The
    page on deployment explains and compares them.

    Args:
        model: A built functional, Sequential or subclassed Keras model, with or without our
            wrappers. Every dimension of its inputs but the batch must be known.
        path: str or path. Where to write, usually `*.tflite`; its folder must exist.
        mode: `None`: the smallest float32 file, with a sparse encoding if the model has zeros for
            one. `"small"`: the verified route with the fewest bytes, whatever its storage;
            `"gzip"`: the one with the fewest under gzip. `"fast"`: the least latency on one thread
            of this machine; of those within 5% the smallest. Or the name of a route, such as
            `"int8+blocks"`: `"float32"`; `"float16"`: half the size; `"dynamic_int8"`: weights of
            1024 and more entries as int8, activations quantized on the fly; `"int8"`: weights and
            activations as int8; `"dynamic_int4"`, `"int4"`: the same with kernels of Dense layers
            in 4 bits, or 2 for ternary ones (dynamic only), for kernels of `quantize_aware`;
            kernels that it has rounded to 8 bits, or left out, stay int8.
        representative_data: For `"int8"` and `"int4"`, which need it (`"small"` and `"fast"` skip
            them without) unless the model has ranges from `quantize_aware`: arrays `(rows, *input
            shape)` to calibrate activations on, nested like the inputs or a dict by input name;
            `(x, y)` or a data set work as well. 100 to 500 rows of real data are usual. From 16
            rows on, one in four (at most 32) is held out for the comparison, unless there is a
            `sample`. Rows that do not fill a last batch are left out. A warning lists doubts about
            the rows: few, equal, or scaled unlike training data.
        batch_size: int. Rows that one call of the file takes.
        sample: Rows to compare on, nested the same way, or `(x, y)` or batches as for `fit`.
            Default: the rows held out of `representative_data`, its first ones if it has fewer than
            16, else 8 standard normal rows (more for a larger batch). Integer inputs and subclassed
            models need one of the two.
        tolerance: float. The largest error that passes. With the difference d of one output y, it
            is max|d| / max(1, max|y|) for float32, by default at most 1e-5, else sqrt(mean d^2) /
            sqrt(mean y^2): at most 5e-3 for float16, 0.1 for dynamic int8 and int4, 0.25 for int8;
            a wrong file has 1 or more.
        timeout: float. Seconds for the conversion by one route, or one run of a file.
        inference_input_type: `"float32"`; with `"int8"` and `"int4"` also `"int8"` or `"uint8"`,
            for devices without floats. `load_litert` takes and gives floats.
        inference_output_type: The same of the outputs.
        target: Of `"fast"`: `None`, this machine, or `"arm64"`. Files are timed on this machine all
            the same, without AMX, which no such processor has; int8 dot products (Armv8.2) are
            assumed. So the order is an estimate, and the report says so.
        ranges: With `"int8"` or `"int4"`: `"measured"`, from the least to the largest value on the
            rows that calibrate; or `"fitted"`, for each tensor the part of it, from 1 to 0.5, in
            which the outputs lose least on up to 96 of these rows. That takes seconds, and costs no
            bytes.
        equalize: bool. With `"int8"` or `"int4"`: whether ranges of channels are made even first,
            on the rows that calibrate, see `quantization.equalize`. It costs no bytes. For
            functional and Sequential models; others raise NotPrunableError.
        floats: With `"int8"` or `"int4"`: names of layers whose operations stay in floats, or
            `"auto"`, the shortest stretch of operations with nine tenths of the error in it, by the
            table of `int8_errors`; with a `tolerance` the shortest with which the error is that
            low. It is chosen on rows held out of `representative_data`, a quarter and at most 32,
            which neither calibrate nor compare. Kernels of these operations are stored in float16.
        max_loss: float. With `"int8"` or `"int4"`: the error that is low enough, in place of the
            four arguments from `tolerance` on that make it low. One file after the other is made,
            as measured, with fitted ranges, equalized, with a stretch in floats (with float ends
            only), and the first whose error is at most that is taken; `report.routes` has all.

    Returns:
        The `ExportReport`: sizes, zeros of each weight, differences, every route tried; its `plot`
        shows bytes and milliseconds of those of `"fast"`. A terminal sees each route's progress.

    Raises:
        ImportError: if ai-edge-litert, ai-edge-quantizer or a converter is missing.
        ExportRouteError: if the named route cannot work, on this model or on any, with the reason.
        ValueError: if an argument does not fit the model, or the model is not built or has dynamic
            dimensions, or a stateful layer has a state that is not zero.
        ExportConversionError: if the converter crashes or refuses the model, with the operations
            that LiteRT lacks; or if, without TensorFlow, the model assigns variables in a call.
        ExportVerificationError: if the file crashes, disagrees, or lost zeros. The message names
            the layer of a functional model where the difference starts, and what to try. A mode
            takes the next file instead; the report has the reason.
        OSError: if the file cannot be written, or the disk is full.
        FloatOperationsWarning: A warning: an integer file computes some operations in floats; the
            report lists them (`in_floats`).

    Limits: the whole model must run on LiteRT's built-in operations. Models of mixed or half
    precision are exported, and compared, in float32. In static int8, loops of recurrent layers
    without `unroll=True` compute in floats; LSTMs by `+lstm` in integers. Calibration rows are
    doubted only if inputs are far from 1 (below 1/32 or above 32) and outputs hardly vary or are
    extreme. On a GPU, Keras may compute in TF32 and differ by more than 1e-5: raise `tolerance`.
    Except on TensorFlow, a new process must be able to import custom layers.

    Examples:
        >>> import keras, tempfile, pathlib
        >>> from keras_sparse_ortho.export import export_litert
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "tiny.tflite"
        >>> report = export_litert(model, path)
        >>> report.total_weights, report.max_abs_diff < 1e-5, path.stat().st_size == report.bytes
        (8, True, True)
    """
    check_model(model)
    require_litert()
    batch_size = check_integer("batch_size", batch_size)
    timeout = check_number("timeout", timeout)
    file = check_path(path)
    trained = has_trained_ranges(model)
    routes = routes_of(mode, representative_data is not None or trained)
    ends = inference_input_type, inference_output_type
    if floats is not None and not isinstance(floats, str):
        floats = list(floats)
    remedy = Remedy(ranges == "fitted", equalize, floats)
    _check_arguments(routes, mode, ends, target, representative_data, trained)
    _check_remedies(model, routes, remedy, ranges, max_loss, trained)
    if max_loss is not None:
        tolerance = _checked_loss(max_loss, tolerance, remedy)
    task = task_of(
        model,
        batch_size,
        sample,
        representative_data,
        tolerance,
        timeout,
        of_blocks=any(route.of_blocks for route in routes),
        of_lstms=any(fuses_lstms(route) for route in routes),
        ends=ends,
        chooses=remedy.chooses or max_loss is not None,
    )
    task = with_remedy(task, remedy)
    warn_of_rows(task)
    if mode is None and not _has_zeros(task):
        routes = routes[:1]
    report = _exported(task, routes, file, mode, target, max_loss is not None)
    if floats is None and STRETCH not in report.remedy:
        warn_of_floats(report)
    return report


def _exported(
    task: Task,
    routes: Sequence[Route],
    file: Path,
    mode: str | None,
    target: str | None,
    tries_remedies: bool,
) -> ExportReport:
    """Writes the file of the best route.

    Args:
        task: The task of the export.
        routes: The routes to try.
        file: Path. Where to write.
        mode: As for `export_litert`.
        target: As for `export_litert`.
        tries_remedies: bool. Whether remedies are tried until the error is low enough.
    """
    # On the target's file system, so that the last step is one atomic rename.
    with staging(file.parent, file.name) as folder:
        steps = Steps("auto" if len(routes) > 1 else False)
        workspace = Workspace(folder, steps)
        size = {None: len, "small": len, "gzip": _zipped}.get(mode)
        if tries_remedies:
            tried = tried_remedies(task, routes[0], workspace)
        else:
            tried = candidates(task, routes, workspace, size)
        winner = _best_of(tried, routes[0], task, workspace, mode, target)
        assert winner.file is not None
        report = ExportReport(
            **_outcome_of(winner, task),
            **_figures_of(winner.file.read_bytes()),
            **_settings_of(task),
            path=str(file),
            mode=mode,
            assumed=None if target is None else TARGETS[target],
            routes=tuple(candidate.outcome for candidate in tried),
        )
        os.replace(winner.file, file)
    return report


def _best_of(
    tried: list[Candidate],
    first_route: Route,
    task: Task,
    workspace: Workspace,
    mode: str | None,
    target: str | None,
) -> Candidate:
    """The smallest verified file, or with `mode="fast"` the one to choose by its time.

    Args:
        tried: The files of all routes, the smallest first.
        first_route: The route whose failure is explained if there is no file.
        task: The task of the export.
        workspace: Its folder and progress.
        mode: As for `export_litert`.
        target: As for `export_litert`.
    """
    verified = [candidate for candidate in tried if candidate.file is not None]
    if not verified:
        first_failures = [
            candidate for candidate in tried if candidate.route == first_route
        ]
        raise explained(task, first_failures[0], workspace.folder)
    if mode != "fast":
        return verified[0]
    workspace.say(f"timing {len(verified)} files")
    _time(verified, task.timeout, target)
    return choose(verified)


def _outcome_of(winner: Candidate, task: Task) -> dict[str, Any]:
    """The figures of the best file, with the remedy that it was asked for."""
    figures = dict(vars(winner.outcome))
    if task.remedy != Remedy():
        figures["remedy"] = task.remedy.name
    return figures


def _figures_of(content: bytes) -> dict[str, Any]:
    """Size under gzip, and zeros of the weights, of a file."""
    return {"gzip_bytes": _zipped(content), "weights": read_weights(content)}


def _settings_of(task: Task) -> dict[str, Any]:
    """The rows of a comparison, the ends of the file, and versions."""
    return {
        "sample_rows": len(task.rows.compared[0]),
        "compared_on": task.rows.origin,
        "ends": task.ends,
        "versions": installed_versions(),
    }


def _has_zeros(task: Task) -> bool:
    """Whether a kernel has so many zeros that an encoding of them may pay."""
    shares = [np.mean(value == 0) for value in task.kernels.values()]
    return any(share >= _LEAST_ZEROS for share in shares)


def check_model(model: object) -> None:
    if not isinstance(model, keras.Model):
        kind = f"{type(model).__module__}.{type(model).__name__}"
        raise ValueError(
            f"`model` must be a model of Keras 3. Received: model of type {kind}"
        )


def _check_arguments(
    routes: Sequence[Route],
    mode: str | None,
    ends: tuple[str, str],
    target: str | None,
    representative_data: Nested,
    trained: bool,
) -> None:
    """ValueError if arguments of `export_litert` do not fit each other.

    Args:
        routes: Those of the mode.
        mode: As the user gave it.
        ends: Types of inputs and outputs.
        target: As the user gave it.
        representative_data: As the user gave it.
        trained: bool. Whether ranges of activations were trained.
    """
    are_static = all(route.needs_data for route in routes)
    allowed = ENDS if are_static else ENDS[:1]
    # Tf.int8 equals "int8".
    if not all(isinstance(end, str) and end in allowed for end in ends):
        raise ValueError(
            "`inference_input_type` and `inference_output_type` must be 'float32', or, with a "
            "static integer mode such as 'int8', one of 'int8' and 'uint8'."
            f"{for_value('inference_input_type', ends[0])}"
            f"{for_value('inference_output_type', ends[1])} "
            f"Received: {ends}, mode={mode!r}"
        )
    if target is not None and (target not in TARGETS or mode != "fast"):
        raise ValueError(
            f"`target` must be None or one of {list(TARGETS)}, and that with mode='fast'. "
            f"Received: {target=}, {mode=}"
        )
    if mode in MODES:
        return
    needs_data = routes[0].needs_data
    # With trained ranges, data are rows to compare on.
    if needs_data != (representative_data is not None) and not (
        trained and needs_data
    ):
        raise ValueError(
            f"`representative_data` is {'needed' if needs_data else 'unused'} with "
            f"mode={mode!r}. Received: {representative_data=!r:.60}"
        )


def _check_remedies(
    model: keras.Model,
    routes: Sequence[Route],
    remedy: Remedy,
    ranges: object,
    max_loss: object,
    trained: bool,
) -> None:
    """ValueError where remedies do not fit the other arguments.

    Args:
        model: The user's model.
        routes: Those of the mode.
        remedy: The user's remedies.
        ranges: As the user gave it, and so is the next one.
        max_loss: The error that is low enough.
        trained: bool. Whether ranges of activations were trained.
    """
    if ranges not in RANGES:
        raise ValueError(
            f"`ranges` must be one of {list(RANGES)}. Received: {ranges=!r}"
        )
    if remedy == Remedy() and max_loss is None:
        return
    are_static = all(
        route.needs_data and route.encoding == "dense" for route in routes
    )
    equalize, floats = remedy.equalizes, remedy.floats
    if trained or not are_static:
        modes = [route.name for route in routes]
        raise ValueError(
            "`ranges`, `equalize`, `floats` and `max_loss` are for mode='int8' and 'int4' with "
            "`representative_data`. In a model of `quantize_aware`, whose ranges are trained, use "
            f"its `exclude`. Received: {ranges=}, {equalize=}, {floats=}, {max_loss=}, routes "
            f"{modes[:5]}, trained ranges: {trained}"
        )
    if floats is None or floats == "auto":
        return
    names: list[str] = []
    if computes_its_graph(model):
        names = [call.operation.name for call in graph_calls(model)]
    unknown = sorted(set(floats) - set(names))
    if isinstance(floats, str) or unknown:
        raise ValueError(
            "`floats` must be 'auto' or a list of names of layers of a functional or Sequential "
            f"model, some of {names[:10]}. Received: {floats!r}"
        )


def _checked_loss(
    max_loss: float, tolerance: float | None, remedy: Remedy
) -> float:
    """The largest error of a file whose remedies are chosen; ValueError if others are given."""
    if tolerance is not None or remedy != Remedy():
        raise ValueError(
            "`max_loss` chooses `ranges`, `equalize` and `floats` itself, and is the tolerance: "
            f"leave these four out. Received: {max_loss=}, {tolerance=}, {remedy.name}"
        )
    loss = check_number("max_loss", max_loss)
    if not loss >= 0:  # NaN as well
        raise ValueError(
            f"`max_loss` must be 0 or more. Received: max_loss={max_loss!r}"
        )
    return loss


def _time(
    verified: Sequence[Candidate], timeout: float, target: str | None
) -> None:
    """Measures the time of files, and notes it in their outcomes."""
    files = [
        candidate.file for candidate in verified if candidate.file is not None
    ]
    times = latencies(files, timeout=timeout, target=target)
    for candidate, milliseconds in zip(verified, times, strict=True):
        outcome = candidate.outcome
        candidate.outcome = dataclasses.replace(
            outcome, latency_ms=milliseconds
        )


def _zipped(content: bytes) -> int:
    return len(gzip.compress(content, compresslevel=6))  # 9 saves 2%


def choose(timed: Sequence[Candidate]) -> Candidate:
    """The smallest of the candidates that are as fast as the fastest, up to noise."""

    def milliseconds(candidate: Candidate) -> float:
        return candidate.outcome.latency_ms or 0.0

    fastest = min(milliseconds(candidate) for candidate in timed)
    fast_enough = [
        candidate
        for candidate in timed
        if milliseconds(candidate) <= _SPEED_MARGIN * fastest
    ]
    return min(fast_enough, key=lambda candidate: candidate.outcome.bytes or 0)


def check_path(path: str | os.PathLike[str]) -> Path:
    """The path of a file to write; ValueError if none can be written there."""
    target, rule = path_of("path", path), None
    if not target.name or not target.parent.is_dir():
        rule = "must name a file in a folder that exists; make the folder first"
    elif not {target.suffix, target.resolve().suffix}.isdisjoint(_OTHER_KINDS):
        rule = (
            "is for a LiteRT file, whose name usually ends in `.tflite`; use `model.save` or "
            "`model.export` for other models"
        )
    elif target.exists() and not target.is_file():
        kind = "a folder" if target.is_dir() else "a device, pipe or socket"
        rule = f"must name a file, but {kind} has that name; choose another"
    if rule is not None:
        raise ValueError(f"`path` {rule}. Received: path={str(path)!r}")
    # A symbolic link keeps its target.
    return target.resolve() if target.is_symlink() else target


def require_litert() -> None:
    converter_of_jax = ("jax", "litert_converter")
    without = converter_backend() != "tensorflow" and not any(
        map(is_missing, converter_of_jax)
    )
    require(
        (
            *(converter_of_jax if without else ("tensorflow",)),
            "ai_edge_quantizer",
            "ai_edge_litert",
        ),
        "`export_litert` converts with TensorFlow, or without it with JAX and litert-converter; "
        "ai-edge-quantizer writes integers, and ai-edge-litert runs the file",
        '"keras-sparse-ortho[litert]", or "keras-sparse-ortho[litert-jax]"',
    )
