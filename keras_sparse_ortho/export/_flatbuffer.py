"""The flatbuffer of a LiteRT file: reading and writing it, and the weights in it."""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

_IDENTIFIER = b"TFL3"
_ALIGNMENT = 16  # required of the data of a buffer by the schema (`force_align`)
_DTYPES = {"FLOAT32": "<f4", "FLOAT16": "<f2", "INT8": "i1", "UINT8": "u1", "INT16": "<i2"}


class LiteRTFileError(ValueError):
    """A file that is not a LiteRT file, is damaged or edited, or is not of the given model."""


@dataclasses.dataclass(frozen=True)
class WeightZeros:
    """One constant of rank 2 or more in the file.

    Attributes:
        name: Name of the tensor in the file (the converter's, not the Keras path).
        shape: Shape in LiteRT's layout: `(out, in)` for a Dense kernel.
        dtype: How an entry is stored: "float32", "float16", "int8"...
        size: Number of entries.
        zeros: Entries whose value is exactly 0.0; in quantized tensors, those at the zero point.
        encoding: "dense", or the sparse encoding: "csr", "1x4" or "1x16"; with "densify " before
            it if a DENSIFY operation restores the dense weight at load.
        bytes: Size of values and indices in the file.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    size: int
    zeros: int
    encoding: str = "dense"
    bytes: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class StoredWeight:
    """One constant of rank 2 or more: `(stored - zero) * scale`; `stored` is one row if sparse."""

    about: WeightZeros
    stored: np.ndarray
    zero: Any = 0
    scale: Any = 1.0
    sparsity: Any = None

    @functools.cached_property
    def values(self) -> np.ndarray:
        """The entries as float32, in the shape of the tensor."""
        values = self.stored.astype("float32", copy=False)
        if self.stored.dtype.kind in "iu":
            values = values - np.float32(self.zero)
        if self.sparsity is not None:
            dense = np.zeros(self.about.shape, "float32")
            dense[_places(self.sparsity, dense.ndim)] = values
            values = dense
        return values * np.float32(self.scale) if self.stored.dtype.kind in "iu" else values

    @property
    def step(self) -> np.ndarray:
        """The difference of neighbouring values, in a shape that broadcasts to the tensor's."""
        return np.asarray(self.scale if self.stored.dtype.kind in "iu" else 0.0, "float32")


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


def flat(content: bytes, path: str) -> bytes:
    """The file with all weights inside of the flatbuffer; the same bytes if they are there."""
    from ai_edge_litert import schema_py_generated as schema

    try:
        root = schema.Model.GetRootAs(content, 0)
        behind = any(_is_behind(root.Buffers(k)) for k in range(root.BuffersLength()))
        return write_model(read_model(content)) if behind else content
    except Exception as error:  # the generated code checks nothing
        raise LiteRTFileError(
            "The file must be a LiteRT model, and it is no flatbuffer of one: it is damaged, or of "
            f"another kind. Received: {path!r} with {len(content)} bytes ({error})"
        ) from error


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


def read_weights(content: bytes) -> tuple[WeightZeros, ...]:
    """The zeros of every weight: constants of rank 2 and more, but no integers without a scale."""
    return tuple(weight.about for weight in stored_weights(content))


