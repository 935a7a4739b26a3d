"""`c_array`: a LiteRT file as a C array, and the operators that LiteRT Micro needs to run it."""

import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from keras_sparse_ortho._checks import check_integer, other_keywords
from keras_sparse_ortho._files import (
    atomic_write,
    check_not_an_input,
    path_of,
)
from keras_sparse_ortho._keras_internals import warn_user
from keras_sparse_ortho._text import printable
from keras_sparse_ortho.errors import (
    ExportRouteError,
    ExportVerificationError,
    LiteRTFileError,
)
from keras_sparse_ortho.export._flatbuffer import (
    ModelT,
    kind_of,
    name_of,
    read_model,
    write_model,
)
from keras_sparse_ortho.export._load_litert import read_packed
from keras_sparse_ortho.export._micro_refusals import refuse_wrong_in_micro
from keras_sparse_ortho.export._packed_zeros import (
    FilterSize,
    check_filters,
    is_decode,
    pack_zeros,
)
from keras_sparse_ortho.export._record import read_record
from keras_sparse_ortho.export._unread import drop_unread

# Routes that LiteRT Micro can run: no sparse encodings, none that quantize in a call.
_ROUTES = (
    None,
    *("float32", "float32+blocks", "float32+lstm"),
    *("int8", "int8+blocks", "int8+lstm"),
)
# By the number of a tensor's type.
_INTEGERS = {
    3: "uint8",
    9: "int8",
}


@other_keywords
def c_array(
    file: str | os.PathLike[str],
    path: str | os.PathLike[str],
    name: str = "model_data",
    *,
    packed: bool = False,
    ram: int | None = None,
) -> tuple[str, ...]:
    """Writes a LiteRT file as a C header, for LiteRT Micro on microcontrollers.

    The header has the array `name`, aligned to 16 bytes, its size `name_size`, and the operators
    that the program must register. Names of inner tensors and metadata, which LiteRT Micro does not
    read, are left out.

    With `packed=True` filters are stored as a bit mask and their live entries: with `n` entries of
    `b` bytes at density `d`, in `n/8 + 16 + d n b` bytes instead of `n b`. Before each layer, in
    every call, the operator "Decode" unpacks its filter; outputs stay the same bit for bit.
    Filters that would not become smaller stay dense, and so do biases, tables of embeddings and
    kernels in four bits. Each filter is unpacked again here, and compared.

    Args:
        file: str or path. A file of the route `int8` or `float32`, dense or with `+blocks` or
            `+lstm`, also compressed; or one that another tool wrote.
        path: str or path. The header, such as `"model_data.h"`.
        name: str. Name of the array, a C identifier.
        packed: bool. Packs the zeros of pruned filters. Where that saves nothing, the array is the
            plain one, and a warning says so.
        ram: int. With `packed`: the largest filter to pack, in bytes unpacked. While its layer
            runs, the arena holds it. Default: any.

    Returns:
        The operators for the program's `MicroMutableOpResolver`: "Conv2D" for `AddConv2D()`.

    Raises:
        ExportRouteError: if LiteRT Micro has no kernels for the file's route, or computes the file
            wrongly without an error: two loops, as of two GRUs, or an LSTM in dynamic int8.
        ExportVerificationError: if a packed filter is another one after unpacking.
        ValueError: if the file is damaged (`LiteRTFileError`), the name is no identifier, `path`
            is the file itself, or `ram` is no positive integer, or given without `packed`.

    Limits: inputs and outputs are float32, unless `export_litert` had other types; then the header
    has their scales and zero points. On the device `arena_used_bytes()` gives the arena's size.

    A packed array needs LiteRT Micro of 2025-10-23 or newer, and 11 kB of code for "Decode". So it
    pays for convolutional networks with more than about 20,000 weights; `narrow` them first, which
    saves RAM and time as well. Dense layers become several times slower: export them as
    `int8+blocks`, which is smaller and faster. Arm's Vela (Ethos-U) cannot compile packed arrays;
    give it the LiteRT file.

    Examples:
        >>> from keras_sparse_ortho.export import c_array
        >>> c_array("model.tflite", "model_data.h", name="my model")
        Traceback (most recent call last):
            ...
        ValueError: `name` must be a C identifier. Received: name='my model'
    """
    if re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) is None:
        raise ValueError(f"`name` must be a C identifier. Received: {name=}")
    if ram is not None:
        ram = check_integer("ram", ram)
        if not packed:
            raise ValueError(
                "`ram` limits what is packed: give `packed=True` with it. Received: "
                f"packed={packed!r}, ram={ram!r}"
            )
    source, target = str(path_of("file", file)), path_of("path", path)
    check_not_an_input("path", target, {"file": source})
    content = read_packed(Path(source))
    route = (read_record(content, source) or {}).get("route")
    if route not in _ROUTES:
        raise ExportRouteError(
            f"LiteRT Micro runs files of the routes {', '.join(_ROUTES[1:])}; it has no kernels "
            "that quantize in a call or restore sparse encodings. Export again, with `mode` one of "
            f"these. Received: {source!r} of route {route!r}"
        )
    array = LeanArray(content, source, packed, ram)
    _warn_of_packing(array.sizes, packed, source)
    comments = [
        f"{printable(Path(source).name)}, route {route or 'unknown'}, by keras_sparse_ortho.",
        *array.comments(),
    ]
    rows = (array.content[k : k + 16] for k in range(0, len(array.content), 16))
    with atomic_write(target) as stream:
        stream.writelines(f"// {comment}\n" for comment in comments)
        stream.write(
            "#pragma once\n#ifndef __cplusplus\n#include <stdalign.h>\n"
            f"#endif\nstatic const unsigned int {name}_size = {len(array.content)};\n"
            f"alignas(16) static const unsigned char {name}[] = {{\n"
        )
        stream.writelines(",".join(map(str, row)) + ",\n" for row in rows)
        stream.write("};\n")
    return array.operators


