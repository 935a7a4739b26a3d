"""Rewrites the FULLY_CONNECTED weights of a dense LiteRT file in a sparse encoding.

The built-in kernel of FULLY_CONNECTED takes sparse weights directly, in an operator of **version
8**: XNNPACK leaves that to the kernel, so the file is right and fast in every interpreter, with
and without XNNPACK (measured with ai-edge-litert 2.3: with versions 9 to 14 XNNPACK reads the
sparse data as dense, and crashes or answers wrongly). The converter's own option
(`EXPERIMENTAL_SPARSITY`, the routes `+sp`) restores most sparse weights at load by a `DENSIFY`
operation, and writes blocks in ways that crash XNNPACK.
"""

import copy
import dataclasses
from typing import Any

import numpy as np

from keras_sparse_ortho.export._flatbuffer import name_of, read_model, write_model
from keras_sparse_ortho.export._routes import ExportRouteError

_SPARSE_VERSION = 8
LEAST_ZEROS = 0.3  # below this the indices cost more than the zeros save
_MOST_BLOCKS = 255  # the int8 kernel keeps block counts and columns in one byte each


# Entries of a block `1 x block` of a weight `(out, in)`, and the type of the stored blocks. The
# kernel refuses or misreads other types in these encodings.
_ENCODINGS = {"csr": (1, "FLOAT32", "<f4"), "1x16": (16, "INT8", "i1")}


@dataclasses.dataclass(frozen=True)
class Encoded:
    """A rewritten file: names of the tensors stored sparsely, and why the others were kept."""

    content: bytes
    encoded: tuple[str, ...]
    kept: dict[str, str]


def encode(content: bytes, encoding: str) -> Encoded:
    """Encode every weight that gains by it; the others stay dense and are run by XNNPACK.

    Raises:
        ExportRouteError: if no weight gains by it.
    """
    from ai_edge_litert import schema_py_generated as schema

    model = read_model(content)
    block, tensor_type, stored = _ENCODINGS[encoding]
    encoded: list[str] = []
    kept: dict[str, str] = {}
    moved: dict[int, int] = {}
    for graph in model.subgraphs:
        for position, operators in _weights(schema, model, graph).items():
            tensor = graph.tensors[position]
            data = model.buffers[tensor.buffer].data
            name = name_of(tensor)
            if tensor.sparsity is not None or data is None or len(data) == 0:
                kept[name] = "it is not a dense constant"
                continue
            if tensor.type != getattr(schema.TensorType, tensor_type):
                kept[name] = f"it is not stored as {tensor_type.lower()}"
                continue
            weight = np.asarray(data).view(stored).reshape(tensor.shape)
            reason = _why_not(weight, block, operators, graph, position)
            if reason is not None:
                kept[name] = reason
                continue
            tensor.sparsity, values = _compress(schema, weight, block)
            # Equal weights still share a buffer; a weight that stays dense keeps the old one.
            dense = tensor.buffer
            if dense not in moved:
                moved[dense] = len(model.buffers)
                buffer = schema.BufferT()
                buffer.data = np.frombuffer(values.tobytes(), np.uint8)
                model.buffers.append(buffer)
            tensor.buffer = moved[dense]
            for operator in operators:
                operator.opcodeIndex = _sparse_opcode(model, operator.opcodeIndex)
            encoded.append(name)
    if not encoded:
        reasons = [f"'{name}': {why}" for name, why in list(kept.items())[:5]]
        raise ExportRouteError(
            f"The encoding '{encoding}' needs a weight of a Dense layer that can be stored so; use "
            f"a dense route. Received: {'; '.join(reasons) or 'no FULLY_CONNECTED operation'}"
        )
    return Encoded(write_model(model), tuple(encoded), kept)


def _weights(schema: Any, model: Any, graph: Any) -> dict[int, list[Any]]:
    """The weight tensors of FULLY_CONNECTED by position, with the operators that use them."""
    users: dict[int, list[Any]] = {}
    for operator in graph.operators or []:
        code = model.operatorCodes[operator.opcodeIndex].builtinCode
        if code == schema.BuiltinOperator.FULLY_CONNECTED:
            users.setdefault(int(operator.inputs[1]), []).append(operator)
    return users


def _why_not(
    weight: np.ndarray, block: int, operators: list[Any], graph: Any, position: int
) -> str | None:
    """The reason to leave a weight dense, or None."""
    columns = weight.shape[1]
    if columns % block:
        return (
            f"its {columns} inputs are not divisible by {block}, and the kernel, which does not "
            "check that, would answer wrongly"
        )
    used = [int(k) for one in graph.operators if one.inputs is not None for k in one.inputs]
    if [*used, *graph.outputs].count(position) != len(operators):
        return "other operations use it as well"
    live = weight.reshape(len(weight), -1, block).any(axis=2)
    if 1.0 - live.mean() < LEAST_ZEROS:
        unit = "entries" if block == 1 else f"blocks of 1x{block}"
        return f"only {1.0 - live.mean():.0%} of its {unit} are zero"
    if block == 16 and (live.shape[1] > _MOST_BLOCKS + 1 or live.sum(1).max() > _MOST_BLOCKS):
        return f"the kernel takes at most {_MOST_BLOCKS} live blocks in a row, of 256"
    return None


def _compress(schema: Any, weight: np.ndarray, block: int) -> tuple[Any, np.ndarray]:
    """The index structure of a weight, and its live blocks one after the other."""
    tiles = weight.reshape(len(weight), -1, block)
    live = tiles.any(axis=2)
    segments = np.concatenate([[0], np.cumsum(live.sum(axis=1))])
    rows, columns = schema.DimensionMetadataT(), schema.DimensionMetadataT()
    rows.format, rows.denseSize = schema.DimensionType.DENSE, len(weight)
    columns.format, columns.denseSize = schema.DimensionType.SPARSE_CSR, 0
    columns.arraySegmentsType, columns.arraySegments = _index_vector(schema, segments)
    columns.arrayIndicesType, columns.arrayIndices = _index_vector(schema, np.nonzero(live)[1])
    sparsity = schema.SparsityParametersT()
    sparsity.dimMetadata = [rows, columns]
    if block > 1:
        inner = schema.DimensionMetadataT()
        inner.format, inner.denseSize = schema.DimensionType.DENSE, block
        sparsity.dimMetadata.append(inner)
        sparsity.blockMap = np.array([1], np.int32)
    sparsity.traversalOrder = np.arange(len(sparsity.dimMetadata), dtype=np.int32)
    return sparsity, tiles[live].ravel()


def _index_vector(schema: Any, values: np.ndarray) -> tuple[int, Any]:
    """The narrowest vector of the schema that holds the values, with its type."""
    largest = int(values.max(initial=0))
    name, dtype = "Int32", "int32"
    if largest < 1 << 8:
        name, dtype = "Uint8", "uint8"
    elif largest < 1 << 16:
        name, dtype = "Uint16", "uint16"
    vector = getattr(schema, f"{name}VectorT")()
    vector.values = values.astype(dtype)
    return int(getattr(schema.SparseIndexVector, f"{name}Vector")), vector


def _sparse_opcode(model: Any, index: int) -> int:
    """The operator code `index` in the version with sparse weights; added if missing."""
    wanted = copy.copy(model.operatorCodes[index])
    if wanted.version == _SPARSE_VERSION:
        return index
    wanted.version = _SPARSE_VERSION
    for k, code in enumerate(model.operatorCodes):
        if code.builtinCode == wanted.builtinCode and code.version == _SPARSE_VERSION:
            return k
    model.operatorCodes.append(wanted)
    return len(model.operatorCodes) - 1
