"""Changes of a float32 LiteRT file that let AEQ quantize more of it."""

import copy
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from ai_edge_quantizer.utils import (
    tfl_flatbuffer_utils as files,
)

from keras_sparse_ortho.export._flatbuffer import (
    ModelT,
    OperatorT,
    SubGraphT,
    TensorT,
    add_code,
    name_of,
    operations,
)
from keras_sparse_ortho.export._marks import Range


def aeq_operations(
    model: ModelT,
) -> Iterator[tuple[SubGraphT, OperatorT, str]]:
    """The operations of a file with their kinds, as `operations`; those unknown to AEQ have ""."""
    known = {kind.value for kind in files.TFL_OP_CODE_TO_NAME.values()}
    for graph, operator, kind in operations(model):
        yield graph, operator, kind if kind in known else ""


def with_plain_gathers(model: ModelT) -> None:
    """Replaces JAX's GATHER_ND along the first axis, which AEQ does not know, by GATHER."""
    for graph, operator, kind in list(operations(model)):
        if kind != "GATHER_ND":
            continue
        source, indices = map(int, operator.inputs)
        shape = graph.tensors[indices].shape
        if len(shape) != 2 or shape[1] != 1:
            continue
        flat = copy_tensor(model, graph, indices, "flat")
        graph.tensors[flat].shape = [int(shape[0])]
        graph.tensors[flat].shapeSignature = None
        operator.inputs = [source, flat]
        operator.opcodeIndex = add_code(model, "GATHER", 1)
        operator.builtinOptionsType = schema.BuiltinOptions.GatherOptions
        operator.builtinOptions = schema.GatherOptionsT()


def with_slices(model: ModelT) -> None:
    """Replaces SPLIT_V, which AEQ does not know, by a STRIDED_SLICE for each of its outputs."""
    for graph, operator, kind in list(operations(model)):
        if kind != "SPLIT_V":
            continue
        source, _, axis_index = map(int, operator.inputs)
        axes = _integers_of(model, graph, axis_index)
        if axes is None:
            continue
        axis = int(axes[0]) % len(graph.tensors[source].shape)
        read = {int(index) for index in graph.outputs}
        for reader in graph.operators:
            read.update(map(int, reader.inputs))
        slices = []
        start = 0
        for output in map(int, operator.outputs):
            end = start + int(graph.tensors[output].shape[axis])
            if output in read:  # AEQ leaves the others in floats
                slices.append(
                    _slice(
                        model,
                        graph,
                        source,
                        output,
                        axis,
                        start,
                        end,
                    )
                )
            start = end
        place = graph.operators.index(operator)
        graph.operators[place : place + 1] = slices


def _slice(
    model: ModelT,
    graph: SubGraphT,
    source: int,
    output: int,
    axis: int,
    start: int,
    end: int,
) -> OperatorT:
    """An operation that reads a part of an axis, and all of the others, however long these are."""
    name = name_of(graph.tensors[output])
    rank = len(graph.tensors[source].shape)
    starts = [0] * rank
    ends = [0] * rank
    starts[axis] = start
    ends[axis] = end
    options = schema.StridedSliceOptionsT()
    options.endMask = 2**rank - 1 - 2**axis
    operator = schema.OperatorT()
    operator.opcodeIndex = add_code(model, "STRIDED_SLICE", 1)
    operator.inputs = [
        source,
        _add_vector(model, graph, f"{name}/begin", starts),
        _add_vector(model, graph, f"{name}/end", ends),
        _add_vector(model, graph, f"{name}/strides", [1] * rank),
    ]
    operator.outputs = [output]
    operator.builtinOptionsType = schema.BuiltinOptions.StridedSliceOptions
    operator.builtinOptions = options
    return operator


def part_outputs(model: ModelT) -> None:
    """Gives outputs that operations read as well their own tensors; AEQ confuses the two."""
    graph = model.subgraphs[0]
    read = {
        int(index) for operator in graph.operators for index in operator.inputs
    }
    outputs = {int(index) for index in graph.outputs}
    for index in sorted(read & outputs):
        end = copy_tensor(model, graph, index, "output")
        graph.operators.append(copying(model, graph, index, end))
        graph.outputs = _replaced(graph.outputs, index, end)
        for signature in model.signatureDefs:
            for output in signature.outputs:
                if output.tensorIndex == index:
                    output.tensorIndex = end


