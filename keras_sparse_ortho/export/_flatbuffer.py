"""The flatbuffer of a LiteRT file: reading and writing it, its weights, and our record in it.

The record is JSON in a metadata buffer, which LiteRT tools leave alone. It holds the SHA-256 of the
whole file with the digest itself taken as zeros, so a truncated or edited file is refused before
any interpreter, which might crash, sees it.
"""

import dataclasses
import hashlib
import json
import math
import re
from typing import Any

import numpy as np

_IDENTIFIER = b"TFL3"
_ALIGNMENT = 16  # required of the data of a buffer by the schema (`force_align`)
_DTYPES = {"FLOAT32": "<f4", "FLOAT16": "<f2", "INT8": "i1", "UINT8": "u1", "INT16": "<i2"}

_NAME = "keras_sparse_ortho"
_BLANK = b"0" * 64
_HEAD = b'{"format": "keras_sparse_ortho/1", "sha256": "'
_RECORD = re.compile(re.escape(_HEAD) + rb"[0-9a-f]{64}\"")
# The metadata's name, as a string of a flatbuffer, and a part of the record: no single damage hides
# both.
_TRACES = (
    len(_NAME).to_bytes(4, "little") + _NAME.encode() + b"\0",
    b'_sparse_ortho/1", "sha256": "',
)


class LiteRTFileError(ValueError):
    """A file that is not a LiteRT file, or is damaged or edited."""


