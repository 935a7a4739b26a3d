"""`c_array`: a LiteRT file as a C array, and what LiteRT Micro needs to run it."""

import dataclasses
import os
import re
import tempfile
from pathlib import Path

from keras_sparse_ortho._files import atomic_write, path_of
from keras_sparse_ortho.export._compare import ExportVerificationError
from keras_sparse_ortho.export._flatbuffer import flat, read_model
from keras_sparse_ortho.export._load_litert import read_packed
from keras_sparse_ortho.export._process import is_missing, run_python
from keras_sparse_ortho.export._record import read_record
from keras_sparse_ortho.export._routes import ExportRouteError

ROUTES = ("float32", "float32+blocks", "int8", "int8+blocks")
"""Those whose kernels LiteRT Micro has: none of sparse encodings, none that quantize in a call."""

# The interpreter reports by printing, and a file may crash it: it gets a process of its own.
_RUN = """import sys
from tflite_micro.python.tflite_micro import runtime
interpreter = runtime.Interpreter.from_file(sys.argv[1])
interpreter.invoke()
interpreter.print_allocations()"""
_ARENA = re.compile(r"Arena allocation total (\d+) bytes")
_SECONDS = 600
# Methods of MicroMutableOpResolver whose name does not follow from that of the operator.
_METHODS = {
    "BATCH_MATMUL": "BatchMatMul",
    "UNIDIRECTIONAL_SEQUENCE_LSTM": "UnidirectionalSequenceLSTM",
}


@dataclasses.dataclass(frozen=True)
class CArray:
    """What was written for a microcontroller.

    Attributes:
        path: The header.
        name: Of the array; `<name>_size` is its number of bytes.
        bytes: Of the array.
        operators: What the program must add to its `MicroMutableOpResolver`, such as "Conv2D" for
            `AddConv2D()`; also in the header.
        arena_bytes: Of the tensor arena that a call took here; None if tflite-micro is missing.
    """

    path: str
    name: str
    bytes: int
    operators: tuple[str, ...]
    arena_bytes: int | None


def c_array(
    file: str | os.PathLike[str], path: str | os.PathLike[str], name: str = "model_data"
) -> CArray:
    """Write a LiteRT file as a C header, for LiteRT Micro on microcontrollers.

    The header has the array, aligned to 16 bytes, the operators that the program must register,
    and the size of the tensor arena. If tflite-micro is installed (`pip install tflite-micro`), the
    file is run by its interpreter, which tells the arena.

    Args:
        file: A file of the route `int8`, `int8+blocks`, `float32` or `float32+blocks`, also
            compressed; or one that another tool wrote.
        path: The header, such as `"model_data.h"`.
        name: Of the array, a C identifier.

    Returns:
        The `CArray`.

    Raises:
        ExportRouteError: if LiteRT Micro has no kernels for the file's route.
        ExportVerificationError: if LiteRT Micro fails to run the file.
        LiteRTFileError: (a ValueError) if the file is damaged or no LiteRT file.
        ValueError: if the name is no identifier.
        ImportError: if ai-edge-litert is missing.

    Limits: The arena is that of this machine with reference kernels. Pointers of 4 bytes take less
    on the device, kernels of CMSIS-NN more: begin with it, and take what `arena_used_bytes()`
    tells there. Inputs and outputs are float32, the operators in between those of the route.

    Example:
    >>> from keras_sparse_ortho.export import c_array
    >>> c_array("model.tflite", "model_data.h", name="my model")
    Traceback (most recent call last):
        ...
    ValueError: `name` must be a C identifier. Received: name='my model'

    Reference:
        [LiteRT for microcontrollers](https://ai.google.dev/edge/litert/microcontrollers/overview)
    """
    if re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) is None:
        raise ValueError(f"`name` must be a C identifier. Received: {name=}")
    given, target = str(path_of("file", file)), path_of("path", path)
    content = read_packed(Path(given))
    route = (read_record(content, given) or {}).get("route")
    if route is not None and route not in ROUTES:
        raise ExportRouteError(
            f"LiteRT Micro runs files of the routes {', '.join(ROUTES)}; it has no kernels that "
            "quantize in a call or restore sparse encodings. Export again, with `mode` one of "
            f"these. Received: {given!r} of route {route!r}"
        )
    content = flat(content, given)  # LiteRT Micro reads no bytes behind the flatbuffer
    operators, arena = _operators(content), _arena(content, given)
    calls = "".join(f"//   resolver.Add{one}();\n" for one in operators)
    told = "not known: tflite-micro was missing" if arena is None else f"{arena} bytes"
    rows = (content[k : k + 16] for k in range(0, len(content), 16))
    with atomic_write(target) as stream:
        stream.write(
            f"// {Path(given).name}, route {route or 'unknown'}, by keras_sparse_ortho.\n"
            f"// tflite::MicroMutableOpResolver<{len(operators)}> resolver;\n{calls}"
            f"// Tensor arena: {told}.\n#pragma once\n#ifndef __cplusplus\n#include <stdalign.h>\n"
            f"#endif\nstatic const unsigned int {name}_size = {len(content)};\n"
            f"alignas(16) static const unsigned char {name}[] = {{\n"
        )
        stream.writelines(",".join(map(str, row)) + ",\n" for row in rows)
        stream.write("};\n")
    return CArray(os.fspath(path), name, len(content), operators, arena)


def _operators(content: bytes) -> tuple[str, ...]:
    """The operators of all graphs in the file, as LiteRT Micro's resolver names them."""
    from ai_edge_litert import schema_py_generated as schema

    names = {code: name for name, code in vars(schema.BuiltinOperator).items()}
    model = read_model(content)
    used = {
        names[model.operatorCodes[operator.opcodeIndex].builtinCode]
        for graph in model.subgraphs
        for operator in graph.operators
    }
    return tuple(sorted(_METHODS.get(name) or _method(name) for name in sorted(used)))


def _method(name: str) -> str:
    return "".join(re.sub(r"^2d$", "2D", part.capitalize()) for part in name.split("_"))


def _arena(content: bytes, file: str) -> int | None:
    """Bytes of the arena in LiteRT Micro's interpreter, which runs the file once on zeros."""
    if is_missing("tflite_micro"):
        return None
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "model.tflite")
        copy.write_bytes(content)
        status, lines = run_python(["-c", _RUN, str(copy)], _SECONDS)
    arena = _ARENA.search("\n".join(lines))
    if status == 0 and arena is not None:
        return int(arena[1])
    raise ExportVerificationError(
        f"LiteRT Micro must run the file. Received: {file!r}; {'; '.join(lines[-2:])}"
    )
