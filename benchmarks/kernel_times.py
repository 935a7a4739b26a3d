"""How the time of a LiteRT file divides among its kernels, by pieces of the file.

A file is cut in front of each operation that reads a kernel. Each piece is a small file: that
operation, and those behind it up to the next kernel, such as activations, sums and pooling.
"""

import pathlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from keras_sparse_ortho.export import (
    drop_unread,
    latencies,
    name_of,
    read_model,
    stored_weights,
    write_model,
)
from keras_sparse_ortho.export._flatbuffer import ModelT, OperatorT, SubGraphT

_TIMED_TOGETHER = 8  # pieces, each in a process of its own
_CALLED_GRAPH = "SubgraphIndex"  # the end of the options that name other graphs


class Kernel(NamedTuple):
    """A weight that an operation reads: its path, and how many entries it has."""

    path: str
    size: int


class Piece(NamedTuple):
    """A run of operations that begins with one that reads kernels, as a file."""

    kernels: list[Kernel]
    content: bytes


def kernel_times(file: pathlib.Path) -> dict[str, float]:
    """Milliseconds of each kernel of a file, by its path.

    Loops are not cut. The time of a piece with several kernels is divided in proportion to their
    entries.
    """
    pieces = pieces_of(file.read_bytes())
    times: dict[str, float] = {}
    for start in range(0, len(pieces), _TIMED_TOGETHER):
        group = pieces[start : start + _TIMED_TOGETHER]
        for piece, ms in zip(group, _latencies_of(group), strict=True):
            entries = sum(kernel.size for kernel in piece.kernels)
            for kernel in piece.kernels:
                share = kernel.size / entries
                times[kernel.path] = times.get(kernel.path, 0.0) + share * ms
    return times


def _latencies_of(pieces: Sequence[Piece]) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for number, piece in enumerate(pieces):
            file = pathlib.Path(folder) / f"{number}.tflite"
            file.write_bytes(piece.content)
            files.append(file)
        return latencies(files)


def pieces_of(content: bytes) -> list[Piece]:
    """The pieces of a file, in order; what stands before the first kernel belongs to it."""
    model = read_model(content)
    graph = model.subgraphs[0]
    kernels_by_buffer = _kernels_by_buffer(model)
    starts = []
    kernels_of_pieces = []
    for number, operator in enumerate(graph.operators):
        kernels = _kernels_read(model, graph, operator, kernels_by_buffer)
        if kernels:
            starts.append(number)
            kernels_of_pieces.append(kernels)
    starts[0] = 0
    stops = [*starts[1:], len(graph.operators)]
    pieces = []
    for start, stop, kernels in zip(
        starts, stops, kernels_of_pieces, strict=True
    ):
        pieces.append(Piece(kernels, _cut(content, start, stop)))
    return pieces


def _kernels_by_buffer(model: ModelT) -> dict[int, Kernel]:
    """The kernels of a file by the number of the buffer that holds them."""
    kernels = {}
    for weight in stored_weights(model):
        path, _, _ = name_of(weight.tensor).partition(" (")  # of a part
        kernels[weight.tensor.buffer] = Kernel(path, int(np.prod(weight.shape)))
    return kernels


def _kernels_read(
    model: ModelT,
    graph: SubGraphT,
    operator: OperatorT,
    kernels_by_buffer: Mapping[int, Kernel],
) -> list[Kernel]:
    """The kernels that an operation reads, also in the graphs that it calls."""
    buffers = []
    for index in operator.inputs:
        if index >= 0:
            buffers.append(graph.tensors[index].buffer)
    for called in _called_graphs(model, operator):
        buffers += [tensor.buffer for tensor in called.tensors]
    return [
        kernels_by_buffer[buffer]
        for buffer in dict.fromkeys(buffers)
        if buffer in kernels_by_buffer
    ]


def _called_graphs(model: ModelT, operator: OperatorT) -> Iterator[SubGraphT]:
    """The bodies and conditions of a loop or a branch, and what these call."""
    options = vars(operator.builtinOptions) if operator.builtinOptions else {}
    for name, value in options.items():
        if name.endswith(_CALLED_GRAPH):
            called = model.subgraphs[value]
            yield called
            for inner in called.operators:
                yield from _called_graphs(model, inner)


def _cut(content: bytes, start: int, stop: int) -> bytes:
    """The file of the operations from `start` to before `stop`."""
    model = read_model(content)
    graph = model.subgraphs[0]
    operators = graph.operators[start:stop]
    tensors_read = _tensors(operators, "inputs")
    tensors_written = _tensors(operators, "outputs")
    read_later = _tensors(graph.operators[stop:], "inputs")
    read_later |= {int(index) for index in graph.outputs}
    inputs = []
    for index in sorted(tensors_read - tensors_written):
        data = model.buffers[graph.tensors[index].buffer].data
        if data is None or len(data) == 0:  # no constant
            inputs.append(index)
    graph.inputs = np.array(inputs, np.int32)
    graph.outputs = np.array(sorted(tensors_written & read_later), np.int32)
    graph.operators = operators
    model.signatureDefs = []
    model.metadata = []
    drop_unread(model)
    return write_model(model)


def _tensors(operators: Sequence[OperatorT], end: str) -> set[int]:
    """The tensors that some operations read or write."""
    tensors: set[int] = set()
    for operator in operators:
        tensors.update(int(index) for index in getattr(operator, end))
    return tensors - {-1}
