"""Small files with filters, made by hand: layers of one filter, of any type and zero points."""

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from keras_sparse_ortho.export import read_model, write_model
from tests.faults.graphs import _made, _model, _op, _tensor

TYPES = schema.TensorType


def sparse(*shape, density=0.2, seed=0, zeros=0, dtype="int8"):
    """An array whose other entries are zero points, without entries that are so by chance."""
    rng = np.random.default_rng(seed)
    values = rng.integers(90, 100, shape).astype(dtype)
    dead = rng.permutation(values.size)[round(density * values.size) :]
    values.flat[dead] = np.broadcast_to(zeros, shape).flat[dead]
    return values


def quantized(tensor, scales, points, axis=0):
    """The tensor with scales and zero points; none of the latter where `points` is None."""
    tensor.quantization = _made(
        "QuantizationParameters",
        scale=np.asarray(scales, np.float32),
        zeroPoint=None if points is None else np.asarray(points, np.int64),
        quantizedDimension=axis,
    )
    return tensor


def dense_layers(
    values,
    kind=TYPES.INT8,
    points=(0,),
    scales=None,
    axis=0,
    ends=TYPES.INT8,
    layers=1,
):
    """A file of square dense layers in a row that all read one filter, `(outputs, inputs)`.

    `values` are the filter's entries, as they are stored.
    """
    n = values.shape[0]
    codes = ["FULLY_CONNECTED"]
    tensors = [_tensor(f"x{k}", [1, n], ends) for k in range(layers + 1)]
    if ends != TYPES.FLOAT32:
        tensors = [quantized(one, [0.1], [0]) for one in tensors]
    filters = _tensor("filter", [*values.shape], kind, 1)
    if kind == TYPES.INT4:
        filters.shape[1] *= 2
    if kind not in (TYPES.FLOAT32, TYPES.FLOAT16):
        scales = np.full(len(points or [0]), 0.01) if scales is None else scales
        quantized(filters, scales, points, axis)
    operators = []
    for k in range(layers):
        options = _made("FullyConnectedOptions")
        one = _op(schema.BuiltinOptions.FullyConnectedOptions, options)
        one.inputs = np.array([k, layers + 1], np.int32)
        one.outputs = np.array([k + 1], np.int32)
        operators.append(one)
    graph = _made(
        "SubGraph",
        tensors=[*tensors, filters],
        inputs=np.array([0], np.int32),
        outputs=np.array([layers], np.int32),
        operators=operators,
    )
    model = _model([graph], codes)
    model.signatureDefs = []
    model.operatorCodes[0].version = 4
    buffer = _made("Buffer", data=np.ascontiguousarray(values).view(np.uint8))
    buffer.data = buffer.data.reshape(-1)
    model.buffers.append(buffer)
    return write_model(model)


def transposed_layer(values):
    """A file of one transposed convolution of 5 x 5 places; `values` are its filter, in int8."""
    channels = values.shape[0]
    shape = [1, 5, 5, channels]
    tensors = [_tensor(name, shape, TYPES.INT8) for name in "xy"]
    tensors = [quantized(one, [0.1], [0]) for one in tensors]
    filters = _tensor("filter", [*values.shape], TYPES.INT8, 1)
    zeros = np.zeros(channels)
    tensors.append(quantized(filters, zeros + 0.002, zeros))
    tensors.append(_tensor("shape", [4], TYPES.INT32, 2))
    options = _made("TransposeConvOptions", strideW=1, strideH=1)
    layer = _op(schema.BuiltinOptions.TransposeConvOptions, options)
    layer.inputs = np.array([3, 2, 0], np.int32)
    layer.outputs = np.array([1], np.int32)
    graph = _made(
        "SubGraph",
        tensors=tensors,
        inputs=np.array([0], np.int32),
        outputs=np.array([1], np.int32),
        operators=[layer],
    )
    model = _model([graph], ["TRANSPOSE_CONV"])
    model.signatureDefs = []
    for constant in (values, np.array(shape, "<i4")):
        data = np.ascontiguousarray(constant).view(np.uint8).reshape(-1)
        model.buffers.append(_made("Buffer", data=data))
    return write_model(model)


def edited(content, edit):
    """The file after `edit(model)`."""
    model = read_model(content)
    edit(model)
    return write_model(model)
