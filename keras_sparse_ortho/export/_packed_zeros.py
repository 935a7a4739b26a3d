"""Packs the zeros of filters for LiteRT Micro, whose operator TFLM_DECODE unpacks them.

A packed filter is two constants, as LiteRT Micro's `decode_state_prune.cc` reads them:

- the mask: a bit for each entry, in the order of the tensor. The first entry is the highest bit of
  the first byte, and 1 is live;
- the live entries in the same order, little-endian, behind a header of 16 bytes.

The operator stands before the layer, and its output is the filter without data. Entries that are
not live become the zero point, that of their channel where channels have their own.
"""

import copy
import dataclasses
from collections import Counter
from collections.abc import Sequence

import numpy as np

from keras_sparse_ortho.errors import (
    ExportVerificationError,
    LiteRTFileError,
)
from keras_sparse_ortho.export._flatbuffer import (
    ModelT,
    OperatorT,
    SubGraphT,
    TensorT,
    kind_of,
    name_of,
)

OPERATOR = b"TFLM_DECODE"
# Kernels that read their filter at each call; others read theirs while they prepare.
_LAYERS = (
    "CONV_2D",
    "DEPTHWISE_CONV_2D",
    "FULLY_CONNECTED",
    "TRANSPOSE_CONV",
)
_FILTER = 1  # the place of the filter among the inputs of a layer
# Type: pruned. Version of the header: 1. Two empty bytes. Version of pruning: 1.
_HEADER = bytes([2, 1, 0, 0, 1]) + bytes(11)
_ADDED = (
    160  # bytes of the tensors and the operator of a packed filter, measured
)
_BITS = 8  # entries in a byte of the mask


@dataclasses.dataclass(frozen=True)
class PackedZeros:
    """The two constants of a packed filter.

    Attributes:
        mask: bytes. One bit an entry.
        entries: bytes. The header and the live entries.
    """

    mask: bytes
    entries: bytes

    @property
    def bytes(self) -> int:
        """The size of both."""
        return len(self.mask) + len(self.entries)


@dataclasses.dataclass(frozen=True)
class FilterSize:
    """How many bytes a filter of a file has.

    Attributes:
        name: str. The converter's name of the tensor.
        layer: str. The kind of the layer that reads it, such as "CONV_2D".
        dense_bytes: int. The size of all entries.
        stored_bytes: int. The size as the filter is stored now.
        why_dense: str. Why it is not packed; empty if it is.
    """

    name: str
    layer: str
    dense_bytes: int
    stored_bytes: int
    why_dense: str


def encode(values: np.ndarray, zeros: np.ndarray) -> PackedZeros:
    """Packs an array; `zeros` has the zero point of each entry. A negative zero is a zero."""
    live = values != zeros
    mask = np.packbits(live.reshape(-1))
    return PackedZeros(mask.tobytes(), _HEADER + values[live].tobytes())


