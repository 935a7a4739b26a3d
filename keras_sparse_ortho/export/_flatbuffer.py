"""The flatbuffer of a LiteRT file: reading and writing it, its weights, and our record in it.

The record is JSON in a metadata buffer, which LiteRT tools leave alone, with the SHA-256 of the
file, whose digest counts as zeros: a damaged file is refused before any interpreter crashes on it.
"""

import dataclasses
import hashlib
import json
import math
import re
from typing import Any

import numpy as np

from keras_sparse_ortho._text import printable
from keras_sparse_ortho.errors import LiteRTFileError

_IDENTIFIER = b"TFL3"
MARK = "kso_range_"  # of an extra output of a float32 file: a number and two doubles in hex follow
_ALIGNMENT = 16  # required of the data of a buffer by the schema (`force_align`)
_DTYPES = {"FLOAT32": "<f4", "FLOAT16": "<f2", "INT8": "i1", "UINT8": "u1", "INT16": "<i2"}
_DTYPES |= {"INT4": "i1", "INT2": "i1"}
_ELEMENTWISE = ("ADD", "SUB", "MUL", "DIV")
_PACKED = {"INT4": 4, "INT2": 2}  # bits of an entry

_NAME = "keras_sparse_ortho"
_BLANK = b"0" * 64
_HEAD = b'{"format": "keras_sparse_ortho/1", "sha256": "'
_RECORD = re.compile(re.escape(_HEAD) + rb"[0-9a-f]{64}\"")
# The metadata's name and a part of the record: no single damage hides both.
_TRACES = (
    len(_NAME).to_bytes(4, "little") + _NAME.encode() + b"\0",
    b'_sparse_ortho/1", "sha256": "',
)


