"""What stands in a LiteRT file: its flatbuffer, its weights, and our record of how it was made.

The record is JSON in a metadata buffer of the flatbuffer, where every LiteRT tool leaves it
alone. It holds the SHA-256 of the whole file with the digest itself taken as zeros, so that a
truncated or altered file is refused before any interpreter, which might crash, sees it.
"""

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from keras_sparse_ortho.export._errors import LiteRTFileError

_IDENTIFIER = b"TFL3"
_ALIGNMENT = 16  # what the schema asks of the data of a buffer (`force_align`)
_DTYPES = {"FLOAT32": "<f4", "FLOAT16": "<f2", "INT8": "i1", "UINT8": "u1", "INT16": "<i2"}

_NAME = "keras_sparse_ortho"
_BLANK = b"0" * 64
_HEAD = b'{"format": "keras_sparse_ortho/1", "sha256": "'
# True and false take the same number of bytes, so that verification may still flip the setting.
_XNNPACK = {True: b'"xnnpack": true ', False: b'"xnnpack": false'}
# As a string of a flatbuffer: its length, and a zero behind it.
_ENTRY = len(_NAME).to_bytes(4, "little") + _NAME.encode() + b"\0"
_DIGEST = b'_sparse_ortho/1", "sha256": "'
_RECORD = re.compile(re.escape(_HEAD) + rb"[0-9a-f]{64}\"")


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


def read_model(content: bytes) -> Any:
    """The `ModelT` of a flatbuffer. Large buffers are views of `content`, not copies."""
    from ai_edge_litert import schema_py_generated as schema

    return schema.ModelT.InitFromObj(schema.Model.GetRootAs(content, 0))


def write_model(model: Any) -> bytes:
    """The flatbuffer of a `ModelT`."""
    size = sum(0 if buffer.data is None else len(buffer.data) for buffer in model.buffers)
    builder = _aligning_builder(size + (1 << 16))
    builder.Finish(model.Pack(builder), _IDENTIFIER)
    return bytes(builder.Output())


@dataclasses.dataclass(frozen=True)
class StoredWeight:
    """One constant of rank 2 or more, as it is stored.

    Attributes:
        about: What is told of it.
        values: As they are stored, in the shape of the tensor; in one row if `sparsity` is given.
        zero: What stands for 0.0 among the values, as one number or along a dimension.
        scale: What an entry is `(value - zero)` times, likewise.
        sparsity: The `SparsityParameters` of the schema, or None.
    """

    about: WeightZeros
    values: np.ndarray
    zero: Any
    scale: Any
    sparsity: Any


def read_weights(content: bytes) -> tuple[WeightZeros, ...]:
    """Count the zeros of every weight in a LiteRT flatbuffer.

    Constants of rank 0 and 1 (biases, shapes) are no weights here, and neither are integers
    without a scale (indices). In a sparse encoding, what is not stored is zero.
    """
    return tuple(weight.about for weight in stored_weights(content))


def stored_weights(content: bytes) -> Iterator[StoredWeight]:
    """The weights of `read_weights`, with their values."""
    from ai_edge_litert import schema_py_generated as schema

    model = schema.Model.GetRootAs(content, 0)
    type_names = {code: name for name, code in vars(schema.TensorType).items()}
    seen = set()
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
            about = WeightZeros(
                name=tensor.Name().decode(),
                shape=shape,
                dtype=values.dtype.name,
                size=size,
                zeros=size - int(np.count_nonzero(values != zero)),
                encoding=f"densify {encoding}" if t in densified else encoding,
                bytes=values.nbytes + index_bytes,
            )
            scale = _scale(tensor, len(shape)) if values.dtype.kind in "iu" else 1.0
            yield StoredWeight(about, values, zero, scale, sparsity)