def decode(packed: PackedZeros, zeros: np.ndarray) -> np.ndarray:
    """The array that LiteRT Micro unpacks.

    Args:
        packed: `PackedZeros`. The two constants.
        zeros: array. The zero point of each entry, with the shape and dtype of the result.

    Raises LiteRTFileError if they are not those of an array of this shape.
    """
    header = packed.entries[: len(_HEADER)]
    mask = np.frombuffer(packed.mask, np.uint8)
    if header != _HEADER or mask.size != -(-zeros.size // _BITS):
        raise LiteRTFileError(
            f"The filter of {zeros.size} entries must have the header {_HEADER.hex()} and one bit "
            "an entry in its mask: it is damaged, or packed in another way. Received: header "
            f"{header.hex()}, a mask of {mask.size} bytes"
        )
    live = np.unpackbits(mask, count=zeros.size).astype(bool)
    stored = len(packed.entries) - len(_HEADER)
    if stored != np.count_nonzero(live) * zeros.itemsize:
        raise LiteRTFileError(
            "The live entries of a packed filter must be those of its mask: the file is damaged. "
            f"Received: {np.count_nonzero(live)} live entries of {zeros.itemsize} bytes in the "
            f"mask, {stored} bytes"
        )
    values = zeros.reshape(-1).copy()
    values[live] = np.frombuffer(
        packed.entries, zeros.dtype, offset=len(_HEADER)
    )
    return values.reshape(zeros.shape)


def pack_zeros(model: ModelT, ram: int | None) -> list[FilterSize]:
    """Packs the filters of a file that become smaller, in place; returns the sizes of all.

    Args:
        model: The file. Graphs of loops and branches stay as they are.
        ram: int. The largest filter to pack, in bytes that it takes unpacked. `None`: any.
    """
    graph = model.subgraphs[0]
    layers: dict[int, list[OperatorT]] = {}
    for operator in graph.operators:
        if kind_of(model, operator) in _LAYERS:
            index = int(operator.inputs[_FILTER])
            layers.setdefault(index, []).append(operator)
    sizes = []
    for index, readers in layers.items():
        tensor = graph.tensors[index]
        data = _data_of(model, tensor)
        if not data.size:  # computed in the file
            continue
        why_dense = _why_dense(model, index, readers)
        stored_bytes = data.size
        if not why_dense and ram is not None and data.size > ram:
            why_dense = f"above `ram`, {ram} bytes"
        if not why_dense:
            zeros = zeros_of(tensor)
            assert zeros is not None  # or `_why_dense` has a reason
            packed = encode(_values_of(data, zeros), zeros)
            if packed.bytes + _ADDED * len(readers) < data.size:
                _store(model, index, readers, packed)
                stored_bytes = packed.bytes
            else:
                why_dense = "smaller as it is"
        sizes.append(
            FilterSize(
                name=name_of(tensor),
                layer=kind_of(model, readers[0]),
                dense_bytes=data.size,
                stored_bytes=stored_bytes,
                why_dense=why_dense,
            )
        )
    return sizes


def _why_dense(model: ModelT, index: int, readers: Sequence[OperatorT]) -> str:
    """Why the operator cannot unpack the filter of some layers; empty if it can."""
    graph = model.subgraphs[0]
    tensor = graph.tensors[index]
    holders: Counter[int] = Counter()
    for other in model.subgraphs:
        holders.update(each.buffer for each in other.tensors)
    uses = list(map(int, graph.outputs))
    for operator in graph.operators:
        uses += map(int, operator.inputs)
    if holders[tensor.buffer] > 1 or uses.count(index) > len(readers):
        return "read by other operations, too"
    if _dtype_of(tensor) is None or tensor.sparsity is not None:
        return "of a type that LiteRT Micro cannot unpack"
    if zeros_of(tensor) is None:
        return "with zero points that LiteRT Micro does not read"
    return ""


def _dtype_of(tensor: TensorT) -> np.dtype | None:
    """The dtype of a tensor; None where the operator has no form for it, as for four bits."""
    from ai_edge_litert import schema_py_generated as schema

    dtypes: dict[int, np.dtype] = {
        schema.TensorType.INT8: np.dtype("int8"),
        schema.TensorType.FLOAT32: np.dtype("<f4"),
    }
    return dtypes.get(tensor.type)


def zeros_of(tensor: TensorT) -> np.ndarray | None:
    """The zero point of each entry, in its dtype; None where LiteRT Micro has no rule for it."""
    dtype = _dtype_of(tensor)
    if dtype is None:
        return None
    shape = tuple(map(int, tensor.shape))
    if dtype.kind == "f":
        return np.zeros(shape, dtype)
    settings = tensor.quantization
    if settings is None or settings.scale is None:
        return None
    # LiteRT Micro ignores scales without as many zero points.
    if settings.zeroPoint is None:
        return None
    points = np.asarray(settings.zeroPoint)
    if not points.size or points.size != len(settings.scale):
        return None
    if points.size > 1:
        axis = int(settings.quantizedDimension)
        if axis not in (0, len(shape) - 1) or points.size != shape[axis]:
            return None
        along = [1] * len(shape)
        along[axis] = points.size
        points = points.reshape(along)
    return np.broadcast_to(points, shape).astype(dtype)


def _data_of(model: ModelT, tensor: TensorT) -> np.ndarray:
    """The bytes of a constant; none of another tensor."""
    data = model.buffers[tensor.buffer].data
    if data is None:
        return np.empty(0, np.uint8)
    return np.asarray(data, np.uint8)


def _values_of(data: np.ndarray, zeros: np.ndarray) -> np.ndarray:
    """Bytes as an array of the shape and dtype of `zeros`."""
    return data.view(zeros.dtype).reshape(zeros.shape)


def _store(
    model: ModelT,
    index: int,
    readers: Sequence[OperatorT],
    packed: PackedZeros,
) -> None:
    """Stores a filter packed, with an operator that unpacks it before each of its layers.

    An unpacked filter lives until the next operation. So each layer has one for itself; all of
    them read the same two constants.
    """
    from ai_edge_litert import schema_py_generated as schema

    graph = model.subgraphs[0]
    constants = [
        _add_bytes(model, graph, packed.mask),
        _add_bytes(model, graph, packed.entries),
    ]
    code = _code_of_operator(model)
    unpacked = graph.tensors[index]
    unpacked.buffer = 0  # the first buffer is empty
    for number, reader in enumerate(readers):
        output = index
        if number:
            output = len(graph.tensors)
            graph.tensors.append(copy.copy(unpacked))
        inputs = list(map(int, reader.inputs))
        inputs[_FILTER] = output
        reader.inputs = np.array(inputs, np.int32)
        operator = schema.OperatorT()
        operator.opcodeIndex = code
        operator.inputs = np.array(constants, np.int32)
        operator.outputs = np.array([output], np.int32)
        graph.operators.insert(graph.operators.index(reader), operator)


def _add_bytes(model: ModelT, graph: SubGraphT, content: bytes) -> int:
    """Adds a constant of bytes to a graph; returns its index."""
    from ai_edge_litert import schema_py_generated as schema

    buffer = schema.BufferT()
    buffer.data = np.frombuffer(content, np.uint8)
    tensor = schema.TensorT()
    tensor.shape = np.array([len(content)], np.int32)
    tensor.type = schema.TensorType.UINT8
    tensor.buffer = len(model.buffers)
    model.buffers.append(buffer)
    graph.tensors.append(tensor)
    return len(graph.tensors) - 1


def _code_of_operator(model: ModelT) -> int:
    """The index of the operator among the codes of a model, to which it is added if it is new."""
    from ai_edge_litert import schema_py_generated as schema

    for index, code in enumerate(model.operatorCodes):
        if code.customCode == OPERATOR:
            return index
    code = schema.OperatorCodeT()
    code.builtinCode = schema.BuiltinOperator.CUSTOM
    code.deprecatedBuiltinCode = schema.BuiltinOperator.CUSTOM
    code.customCode = OPERATOR
    code.version = 1
    model.operatorCodes.append(code)
    return len(model.operatorCodes) - 1


def is_decode(model: ModelT, operator: OperatorT) -> bool:
    """Whether an operation unpacks filters."""
    return bool(
        model.operatorCodes[operator.opcodeIndex].customCode == OPERATOR
    )


def check_filters(packed: ModelT, dense: ModelT) -> None:
    """Unpacks the filters of a packed file and compares them with those of the dense one.

    Raises ExportVerificationError if a layer reads another filter, LiteRTFileError if a packed one
    is damaged.
    """
    filters = _filters_that_layers_read(packed)
    expected_filters = _filters_that_layers_read(dense)
    if len(filters) != len(expected_filters):
        raise ExportVerificationError(
            "A packed file must have the layers of the dense one. Received: "
            f"{len(filters)} layers instead of {len(expected_filters)}"
        )
    for number, values in enumerate(filters):
        expected = expected_filters[number]
        if not np.array_equal(values, expected, equal_nan=True):
            raise ExportVerificationError(
                "A filter must be the same after packing and unpacking, and this one is not; "
                f"please report it. Received: the filter of layer {number}, {values.shape} "
                f"{values.dtype} instead of {expected.shape} {expected.dtype}"
            )


def _filters_that_layers_read(model: ModelT) -> list[np.ndarray]:
    """The filter of each layer in order: a constant, or what the operation before it unpacks."""
    graph = model.subgraphs[0]
    filters = []
    unpacked: dict[int, np.ndarray] = {}
    for operator in graph.operators:
        if is_decode(model, operator):
            unpacked = _unpacked_by(model, operator)
            continue
        if kind_of(model, operator) in _LAYERS:
            index = int(operator.inputs[_FILTER])
            tensor = graph.tensors[index]
            values = _data_of(model, tensor)
            zeros = zeros_of(tensor)
            if index in unpacked:
                values = unpacked[index]
            elif zeros is not None and values.size:
                values = _values_of(values, zeros)
            filters.append(values)
        unpacked = {}
    return filters


def _unpacked_by(model: ModelT, operator: OperatorT) -> dict[int, np.ndarray]:
    """The filters that an operator TFLM_DECODE writes, by the index of the tensor."""
    graph = model.subgraphs[0]
    unpacked = {}
    for number, index in enumerate(map(int, operator.outputs)):
        mask, entries = (
            _data_of(model, graph.tensors[place]).tobytes()
            for place in operator.inputs[2 * number : 2 * number + 2]
        )
        zeros = zeros_of(graph.tensors[index])
        if zeros is None:
            raise LiteRTFileError(
                "An unpacked filter must be of int8 or float32, with zero points for int8. "
                f"Received: tensor {index}"
            )
        unpacked[index] = decode(PackedZeros(mask, entries), zeros)
    return unpacked
