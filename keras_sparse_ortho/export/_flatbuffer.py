"""The flatbuffer of a LiteRT file: read and written, with the names in it."""

import functools
import hashlib
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np

# Objects of the generated schema, which has no types.
ModelT: TypeAlias = Any
"""A whole file."""

SubGraphT: TypeAlias = Any
"""A graph of a file: its tensors, its operations in order, and its ends."""

TensorT: TypeAlias = Any
"""A tensor of a graph. One with data in its buffer is a constant."""

OperatorT: TypeAlias = Any
"""An operation of a graph."""

MARK = "kso_range_"  # of an extra output of a float32 file: a number and two doubles in hex follow
LSTM_KIND = "UNIDIRECTIONAL_SEQUENCE_LSTM"
_IDENTIFIER = b"TFL3"
_ALIGNMENT = (
    16  # required of the data of a buffer by the schema (`force_align`)
)
_PLACEHOLDER = 1  # an offset of a buffer without data


def read_model(content: bytes) -> ModelT:
    """The `ModelT` of a flatbuffer, with the weights that AEQ keeps behind files above 256 KiB."""
    from ai_edge_litert import schema_py_generated as schema

    root = schema.Model.GetRootAs(content, 0)
    model = schema.ModelT.InitFromObj(root)
    for buffer in model.buffers:
        if buffer.offset > _PLACEHOLDER and buffer.size:
            buffer.data = np.frombuffer(
                content, np.uint8, buffer.size, buffer.offset
            )
            buffer.offset = 0
            buffer.size = 0
    return model


def write_model(model: ModelT) -> bytes:
    """The flatbuffer of a `ModelT`, with all used buffers in it, where LiteRT Micro needs them."""
    used = {
        tensor.buffer for graph in model.subgraphs for tensor in graph.tensors
    }
    used |= {entry.buffer for entry in model.metadata or []}
    size = 0
    for index, buffer in enumerate(model.buffers):
        if index not in used:
            buffer.data = None
        if buffer.data is not None:
            size += len(buffer.data)
    builder = _builder(size + (1 << 16))
    builder.Finish(model.Pack(builder), _IDENTIFIER)
    return bytes(builder.Output())


def _builder(size: int) -> Any:
    """A builder that aligns byte vectors as the schema asks, and stores equal vectors once.

    The generated Python code does neither. Zero points and scales, 12 bytes for each channel of a
    kernel and of a bias, are often equal.
    """
    import flatbuffers  # type: ignore[import-untyped]  # comes with TensorFlow and ai-edge-litert

    class Builder(flatbuffers.Builder):
        def __init__(self, size: int) -> None:
            super().__init__(size)
            self._places: dict[tuple[str, bytes], int] = {}

        def CreateNumpyVector(self, x: np.ndarray) -> int:
            key = x.dtype.str, hashlib.sha256(x.tobytes()).digest()
            if key not in self._places:
                self._places[key] = self._new_vector(x)
            return self._places[key]

        def _new_vector(self, x: np.ndarray) -> int:
            if x.dtype != np.uint8:
                return int(super().CreateNumpyVector(x))
            self.StartVector(1, x.size, _ALIGNMENT)
            self.head -= x.size
            self.Bytes[self.head : self.head + x.size] = x.tobytes()
            return int(self.EndVector())

    return Builder(size)


def add_code(model: ModelT, name: str, version: int) -> int:
    """Adds a built-in operation to the codes of a model if it is new there; returns its index."""
    from ai_edge_litert import schema_py_generated as schema

    number = getattr(schema.BuiltinOperator, name)
    for index, code in enumerate(model.operatorCodes):
        if code.builtinCode == number and code.version == version:
            return index
    code = schema.OperatorCodeT()
    code.builtinCode = number
    code.deprecatedBuiltinCode = number
    code.version = version
    model.operatorCodes.append(code)
    return len(model.operatorCodes) - 1


def operations(
    model: ModelT,
) -> Iterator[tuple[SubGraphT, OperatorT, str]]:
    """The operations of a file in order, each with its graph and its kind, such as "CONV_2D"."""
    for graph in model.subgraphs:
        for operator in graph.operators:
            yield graph, operator, kind_of(model, operator)


def kind_of(model: ModelT, operator: OperatorT) -> str:
    """The kind of an operation, such as "CONV_2D"."""
    code = model.operatorCodes[operator.opcodeIndex]
    # Older files have the number in the other field, which holds numbers below 127.
    return _kinds()[max(code.builtinCode, code.deprecatedBuiltinCode)]


@functools.cache
def _kinds() -> dict[int, str]:
    """The kinds of operations by their numbers in the schema."""
    from ai_edge_litert import schema_py_generated as schema

    return {
        number: name for name, number in vars(schema.BuiltinOperator).items()
    }


def has_lstms(content: bytes) -> bool:
    """Whether a file computes an LSTM by LiteRT's fused operator."""
    kinds = {kind for _, _, kind in operations(read_model(content))}
    return LSTM_KIND in kinds


def name_of(tensor: TensorT) -> str:
    """The name of a tensor, by which operations and ranges find it; `printable` shows it."""
    if isinstance(tensor.name, bytes):
        return tensor.name.decode("utf-8", "backslashreplace")
    return str(tensor.name)


def operations_in_floats(content: bytes) -> tuple[str, ...]:
    """The operations of a file that compute floats, such as "MEAN of model/norm/moments".

    Those that only turn floats into integers, or back, are none.
    """
    from ai_edge_litert import schema_py_generated as schema

    in_floats = []
    for graph, operator, kind in operations(read_model(content)):
        if kind in ("QUANTIZE", "DEQUANTIZE", "DENSIFY"):
            continue
        for index in operator.outputs:
            output = graph.tensors[index]
            if output.type == schema.TensorType.FLOAT32:
                in_floats.append(f"{kind} of {name_of(output)}")
                break
    return tuple(in_floats)
