"""Which tensors of a LiteRT file are which layers': found by their values on one batch.

Converters fuse operations, and name tensors in ways of their own.
"""

import contextlib
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TypedDict

import numpy as np

from keras_sparse_ortho.export._flatbuffer import ModelT, name_of, read_model

_TOLERANCE = (
    1e-3  # of the largest entry, by which values of one tensor may differ
)


class LayerCall(TypedDict):
    """A call of a layer, as JSON has it.

    Attributes:
        layer: str. Its name.
        readers: The places of the calls that read its outputs.
        outputs: The numbers of its outputs' arrays.
    """

    layer: str
    readers: list[int]
    outputs: list[int]


def write_calls(
    path: Path,
    calls: Sequence[LayerCall],
    outputs: Sequence[np.ndarray],
    inputs: dict[str, np.ndarray],
) -> None:
    """Writes the calls of a model with their outputs on one batch.

    Args:
        path: Path. An NPZ file.
        calls: The calls in order.
        outputs: The arrays.
        inputs: The batch, by name.
    """
    header = json.dumps({"calls": list(calls), "inputs": list(inputs)})
    np.savez(path, np.array(header), *inputs.values(), *outputs)


def layers_of_tensors(content: bytes, path: str) -> dict[str, str]:
    """The layer of each tensor of a file; that of the next one where values are inside a layer.

    Kernels count as tensors of the operations that read them.

    Args:
        content: bytes. A file of floats.
        path: str. A file of `write_calls`.
    """
    match = _Match(content, path)
    layers = {}
    for index, tensor in enumerate(match.graph.tensors):
        layer = match.layer_of(index)
        if layer is not None:
            layers[name_of(tensor)] = layer
    return layers


def tensors_of_layers(
    content: bytes, path: str, names: Collection[str]
) -> list[str]:
    """The names of the tensors that the operations of layers write.

    Args:
        content: bytes. A file of floats.
        path: str. A file of `write_calls`.
        names: Names of layers.

    Raises ValueError for a layer without an operation.
    """
    match = _Match(content, path)
    tensors = []
    for name in names:
        indices = match.tensors_of(name)
        if not indices:
            raise ValueError(
                "`floats` must name layers that the file computes by operations of their own. "
                f"Received: {name!r}"
            )
        tensors += [name_of(match.graph.tensors[index]) for index in indices]
    return tensors


class _Match:
    """The tensors of a file beside the calls of a model.

    Args:
        content: bytes. A file of floats.
        path: str. A file of `write_calls`.
    """

    def __init__(self, content: bytes, path: str) -> None:
        model = read_model(content)
        self.graph = model.subgraphs[0]
        with np.load(path) as arrays:
            header, *values = [arrays[name] for name in arrays.files]
        contents = json.loads(str(header))
        self._calls: list[LayerCall] = contents["calls"]
        names = contents["inputs"]
        inputs = dict(zip(names, values, strict=False))
        outputs = [np.sort(value, axis=None) for value in values[len(names) :]]
        self._calls_of_tensor: dict[int, list[int]] = {}
        self._tensors_of_call: dict[int, list[int]] = {}
        for index, value in _values(model, content, inputs).items():
            value = np.sort(value, axis=None)
            for place, call in enumerate(self._calls):
                for number in call["outputs"]:
                    if _is_same(value, outputs[number]):
                        self._calls_of_tensor.setdefault(index, []).append(
                            place
                        )
                        self._tensors_of_call.setdefault(place, []).append(
                            index
                        )
        self._readers: dict[int, list[int]] = {}
        self._writes: dict[int, bool] = {}
        for operator in self.graph.operators:
            results = [int(index) for index in operator.outputs]
            for index in map(int, operator.inputs):
                self._readers.setdefault(index, []).extend(results)
            self._writes |= dict.fromkeys(results, True)

    def layer_of(self, index: int) -> str | None:
        """The layer of a tensor, or of the first one behind it that has a layer."""
        place = self._call_behind(index)
        return None if place is None else self._calls[place]["layer"]

    def _call_behind(self, index: int) -> int | None:
        """The first call with the values of a tensor, or of the first one behind it."""
        waiting = [index]
        reached = set(waiting)
        while waiting:
            tensor = waiting.pop(0)
            if tensor in self._calls_of_tensor:
                return self._calls_of_tensor[tensor][0]
            behind = set(self._readers.get(tensor, [])) - reached
            waiting += sorted(behind)
            reached |= behind
        return None

    def tensors_of(self, name: str) -> list[int]:
        """The tensors that operations write for a layer."""
        targets = set()
        for place, call in enumerate(self._calls):
            if call["layer"] == name:
                targets |= self._call_in_file(place)
        indices = []
        for index in self._writes:
            call_behind = self._call_behind(index)
            if call_behind is None:
                continue
            if targets & set(self._same_calls(call_behind)):
                indices.append(index)
        return indices

    def _same_calls(self, place: int) -> list[int]:
        """The calls with the values of a call."""
        calls = [place]
        for index in self._tensors_of_call.get(place, []):
            calls += self._calls_of_tensor[index]
        return calls

    def _call_in_file(self, place: int) -> set[int]:
        """The call itself if the file has its outputs, else the first ones behind it."""
        written = [
            index
            for index in self._tensors_of_call.get(place, [])
            if index in self._writes
        ]
        if written:
            return {place}
        behind = set()
        for reader in self._calls[place]["readers"]:
            behind |= self._call_in_file(reader)
        return behind


def _values(
    model: ModelT, content: bytes, inputs: dict[str, np.ndarray]
) -> dict[int, np.ndarray]:
    """The values of all tensors of floats on a batch, by index, without constants."""
    from ai_edge_litert import schema_py_generated as schema
    from ai_edge_litert.interpreter import Interpreter, OpResolverType

    interpreter = Interpreter(
        model_content=content,
        experimental_op_resolver_type=OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
        experimental_preserve_all_tensors=True,
    )
    interpreter.get_signature_runner()(**inputs)
    values = {}
    for index, tensor in enumerate(model.subgraphs[0].tensors):
        is_constant = model.buffers[tensor.buffer].data is not None
        if is_constant or tensor.type != schema.TensorType.FLOAT32:
            continue
        with contextlib.suppress(ValueError):  # nothing has written to it
            values[index] = np.array(interpreter.get_tensor(index))
    return values


def _is_same(value: np.ndarray, other: np.ndarray) -> bool:
    """Whether sorted values agree."""
    if value.shape != other.shape:
        return False
    largest = max(np.abs(other).max(initial=0.0), 1e-6)
    return bool(np.abs(value - other).max(initial=0.0) <= _TOLERANCE * largest)
