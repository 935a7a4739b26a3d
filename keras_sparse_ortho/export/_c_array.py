"""`c_array`: a LiteRT file as a C array, and the operators that LiteRT Micro needs to run it."""

import os
import re
from pathlib import Path

from keras_sparse_ortho._checks import other_keywords
from keras_sparse_ortho._files import (
    atomic_write,
    check_not_an_input,
    path_of,
)
from keras_sparse_ortho._text import printable
from keras_sparse_ortho.errors import (
    ExportRouteError,
    LiteRTFileError,
)
from keras_sparse_ortho.export._flatbuffer import (
    ModelT,
    SubGraphT,
    name_of,
    read_model,
    write_model,
)
from keras_sparse_ortho.export._load_litert import read_packed
from keras_sparse_ortho.export._micro_refusals import refuse_wrong_in_micro
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
) -> tuple[str, ...]:
    """Writes a LiteRT file as a C header, for LiteRT Micro on microcontrollers.

    The header has the array `name`, aligned to 16 bytes, its size `name_size`, and the operators
    that the program must register. Names of inner tensors and metadata, which LiteRT Micro does not
    read, are left out.

    Args:
        file: str or path. A file of the route `int8` or `float32`, dense or with `+blocks` or
            `+lstm`, also compressed; or one that another tool wrote.
        path: str or path. The header, such as `"model_data.h"`.
        name: str. Name of the array, a C identifier.

    Returns:
        The operators for the program's `MicroMutableOpResolver`: "Conv2D" for `AddConv2D()`.

    Raises:
        ExportRouteError: if LiteRT Micro has no kernels for the file's route, or computes the file
            wrongly without an error: two loops, as of two GRUs, or an LSTM in dynamic int8.
        ValueError: if the file is damaged (`LiteRTFileError`), the name is no identifier, or `path`
            is the file itself.

    Limits: inputs and outputs are float32, unless `export_litert` had other types; then the header
    has their scales and zero points. On the device `arena_used_bytes()` gives the arena's size.

    Examples:
        >>> from keras_sparse_ortho.export import c_array
        >>> c_array("model.tflite", "model_data.h", name="my model")
        Traceback (most recent call last):
            ...
        ValueError: `name` must be a C identifier. Received: name='my model'
    """
    if re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) is None:
        raise ValueError(f"`name` must be a C identifier. Received: {name=}")
    given, target = str(path_of("file", file)), path_of("path", path)
    check_not_an_input("path", target, {"file": given})
    content = read_packed(Path(given))
    route = (read_record(content, given) or {}).get("route")
    if route not in _ROUTES:
        raise ExportRouteError(
            f"LiteRT Micro runs files of the routes {', '.join(_ROUTES[1:])}; it has no kernels "
            "that quantize in a call or restore sparse encodings. Export again, with `mode` one of "
            f"these. Received: {given!r} of route {route!r}"
        )
    content, operators, ends = _in_one_piece(content, given)
    refuse_wrong_in_micro(read_model(content), given)
    calls = "".join(f"//   resolver.Add{one}();\n" for one in operators)
    calls += "".join(f"// {one}\n" for one in ends)
    rows = (content[k : k + 16] for k in range(0, len(content), 16))
    with atomic_write(target) as stream:
        stream.write(
            f"// {printable(Path(given).name)}, route {route or 'unknown'}, "
            "by keras_sparse_ortho.\n"
            f"// tflite::MicroMutableOpResolver<{len(operators)}> resolver;\n{calls}"
            "#pragma once\n#ifndef __cplusplus\n#include <stdalign.h>\n"
            f"#endif\nstatic const unsigned int {name}_size = {len(content)};\n"
            f"alignas(16) static const unsigned char {name}[] = {{\n"
        )
        stream.writelines(",".join(map(str, row)) + ",\n" for row in rows)
        stream.write("};\n")
    return operators


def _in_one_piece(
    content: bytes, file: str
) -> tuple[bytes, tuple[str, ...], list[str]]:
    """The file in one lean flatbuffer, Micro's operators, and scales of inputs and outputs."""
    try:
        model = read_model(content)
        operators = _operators(model)
        ends = _ends(model.subgraphs[0])
        _drop_names(model)
        model.metadata = None
        drop_unread(model)
        content = write_model(model)
    except Exception as error:  # the generated code checks nothing
        raise LiteRTFileError(
            "The file must be a LiteRT model, and it is no flatbuffer of one: it is damaged, or of "
            f"another kind. Received: {file!r} with {len(content)} bytes ({error})"
        ) from error
    return content, operators, ends


def _drop_names(model: ModelT) -> None:
    """Removes the names of tensors but inputs and outputs: LiteRT Micro reads none."""
    for graph in model.subgraphs:
        ends = {*map(int, graph.inputs), *map(int, graph.outputs)}
        for index, tensor in enumerate(graph.tensors):
            if index not in ends:
                tensor.name = None


def _operators(model: ModelT) -> tuple[str, ...]:
    """The names of LiteRT Micro for the operators that a model uses, in order."""
    from ai_edge_litert import schema_py_generated as schema

    names = {code: name for name, code in vars(schema.BuiltinOperator).items()}
    used = set()
    for graph in model.subgraphs:
        for operator in graph.operators:
            code = model.operatorCodes[operator.opcodeIndex]
            # Older files have the number in the other field, which holds numbers below 127.
            name = names[max(code.builtinCode, code.deprecatedBuiltinCode)]
            used.add(name.title().replace("_", ""))
    operators = []
    for name in sorted(used):
        operators.append(
            name.replace("Lstm", "LSTM").replace("Matmul", "MatMul")
        )
    return tuple(operators)


def _ends(graph: SubGraphT) -> list[str]:
    """How integers at the inputs and outputs are made from floats, one line each."""
    lines = []
    for index in (*graph.inputs, *graph.outputs):
        tensor = graph.tensors[index]
        kind = _INTEGERS.get(tensor.type)
        settings = tensor.quantization
        if kind is None or settings is None or settings.scale is None:
            continue
        scale = float(settings.scale[0])
        zero_point = int(settings.zeroPoint[0])
        name = printable(name_of(tensor))
        lines.append(f"{name}: {kind} = round(x / {scale:.9g}) + {zero_point}")
    return lines