def attach(content: bytes, record: dict[str, Any]) -> bytes:
    """The file with a record of ours; its digest is blank until `seal`."""
    from ai_edge_litert import schema_py_generated as schema

    model = read_model(content)
    for entry in model.metadata or []:  # of an earlier export
        if entry.name in (_NAME, _NAME.encode()):
            model.buffers[entry.buffer].data = None
    model.metadata = [e for e in model.metadata or [] if e.name not in (_NAME, _NAME.encode())]
    ours = {key: value for key, value in record.items() if key not in ("format", "sha256")}
    text = json.dumps(ours | {"xnnpack": None})[1:].encode()
    text = text.replace(b'"xnnpack": null', _XNNPACK[True])
    buffer, entry = schema.BufferT(), schema.MetadataT()
    buffer.data = np.frombuffer(_HEAD + _BLANK + b'", ' + text, np.uint8)
    entry.name, entry.buffer = _NAME, len(model.buffers)
    model.buffers.append(buffer)
    model.metadata = [*model.metadata, entry]
    return write_model(model)


def seal(content: bytes, xnnpack: bool) -> bytes:
    """The same file with the interpreter's setting and the digest filled in."""
    start = _record_start(content)
    if start is None:
        raise LiteRTFileError("The file has no record of keras_sparse_ortho to seal.")
    at = start + len(_HEAD)
    content = content[:at] + _BLANK + content[at + len(_BLANK) :]
    flag = re.compile(b"|".join(_XNNPACK.values())).search(content, at)
    if flag is None:
        raise LiteRTFileError("The record of the file does not say whether XNNPACK is used.")
    content = content[: flag.start()] + _XNNPACK[xnnpack] + content[flag.end() :]
    digest = hashlib.sha256(content).hexdigest().encode()
    return content[:at] + digest + content[at + len(_BLANK) :]


def read_record(content: bytes, path: str) -> dict[str, Any] | None:
    """The record of a file, or None if this package did not write it.

    Raises:
        LiteRTFileError: If the file is not what it was when it was sealed.
    """
    start = _record_start(content)
    if start is None:
        # The name and the record stand in different places: no single damage hides both.
        if _ENTRY in content or _DIGEST in content:
            raise LiteRTFileError(
                "The file must be as `export_litert` wrote it: the record in it is damaged. "
                f"Received: {path!r} with {len(content)} bytes"
            )
        return None
    at = start + len(_HEAD)
    written = content[at : at + len(_BLANK)]
    blank = content[:at] + _BLANK + content[at + len(_BLANK) :]
    digest = hashlib.sha256(blank).hexdigest().encode()
    if digest != written:
        raise LiteRTFileError(
            "The file must be as `export_litert` wrote it: it is corrupted, truncated, or was "
            f"edited since. Received: {path!r} with {len(content)} bytes and SHA-256 "
            f"{digest.decode()[:12]}..., not {written.decode()[:12]}..."
        )
    text = content[start : start + (1 << 20)].decode("utf-8", "replace")
    record, _ = json.JSONDecoder().raw_decode(text)
    return dict(record)


def _aligning_builder(size: int) -> Any:
    """A builder that aligns byte vectors as the schema asks; the generated Python code does not."""
    import flatbuffers  # type: ignore[import-untyped]  # comes with TensorFlow and ai-edge-litert

    class AligningBuilder(flatbuffers.Builder):
        def CreateNumpyVector(self, x: np.ndarray) -> int:
            if x.dtype != np.uint8:
                return int(super().CreateNumpyVector(x))
            self.StartVector(1, x.size, _ALIGNMENT)
            self.head -= x.size
            self.Bytes[self.head : self.head + x.size] = x.tobytes()
            return int(self.EndVector())

    return AligningBuilder(size)


def _densified(schema: Any, model: Any, graph: Any) -> set[int]:
    """Positions of the tensors that a DENSIFY operation restores."""
    positions = set()
    for k in range(graph.OperatorsLength()):
        operator = graph.Operators(k)
        code = model.OperatorCodes(operator.OpcodeIndex()).BuiltinCode()
        if code == schema.BuiltinOperator.DENSIFY:
            positions.add(int(operator.Inputs(0)))
    return positions


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


def _scale(tensor: Any, rank: int) -> np.ndarray:
    """What the integers are multiplied by, as one number or along a dimension."""
    quantization = tensor.Quantization()
    shape = [1] * rank
    shape[quantization.QuantizedDimension()] = -1
    return np.asarray(quantization.ScaleAsNumpy()).reshape(shape)


def _record_start(content: bytes) -> int | None:
    record = _RECORD.search(content)
    return None if record is None else record.start()
