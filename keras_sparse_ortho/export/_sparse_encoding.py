"""Mends the sparse encoding of files by TensorFlow's converter."""

from typing import Any

from ai_edge_litert import schema_py_generated as schema

from keras_sparse_ortho.export._flatbuffer import (
    add_code,
    name_of,
    read_model,
    write_model,
)


def with_densify(content: bytes) -> bytes:
    """The file with an operation DENSIFY behind every sparse tensor that DEQUANTIZE reads.

    The converter leaves that operation out where it stores blocks of four entries in float16: it
    does so where an operation could multiply such blocks, and DEQUANTIZE stands between the two.
    DEQUANTIZE takes what is stored for a dense kernel, and the outputs are infinite or random.
    """
    model = read_model(content)
    dequantize = schema.BuiltinOperator.DEQUANTIZE
    code = None
    for graph in model.subgraphs:
        for reader in list(graph.operators):
            source = int(reader.inputs[0]) if len(reader.inputs) else -1
            if (
                model.operatorCodes[reader.opcodeIndex].builtinCode
                != dequantize
            ):
                continue
            if graph.tensors[source].sparsity is None:
                continue
            if code is None:
                code = add_code(model, "DENSIFY", 1)
            _insert_densify(graph, reader, source, code)
    return content if code is None else write_model(model)


def _insert_densify(graph: Any, reader: Any, source: int, code: int) -> None:
    """Lets `reader` read a dense tensor that DENSIFY makes of the sparse one, `source`."""
    sparse = graph.tensors[source]
    dense = schema.TensorT()
    dense.name = f"{name_of(sparse)}/dense".encode()
    dense.shape = sparse.shape
    dense.type = sparse.type
    dense.buffer = 0  # the first buffer is empty
    densify = schema.OperatorT()
    densify.opcodeIndex = code
    densify.inputs = [source]
    densify.outputs = [len(graph.tensors)]
    densify.builtinOptionsType = schema.BuiltinOptions.DensifyOptions
    densify.builtinOptions = schema.DensifyOptionsT()
    reader.inputs = [len(graph.tensors)]
    graph.tensors.append(dense)
    graph.operators.insert(graph.operators.index(reader), densify)
