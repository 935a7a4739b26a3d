"""Trained ranges of activations in a file that is made without TensorFlow.

Where a model rounds a tensor, its trace has a mark: an operation that computes nothing and whose
name holds the range. litert-converter knows no such operation and leaves it as it is, so that the
float32 file tells which tensors have which ranges. Here the marks are taken out of that file.
ai-edge-quantizer gets the ranges in place of calibrated ones, and is told which operations have
none and stay in floats.
"""

import collections
import copy
import dataclasses
import math
import re
import struct
from collections.abc import Iterable
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
_MOVES = ("RESHAPE", "TRANSPOSE")
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


def without_marks(content: bytes, recipe: list[dict[str, Any]]) -> Unmarked | None:
    """A float32 file without its marks, `None` if it has none.

    Args:
        content: The file.
        recipe: That of ai-edge-quantizer, which says what is computed in integers.
    """
    model = read_model(content)
    graph = model.subgraphs[0]
    marks = {id(one): own for one in graph.operators if (own := _range_of(one)) is not None}
    if not marks:
        return None
    reshape, kinds = _reshape(model), _kinds(model)
    dead = _with_biases(model, graph, kinds)
    spread = _Spread(model, kinds, marks, reshape)
    whole = spread.whole(_computed_in_integers(kinds, recipe))
    same, kept = spread.same, []
    in_floats = {int(k) for k in graph.outputs} | {
        k
        for one in graph.operators
        if id(one) not in {*whole, *marks}
        for k in spread.reads[id(one)]
    }
    floats: list[str] = []
    for one in graph.operators:
        if id(one) in marks:
            end = int(one.outputs[0])
            if end not in in_floats or id(spread.makers.get(same[end])) in whole:
                continue
            del same[end]  # from floats to floats: an operation in integers rounds
            kept.append(_reshape_of(one, graph, reshape))
            continue
        kept.append(one)
        if id(one) not in whole:
            floats.append("".join(f"{graph.tensors[k].name.decode()};" for k in one.outputs))
    graph.operators = kept
    for one in kept:
        one.inputs = [same.get(int(k), int(k)) for k in one.inputs]
    found = {graph.tensors[k].name.decode(): own for k, own in spread.ranges.items()}
    _end_in(model, same)
    _drop(model, dead | set(same))
    if not any(_names_subgraphs(one) for one in graph.operators):
        model.subgraphs = [graph]
    pattern = "^(" + "|".join(map(re.escape, floats)) + ")$"
    return Unmarked(write_model(model), found, pattern)


class _Spread:
    """The ranges of marks, and of what has them without a mark.

    Attributes:
        ranges: By the index of a tensor.
        same: What a mark gives: what it takes.
        rounded: Tensors that are read as integers have them.
        reads: By the `id` of an operation: the tensors of floats that it takes, without constants.
        makers: By the index of a tensor: the operation that gives it.
    """

    def __init__(self, model: Any, kinds: list[str], marks: dict[int, Range], reshape: int) -> None:
        self.graph, self.kinds, self.reshape = model.subgraphs[0], kinds, reshape
        self.ranges: dict[int, Range] = {}
        self.same: dict[int, int] = {}
        self.rounded: set[int] = set()
        self.apart = set(marks)  # operations that do not compute in integers
        operators = self.graph.operators
        self.readers = collections.Counter(int(k) for one in operators for k in one.inputs)
        self.makers = {int(k): one for one in operators for k in one.outputs}
        self.reads = {
            id(one): [int(k) for k in one.inputs if _is_varying(model, self.graph, int(k))]
            for one in operators
        }
        self.graph.operators = []
        for one in operators:
            self._add(one, marks.get(id(one)))

    def whole(self, in_integers: set[str]) -> set[int]:
        """Operations, by `id`, that take and give integers."""
        return {
            id(one)
            for one in self.graph.operators
            if id(one) not in self.apart
            and self.reads[id(one)]
            and self.kinds[one.opcodeIndex] in in_integers
            and all(k in self.rounded for k in self.reads[id(one)])
            and all(int(k) in self.ranges for k in one.outputs)
        }

    def _add(self, one: Any, own: Range | None) -> None:
        """Takes the next operation, a mark if it has a range of its own."""
        varying, kind = self.reads[id(one)], self.kinds[one.opcodeIndex]
        if own is not None:
            self._mark(one, own)
        elif varying and all(k in self.rounded for k in varying) and kind in (*_PASS_ON, *_FIXED):
            own = _FIXED.get(kind) or self.ranges[varying[0]]
        if own is not None:
            self.ranges.update(dict.fromkeys(map(int, one.outputs), own))
            self.rounded.update(map(int, one.outputs))
        self.graph.operators.append(one)

    def _mark(self, one: Any, own: Range) -> None:
        (taken,) = self.reads[id(one)]
        first = self.same.get(taken, taken)
        if self.ranges.get(first, own) != own:  # from one range to another: in floats
            first = _copy_of_tensor(self.graph, first, "between")
            between = _reshape_of(one, self.graph, self.reshape)
            between.outputs = one.inputs = [first]
            self.makers[first], self.reads[id(between)] = between, [taken]
            self.reads[id(one)] = [first]
            self.apart.add(id(between))
            self.graph.operators.append(between)
        self.ranges[first], self.same[int(one.outputs[0])] = own, first
        # What is only moved about before it is rounded can be rounded before.
        while (maker := self.makers.get(first)) and self.kinds[maker.opcodeIndex] in _MOVES:
            first = int(maker.inputs[0])
            if first in self.ranges or first in self.rounded or self.readers[first] > 1:
                break
            self.ranges[first] = own
            self.rounded.add(first)


