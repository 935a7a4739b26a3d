"""What a LiteRT file holds: its weights, the kernels' zeros, and our record of the export.

The record is JSON in a metadata buffer of the flatbuffer, which LiteRT tools leave alone. It holds
the SHA-256 of the whole file with the digest itself taken as zeros, so that a truncated or edited
file is refused before any interpreter, which might crash, sees it.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

_IDENTIFIER = b"TFL3"
_ALIGNMENT = 16  # required of the data of a buffer by the schema (`force_align`)
_DTYPES = {"FLOAT32": "<f4", "FLOAT16": "<f2", "INT8": "i1", "UINT8": "u1", "INT16": "<i2"}

_NAME = "keras_sparse_ortho"
_BLANK = b"0" * 64
_HEAD = b'{"format": "keras_sparse_ortho/1", "sha256": "'
# Both have the same number of bytes, so that verification can still flip the setting.
_XNNPACK = {True: b'"xnnpack": true ', False: b'"xnnpack": false'}
# As a string of a flatbuffer: its length before it, and a zero after it.
_ENTRY = len(_NAME).to_bytes(4, "little") + _NAME.encode() + b"\0"
_DIGEST = b'_sparse_ortho/1", "sha256": "'
_RECORD = re.compile(re.escape(_HEAD) + rb"[0-9a-f]{64}\"")

# An entry may differ from the kernel's by this fraction of it, and by this many integer steps.
_ROUNDING, _STEPS = 1e-3, 0.51
# The share of a kernel's live entries that a tensor must have to be said to hold the kernel, and
# the least number of entries that must agree where a scale was fitted.
_SHARE, _LEAST = 0.75, 8
# Rows that are compared before all of them are, and rows that are matched at once.
_FEW, _CHUNK = 64, 256


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


# --- the flatbuffer -------------------------------------------------------------------------------


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
    """The flatbuffer of a `ModelT`."""
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


# --- the zeros of kernels -------------------------------------------------------------------------


class KernelsInFile(NamedTuple):
    """A message about a kernel that lost zeros, or None; the kernels that no tensor holds."""

    lost: str | None
    absent: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class _Match:
    """A tensor that holds a kernel: the share of entries that agree, and the zeros that do not."""

    tensor: StoredWeight
    share: float
    lost: int


def find_kernels(
    kernels: Iterable[tuple[str, np.ndarray]], weights: Iterable[StoredWeight]
) -> KernelsInFile:
    """Find every kernel among the tensors of a file by its live values, and check its zeros.

    A tensor T of equal size holds a kernel K if, for some order of axes, the live entries of K are

        T = s K

    up to rounding, where s is 1 or a number for each entry of the first or the last axis of T (a
    batch normalization that the converter folded into the kernel). It holds a part of K if its
    rows along some axis are rows of K: a slice, or rows at constant indices. Then every zero of
    the kernel, or of the part, must be a zero of the tensor.

    A kernel that no tensor holds was combined with other constants.
    """
    missing = [(path, value) for path, value in kernels if not value.all()]
    if not missing:
        return KernelsInFile(None, ())
    tensors = list(weights)
    largest = max(float(np.abs(value).max()) for _, value in missing) or 1.0
    for search in (
        _whole,
        functools.partial(_whole, scaled=True),
        _parts,
        functools.partial(_all_zero, largest=largest),
    ):
        taken, left = [], []
        for path, kernel in missing:
            matches = list(search(kernel, tensors))
            if not matches:
                left.append((path, kernel))
                continue
            # Kernels may have much in common: the tensor that agrees in most entries is its own.
            most = max(match.share for match in matches)
            best = min((m for m in matches if m.share == most), key=lambda match: match.lost)
            if best.lost:
                zeros = kernel.size - np.count_nonzero(kernel)
                return KernelsInFile(
                    f"kernel '{path}' has {zeros} zeros of {kernel.size}, of which {best.lost} "
                    f"are not zero in its tensor '{best.tensor.about.name}'",
                    (),
                )
            taken.append(best.tensor)
        # Equal kernels may share a tensor, but no tensor is found in two ways.
        tensors = [tensor for tensor in tensors if tensor not in taken]
        missing = left
    return KernelsInFile(None, tuple(path for path, _ in missing))


def _whole(
    kernel: np.ndarray, tensors: list[StoredWeight], scaled: bool = False
) -> Iterator[_Match]:
    """The tensors that hold a kernel, with its axes in some order; with scales if `scaled`."""
    kernel = kernel.squeeze()
    tensors = [tensor for tensor in tensors if tensor.about.size == kernel.size]
    for shape in dict.fromkeys(tensor.about.shape for tensor in tensors):
        for order in kernel_orders(kernel.shape, shape):
            arranged = kernel.transpose(order).reshape(shape)
            for axis in (0, -1) if scaled else (0,):
                rows = _rows(arranged, axis)
                for tensor in tensors:
                    if tensor.about.shape == shape:
                        values, step = _rows_of(tensor, axis)
                        yield from _matches(tensor, rows, values, step, scaled)


def _parts(kernel: np.ndarray, tensors: list[StoredWeight]) -> Iterator[_Match]:
    """The tensors whose rows along the first or last axis, or across it, are rows of a kernel."""
    kernel = kernel.squeeze()
    for tensor, axis in itertools.product(tensors, range(kernel.ndim)):
        rows = _rows(kernel, axis)
        width = rows.shape[1]
        if width == 1 or tensor.about.size % width or not kernel.any():
            continue
        pairs = [_rows_of(tensor, 0), _rows_of(tensor, -1)]
        for values, step in (*pairs, *((v.T, s.T) for v, s in pairs)):
            if values.shape[1] == width:
                few = slice(None, None, -(-len(values) // _FEW))
                share = _share(_nearest(rows, values[few]), values[few], step[few], False)
                if share is None or share >= _SHARE / 2:
                    nearest = _nearest(rows, values)
                    if np.count_nonzero(nearest) >= _LEAST:
                        yield from _matches(tensor, nearest, values, step, False)


def _all_zero(kernel: np.ndarray, tensors: list[StoredWeight], largest: float) -> Iterator[_Match]:
    """The tensors that may be a kernel of zeros: none of their entries is as large as a weight."""
    for tensor in tensors if not kernel.any() else ():
        values = tensor.values
        if values.size == kernel.size and np.abs(values).max() <= _ROUNDING * largest:
            yield _Match(tensor, 1.0, int(np.count_nonzero(values)))


def kernel_orders(shape: Sequence[int], target: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The orders of axes from which a reshape that joins or splits axes leads to a shape."""
    ends = set(np.cumprod(target).tolist()) - {1}
    for order in itertools.permutations(range(len(shape))):
        mine = set(np.cumprod([shape[axis] for axis in order]).tolist())
        if mine <= ends or ends <= mine:
            yield order


