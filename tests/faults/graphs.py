"""Small LiteRT files, made by hand: no converter, and graphs that no converter would write."""

from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from keras_sparse_ortho.export._flatbuffer import with_digest, with_record, write_model

__all__ = ["absolute", "forever", "sealed", "with_digest", "with_record", "with_tensors"]

ROWS, WIDTH = 1, 4
RECORD = {
    "route": "float32",
    "model": "m",
    "inputs": [{"name": "x", "shape": [ROWS, WIDTH], "dtype": "float32"}],
    "outputs": [{"name": "y", "shape": [ROWS, WIDTH]}],
}


def sealed(content: bytes, record: dict[str, Any] | None = None, xnnpack: bool = False) -> bytes:
    """A file with a record of ours and the right digest, as anybody can make one."""
    return with_record(content, {"xnnpack": xnnpack} | (RECORD if record is None else record))


def absolute(size: int = WIDTH, name: str = "y") -> bytes:
    """`y = |x|`, for any static size."""
    return write_model(_model([_graph([ROWS, size], [(_op("ABS"), [0], [1])], name)], ["ABS"]))


def forever() -> bytes:
    """A loop whose condition is always true."""
    options = schema.WhileOptionsT()
    options.condSubgraphIndex, options.bodySubgraphIndex = 1, 2
    loop = _op("WHILE", schema.BuiltinOptions.WhileOptions, options)
    main = _graph([ROWS, WIDTH], [(loop, [0], [1])])
    condition = _graph([ROWS, WIDTH], [])
    yes = _tensor("yes", [1], schema.TensorType.BOOL)
    yes.buffer = 1
    condition.tensors.append(yes)
    condition.outputs = np.array([2], np.int32)
    body = _graph([ROWS, WIDTH], [(_op("ABS", code=1), [0], [1])])
    model = _model([main, condition, body], ["WHILE", "ABS"])
    model.buffers.append(_buffer(np.ones(1, np.uint8)))
    return write_model(model)


def with_tensors(inputs: list[int], outputs: list[int]) -> bytes:
    """An operation that reads and writes tensors of any number, which the graph may not have."""
    return write_model(_model([_graph([ROWS, WIDTH], [(_op("ABS"), inputs, outputs)])], ["ABS"]))


def _model(graphs: list[Any], codes: list[str]) -> Any:
    model = schema.ModelT()
    model.version, model.description = 3, "hand-made"
    model.subgraphs, model.buffers = graphs, [schema.BufferT()]
    model.operatorCodes = []
    for name in codes:
        code = schema.OperatorCodeT()
        code.builtinCode = getattr(schema.BuiltinOperator, name)
        code.deprecatedBuiltinCode, code.version = min(code.builtinCode, 127), 1
        model.operatorCodes.append(code)
    signature = schema.SignatureDefT()
    signature.signatureKey, signature.subgraphIndex = "serving_default", 0
    signature.inputs, signature.outputs = [_named("x", 0)], [_named(graphs[0].tensors[1].name, 1)]
    model.signatureDefs = [signature]
    return model


def _graph(shape: list[int], operators: list[Any], name: str = "y") -> Any:
    graph = schema.SubGraphT()
    kind = schema.TensorType.FLOAT32
    graph.tensors = [_tensor("x", shape, kind), _tensor(name, shape, kind)]
    graph.inputs, graph.outputs = np.array([0], np.int32), np.array([1], np.int32)
    graph.operators = []
    for operator, inputs, outputs in operators:
        operator.inputs = np.array(inputs, np.int32)
        operator.outputs = np.array(outputs, np.int32)
        graph.operators.append(operator)
    return graph


def _op(name: str, kind: int = 0, options: Any = None, code: int = 0) -> Any:
    operator = schema.OperatorT()
    operator.opcodeIndex, operator.builtinOptionsType = code, kind
    operator.builtinOptions = options
    return operator


def _tensor(name: str, shape: list[int], kind: int) -> Any:
    tensor = schema.TensorT()
    tensor.name, tensor.shape = name, np.array(shape, np.int32)
    tensor.type, tensor.buffer = kind, 0
    return tensor


def _buffer(data: np.ndarray) -> Any:
    buffer = schema.BufferT()
    buffer.data = data
    return buffer


def _named(name: str, tensor: int) -> Any:
    entry = schema.TensorMapT()
    entry.name, entry.tensorIndex = name, tensor
    return entry
