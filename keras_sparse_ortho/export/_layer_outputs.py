"""Outputs of layers, and kernels, for the worker to name the tensors of a file by."""

import json
from collections.abc import Mapping
from pathlib import Path

import keras
import numpy as np

from keras_sparse_ortho._keras_internals import (
    computes_its_graph,
    graph_calls,
    graph_ends,
)
from keras_sparse_ortho.export._layer_tensors import LayerCall, write_calls
from keras_sparse_ortho.export._reference import keras_outputs
from keras_sparse_ortho.export._signature import full_batches
from keras_sparse_ortho.export._task import Task


def write_layer_outputs(task: Task, path: Path) -> None:
    """Writes the outputs of all layers on one batch; of none where the graph is not known."""
    batch = full_batches(task.rows.compared, task.signature.batch_size)[0]
    names = [str(spec["name"]) for spec in task.signature.specs]
    inputs = dict(zip(names, batch, strict=True))
    calls: list[LayerCall] = []
    outputs: list[np.ndarray] = []
    if computes_its_graph(task.model):
        tensors: list[keras.KerasTensor] = []
        numbers: dict[int, int] = {}
        writers: dict[int, int] = {}
        for place, call in enumerate(graph_calls(task.model)):
            for tensor in call.inputs:
                if id(tensor) in writers:
                    calls[writers[id(tensor)]]["readers"].append(place)
            for tensor in call.outputs:
                writers[id(tensor)] = place
                if keras.backend.is_float_dtype(tensor.dtype):
                    numbers[id(tensor)] = len(tensors)
                    tensors.append(tensor)
            of_call = [
                numbers[id(tensor)]
                for tensor in call.outputs
                if id(tensor) in numbers
            ]
            calls.append(
                {
                    "layer": call.operation.name,
                    "readers": [],
                    "outputs": of_call,
                }
            )
        ends, _ = graph_ends(task.model)
        probe = keras.Model(ends, tensors)
        _, outputs = keras_outputs(probe, task.signature, batch)
    write_calls(path, calls, outputs, inputs)


def write_kernels(path: Path, kernels: Mapping[str, np.ndarray]) -> None:
    """Writes kernels by path, which an NPZ file has no names for."""
    header = json.dumps(list(kernels))
    np.savez(path, np.array(header), *kernels.values())