class LeanArray:
    """The bytes of an array, in one lean flatbuffer, and what the header says of them.

    Args:
        content: bytes. A LiteRT file.
        file: str. Its name, for messages.
        packed: bool. Whether zeros are packed.
        ram: int. The largest filter to pack, in bytes unpacked.

    Attributes:
        content: bytes. The array.
        counts: dict of str to int. How often it has each operator of LiteRT Micro, by name.
        sizes: list of `FilterSize`. Its filters, if zeros are packed.
        ends: list of str. Scales of inputs and outputs.
    """

    def __init__(
        self, content: bytes, file: str, packed: bool, ram: int | None
    ) -> None:
        self.sizes: list[FilterSize] = []
        try:
            model = read_model(content)
            refuse_wrong_in_micro(model, file)
            if packed:
                self.sizes = pack_zeros(model, ram)
            self.counts = _operators(model)
            self.ends = _ends(model)
            _drop_names(model)
            model.metadata = None
            drop_unread(model)
            self.content = write_model(model)
            if packed:
                check_filters(read_model(self.content), read_model(content))
        except (ExportRouteError, ExportVerificationError, LiteRTFileError):
            raise
        except Exception as error:  # the generated code checks nothing
            raise LiteRTFileError(
                "The file must be a LiteRT model, and it is no flatbuffer of one: it is damaged, "
                f"or of another kind. Received: {file!r} with {len(content)} bytes ({error})"
            ) from error

    @property
    def operators(self) -> tuple[str, ...]:
        """The operators that the program must register, in order."""
        return tuple(self.counts)

    def comments(self) -> list[str]:
        """The lines of the header about operators, ends and packed filters."""
        lines = [
            f"tflite::MicroMutableOpResolver<{len(self.operators)}> resolver;"
        ]
        for operator in self.operators:
            lines.append(f"  resolver.Add{operator}();")
        lines += self.ends
        packed = [size for size in self.sizes if not size.why_dense]
        if packed:
            dense_bytes = sum(size.dense_bytes for size in packed)
            stored_bytes = sum(size.stored_bytes for size in packed)
            largest = max(size.dense_bytes for size in packed)
            lines += [
                f"Packed zeros: {len(packed)} filters have {stored_bytes} bytes instead of "
                f"{dense_bytes}.",
                f"RAM: the arena holds one unpacked filter at a time, at most {largest} bytes.",
                "AddDecode() needs LiteRT Micro of 2025-10-23 or newer, and 11 kB of code.",
                "Vela (Ethos-U) cannot compile this array: give it the LiteRT file.",
            ]
        for size in self.sizes:
            if size.why_dense:
                lines.append(f"Dense, {size.why_dense}: {printable(size.name)}")
        return lines