def _rows(array: np.ndarray, axis: int) -> np.ndarray:
    """The entries of an axis as the rows of a matrix."""
    return np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1)


def _rows_of(tensor: StoredWeight, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """The values of a tensor and their steps, as rows."""
    return _rows(tensor.values, axis), _rows(np.broadcast_to(tensor.step, tensor.about.shape), axis)


def _matches(
    tensor: StoredWeight, rows: np.ndarray, values: np.ndarray, step: np.ndarray, scaled: bool
) -> Iterator[_Match]:
    """The match of rows of a kernel with those of a tensor, if enough of them agree."""
    few = slice(None, None, -(-len(rows) // _FEW))
    share = _share(rows[few], values[few], step[few], scaled)
    if share is None or share >= _SHARE / 2:
        share = _share(rows, values, step, scaled)
        if share is not None and share >= _SHARE:
            yield _Match(tensor, share, int(np.count_nonzero(values[rows == 0])))


def _share(rows: np.ndarray, values: np.ndarray, step: np.ndarray, scaled: bool) -> float | None:
    """The share of live entries that agree, in each row up to a scale; None if they are too few."""
    expected, fitted = rows, 0
    if scaled:
        squares = np.sum(rows**2, axis=1, keepdims=True)
        scale = np.sum(values * rows, axis=1, keepdims=True) / np.maximum(squares, 1e-30)
        # The scale is an estimate, off by up to half a step as well; it fits one entry of a row.
        expected, step, fitted = scale * rows, 2 * step, int(np.count_nonzero(scale))
    close = np.abs(values - expected) <= _ROUNDING * np.abs(expected) + _STEPS * step
    possible = np.count_nonzero(expected) - fitted
    if possible < (_LEAST if scaled else 1):
        return None
    return float((np.count_nonzero(close & (expected != 0)) - fitted) / possible)


def _nearest(rows: np.ndarray, values: np.ndarray) -> np.ndarray:
    """For each row of values the row of a kernel that is nearest to it."""
    squares = np.sum(rows**2, axis=1)
    chunks = range(0, len(values), _CHUNK)
    found = [(squares - 2 * values[k : k + _CHUNK] @ rows.T).argmin(axis=1) for k in chunks]
    nearest: np.ndarray = rows[np.concatenate(found)]
    return nearest


# --- the record -----------------------------------------------------------------------------------


def attach(content: bytes, record: dict[str, Any]) -> bytes:
    """The file with a record; its digest is blank until `seal`."""
    from ai_edge_litert import schema_py_generated as schema

    model = read_model(content)
    others = []
    for entry in model.metadata or []:
        if entry.name in (_NAME, _NAME.encode()):  # of an earlier export
            model.buffers[entry.buffer].data = None
        else:
            others.append(entry)
    ours = {key: value for key, value in record.items() if key not in ("format", "sha256")}
    text = json.dumps(ours | {"xnnpack": None})[1:].encode()
    text = text.replace(b'"xnnpack": null', _XNNPACK[True])
    buffer, entry = schema.BufferT(), schema.MetadataT()
    buffer.data = np.frombuffer(_HEAD + _BLANK + b'", ' + text, np.uint8)
    entry.name, entry.buffer = _NAME, len(model.buffers)
    model.buffers.append(buffer)
    model.metadata = [*others, entry]
    return write_model(model)


def seal(content: bytes, xnnpack: bool) -> bytes:
    """The same file with the interpreter's setting and the digest filled in."""
    found = _RECORD.search(content)
    if found is None:
        raise LiteRTFileError("The file has no record of keras_sparse_ortho to seal.")
    at = found.start() + len(_HEAD)
    content = content[:at] + _BLANK + content[at + len(_BLANK) :]
    flag = re.compile(b"|".join(_XNNPACK.values())).search(content, at)
    if flag is None:
        raise LiteRTFileError("The record of the file does not say whether XNNPACK is used.")
    content = content[: flag.start()] + _XNNPACK[xnnpack] + content[flag.end() :]
    digest = hashlib.sha256(content).hexdigest().encode()
    return content[:at] + digest + content[at + len(_BLANK) :]


def read_record(content: bytes, path: str) -> dict[str, Any] | None:
    """The record of a file, or None if this package did not write it; raises if it was changed."""
    found = _RECORD.search(content)
    if found is None:
        # The name and the record are in different places: no single damage hides both.
        if _ENTRY in content or _DIGEST in content:
            raise LiteRTFileError(
                "The file must be as `export_litert` wrote it: the record in it is damaged. "
                f"Received: {path!r} with {len(content)} bytes"
            )
        return None
    at = found.start() + len(_HEAD)
    written = content[at : at + len(_BLANK)]
    blank = content[:at] + _BLANK + content[at + len(_BLANK) :]
    digest = hashlib.sha256(blank).hexdigest().encode()
    if digest != written:
        raise LiteRTFileError(
            "The file must be as `export_litert` wrote it: it is corrupted, truncated, or was "
            f"edited since. Received: {path!r} with {len(content)} bytes and SHA-256 "
            f"{digest.decode()[:12]}..., not {written.decode()[:12]}..."
        )
    text = content[found.start() : found.start() + (1 << 20)].decode("utf-8", "replace")
    try:
        record = dict(json.JSONDecoder().raw_decode(text)[0])
        wrong = [key for key, fits in _SCHEMA.items() if not fits(record.get(key))]
    except (ValueError, RecursionError) as error:
        wrong = [f"JSON ({type(error).__name__})"]
    if wrong:
        raise LiteRTFileError(
            "The record in the file must be as `export_litert` writes it, and this one was changed "
            f"and its digest too. Received: {path!r} with a wrong or missing {', '.join(wrong)}"
        )
    return record


def _are_tensors(value: Any) -> bool:
    """Whether these describe inputs or outputs: distinct names, and static shapes."""
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        return False
    names = [one.get("name") for one in value]
    shapes = [one.get("shape") for one in value]
    return (
        all(isinstance(name, str) for name in names)
        and 0 < len(set(names)) == len(names)
        and all(isinstance(shape, list) and shape for shape in shapes)
        and all(type(size) is int and 0 < size < 2**31 for shape in shapes for size in shape)
    )


def _are_inputs(value: Any) -> bool:
    """Whether these are tensors of numbers, all with the same number of rows."""
    return (
        _are_tensors(value)
        and all(one.get("dtype") in _INPUT_DTYPES for one in value)
        and len({one["shape"][0] for one in value}) == 1
    )


def _is_tolerance(value: Any) -> bool:
    whole = type(value) is int and 0 <= value < 2**31
    return value is None or whole or (isinstance(value, float) and value >= 0)


_INPUT_DTYPES = (
    *("float16", "float32", "float64", "bool"),
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
)
# What the record of a file of ours holds; None is a key that it may lack.
_SCHEMA: dict[str, Callable[[Any], bool]] = {
    "xnnpack": lambda value: isinstance(value, bool),
    "inputs": _are_inputs,
    "outputs": _are_tensors,
    "route": lambda value: value is None or isinstance(value, str),
    "model": lambda value: value is None or isinstance(value, str),
    "measure": lambda value: value in (None, "max", "rms"),
    "tolerance": _is_tolerance,
}
