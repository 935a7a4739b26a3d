"""The weights as they stand in a LiteRT file, and the promise that no zero was lost."""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

_DTYPES = {"FLOAT32": "<f4", "FLOAT16": "<f2", "INT8": "i1", "UINT8": "u1", "INT16": "<i2"}


@dataclasses.dataclass(frozen=True)
class WeightZeros:
    """One constant of rank 2 or more in the file.

    Attributes:
        name: Name of the tensor in the file (the converter's, not the Keras path).
        shape: Shape in LiteRT's layout: `(out, in)` for a Dense kernel.
        dtype: How an entry is stored: "float32", "float16", "int8"...
        size: Number of entries.
        zeros: Entries whose value is exactly 0.0; in quantized tensors, those at the zero point.
        encoding: "dense"; "csr", "1x4" or "1x16" where the kernel takes the sparse weight; with
            "densify " before it where it is restored at load.
        bytes: What values and indices take in the file.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    size: int
    zeros: int
    encoding: str = "dense"
    bytes: int = 0


def read_weights(content: bytes) -> tuple[WeightZeros, ...]:
    """Count the zeros of every weight in a LiteRT flatbuffer.

    Constants of rank 0 and 1 (biases, shapes) are no weights here, and neither are integers
    without a scale (indices). In a sparse encoding, what is not stored is zero.
    """
    from ai_edge_litert import schema_py_generated as schema

    model = schema.Model.GetRootAs(content, 0)
    type_names = {code: name for name, code in vars(schema.TensorType).items()}
    found, seen = [], set()
    for g in range(model.SubgraphsLength()):
        graph = model.Subgraphs(g)
        densified = _densified(schema, model, graph)
        for t in range(graph.TensorsLength()):
            tensor = graph.Tensors(t)
            buffer = model.Buffers(tensor.Buffer())
            stored = _DTYPES.get(type_names.get(tensor.Type(), ""))
            sparsity = tensor.Sparsity()
            # Of a kernel that is zero throughout, a sparse encoding stores nothing.
            empty = buffer.DataLength() == 0
            if (empty and sparsity is None) or tensor.ShapeLength() < 2 or stored is None:
                continue
            if tensor.Buffer() in seen:  # the bodies of loops share constants with the main graph
                continue
            values = np.empty(0, stored) if empty else buffer.DataAsNumpy().view(stored)
            shape = tuple(int(size) for size in tensor.ShapeAsNumpy())
            if sparsity is None:
                values = values.reshape(shape)
            zero = _zero_point(tensor, values.ndim) if values.dtype.kind in "iu" else 0
            if zero is None:
                continue
            if not empty:
                seen.add(tensor.Buffer())
            size = math.prod(shape)
            encoding, index_bytes = _encoding(schema, sparsity)
            found.append(
                WeightZeros(
                    name=tensor.Name().decode(),
                    shape=shape,
                    dtype=values.dtype.name,
                    size=size,
                    zeros=size - int(np.count_nonzero(values != zero)),
                    encoding=f"densify {encoding}" if t in densified else encoding,
                    bytes=values.nbytes + index_bytes,
                )
            )
    return tuple(found)


def lost_zeros(
    kernels: Iterable[tuple[str, np.ndarray]], weights: Iterable[WeightZeros]
) -> str | None:
    """Say which Keras kernel has zeros that the file does not have, or None.

    The converter transposes, reshapes, renames and merges equal constants but keeps sizes, so a
    kernel is compared with the tensors of its size, the one with most zeros first. Kernels with
    no such tensor (split by the converter) are compared by their sum with all tensors left over.

    Args:
        kernels: Path and value of each kernel (rank 2 or more) of the plain Keras model.
        weights: What `read_weights` found in the file.
    """
    by_size: dict[int, list[int]] = defaultdict(list)
    for weight in weights:
        by_size[weight.size].append(weight.zeros)
    wanted: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for path, value in kernels:
        zeros = int(value.size - np.count_nonzero(value))
        wanted[value.size].append((zeros, path))
    unmatched = 0
    for size, pairs in wanted.items():
        there = sorted(by_size.pop(size, []), reverse=True)
        if not there:
            unmatched += sum(zeros for zeros, _ in pairs)
            continue
        for rank, (zeros, path) in enumerate(sorted(pairs, reverse=True)):
            # Fewer tensors than kernels: equal kernels became one tensor.
            most = there[min(rank, len(there) - 1)]
            if most < zeros:
                return f"kernel '{path}' has {zeros} zeros of {size}, its tensor in the file {most}"
    left = sum(zeros for group in by_size.values() for zeros in group)
    if left < unmatched:
        return f"kernels without a tensor of their size have {unmatched} zeros, the rest {left}"
    return None


def sparse_kernels(weights: Iterable[keras.Variable]) -> list[tuple[str, np.ndarray]]:
    """Path and value of the weights whose zeros must not be lost: kernels, by name or by looks.

    A bias can have rank 2 as well (GRU, MultiHeadAttention), and the converter may fold it away.
    Fresh biases are all zero and trained ones have none, so that a weight of any other name
    (of a custom layer) counts as a kernel if some but not all of it is zero.
    """
    found = []
    for variable in weights:
        if len(variable.shape) < 2:
            continue
        value = np.asarray(keras.ops.convert_to_numpy(variable.value))
        live = np.count_nonzero(value)
        if any(part in variable.name for part in ("kernel", "embedding")) or 0 < live < value.size:
            found.append((variable.path, value))
    return found


def _densified(schema: Any, model: Any, graph: Any) -> set[int]:
    """Positions of the tensors that a DENSIFY operation restores."""
    found = set()
    for k in range(graph.OperatorsLength()):
        operator = graph.Operators(k)
        code = model.OperatorCodes(operator.OpcodeIndex()).BuiltinCode()
        if code == schema.BuiltinOperator.DENSIFY:
            found.add(int(operator.Inputs(0)))
    return found


def _encoding(schema: Any, sparsity: Any) -> tuple[str, int]:
    """The name of a tensor's encoding, and the bytes of its indices."""
    if sparsity is None:
        return "dense", 0
    parameters = schema.SparsityParametersT.InitFromObj(sparsity)
    vectors = [
        vector
        for dimension in parameters.dimMetadata
        for vector in (dimension.arraySegments, dimension.arrayIndices)
        if vector is not None
    ]
    index_bytes = sum(np.asarray(vector.values).nbytes for vector in vectors)
    blocked = parameters.blockMap
    if blocked is None or len(blocked) == 0:
        return "csr", index_bytes
    inner = parameters.dimMetadata[len(parameters.traversalOrder) - len(blocked) :]
    return "x".join(["1"] * (2 - len(inner)) + [str(d.denseSize) for d in inner]), index_bytes


def _zero_point(tensor: Any, rank: int) -> Any:
    """The integer that stands for 0.0, for each entry; None if the integers are no weights.

    It is 0 for kernels, but not for the embedding tables of the int8 route.
    """
    quantization = tensor.Quantization()
    if quantization is None or quantization.ScaleLength() == 0:
        return None
    points = quantization.ZeroPointAsNumpy()
    if np.ndim(points) == 0 or len(points) == 0:
        return 0
    if len(points) == 1:
        return points[0]
    if rank != tensor.ShapeLength():  # sparse values stand in one row; kernels have zero point 0
        return 0 if not np.any(points) else None
    shape = [1] * rank
    shape[quantization.QuantizedDimension()] = -1
    return points.reshape(shape)