def _range_of(operation: Any) -> Range | None:
    """The range that a mark holds, `None` of another operation."""
    name = getattr(operation.builtinOptions2, "name", None)
    if not isinstance(name, bytes) or not name.startswith(_MARK.encode()):
        return None
    low, high = struct.unpack("<dd", bytes.fromhex(name.decode().removeprefix(_MARK)))
    return low, high


def _names_subgraphs(operation: Any) -> bool:
    """Whether an operation names other graphs of the file."""
    options = (operation.builtinOptions, operation.builtinOptions2)
    return any("ubgraph" in key for own in options if own is not None for key in vars(own))


def _is_varying(model: Any, graph: Any, index: int) -> bool:
    """Whether a tensor holds floats that are no constants."""
    if index < 0:
        return False
    tensor = graph.tensors[index]
    return tensor.type == 0 and model.buffers[tensor.buffer].data is None


def _kinds(model: Any) -> list[str]:
    """The names of the operations of a file, by their index."""
    from ai_edge_litert import schema_py_generated as schema

    names = {value: name for name, value in vars(schema.BuiltinOperator).items()}
    return [names.get(code.builtinCode, "") for code in model.operatorCodes]


def _computed_in_integers(kinds: Iterable[str], recipe: list[dict[str, Any]]) -> set[str]:
    """Those of the kinds of operations that ai-edge-quantizer lets compute in integers."""
    from ai_edge_quantizer import qtyping, recipe_manager

    manager = recipe_manager.RecipeManager()
    manager.load_quantization_recipe(recipe)
    known = {name.value: name for name in qtyping.TFLOperationName}
    return {
        kind
        for kind in kinds
        if kind in known and manager.get_quantization_configs(known[kind], ";")[0] != "no_quantize"
    }


def _with_biases(model: Any, graph: Any, kinds: list[str]) -> set[int]:
    """Moves the addition of a bias behind a RESHAPE into the product before it, as TensorFlow does.

    So are those of the heads of an attention. Returns tensors that no operation needs any more.
    """
    readers = collections.Counter(int(k) for one in graph.operators for k in one.inputs)
    makers = {int(k): one for one in graph.operators for k in one.outputs}
    dead: set[int] = set()
    for one in list(graph.operators):
        if kinds[one.opcodeIndex] != "ADD" or one.builtinOptions.fusedActivationFunction:
            continue
        for x, bias in (one.inputs, one.inputs[::-1]):
            moved = makers.get(int(x))
            if moved is None or kinds[moved.opcodeIndex] != "RESHAPE" or readers[int(x)] > 1:
                continue
            product = makers.get(int(moved.inputs[0]))
            if product is None or kinds[product.opcodeIndex] != "FULLY_CONNECTED":
                continue
            inner, held = int(moved.inputs[0]), graph.tensors[int(bias)]
            shape = [int(k) for k in held.shape]
            while shape[:1] == [1]:
                shape = shape[1:]
            units = int(graph.tensors[inner].shape[-1])
            after = [int(k) for k in graph.tensors[int(x)].shape]
            if (
                readers[inner] > 1
                or product.builtinOptions.fusedActivationFunction
                or (len(product.inputs) > 2 and product.inputs[2] >= 0)
                or model.buffers[held.buffer].data is None
                or math.prod(shape) != units
                or after[len(after) - len(shape) :] != shape
            ):
                continue
            flat = _copy_of_tensor(graph, int(bias), "flat")
            graph.tensors[flat].shape, graph.tensors[flat].shapeSignature = [units], None
            product.inputs = [*product.inputs[:2], flat]
            moved.outputs = one.outputs
            graph.operators.remove(one)
            dead.add(int(x))
            if readers[int(bias)] == 1:
                dead.add(int(bias))
            break
    return dead


def _reshape(model: Any) -> int:
    """The index of RESHAPE among the operations of a file, to which it is added."""
    from ai_edge_litert import schema_py_generated as schema

    code = schema.OperatorCodeT()
    code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.RESHAPE
    code.version = 1
    model.operatorCodes.append(code)
    return len(model.operatorCodes) - 1


def _reshape_of(mark: Any, graph: Any, index: int) -> Any:
    """An operation with the inputs and outputs of a mark that computes nothing, either."""
    from ai_edge_litert import schema_py_generated as schema

    made = schema.OperatorT()
    made.opcodeIndex, made.inputs, made.outputs = index, mark.inputs, mark.outputs
    made.builtinOptionsType = schema.BuiltinOptions.ReshapeOptions
    made.builtinOptions = schema.ReshapeOptionsT()
    made.builtinOptions.newShape = graph.tensors[int(mark.outputs[0])].shape
    return made


def _copy_of_tensor(graph: Any, index: int, name: str) -> int:
    """The index of a new tensor like another one."""
    made = copy.copy(graph.tensors[index])
    made.name += f"/{name}".encode()
    graph.tensors.append(made)
    return len(graph.tensors) - 1


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
