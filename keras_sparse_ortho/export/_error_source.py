"""Where the difference between a file and Keras starts, and what to try: only asked on failures."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import keras

from keras_sparse_ortho._keras_internals import computes_its_graph, graph_calls, graph_ends
from keras_sparse_ortho.export._candidates import convert, litert_outputs
from keras_sparse_ortho.export._compare import DisagreementError, ExportVerificationError, compare
from keras_sparse_ortho.export._model import keras_outputs
from keras_sparse_ortho.export._process import Worker
from keras_sparse_ortho.export._routes import Route, route_for
from keras_sparse_ortho.export._task import Task
from keras_sparse_ortho.quantization import innermost

_NORMALIZATIONS = tuple(
    getattr(keras.layers, name)
    for name in ("LayerNormalization", "GroupNormalization", "RMSNormalization")
    if hasattr(keras.layers, name)
)


class ErrorSource(NamedTuple):
    """The first layer behind which a file differs, and the error there."""

    layer: Any
    error: float

    def __str__(self) -> str:
        kind = type(innermost(self.layer)).__name__
        return f"layer '{self.layer.name}' ({kind}): error {self.error:.3g} behind it"


def explained(task: Task, route: Route, failure: Exception | None) -> Exception:
    """The failure of a route, with the layer where the error starts and what to try instead."""
    if not isinstance(failure, DisagreementError):
        return failure or ExportVerificationError("There is no file.")
    allowed = route.tolerance if task.tolerance is None else task.tolerance
    source = error_source(task, route, allowed / 2)
    where = "" if source is None else f"The difference starts at {source}. "
    text = f"{failure.rule} {where}{_remedy(task, route, source)} Received: {failure.received}"
    return ExportVerificationError(text)


def error_source(task: Task, route: Route, least: float) -> ErrorSource | None:
    """The first layer of a graph behind which the error is more than `least`; None if unknown.

    The model is converted once more, by the dense route of the same storage, with the outputs of
    all its layers as outputs of the file.
    """
    if not computes_its_graph(task.model):
        return None
    try:
        return _search(task, route_for(route.quantization), least)
    except Exception:  # the failure that is being explained counts, not this one
        return None


def _search(task: Task, route: Route, least: float) -> ErrorSource | None:
    found = [
        (call.operation, tensor)
        for call in graph_calls(task.model)
        for tensor in call.outputs
        if not isinstance(call.operation, keras.layers.InputLayer)
        and keras.backend.is_float_dtype(tensor.dtype)
    ]
    probe = keras.Model(graph_ends(task.model)[0], [tensor for _, tensor in found])
    names, want = keras_outputs(probe, task.signature, task.sample)
    folder = task.folder / "layers"
    folder.mkdir()
    task = dataclasses.replace(task, model=probe, names=names, want=want, folder=folder)
    converted = convert(task, [route])[route.name]
    if not isinstance(converted, Path):
        return None
    with Worker() as worker:
        got, _ = litert_outputs(worker, converted, task, xnnpack=True)
    for (layer, _), name, one, other in zip(found, names, want, got, strict=True):
        error = compare([name], [one], [other], route.measure).error
        if not error <= least:
            return ErrorSource(layer, error)
    return None


def _remedy(task: Task, route: Route, source: ErrorSource | None) -> str:
    """What to try in place of a route."""
    if route.quantization is None:
        return "Raise `tolerance` if such a difference is acceptable."
    if route.quantization == "float16":
        return "Try quantization=None (float32): float16 ends at 65504."
    if route.quantization == "dynamic_int8":
        return 'Try quantization="float16".'
    excluded = "..." if source is None else repr(source.layer.name)
    text = 'Try mode="dynamic_int8", which computes activations in floats, or '
    if task.has_ranges:
        return f"{text}leave the layer in floats: quantize_aware(model, exclude=[{excluded}])."
    text += "train with quantize_aware(model), which leaves layers in floats by `exclude`"
    if source is not None and isinstance(source.layer, _NORMALIZATIONS):
        text += " and the statistics of normalizations always"
    return f"{text}, or give more and other rows as `representative_data`."