@dataclasses.dataclass(frozen=True)
class WeightZeros:
    """One constant of rank 2 or more in the file.

    Attributes:
        name: str. The converter's name of the tensor, not the Keras path.
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


def read_model(content: bytes) -> Any:
    """The `ModelT` of a flatbuffer, with the weights that AEQ keeps behind files above 256 KiB."""
    from ai_edge_litert import schema_py_generated as schema

    root = schema.Model.GetRootAs(content, 0)
    model = schema.ModelT.InitFromObj(root)
    for buffer in model.buffers:
        if buffer.offset > 1 and buffer.size:  # an offset of 1 is a placeholder
            buffer.data = np.frombuffer(content, np.uint8, buffer.size, buffer.offset)
            buffer.offset = buffer.size = 0
    return model


def write_model(model: Any) -> bytes:
    """The flatbuffer of a `ModelT`, with all used buffers in it, where LiteRT Micro needs them."""
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


def add_code(model: Any, name: str, version: int) -> int:
    """Adds a built-in operation to the codes of a model; returns its index."""
    from ai_edge_litert import schema_py_generated as schema

    code = schema.OperatorCodeT()
    code.builtinCode = code.deprecatedBuiltinCode = getattr(schema.BuiltinOperator, name)
    code.version = version
    model.operatorCodes.append(code)
    return len(model.operatorCodes) - 1


def name_of(tensor: Any) -> str:
    """The name of a tensor, by which operations and ranges find it; `printable` shows it."""
    if isinstance(tensor.name, bytes):
        return tensor.name.decode("utf-8", "backslashreplace")
    return str(tensor.name)


def read_weights(content: bytes) -> tuple[WeightZeros, ...]:
    """The weights: constants of rank 2 and more, but no integers without a scale, nor vectors."""
    from ai_edge_litert import schema_py_generated as schema

    model = read_model(content)
    type_names = {code: name for name, code in vars(schema.TensorType).items()}
    elementwise = {getattr(schema.BuiltinOperator, name) for name in _ELEMENTWISE}
    found, seen, tensors, read = [], set(), [], set()
    for graph in model.subgraphs:
        tensors += graph.tensors
        for op in graph.operators:
            if model.operatorCodes[op.opcodeIndex].builtinCode in elementwise:
                read |= {id(graph.tensors[k]) for k in op.inputs}
    for tensor in tensors:
        kind = type_names.get(tensor.type, "")
        dtype, bits = _DTYPES.get(kind), _PACKED.get(kind)
        data, sparse = model.buffers[tensor.buffer].data, tensor.sparsity is not None
        # The bodies of loops share constants with the main graph.
        if dtype is None or tensor.buffer in seen or len(tensor.shape) < 2:
            continue
        # The sparse encoding of a kernel of zeros stores nothing.
        if data is None and not sparse:
            continue
        shape = tuple(int(size) for size in tensor.shape)
        size = math.prod(shape)
        if id(tensor) in read and size == max(shape):
            continue
        stored = np.asarray([] if data is None else data, np.uint8)
        if bits is not None:  # the first entry is in the lowest bits; what counts is which are zero
            parts = [(stored >> k) % 2**bits for k in range(0, 8, bits)]
            stored = np.stack(parts, axis=-1).reshape(-1)[:size]
        stored = stored.view(dtype) if sparse else stored.view(dtype).reshape(shape)
        zero: Any = 0
        if stored.dtype.kind in "iu":
            about = tensor.quantization
            if about is None or about.scale is None or len(about.scale) == 0:
                continue
            # A number, or along a dimension; those of sparse kernels, in a row, are all 0.
            zero = np.asarray(0 if about.zeroPoint is None else about.zeroPoint)
            axes = [-1 if k == about.quantizedDimension else 1 for k in range(len(shape))]
            zero = zero.max() if sparse or zero.size == 1 else zero.reshape(axes)
        if data is not None:
            seen.add(tensor.buffer)
        zeros = size - int(np.count_nonzero(stored != zero))
        name = stored.dtype.name if bits is None else kind.lower()
        found.append(WeightZeros(printable(name_of(tensor)), shape, name, size, zeros, sparse))
    return tuple(found)


def operations_in_floats(content: bytes) -> tuple[str, ...]:
    """The operations of a file that compute floats, such as "MEAN of model/norm/moments".

    Those that only turn floats into integers, or back, are none.
    """
    from ai_edge_litert import schema_py_generated as schema

    model = read_model(content)
    names = {code: name for name, code in vars(schema.BuiltinOperator).items()}
    found = []
    for graph in model.subgraphs:
        for op in graph.operators:
            kind = names[model.operatorCodes[op.opcodeIndex].builtinCode]
            floats = [k for k in op.outputs if graph.tensors[k].type == schema.TensorType.FLOAT32]
            if floats and kind not in ("QUANTIZE", "DEQUANTIZE", "DENSIFY"):
                found.append(f"{kind} of {name_of(graph.tensors[floats[0]])}")
    return tuple(found)


def with_record(content: bytes, record: dict[str, Any]) -> bytes:
    from ai_edge_litert import schema_py_generated as schema

    model = read_model(content)
    # Drop that of an earlier export.
    others = [one for one in model.metadata or [] if one.name not in (_NAME, _NAME.encode())]
    buffer, entry = schema.BufferT(), schema.MetadataT()
    text = _HEAD + _BLANK + b'", ' + json.dumps(record)[1:].encode()
    buffer.data = np.frombuffer(text, np.uint8)
    entry.name, entry.buffer = _NAME, len(model.buffers)
    model.buffers.append(buffer)
    model.metadata = [*others, entry]
    return with_digest(write_model(model))


def with_digest(content: bytes) -> bytes:
    at = content.index(_HEAD) + len(_HEAD)
    ends = content[:at], content[at + len(_BLANK) :]
    return hashlib.sha256(_BLANK.join(ends)).hexdigest().encode().join(ends)


def read_record(content: bytes, path: str) -> dict[str, Any] | None:
    """The record of a file, or None if this package did not write it; raises if it was changed."""
    found = _RECORD.search(content)
    if found is None and not any(trace in content for trace in _TRACES):
        return None
    if found is None or with_digest(content) != content:
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
            all(isinstance(one, str) for one in texts)
            and all(len(set(some)) == len(some) > 0 for some in names)
        ):
            raise ValueError("other values")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise LiteRTFileError(
            "The record in the file must be as `export_litert` writes it, and this one was changed "
            f"and its digest too. Received: {path!r}, {type(error).__name__}: {error}"
        ) from None
    return {**record, "input_names": names[0], "output_names": names[1]}
