"""Explains wrong rows and files of `export_litert`: where an error starts, and remedies."""

import contextlib
import copy
from pathlib import Path
from typing import Any

import keras

from keras_sparse_ortho._keras_internals import (
    computes_its_graph,
    graph_calls,
    graph_ends,
    warn_user,
)
from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.errors import ExportVerificationError, FloatOperationsWarning
from keras_sparse_ortho.export._candidates import Candidate, compare, convert, litert_outputs
from keras_sparse_ortho.export._routes import ExportReport, Route, counts_by_kind
from keras_sparse_ortho.export._task import Task, keras_outputs
from keras_sparse_ortho.quantization import innermost, ranges_of

_REMEDIES = {
    "float32": "Raise `tolerance` if such a difference is acceptable.",
    "float16": "Try mode=None (float32): float16 ends at 65504.",
    "dynamic_int8": 'Try mode="float16".',
    "dynamic_int4": 'Try mode="dynamic_int8", or train with quantize_aware(model, "int4", None).',
    "int4": 'Try mode="int8", or train with quantize_aware(model, "int4").',
}


def warn_of_rows(task: Task) -> None:
    """Warns of calibration rows, or of trained ranges, that cannot be right."""
    if task.doubts and task.calibrating is not None:
        low = min(float(array.min()) for array in task.calibrating)
        high = max(float(array.max()) for array in task.calibrating)
        warn_user(
            "An int8 file is right only within the ranges that `representative_data` shows it, "
            f"and these rows are doubtful: {'; '.join(task.doubts)}. Give 100 to 500 rows of real "
            "data, scaled as in training, and compare the file with Keras on others. "
            f"Received: values from {low:.3g} to {high:.3g}"
        )
    empty = [own.path for own in ranges_of(task.model) if to_numpy(own.high) == to_numpy(own.low)]
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


def explained(task: Task, tried: Candidate) -> Exception:
    """The failure of a route, with the layer where the error starts and what to try instead."""
    route, failure = tried.route, tried.failure
    if tried.outcome.error is None:  # it does not run, or lost zeros
        return failure
    layer, source = error_source(task, route, task.allowed(route) / 2)
    where = "" if layer is None else f"The difference starts at {source}. "
    rule, _, received = str(failure).partition("Received: ")
    text = f"{rule}{where}{_remedy(task, route, layer)} Received: {received}"
    return ExportVerificationError(text)


def error_source(task: Task, route: Route, least: float) -> tuple[Any, str]:
    """The first layer of a graph with a larger error behind it; converts it with all as outputs."""
    unknown = None, "no single layer"
    if not computes_its_graph(task.model):
        return unknown
    with contextlib.suppress(Exception):  # the failure that is being explained counts
        found = [
            (call.operation, tensor)
            for call in graph_calls(task.model)
            for tensor in call.outputs
            if not isinstance(call.operation, keras.layers.InputLayer)
            and keras.backend.is_float_dtype(tensor.dtype)
        ]
        probe = keras.Model(graph_ends(task.model)[0], [tensor for _, tensor in found])
        names, want = keras_outputs(probe, task.signature, task.sample)
        task, dense = copy.copy(task), Route(route.storage)
        task.model, task.names, task.want = probe, names, want
        task.folder = task.folder / "layers"
        task.folder.mkdir()
        converted = convert(task, [dense])[dense]
        got = litert_outputs(converted, task) if isinstance(converted, Path) else []
        for (layer, _), name, one, other in zip(found, names, want, got, strict=True):
            error = compare([name], [one], [other], route.measure).error
            if not error <= least:
                kind = type(innermost(layer)).__name__
                what = "layer" if isinstance(layer, keras.layers.Layer) else "operation"
                return layer, f"{what} {layer.name!r} ({kind}): error {error:.3g} behind it"
    return unknown


def _remedy(task: Task, route: Route, layer: Any) -> str:
    if route.encoding != "dense":
        return f'Try mode="{route.storage}".'
    if route.storage in _REMEDIES:
        return _REMEDIES[route.storage]
    text = 'Try mode="dynamic_int8", which computes activations in floats, or '
    if task.has_ranges:
        # `exclude` names layers, and an operation of the graph is none.
        is_layer = isinstance(layer, keras.layers.Layer)
        excluded = repr(layer.name) if is_layer else "..."
        return f"{text}leave the layer in floats: quantize_aware(model, exclude=[{excluded}])."
    return (
        f"{text}train with quantize_aware(model), which leaves layers in floats by `exclude` and "
        "the statistics of normalizations always, or give more and other rows as "
        "`representative_data`."
    )