@dataclasses.dataclass(frozen=True)
class WeightZeros:
    """One constant of rank 2 or more in the file.

    Attributes:
        name: Name of the tensor in the file (the converter's, not the Keras path).
        shape: Shape in LiteRT's layout: `(out, in)` for a Dense kernel.
        dtype: How an entry is stored: "float32", "float16", "int8"...
        size: Number of entries.
        zeros: Entries whose value is exactly 0.0; in quantized tensors, those at the zero point.
        sparse: Whether only the live entries, or blocks of them, are stored.
        bytes: Size of values and indices in the file.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    size: int
    zeros: int
    sparse: bool = False
    bytes: int = 0


# --- reading and writing --------------------------------------------------------------------------


def read_model(content: bytes) -> Any:
    """The `ModelT` of a flatbuffer. Large buffers are views of `content`, not copies.

    Other tools keep large weights behind the flatbuffer (ai-edge-quantizer 0.10: files above 256
    KiB). `write_model` writes them into it, where LiteRT Micro and others look for them.
    """
    from ai_edge_litert import schema_py_generated as schema

    root = schema.Model.GetRootAs(content, 0)
    model = schema.ModelT.InitFromObj(root)
    for k, buffer in enumerate(model.buffers):
        if _is_behind(root.Buffers(k)):
            buffer.data = _bytes_of(root.Buffers(k), content)
            buffer.offset = buffer.size = 0
    return model


def _is_behind(buffer: Any) -> bool:
    """Whether the bytes of a buffer lie behind the flatbuffer; an offset of 1 is a placeholder."""
    return bool(buffer.Offset() > 1 and buffer.Size())


def _bytes_of(buffer: Any, content: bytes) -> np.ndarray:
    """The bytes of a buffer, in the flatbuffer or behind it."""
    if _is_behind(buffer):
        return np.frombuffer(content, np.uint8, buffer.Size(), buffer.Offset())
    inside: np.ndarray = buffer.DataAsNumpy() if buffer.DataLength() else np.empty(0, np.uint8)
    return inside


def write_model(model: Any) -> bytes:
    """The flatbuffer of a `ModelT`, without buffers that nothing refers to."""
    used = {tensor.buffer for graph in model.subgraphs for tensor in graph.tensors}
    used |= {entry.buffer for entry in model.metadata or []}
    for k, buffer in enumerate(model.buffers):
        if k not in used:
            buffer.data = None
    size = sum(0 if buffer.data is None else len(buffer.data) for buffer in model.buffers)
    builder = _aligning_builder(size + (1 << 16))
    builder.Finish(model.Pack(builder), _IDENTIFIER)
    return bytes(builder.Output())


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


def name_of(tensor: Any) -> str:
    """The name of a tensor of a `ModelT`."""
    return tensor.name.decode() if isinstance(tensor.name, bytes) else str(tensor.name)


# --- weights --------------------------------------------------------------------------------------


def read_weights(content: bytes) -> tuple[WeightZeros, ...]:
    """The weights: constants of rank 2 and more, but no integers without a scale."""
    from ai_edge_litert import schema_py_generated as schema

    model = schema.Model.GetRootAs(content, 0)
    type_names = {code: name for name, code in vars(schema.TensorType).items()}
    found, seen = [], set()
    for graph in map(model.Subgraphs, range(model.SubgraphsLength())):
        for tensor in map(graph.Tensors, range(graph.TensorsLength())):
            dtype = _DTYPES.get(type_names.get(tensor.Type(), ""))
            sparsity = tensor.Sparsity()
            data = _bytes_of(model.Buffers(tensor.Buffer()), content)
            # The sparse encoding of a kernel of zeros stores nothing.
            if (data.size == 0 and sparsity is None) or tensor.ShapeLength() < 2 or dtype is None:
                continue
            if tensor.Buffer() in seen:  # the bodies of loops share constants with the main graph
                continue
            stored = data.view(dtype)
            shape = tuple(int(size) for size in tensor.ShapeAsNumpy())
            zero = _zero_point(tensor) if stored.dtype.kind in "iu" else 0
            if zero is None:
                continue
            if data.size:
                seen.add(tensor.Buffer())
            indices = 0
            if sparsity is None:
                stored = stored.reshape(shape)
            else:
                levels = schema.SparsityParametersT.InitFromObj(sparsity).dimMetadata
                vectors = [v for one in levels for v in (one.arraySegments, one.arrayIndices) if v]
                indices = sum(np.asarray(vector.values).nbytes for vector in vectors)
                zero = np.max(zero)  # those of kernels are all 0
            size = math.prod(shape)
            zeros = size - int(np.count_nonzero(stored != zero))
            about = (tensor.Name().decode(), shape, stored.dtype.name, size, zeros)
            found.append(WeightZeros(*about, sparsity is not None, stored.nbytes + indices))
    return tuple(found)


def _zero_point(tensor: Any) -> Any:
    """The zero point, a number or along a dimension; None: there is no scale."""
    quantization = tensor.Quantization()
    if quantization is None or quantization.ScaleLength() == 0:
        return None
    shape = [1] * tensor.ShapeLength()
    shape[quantization.QuantizedDimension()] = -1
    points = np.atleast_1d(quantization.ZeroPointAsNumpy())
    return points.reshape(shape) if np.any(points) else 0


# --- the record of an export ----------------------------------------------------------------------


def with_record(content: bytes, record: dict[str, Any]) -> bytes:
    """The file with a record and its digest."""
    from ai_edge_litert import schema_py_generated as schema

    model = read_model(content)
    others = []
    for entry in model.metadata or []:
        if entry.name in (_NAME, _NAME.encode()):  # of an earlier export
            model.buffers[entry.buffer].data = None
        else:
            others.append(entry)
    buffer, entry = schema.BufferT(), schema.MetadataT()
    text = _HEAD + _BLANK + b'", ' + json.dumps(record)[1:].encode()
    buffer.data = np.frombuffer(text, np.uint8)
    entry.name, entry.buffer = _NAME, len(model.buffers)
    model.buffers.append(buffer)
    model.metadata = [*others, entry]
    return with_digest(write_model(model))


def with_digest(content: bytes) -> bytes:
    """The file with the digest of its present content in its record."""
    at = content.index(_HEAD) + len(_HEAD)
    ends = content[:at], content[at + len(_BLANK) :]
    return hashlib.sha256(_BLANK.join(ends)).hexdigest().encode().join(ends)


def read_record(content: bytes, path: str) -> dict[str, Any] | None:
    """The record of a file, or None if this package did not write it; raises if it was changed."""
    found = _RECORD.search(content)
    if found is None:
        if any(trace in content for trace in _TRACES):
            raise LiteRTFileError(
                "The file must be as `export_litert` wrote it: the record in it is damaged. "
                f"Received: {path!r} with {len(content)} bytes"
            )
        return None
    if with_digest(content) != content:
        raise LiteRTFileError(
            "The file must be as `export_litert` wrote it: it is corrupted, truncated, or was "
            f"edited since. Received: {path!r} with {len(content)} bytes and another SHA-256"
        )
    text = content[found.start() : found.start() + (1 << 20)].decode("utf-8", "replace")
    try:
        record = dict(json.JSONDecoder().raw_decode(text)[0])
        names = [[one["name"] for one in record[key]] for key in ("inputs", "outputs")]
        texts = (record.get("route") or "", record.get("model") or "", *names[0], *names[1])
        if not (
            isinstance(record["xnnpack"], bool)
            and all(isinstance(one, str) for one in texts)
            and all(len(set(some)) == len(some) > 0 for some in names)
        ):
            raise ValueError("other values")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise LiteRTFileError(
            "The record in the file must be as `export_litert` writes it, and this one was changed "
            f"and its digest too. Received: {path!r}, {type(error).__name__}: {error}"
        ) from None
    return {**record, "input_names": names[0], "output_names": names[1]}
