"""Ranges of training in a float32 file: the outputs that name them, and which tensors they are of.

`_tracing.py` gives a traced model one output more for every trained range. Its name has a number
and the range. Here these outputs are taken out of the file again.
"""

from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from keras_sparse_ortho.export._flatbuffer import MARK, name_of

Range = tuple[float, float]

# Operations whose output has the entries of their input, or some of them, or zeros beside.
MOVING = (
    *("RESHAPE", "TRANSPOSE", "SQUEEZE", "EXPAND_DIMS", "BROADCAST_TO", "SLICE", "STRIDED_SLICE"),
    *("GATHER", "PAD", "TILE", "SPACE_TO_DEPTH"),
)
# Those where one input is a constant, by code.
_AFFINE = {getattr(schema.BuiltinOperator, name): name for name in ("ADD", "SUB", "MUL", "DIV")}
_MOVING_CODES = {getattr(schema.BuiltinOperator, name) for name in MOVING}
_OUTSIDE = 0.1  # of a range's width: how far 0, which integers need, may be from it
_SAME = 1e-6  # relative difference of entries of a constant that count as one number


class ScalingMoved(Exception):
    """The converter moved scalings by channel into kernels; `numbers` are those of the marks."""

    def __init__(self, numbers: list[int]) -> None:
        super().__init__(f"the marks {numbers} need an operation of their own")
        self.numbers = numbers


def take_marks(model: Any) -> dict[str, Range]:
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
            place = _take_barrier(model, graph, signature, int(end.tensorIndex))
            name = name_of(graph.tensors[place])
            ranges[name] = float(low), float(high)
            numbers[name] = int(number)
        if len(outputs) < len(signature.outputs):
            signature.outputs = outputs
            graph.outputs = [end.tensorIndex for end in outputs]
            _drop_unread(model, graph, ranges, numbers)
    return ranges


def _take_barrier(model: Any, graph: Any, signature: Any, marked: int) -> int:
    """Takes the MAXIMUM that `_tracing.py` has put in front of a marked tensor out of the graph.

    Returns:
        The tensor that has the range then: the input of MAXIMUM, or the marked one without it.
    """
    makers = [op for op in graph.operators if marked in map(int, op.outputs)]
    if not makers or _code_of(model, makers[0]) != schema.BuiltinOperator.MAXIMUM:
        return marked
    (maker,) = makers
    varying = [int(k) for k in maker.inputs if _constant(model, graph, int(k)) is None]
    if len(varying) != 1:
        return marked
    graph.operators.remove(maker)
    for op in graph.operators:
        op.inputs = [varying[0] if int(k) == marked else int(k) for k in op.inputs]
    for end in signature.outputs:
        if end.tensorIndex == marked:
            end.tensorIndex = varying[0]
    return varying[0]


def _drop_unread(model: Any, graph: Any, ranges: dict[str, Range], numbers: dict[str, int]) -> None:
    """Removes operations made for marks alone; their inputs get the range that stands for theirs.

    Raises ScalingMoved where there is no such range: the converter has multiplied the kernel behind
    by a number for each channel.
    """
    moved = []
    read = {*graph.outputs}
    for op in reversed(list(graph.operators)):
        if not read.isdisjoint(op.outputs):
            read.update(op.inputs)
            continue
        graph.operators.remove(op)
        output = name_of(graph.tensors[op.outputs[0]])
        if output not in ranges:
            continue
        own, number = ranges.pop(output), numbers.pop(output)
        places = [int(k) for k in op.inputs if _constant(model, graph, int(k)) is None]
        names = [name_of(graph.tensors[k]) for k in places if graph.tensors[k].type == 0]
        if len(names) == 1 and names[0] in ranges:
            continue
        before = range_before(model, graph, op, own) if len(names) == 1 else None
        if before is None:
            moved.append(number)
        else:
            ranges[names[0]], numbers[names[0]] = before, number
    if moved:
        raise ScalingMoved(moved)


def range_before(model: Any, graph: Any, op: Any, after: Range) -> Range | None:
    """The range of the one varying input of an operation whose output has the range `after`.

    An operation that adds or multiplies one number maps a range to another with the same 256
    steps, so that the integers are those of training, but for a shift of a fraction of a step.
    `None` for operations without such a range.
    """
    code = _code_of(model, op)
    if code in _MOVING_CODES:
        return after
    if code not in _AFFINE:
        return None
    first, second = (_constant(model, graph, int(k)) for k in op.inputs)
    constant = second if first is None else first
    if constant is None or constant.size == 0 or np.ptp(constant) > _SAME * abs(constant).max():
        return None
    number = float(constant.reshape(-1)[0])
    reverse = {
        "ADD": lambda y: y - number,
        "SUB": (lambda y: y + number) if first is None else (lambda y: number - y),
        "MUL": lambda y: y / number,
        "DIV": (lambda y: y * number) if first is None else None,  # number / x is not affine
    }[_AFFINE[code]]
    if reverse is None or (number == 0 and _AFFINE[code] == "MUL"):
        return None
    ends = sorted(reverse(end) for end in after)
    outside = max(ends[0], -ends[-1], 0.0)
    if outside > _OUTSIDE * (ends[-1] - ends[0]):
        return None
    return min(ends[0], 0.0), max(ends[-1], 0.0)


def _code_of(model: Any, op: Any) -> int:
    return int(model.operatorCodes[op.opcodeIndex].builtinCode)


def _constant(model: Any, graph: Any, place: int) -> np.ndarray | None:
    """The values of a constant of floats, or `None` for another tensor."""
    tensor = graph.tensors[place] if place >= 0 else None
    if tensor is None or tensor.type != schema.TensorType.FLOAT32:
        return None
    data = model.buffers[tensor.buffer].data
    return None if data is None else np.asarray(data).view("<f4")
