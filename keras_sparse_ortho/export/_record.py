"""The record of an export in its LiteRT file.

It is JSON in a metadata buffer of the flatbuffer, which LiteRT tools leave alone. It holds the
SHA-256 of the whole file with the digest itself taken as zeros, so a truncated or edited file is
refused before any interpreter, which might crash, sees it.
"""

import hashlib
import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from keras_sparse_ortho.export._flatbuffer import LiteRTFileError, read_model, write_model

_NAME = "keras_sparse_ortho"
_BLANK = b"0" * 64
_HEAD = b'{"format": "keras_sparse_ortho/1", "sha256": "'
# Both have the same number of bytes, so that verification can still flip the setting.
_XNNPACK = {True: b'"xnnpack": true ', False: b'"xnnpack": false'}
# As a string of a flatbuffer: its length before it, and a zero after it.
_ENTRY = len(_NAME).to_bytes(4, "little") + _NAME.encode() + b"\0"
_DIGEST = b'_sparse_ortho/1", "sha256": "'
_RECORD = re.compile(re.escape(_HEAD) + rb"[0-9a-f]{64}\"")
_ROUNDING, _STEPS = 1e-3, 0.51
# The share of a kernel's live entries that a tensor must have to be said to hold the kernel, and


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