def round_floats(
    model: ModelT,
    trained: dict[str, Range],
    ranges: dict[str, Range],
    in_floats: Iterable[tuple[SubGraphT, OperatorT]],
) -> None:
    """Rounds trained ranges around float operations, by a RESHAPE that AEQ does in integers.

    Args:
        model: The file.
        trained: Trained ranges by name of a tensor.
        ranges: All ranges by name, to which new ones are added.
        in_floats: The operations that stay in floats, each with its graph.
    """
    main = model.subgraphs[0]
    operators = [operator for graph, operator in in_floats if graph is main]
    read = {int(index) for operator in operators for index in operator.inputs}
    read |= {int(index) for index in main.outputs}
    for operator in operators:
        for index in map(int, list(operator.outputs)):
            name = name_of(main.tensors[index])
            if index not in read or name not in trained:
                continue
            before = copy_tensor(model, main, index, "before")
            ranges[name_of(main.tensors[before])] = ranges[name]
            operator.outputs = _replaced(operator.outputs, index, before)
            place = main.operators.index(operator) + 1
            main.operators.insert(place, copying(model, main, before, index))


def _replaced(indices: Iterable[int], index: int, other: int) -> list[int]:
    return [other if item == index else int(item) for item in indices]


def copy_tensor(
    model: ModelT, graph: SubGraphT, index: int, suffix: str
) -> int:
    """Adds a copy of a tensor with a name of its own to a graph; returns its index."""
    tensor = copy.copy(graph.tensors[index])
    tensor.name = _new_name(model, f"{name_of(tensor)}/{suffix}").encode()
    graph.tensors.append(tensor)
    return len(graph.tensors) - 1


def add_tensor(
    model: ModelT, graph: SubGraphT, name: str, shape: Sequence[int]
) -> int:
    """Adds a tensor of float32 to a graph; returns its index."""
    tensor = schema.TensorT()
    tensor.name = _new_name(model, name).encode()
    tensor.type = schema.TensorType.FLOAT32
    tensor.shape = list(shape)
    graph.tensors.append(tensor)
    return len(graph.tensors) - 1


def add_constant(
    model: ModelT, graph: SubGraphT, name: str, values: np.ndarray
) -> int:
    """Adds a constant of float32, or of integers, to a graph; returns its index."""
    index = add_tensor(model, graph, name, values.shape)
    set_constant(model, graph.tensors[index], values)
    return index


def set_constant(model: ModelT, tensor: TensorT, values: np.ndarray) -> None:
    """Makes a tensor a constant of the type of its values."""
    tensor.type = getattr(schema.TensorType, values.dtype.name.upper())
    buffer = schema.BufferT()
    buffer.data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    tensor.buffer = len(model.buffers)
    model.buffers.append(buffer)


def _add_vector(
    model: ModelT, graph: SubGraphT, name: str, values: list[int]
) -> int:
    """Adds a constant vector of int32 to a graph; returns its index."""
    return add_constant(model, graph, name, np.array(values, np.int32))


def _new_name(model: ModelT, name: str) -> str:
    """A name that no tensor has: AEQ finds tensors by their names."""
    names = {
        name_of(tensor) for graph in model.subgraphs for tensor in graph.tensors
    }
    number = 0
    numbered = name
    while numbered in names:
        number += 1
        numbered = f"{name}_{number}"
    return numbered


def _integers_of(
    model: ModelT, graph: SubGraphT, index: int
) -> np.ndarray | None:
    """The values of a constant of int32; None for other tensors."""
    tensor = graph.tensors[index]
    data = model.buffers[tensor.buffer].data
    if data is None or tensor.type != schema.TensorType.INT32:
        return None
    return np.asarray(data).view("<i4")


def copying(
    model: ModelT, graph: SubGraphT, source: int, output: int
) -> OperatorT:
    """An operation that copies a tensor to another one of its shape."""
    operator = schema.OperatorT()
    operator.opcodeIndex = add_code(model, "RESHAPE", 1)
    operator.inputs = [source]
    operator.outputs = [output]
    operator.builtinOptionsType = schema.BuiltinOptions.ReshapeOptions
    operator.builtinOptions = schema.ReshapeOptionsT()
    operator.builtinOptions.newShape = graph.tensors[output].shape
    return operator
