"""Small LiteRT files, made by hand: no converter, and graphs that no converter would write."""

from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from keras_sparse_ortho.export import (
    read_model,
    with_digest,
    with_record,
    write_model,
)

__all__ = ["absolute", "forever", "sealed", "with_digest", "with_tensors"]

ROWS, WIDTH = 1, 4
RECORD = {
    "route": "float32",
    "model": "m",
    "inputs": [{"name": "x", "shape": [ROWS, WIDTH], "dtype": "float32"}],
    "outputs": [{"name": "y", "shape": [ROWS, WIDTH]}],
}


def sealed(content: bytes, record: dict[str, Any] | None = None) -> bytes:
    """A file with a record of ours and the right digest, as anybody can make one."""
    return with_record(
        read_model(content), RECORD if record is None else record
    )


def absolute(size: int = WIDTH, name: str = "y") -> bytes:
    """`y = |x|`, for any static size."""
    return write_model(
        _model([_graph([ROWS, size], [(_op(), [0], [1])], name)], ["ABS"])
    )


def forever() -> bytes:
    """A loop whose condition is always true."""
    options = _made("WhileOptions", condSubgraphIndex=1, bodySubgraphIndex=2)
    loop = _op(schema.BuiltinOptions.WhileOptions, options)
    main = _graph([ROWS, WIDTH], [(loop, [0], [1])])
    condition = _graph([ROWS, WIDTH], [])
    condition.tensors.append(_tensor("yes", [1], schema.TensorType.BOOL, 1))
    condition.outputs = np.array([2], np.int32)
    body = _graph([ROWS, WIDTH], [(_op(code=1), [0], [1])])
    model = _model([main, condition, body], ["WHILE", "ABS"])
    model.buffers.append(_made("Buffer", data=np.ones(1, np.uint8)))
    return write_model(model)


def with_tensors(inputs: list[int], outputs: list[int]) -> bytes:
    """An operation that reads and writes tensors of any number, which the graph may not have."""
    return write_model(
        _model([_graph([ROWS, WIDTH], [(_op(), inputs, outputs)])], ["ABS"])
    )


def _made(kind: str, **fields: Any) -> Any:
    """An object of the schema."""
    found = getattr(schema, f"{kind}T")()
    for name, value in fields.items():
        setattr(found, name, value)
    return found


def _model(graphs: list[Any], codes: list[str]) -> Any:
    numbers = [getattr(schema.BuiltinOperator, name) for name in codes]
    signature = _made(
        "SignatureDef",
        signatureKey="serving_default",
        subgraphIndex=0,
        inputs=[_made("TensorMap", name="x", tensorIndex=0)],
        outputs=[
            _made("TensorMap", name=graphs[0].tensors[1].name, tensorIndex=1)
        ],
    )
    return _made(
        "Model",
        version=3,
        description="hand-made",
        subgraphs=graphs,
        buffers=[schema.BufferT()],
        operatorCodes=[
            _made(
                "OperatorCode",
                builtinCode=n,
                deprecatedBuiltinCode=min(n, 127),
                version=1,
            )
            for n in numbers
        ],
        signatureDefs=[signature],
    )


def _graph(shape: list[int], operators: list[Any], name: str = "y") -> Any:
    for operator, inputs, outputs in operators:
        operator.inputs, operator.outputs = (
            np.array(inputs, np.int32),
            np.array(outputs, np.int32),
        )
    return _made(
        "SubGraph",
        tensors=[_tensor("x", shape), _tensor(name, shape)],
        inputs=np.array([0], np.int32),
        outputs=np.array([1], np.int32),
        operators=[operator for operator, _, _ in operators],
    )


def _op(kind: int = 0, options: Any = None, code: int = 0) -> Any:
    return _made(
        "Operator",
        opcodeIndex=code,
        builtinOptionsType=kind,
        builtinOptions=options,
    )


def _tensor(
    name: str,
    shape: list[int],
    kind: int = schema.TensorType.FLOAT32,
    at: int = 0,
) -> Any:
    return _made(
        "Tensor",
        name=name,
        shape=np.array(shape, np.int32),
        type=kind,
        buffer=at,
    )
