"""Ranges of training in a float32 file: the outputs that name them, and which tensors they are of.

`_tracing.py` gives a traced model one output more for every trained range. Its name has a number
and the range. Here these outputs are taken out of the file again.
"""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from keras_sparse_ortho.export._flatbuffer import (
    MARK,
    ModelT,
    OperatorT,
    SubGraphT,
    kind_of,
    name_of,
)
from keras_sparse_ortho.export._unread import drop_operations

Range: TypeAlias = tuple[float, float]
"""The least and the largest value of a tensor."""

# Operations whose output has the entries of their input, or some of them, or zeros beside.
MOVING = (
    "RESHAPE",
    "TRANSPOSE",
    "SQUEEZE",
    "EXPAND_DIMS",
    "BROADCAST_TO",
    "SLICE",
    "STRIDED_SLICE",
    "GATHER",
    "PAD",
    "TILE",
    "SPACE_TO_DEPTH",
)
_OUTSIDE = (
    0.1  # of a range's width: how far 0, which integers need, may be from it
)
_SAME_NUMBER = 1e-6  # relative difference of entries of a constant that count as one number


class ScalingMoved(Exception):
    """The converter moved scalings by channel into kernels; `numbers` are those of the marks."""

    def __init__(self, numbers: list[int]) -> None:
        super().__init__(f"the marks {numbers} need an operation of their own")
        self.numbers = numbers


def take_marks(model: ModelT) -> dict[str, Range]:
    """Takes the outputs that name ranges out of a file; the ranges by name of tensor.

    Raises ScalingMoved if a range is of a tensor that the converter has made superfluous.
    """
    ranges: dict[str, Range] = {}
    numbers: dict[str, int] = {}
    for signature in model.signatureDefs:
        graph = model.subgraphs[signature.subgraphIndex]
        outputs = []
        for end in signature.outputs:
            if not end.name.startswith(MARK.encode()):
                outputs.append(end)
                continue
            number, text = end.name.decode().removeprefix(MARK).split("_")
            low, high = np.frombuffer(bytes.fromhex(text), "<f8")
            index = _take_barrier(model, graph, signature, int(end.tensorIndex))
            name = name_of(graph.tensors[index])
            ranges[name] = float(low), float(high)
            numbers[name] = int(number)
        if len(outputs) < len(signature.outputs):
            signature.outputs = outputs
            graph.outputs = [end.tensorIndex for end in outputs]
            _drop_unread(model, graph, ranges, numbers)
    return ranges


def _take_barrier(
    model: ModelT,
    graph: SubGraphT,
    signature: schema.SignatureDefT,
    marked: int,
) -> int:
    """Takes the MAXIMUM that `_tracing.py` has put in front of a marked tensor out of the graph.

    Returns:
        The tensor that has the range then: the input of MAXIMUM, or the marked one without it.
    """
    barrier = None
    for operator in graph.operators:
        if marked in map(int, operator.outputs):
            barrier = operator
    if barrier is None or kind_of(model, barrier) != "MAXIMUM":
        return marked
    varying = _varying_inputs(model, graph, barrier)
    if len(varying) != 1:
        return marked
    (source,) = varying
    graph.operators.remove(barrier)
    for operator in graph.operators:
        inputs = map(int, operator.inputs)
        operator.inputs = [
            source if index == marked else index for index in inputs
        ]
    for end in signature.outputs:
        if end.tensorIndex == marked:
            end.tensorIndex = source
    return source


def _drop_unread(
    model: ModelT,
    graph: SubGraphT,
    ranges: dict[str, Range],
    numbers: dict[str, int],
) -> None:
    """Removes operations made for marks alone; their inputs get the range that stands for theirs.

    Raises ScalingMoved where there is no such range: the converter has multiplied the kernel behind
    by a number for each channel.

    Args:
        model: The file.
        graph: The graph without the marked outputs.
        ranges: Ranges by name of a tensor, which are changed in place.
        numbers: The numbers of their marks, by name, which are changed as well.
    """
    moved = []
    for operator in drop_operations(graph):
        output = name_of(graph.tensors[operator.outputs[0]])
        if output not in ranges:
            continue
        after = ranges.pop(output)
        number = numbers.pop(output)
        sources = []
        for index in _varying_inputs(model, graph, operator):
            tensor = graph.tensors[index]
            if tensor.type == schema.TensorType.FLOAT32:
                sources.append(name_of(tensor))
        before = None
        if len(sources) == 1:
            if sources[0] in ranges:
                continue
            before = range_before(model, graph, operator, after)
        if before is None:
            moved.append(number)
        else:
            ranges[sources[0]] = before
            numbers[sources[0]] = number
    if moved:
        raise ScalingMoved(moved)


def range_before(
    model: ModelT, graph: SubGraphT, operator: OperatorT, after: Range
) -> Range | None:
    """The range of the one varying input of an operation whose output has the range `after`.

    An operation that adds or multiplies one number maps a range to another with the same 256
    steps, so that the integers are those of training, but for a shift of a fraction of a step.
    `None` for operations without such a range.
    """
    kind = kind_of(model, operator)
    if kind in MOVING:
        return after
    if kind not in ("ADD", "SUB", "MUL", "DIV"):
        return None
    first, second = (
        _constant(model, graph, int(index)) for index in operator.inputs
    )
    constant = second if first is None else first
    if constant is None or constant.size == 0:
        return None
    if np.ptp(constant) > _SAME_NUMBER * abs(constant).max():
        return None
    number = float(constant.reshape(-1)[0])
    inverse = _inverse(kind, number, number_is_first=first is not None)
    if inverse is None:
        return None
    low, high = sorted(inverse(end) for end in after)
    outside = max(low, -high, 0.0)
    if outside > _OUTSIDE * (high - low):
        return None
    return min(low, 0.0), max(high, 0.0)


def _inverse(
    kind: str, number: float, *, number_is_first: bool
) -> Callable[[float], float] | None:
    """The inverse of an operation of a tensor and a number; None if it has none, or is curved."""
    if kind == "ADD":
        return lambda y: y - number
    if kind == "SUB":
        if number_is_first:
            return lambda y: number - y
        return lambda y: y + number
    if kind == "MUL":
        if number == 0:
            return None
        return lambda y: y / number
    if number_is_first:  # number / x
        return None
    return lambda y: y * number


def _varying_inputs(
    model: ModelT, graph: SubGraphT, operator: OperatorT
) -> list[int]:
    """The inputs of an operation that are no constants of floats."""
    indices = map(int, operator.inputs)
    return [
        index for index in indices if _constant(model, graph, index) is None
    ]


def _constant(model: ModelT, graph: SubGraphT, index: int) -> np.ndarray | None:
    """The values of a constant of floats, or `None` for another tensor."""
    if index < 0:
        return None
    tensor = graph.tensors[index]
    data = model.buffers[tensor.buffer].data
    if tensor.type != schema.TensorType.FLOAT32 or data is None:
        return None
    return np.asarray(data).view("<f4")