def _warn_of_packing(
    sizes: Sequence[FilterSize], packed: bool, file: str
) -> None:
    """Warns where packing saves nothing, or makes mostly dense layers slower."""
    if not packed:
        return
    dense_bytes: dict[bool, int] = {True: 0, False: 0}
    for size in sizes:
        if not size.why_dense:
            dense_bytes[size.layer == "FULLY_CONNECTED"] += size.dense_bytes
    if not any(dense_bytes.values()):
        reasons = [f"{size.name} is {size.why_dense}" for size in sizes]
        warn_user(
            "`packed=True` packs the zeros of pruned filters, and here none becomes smaller, or "
            "`ram` is too little for it: the array is the plain one. Prune the model first, to a "
            "density of 0.8 or less, or leave `packed` out. Received: "
            f"{file!r} with {reasons[:5] or 'no filters'}"
        )
    elif dense_bytes[True] > dense_bytes[False]:
        warn_user(
            "Packed zeros are for convolutions. Each call unpacks a filter, and a dense layer uses "
            "it for one row: it becomes several times slower, and needs its whole kernel in RAM. "
            "Live blocks are smaller and faster there: prune with `structure=kso.Block(...)` and "
            'export with `mode="int8+blocks"`. Received: '
            f"{file!r}, {dense_bytes[True]} bytes of dense layers, {dense_bytes[False]} of others"
        )


def _drop_names(model: ModelT) -> None:
    """Removes the names of tensors but inputs and outputs: LiteRT Micro reads none."""
    for graph in model.subgraphs:
        ends = {*map(int, graph.inputs), *map(int, graph.outputs)}
        for index, tensor in enumerate(graph.tensors):
            if index not in ends:
                tensor.name = None


def _operators(model: ModelT) -> dict[str, int]:
    """How often a model uses each operator, by LiteRT Micro's name, in order."""
    counts: Counter[str] = Counter()
    for graph in model.subgraphs:
        for operator in graph.operators:
            name = kind_of(model, operator).title().replace("_", "")
            if is_decode(model, operator):
                name = "Decode"
            name = name.replace("Lstm", "LSTM").replace("Matmul", "MatMul")
            counts[name] += 1
    return dict(sorted(counts.items()))


def _ends(model: ModelT) -> list[str]:
    """How integers at the inputs and outputs are made from floats, one line each."""
    graph = model.subgraphs[0]
    names = _names_of_ends(model)
    lines = []
    for index in (*graph.inputs, *graph.outputs):
        tensor = graph.tensors[index]
        kind = _INTEGERS.get(tensor.type)
        settings = tensor.quantization
        if kind is None or settings is None or settings.scale is None:
            continue
        scale = float(settings.scale[0])
        zero_point = int(settings.zeroPoint[0])
        name = printable(names.get(int(index), name_of(tensor)))
        lines.append(f"{name}: {kind} = round(x / {scale:.9g}) + {zero_point}")
    return lines


def _names_of_ends(model: ModelT) -> dict[int, str]:
    """The names of inputs and outputs in the signatures, which are the model's, by tensor."""
    names = {}
    for signature in model.signatureDefs or []:
        for end in (*signature.inputs, *signature.outputs):
            names[int(end.tensorIndex)] = end.name.decode()
    return names
