"""Float constants of a LiteRT file stored in fewer bits."""

from collections.abc import Collection

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from keras_sparse_ortho.export._flatbuffer import (
    ModelT,
    TensorT,
    add_code,
    name_of,
    read_model,
    write_model,
)
from keras_sparse_ortho.export._integer_kernels import magnitudes

# Entries of a constant.
_LEAST_SIZE = {
    "float16": 128,
    "dynamic": 1024,
    "static": 256,
}


def narrowed(content: bytes, kind: str, precise: Collection[str] = ()) -> bytes:
    """The file with large float constants narrowed, and restored by DEQUANTIZE at load.

    Args:
        content: bytes. The file.
        kind: str. "float16", or "static" or "dynamic" for int8.
        precise: Names of constants that get float16 even so.
    """
    model = read_model(content)
    code = add_code(model, "DEQUANTIZE", 3)
    narrow_buffers: dict[int, int] = {}  # by the buffer of the floats
    for graph in model.subgraphs:
        read = {
            int(index)
            for operator in graph.operators
            for index in operator.inputs
        }
        outputs = {int(index) for index in graph.outputs}
        for index in sorted(read - outputs - {-1}):
            tensor = graph.tensors[index]
            values = _float_constant(model, tensor)
            if values is None or values.size < _LEAST_SIZE[kind]:
                continue
            if kind == "float16" or name_of(tensor) in precise:
                narrow, entries = _in_float16(values)
            elif values.ndim < 2:
                continue
            else:
                narrow, entries = _in_int8(values)
            if tensor.buffer not in narrow_buffers:
                narrow_buffers[tensor.buffer] = _add_buffer(model, entries)
            narrow.name = f"{name_of(tensor)}/narrow".encode()
            narrow.shape = tensor.shape
            narrow.buffer = narrow_buffers[tensor.buffer]
            tensor.buffer = 0  # the first one is empty
            widen = schema.OperatorT()
            widen.opcodeIndex = code
            widen.inputs = [len(graph.tensors)]
            widen.outputs = [index]
            graph.tensors.append(narrow)
            graph.operators.insert(0, widen)
    return write_model(model)


def _float_constant(model: ModelT, tensor: TensorT) -> np.ndarray | None:
    data = model.buffers[tensor.buffer].data
    if tensor.type != schema.TensorType.FLOAT32 or data is None:
        return None
    if tensor.sparsity is not None:
        return None
    return np.asarray(data).view("<f4").reshape(tensor.shape)


def _in_float16(values: np.ndarray) -> tuple[TensorT, np.ndarray]:
    """A tensor of float16, and its entries."""
    tensor = schema.TensorT()
    tensor.type = schema.TensorType.FLOAT16
    # The comparison with Keras refuses infinities.
    with np.errstate(over="ignore"):
        return tensor, values.astype("<f2")


def _in_int8(values: np.ndarray) -> tuple[TensorT, np.ndarray]:
    """A tensor of int8, and its entries; volumes have a scale for each output."""
    rows = np.abs(values).reshape(1, -1)
    if values.ndim == 5:
        rows = magnitudes(values, -1)
    scales = rows.max(axis=1) / np.float32(127)
    scales = np.where(scales > 0, scales, np.float32(1))
    settings = schema.QuantizationParametersT()
    settings.scale = scales
    settings.zeroPoint = np.zeros(scales.size, np.int64)
    settings.quantizedDimension = values.ndim - 1
    tensor = schema.TensorT()
    tensor.type = schema.TensorType.INT8
    tensor.quantization = settings
    return tensor, np.rint(values / scales).astype(np.int8)


def _add_buffer(model: ModelT, entries: np.ndarray) -> int:
    """Adds entries to a file; returns the index of their buffer."""
    buffer = schema.BufferT()
    buffer.data = entries.reshape(-1).view(np.uint8)
    model.buffers.append(buffer)
    return len(model.buffers) - 1