def stored_weights(content: bytes) -> Iterator[StoredWeight]:
    """The weights of `read_weights`, with their values."""
    from ai_edge_litert import schema_py_generated as schema

    model = schema.Model.GetRootAs(content, 0)
    type_names = {code: name for name, code in vars(schema.TensorType).items()}
    seen = set()
    for g in range(model.SubgraphsLength()):
        graph = model.Subgraphs(g)
        densified = {
            int(one.Inputs(0))
            for one in map(graph.Operators, range(graph.OperatorsLength()))
            if model.OperatorCodes(one.OpcodeIndex()).BuiltinCode()
            == schema.BuiltinOperator.DENSIFY
        }
        for t in range(graph.TensorsLength()):
            tensor = graph.Tensors(t)
            buffer = model.Buffers(tensor.Buffer())
            dtype = _DTYPES.get(type_names.get(tensor.Type(), ""))
            sparsity = tensor.Sparsity()
            # The sparse encoding of a kernel of zeros stores nothing.
            data = _bytes_of(buffer, content)
            empty = data.size == 0
            if (empty and sparsity is None) or tensor.ShapeLength() < 2 or dtype is None:
                continue
            if tensor.Buffer() in seen:  # the bodies of loops share constants with the main graph
                continue
            stored = data.view(dtype)
            shape = tuple(int(size) for size in tensor.ShapeAsNumpy())
            quantized = _quantization(tensor) if stored.dtype.kind in "iu" else (0, 1.0)
            # The zero points of channels fit no row of values; those of kernels are all 0.
            if quantized is None or (sparsity is not None and np.size(quantized[0]) > 1):
                continue
            if not empty:
                seen.add(tensor.Buffer())
            encoding, size_of_indices = "dense", 0
            if sparsity is None:
                stored = stored.reshape(shape)
            else:
                sparsity = schema.SparsityParametersT.InitFromObj(sparsity)
                encoding, size_of_indices = _encoding(sparsity)
            size = math.prod(shape)
            about = WeightZeros(
                name=tensor.Name().decode(),
                shape=shape,
                dtype=stored.dtype.name,
                size=size,
                zeros=size - int(np.count_nonzero(stored != quantized[0])),
                encoding=f"densify {encoding}" if t in densified else encoding,
                bytes=stored.nbytes + size_of_indices,
            )
            yield StoredWeight(about, stored, quantized[0], quantized[1], sparsity)


def _quantization(tensor: Any) -> tuple[Any, Any] | None:
    """Zero point and scale, each a number or along a dimension; None: there is no scale."""
    quantization = tensor.Quantization()
    if quantization is None or quantization.ScaleLength() == 0:
        return None
    shape = [1] * tensor.ShapeLength()
    shape[quantization.QuantizedDimension()] = -1
    points = np.atleast_1d(quantization.ZeroPointAsNumpy())
    zero = points.reshape(shape) if np.any(points) else 0
    return zero, np.asarray(quantization.ScaleAsNumpy()).reshape(shape)


def _encoding(sparsity: Any) -> tuple[str, int]:
    """The name of a sparse encoding, and the bytes of its indices."""
    levels = sparsity.dimMetadata
    vectors = [v for level in levels for v in (level.arraySegments, level.arrayIndices) if v]
    size = sum(np.asarray(vector.values).nbytes for vector in vectors)
    blocked = 0 if sparsity.blockMap is None else len(sparsity.blockMap)
    block = [str(level.denseSize) for level in levels[len(levels) - blocked :]]
    return "x".join(["1"] * (2 - blocked) + block) if blocked else "csr", size


def _places(sparsity: Any, rank: int) -> tuple[np.ndarray, ...]:
    """Where in the dense tensor each stored value belongs: its index along each dimension.

    The encoding is a tree with a level for each dimension, then for each dimension within a block,
    in the order of traversal. A node of a dense level has all children, of a sparse level those
    listed.
    """
    blocked = [] if sparsity.blockMap is None else [int(d) for d in sparsity.blockMap]
    nodes, sizes = 1, {}
    places = dict.fromkeys(range(rank + len(blocked)), np.zeros(1, np.int64))
    for dimension, level in zip(sparsity.traversalOrder, sparsity.dimMetadata, strict=True):
        if level.arraySegments is None:
            parents = np.repeat(np.arange(nodes), level.denseSize)
            children = np.tile(np.arange(level.denseSize), nodes)
        else:
            segments = np.asarray(level.arraySegments.values, np.int64)
            parents = np.repeat(np.arange(nodes), np.diff(segments))
            children = np.asarray(level.arrayIndices.values, np.int64)
        places = {known: place[parents] for known, place in places.items()}
        places[int(dimension)], nodes = children, len(children)
        sizes[int(dimension)] = level.denseSize
    for inner, dimension in enumerate(blocked, start=rank):
        places[dimension] = places[dimension] * sizes[inner] + places[inner]
    return tuple(places[dimension] for dimension in range(rank))
