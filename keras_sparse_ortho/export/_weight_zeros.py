"""The weights in a LiteRT file, and how many of their entries are zero."""

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from keras_sparse_ortho._text import printable
from keras_sparse_ortho.export._flatbuffer import (
    ModelT,
    TensorT,
    name_of,
    operations,
    read_model,
)

# How NumPy reads the data of weights, by the name of their type.
_DTYPES = {
    "FLOAT32": "<f4",
    "FLOAT16": "<f2",
    "INT8": "i1",
    "UINT8": "u1",
    "INT16": "<i2",
    "INT4": "i1",
    "INT2": "i1",
}
# of an entry, where a byte holds several
_BITS = {
    "INT4": 4,
    "INT2": 2,
}
_ELEMENTWISE = ("ADD", "SUB", "MUL", "DIV")


@dataclasses.dataclass(frozen=True)
class WeightZeros:
    """One constant of rank 2 or more in the file.

    Attributes:
        name: str. The path of the kernel. The converter's name of the tensor if it holds no whole
            kernel, zeros alone, or a sparse encoding. A kernel of blocks may have several tensors,
            such as "dense/kernel (1 of 2)".
        shape: tuple of int. In LiteRT's layout: `(out, in)` for a Dense kernel.
        dtype: str. How an entry is stored: "float32", "float16", "int8", "int4"...
        size: int. Number of entries.
        zeros: int. Entries that are exactly 0.0; in quantized tensors, those at the zero point.
        sparse: bool. Whether only the live entries, or blocks of them, are stored.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    size: int
    zeros: int
    sparse: bool = False


def read_weights(content: bytes) -> tuple[WeightZeros, ...]:
    """The weights: constants of rank 2 and more, but no integers without a scale, nor vectors."""
    weights = []
    for weight in stored_weights(read_model(content)):
        live = int(np.count_nonzero(weight.entries != weight.zero_points))
        size = math.prod(weight.shape)
        weights.append(
            WeightZeros(
                name=printable(name_of(weight.tensor)),
                shape=weight.shape,
                dtype=weight.dtype,
                size=size,
                zeros=size - live,
                sparse=weight.is_sparse,
            )
        )
    return tuple(weights)


class StoredWeight(NamedTuple):
    """The data of one weight in a file.

    Attributes:
        tensor: The tensor in the file.
        shape: tuple of int. Its shape.
        dtype: str. How an entry is stored.
        entries: Array of the shape; in a row, and live ones alone, if the weight is sparse.
        zero_points: Array that broadcasts against `entries`: what stands for 0.0.
        scales: Array that broadcasts against `entries`: the step of integers.
        is_sparse: bool. Whether a sparse encoding is used.
    """

    tensor: TensorT
    shape: tuple[int, ...]
    dtype: str
    entries: np.ndarray
    zero_points: np.ndarray
    scales: np.ndarray
    is_sparse: bool

    def values(self) -> np.ndarray:
        """The entries as floats."""
        return (
            self.entries.astype(np.float32) - self.zero_points
        ) * self.scales


def stored_weights(model: ModelT) -> Iterator[StoredWeight]:
    """The weights of a file as they are stored, each buffer once."""
    operands = _operands_of_elementwise(model)
    buffers = set()
    for graph in model.subgraphs:
        for tensor in graph.tensors:
            # The bodies of loops share constants with the main graph.
            rank = 0 if tensor.shape is None else len(tensor.shape)
            if rank < 2 or tensor.buffer in buffers:
                continue
            is_vector = math.prod(tensor.shape) == max(tensor.shape)
            if is_vector and id(tensor) in operands:
                continue
            weight = _stored_weight(model, tensor)
            if weight is None:
                continue
            if model.buffers[tensor.buffer].data is not None:
                buffers.add(tensor.buffer)
            yield weight


def _operands_of_elementwise(model: ModelT) -> set[int]:
    """The tensors, by `id`, that additions and products by entry read."""
    operands = set()
    for graph, operator, kind in operations(model):
        if kind in _ELEMENTWISE:
            operands |= {id(graph.tensors[index]) for index in operator.inputs}
    return operands


def _stored_weight(model: ModelT, tensor: TensorT) -> StoredWeight | None:
    """The data of a tensor; None if it is no constant, or has another type than weights."""
    from ai_edge_litert import schema_py_generated as schema

    type_names = {
        number: name for name, number in vars(schema.TensorType).items()
    }
    kind = type_names.get(tensor.type, "")
    if kind not in _DTYPES:
        return None
    is_sparse = tensor.sparsity is not None
    data = model.buffers[tensor.buffer].data
    if data is None:
        # The sparse encoding of a kernel of zeros stores nothing.
        if not is_sparse:
            return None
        data = []
    shape = tuple(int(size) for size in tensor.shape)
    entries = np.asarray(data, np.uint8)
    dtype = np.dtype(_DTYPES[kind]).name
    if kind in _BITS:
        entries = _unpacked(entries, _BITS[kind])[: math.prod(shape)]
        dtype = kind.lower()
    entries = entries.view(_DTYPES[kind])
    if not is_sparse:
        entries = entries.reshape(shape)
    zero_points = np.zeros(())
    scales = np.ones(())
    if entries.dtype.kind != "f":
        settings = tensor.quantization
        if (
            settings is None
            or settings.scale is None
            or len(settings.scale) == 0
        ):
            return None
        scales = _by_entry(settings.scale, tensor)
        if settings.zeroPoint is not None:
            zero_points = _by_entry(settings.zeroPoint, tensor)
    return StoredWeight(
        tensor, shape, dtype, entries, zero_points, scales, is_sparse
    )


def _unpacked(packed: np.ndarray, bits: int) -> np.ndarray:
    """The signed entries in each byte, of which the first is in the lowest bits."""
    parts = [(packed >> shift) % 2**bits for shift in range(0, 8, bits)]
    entries = np.stack(parts, axis=-1).reshape(-1).astype(np.int8)
    return np.where(entries < 2 ** (bits - 1), entries, entries - 2**bits)


def _by_entry(setting: np.ndarray, tensor: TensorT) -> np.ndarray:
    """A setting of the quantization of a tensor, for all or by channel, in a fitting shape."""
    values = np.asarray(setting)
    # The entries of sparse kernels are in a row; their zero points are all 0.
    if tensor.sparsity is not None or values.size == 1:
        return np.asarray(values.max())
    shape = [1] * len(tensor.shape)
    shape[tensor.quantization.quantizedDimension] = -1
    return values.reshape(shape)
