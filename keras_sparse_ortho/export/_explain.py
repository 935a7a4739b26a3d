"""Explains wrong rows and files of `export_litert`: where an error starts, and remedies."""

import contextlib
import dataclasses
from pathlib import Path
from typing import TypeAlias

import keras

from keras_sparse_ortho._keras_internals import (
    computes_its_graph,
    graph_calls,
    graph_ends,
    warn_user,
)
from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.errors import (
    ExportVerificationError,
    FloatOperationsWarning,
)
from keras_sparse_ortho.export._candidates import Candidate
from keras_sparse_ortho.export._comparison import (
    compare,
    litert_outputs,
)
from keras_sparse_ortho.export._conversion import convert
from keras_sparse_ortho.export._reference import keras_outputs
from keras_sparse_ortho.export._routes import (
    ExportReport,
    Route,
    counts_by_kind,
)
from keras_sparse_ortho.export._task import Steps, Task, Workspace
from keras_sparse_ortho.quantization import innermost, ranges_of

GraphOperation: TypeAlias = keras.Operation
"""A layer of a graph, or an operation such as `a + b`."""

_REMEDIES = {
    "float32": "Raise `tolerance` if such a difference is acceptable.",
    "float16": "Try mode=None (float32): float16 ends at 65504.",
    "dynamic_int8": 'Try mode="float16".',
    "dynamic_int4": 'Try mode="dynamic_int8", or train with quantize_aware(model, "int4", None).',
    "int4": 'Try mode="int8", or train with quantize_aware(model, "int4").',
}


def warn_of_rows(task: Task) -> None:
    """Warns of calibration rows, or of trained ranges, that cannot be right."""
    calibrating = task.rows.calibrating
    if task.doubts and calibrating is not None:
        low = min(float(array.min()) for array in calibrating)
        high = max(float(array.max()) for array in calibrating)
        warn_user(
            "An int8 file is right only within the ranges that `representative_data` shows it, "
            f"and these rows are doubtful: {'; '.join(task.doubts)}. Give 100 to 500 rows of real "
            "data, scaled as in training, and compare the file with Keras on others. "
            f"Received: values from {low:.3g} to {high:.3g}"
        )
    empty = []
    for rounding in ranges_of(task.model):
        if to_numpy(rounding.high) == to_numpy(rounding.low):
            empty.append(rounding.path)
    if empty:
        warn_user(
            "Trained ranges of activations must hold more than zero, or the file computes zeros "
            f"there: call the model on real data with training=True. Received: {empty[:5]}"
        )


def warn_of_floats(report: ExportReport) -> None:
    """Warns of operations that a file of integers computes in floats."""
    if report.in_floats:
        warn_user(
            f"A file of route {report.route!r} should compute integers alone, and "
            f"{len(report.in_floats)} of its operations compute floats: LiteRT has no integer form "
            "of them, or no range was trained or calibrated for their inputs or outputs. They are "
            "slower, and a device without floats cannot run them. Use other layers there, or keep "
            f"them; `report.in_floats` lists them. Received: {counts_by_kind(report.in_floats)}, "
            f"such as {list(report.in_floats[:3])}",
            FloatOperationsWarning,
        )


def explained(task: Task, tried: Candidate, folder: Path) -> Exception:
    """The failure of a route, with the layer where the error starts and what to try instead.

    Args:
        task: `Task`. The model and its rows.
        tried: `Candidate`. The route and its failure.
        folder: Path. A folder for the file of the layers.
    """
    failure = tried.failure
    assert failure is not None
    if tried.outcome.error is None:  # it does not run, or lost zeros
        return failure
    route = tried.route
    layer, source = error_source(task, route, task.allowed(route) / 2, folder)
    where = "" if layer is None else f"The difference starts at {source}. "
    rule, _, received = str(failure).partition("Received: ")
    remedy = _remedy(task, route, layer)
    return ExportVerificationError(
        f"{rule}{where}{remedy} Received: {received}"
    )


def error_source(
    task: Task, route: Route, least: float, folder: Path
) -> tuple[GraphOperation | None, str]:
    """The first layer of a graph with a larger error behind it; converts it with all as outputs."""
    if computes_its_graph(task.model):
        # The failure that is being explained counts.
        with contextlib.suppress(Exception):
            layer, error = _first_wrong_layer(task, route, least, folder)
            kind = type(innermost(layer)).__name__
            category = (
                "layer"
                if isinstance(layer, keras.layers.Layer)
                else "operation"
            )
            return (
                layer,
                f"{category} {layer.name!r} ({kind}): error {error:.3g} behind it",
            )
    return None, "no single layer"


def _first_wrong_layer(
    task: Task, route: Route, least: float, folder: Path
) -> tuple[GraphOperation, float]:
    """The first layer with an error above `least`, and that error; LookupError without one."""
    layers = []
    tensors = []
    for call in graph_calls(task.model):
        if isinstance(call.operation, keras.layers.InputLayer):
            continue
        for tensor in call.outputs:
            if keras.backend.is_float_dtype(tensor.dtype):
                layers.append(call.operation)
                tensors.append(tensor)
    inputs, _ = graph_ends(task.model)
    probe = keras.Model(inputs, tensors)
    names, outputs = keras_outputs(probe, task.signature, task.rows.compared)
    task = dataclasses.replace(task, model=probe, names=names, outputs=outputs)
    workspace = Workspace(folder / "layers", Steps(verbose=False))
    workspace.folder.mkdir()
    if not route.of_lstms:
        route = Route(route.storage)
    file = convert(task, [route], workspace)[route]
    if isinstance(file, Exception):
        raise file
    results = litert_outputs(file, task)
    for layer, name, expected, actual in zip(
        layers, names, outputs, results, strict=True
    ):
        error = compare([name], [expected], [actual], route.measure).error
        if not error <= least:
            return layer, error
    raise LookupError("all layers agree")


def _remedy(task: Task, route: Route, layer: GraphOperation | None) -> str:
    """The advice where a route fails."""
    if route.encoding != "dense":
        return f'Try mode="{route.storage}".'
    if route.storage in _REMEDIES:
        return _REMEDIES[route.storage]
    text = 'Try mode="dynamic_int8", which computes activations in floats, or '
    if task.has_ranges:
        excluded = "..."
        # `exclude` names layers, and an operation of the graph is none.
        if isinstance(layer, keras.layers.Layer):
            excluded = repr(layer.name)
        return f"{text}leave the layer in floats: quantize_aware(model, exclude=[{excluded}])."
    return (
        f"{text}train with quantize_aware(model), which leaves layers in floats by `exclude` and "
        "the statistics of normalizations always, or give more and other rows as "
        "`representative_data`."
    )
