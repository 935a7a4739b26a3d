"""Trained ranges of activations in a file that is made without TensorFlow.

Where a model rounds a tensor, its trace has a mark: an operation that computes nothing and whose
name holds the range. litert-converter knows no such operation and leaves it as it is, so that the
float32 file tells which tensors have which ranges. Here the marks are taken out of that file.
ai-edge-quantizer gets the ranges in place of calibrated ones, and is told which operations have
none and stay in floats.
"""

import dataclasses
import re
import struct
from typing import Any

import numpy as np

from keras_sparse_ortho.export._litert_file import read_model, write_model

_MARK = "keras_sparse_ortho.range_"  # and two doubles, in hexadecimal digits

Range = tuple[float, float]

# What they give has the range of what they take.
_PASS_ON = (
    *("RESHAPE", "TRANSPOSE", "SQUEEZE", "EXPAND_DIMS", "BROADCAST_TO"),
    *("SLICE", "STRIDED_SLICE", "SPLIT", "GATHER", "PAD", "TILE", "REVERSE_V2"),
    *("MAX_POOL_2D", "AVERAGE_POOL_2D", "REDUCE_MAX", "SPACE_TO_DEPTH", "DEPTH_TO_SPACE"),
)
# What they give has these ranges in LiteRT.
_FIXED = {"SOFTMAX": (0, 255 / 256), "LOGISTIC": (0, 255 / 256), "TANH": (-1, 127 / 128)}


@dataclasses.dataclass(frozen=True)
class Unmarked:
    """A float32 file without its marks.

    Attributes:
        content: The file.
        ranges: Lowest and highest value of a tensor, by its name.
        floats: Matches the names of what operations in floats give, each with a `;` behind it.
    """

    content: bytes
    ranges: dict[str, Range]
    floats: str


def mark(x: Any, low: float, high: float) -> Any:
    """The tensor `x` with its range, in a trace of JAX."""
    import jax

    name = _MARK + struct.pack("<dd", low, high).hex()
    return jax.lax.composite(lambda x: x, name=name)(x)


def without_marks(content: bytes) -> Unmarked | None:
    """A float32 file without its marks, `None` if it has none."""
    from ai_edge_litert import schema_py_generated as schema

    model = read_model(content)
    graph = model.subgraphs[0]
    names = {value: name for name, value in vars(schema.BuiltinOperator).items()}
    kinds = [names.get(code.builtinCode) for code in model.operatorCodes]
    marks = [_range_of(one) for one in graph.operators]
    if not any(marks):
        return None
    ranges: dict[int, Range] = {}  # of tensors, by their index
    same: dict[int, int] = {}  # what a mark gives: what it takes
    rounded: set[int] = set()  # tensors that are read as integers have them
    kept: list[tuple[Any, bool]] = []  # operations, and whether they take integers
    for one, own in zip(graph.operators, marks, strict=True):
        kind = kinds[one.opcodeIndex]
        taken = [int(k) for k in one.inputs]
        one.inputs = [same.get(k, k) for k in taken]
        varying = [k for k in taken if _is_varying(model, graph, k)]
        whole = bool(varying) and all(k in rounded for k in varying)
        given = [int(k) for k in one.outputs]
        if own is not None:
            rounded.update(given)
            if ranges.setdefault(one.inputs[0], own) == own:
                same[given[0]] = one.inputs[0]
                continue
            _become_reshape(model, graph, one, schema)  # from one range to another, in floats
            ranges[given[0]], whole = own, False
        elif whole and (kind in _PASS_ON or kind in _FIXED):
            first = varying[0]
            own = _FIXED.get(kind) or ranges[same.get(first, first)]
            ranges.update(dict.fromkeys(given, own))
            rounded.update(given)
        kept.append((one, whole))
    graph.operators = [one for one, _ in kept]
    floats = [
        "".join(f"{graph.tensors[k].name.decode()};" for k in one.outputs)
        for one, whole in kept
        if not (whole and all(int(k) in ranges for k in one.outputs))
    ]
    found = {graph.tensors[k].name.decode(): own for k, own in ranges.items()}
    _end_in(model, same)
    _drop(model, set(same))
    if not any(_subgraphs_of(one) for one in graph.operators):
        model.subgraphs = [graph]
    pattern = "^(" + "|".join(map(re.escape, floats)) + ")$"
    return Unmarked(write_model(model), found, pattern)


def _range_of(operation: Any) -> Range | None:
    """The range that a mark holds, `None` of another operation."""
    name = getattr(operation.builtinOptions2, "name", None)
    if not isinstance(name, bytes) or not name.startswith(_MARK.encode()):
        return None
    low, high = struct.unpack("<dd", bytes.fromhex(name.decode().removeprefix(_MARK)))
    return low, high


def _subgraphs_of(operation: Any) -> bool:
    """Whether an operation names other graphs of the file."""
    options = (operation.builtinOptions, operation.builtinOptions2)
    return any("ubgraph" in key for own in options if own is not None for key in vars(own))


def _is_varying(model: Any, graph: Any, index: int) -> bool:
    """Whether a tensor holds floats that are no constants."""
    if index < 0:
        return False
    tensor = graph.tensors[index]
    return tensor.type == 0 and model.buffers[tensor.buffer].data is None


def _become_reshape(model: Any, graph: Any, mark: Any, schema: Any) -> None:
    """Makes an operation of a mark that computes nothing, either."""
    code = schema.OperatorCodeT()
    code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.RESHAPE
    code.version = 1
    model.operatorCodes.append(code)
    mark.opcodeIndex = len(model.operatorCodes) - 1
    mark.builtinOptions2, mark.builtinOptions2Type = None, 0
    mark.builtinOptionsType = schema.BuiltinOptions.ReshapeOptions
    mark.builtinOptions = schema.ReshapeOptionsT()
    mark.builtinOptions.newShape = graph.tensors[int(mark.outputs[0])].shape


def _end_in(model: Any, same: dict[int, int]) -> None:
    """Lets outputs of the file be what marks took."""
    graph = model.subgraphs[0]
    graph.outputs = [same.get(int(k), int(k)) for k in graph.outputs]
    for signature in model.signatureDefs or ():
        for end in signature.outputs:
            end.tensorIndex = same.get(end.tensorIndex, end.tensorIndex)


def _drop(model: Any, dead: set[int]) -> None:
    """Leaves tensors out of the file that no operation names."""
    graph = model.subgraphs[0]
    left = [k for k in range(len(graph.tensors)) if k not in dead]
    now = {-1: -1} | {k: place for place, k in enumerate(left)}
    graph.tensors = [graph.tensors[k] for k in left]
    for one in (graph, *graph.operators):
        one.inputs = np.array([now[int(k)] for k in one.inputs], np.int32)
        one.outputs = np.array([now[int(k)] for k in one.outputs], np.int32)
    for signature in model.signatureDefs or ():
        for end in (*signature.inputs, *signature.outputs):
            end.tensorIndex = now[end.tensorIndex]
