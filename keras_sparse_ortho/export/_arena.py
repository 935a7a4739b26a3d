"""`arena_of`: the memory that an array takes in LiteRT Micro, as tflite-micro reports it."""

import re
import tempfile
from pathlib import Path

from keras_sparse_ortho.errors import ExportVerificationError
from keras_sparse_ortho.export._process import JobError, Worker, require

_TIMEOUT = 60.0  # seconds; it takes one
_TOTAL = re.compile(r"Arena allocation total (\d+) bytes")


def require_micro() -> None:
    """Raises ImportError that says what to install if tflite-micro is missing."""
    use = (
        "The arena of a file is what the package tflite-micro reports (Linux on x86-64), or what a "
        "function of yours returns, as `arena=`"
    )
    require(("tflite_micro",), use, '"keras-sparse-ortho[micro]"')


def arena_of(array: bytes) -> int:
    """The bytes of the arena that an array takes, as `print_allocations` reports them.

    A process of its own asks the interpreter, which may crash. On this machine pointers have 64
    bits: on a device of 32 bits the records take less, and the sum is a little smaller.

    Args:
        array: bytes. A LiteRT file, or the content of an array of `c_array`.

    Raises:
        ImportError: If tflite-micro is missing.
        ExportVerificationError: If it does not run the array.
    """
    require_micro()
    with tempfile.TemporaryDirectory() as folder, Worker() as worker:
        file = Path(folder) / "array.tflite"
        file.write_bytes(array)
        try:
            text = str(worker.run("allocations", _TIMEOUT, file=str(file)))
        except JobError as error:
            raise ExportVerificationError(
                "LiteRT Micro must run the array, and tflite-micro does not. Received: "
                f"{len(array)} bytes; {error}"
            ) from error
    total = _TOTAL.search(text)
    if total is None:
        raise ExportVerificationError(
            "tflite-micro must print the total of the arena, and this version prints something "
            f"else. Received: {text[:200]!r}"
        )
    return int(total[1])
