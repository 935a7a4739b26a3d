"""Our record in a LiteRT file: JSON in a metadata buffer, which LiteRT tools leave alone.

It has the SHA-256 of the file, whose digest counts as zeros: a damaged file is refused before any
interpreter crashes on it.
"""

import hashlib
import json
import re
from typing import Any, TypeAlias

import numpy as np

from keras_sparse_ortho.errors import LiteRTFileError
from keras_sparse_ortho.export._flatbuffer import (
    ModelT,
    write_model,
)

Record: TypeAlias = dict[str, Any]
"""JSON values: the route, the name of the model, its inputs and outputs."""

_NAME = "keras_sparse_ortho"
_BLANK = b"0" * 64
_HEAD = b'{"format": "keras_sparse_ortho/1", "sha256": "'
_PATTERN = re.compile(re.escape(_HEAD) + rb"[0-9a-f]{64}\"")
# The metadata's name and a part of the record: no single damage hides both.
_TRACES = (
    len(_NAME).to_bytes(4, "little") + _NAME.encode() + b"\0",
    b'_sparse_ortho/1", "sha256": "',
)
_LARGEST = 1 << 20  # bytes of a record


def with_record(model: ModelT, record: Record) -> bytes:
    """The file of a model with a record, in place of that of an earlier export, and its digest."""
    from ai_edge_litert import schema_py_generated as schema

    text = _HEAD + _BLANK + b'", ' + json.dumps(record)[1:].encode()
    entry = schema.MetadataT()
    entry.name = _NAME
    entry.buffer = len(model.buffers)
    buffer = schema.BufferT()
    buffer.data = np.frombuffer(text, np.uint8)
    model.buffers.append(buffer)
    names = (_NAME, _NAME.encode())
    others = [
        metadata
        for metadata in model.metadata or []
        if metadata.name not in names
    ]
    model.metadata = [*others, entry]
    return with_digest(write_model(model))


def with_digest(content: bytes) -> bytes:
    """The file with the digest of itself in its record."""
    start = content.index(_HEAD) + len(_HEAD)
    before = content[:start]
    behind = content[start + len(_BLANK) :]
    digest = hashlib.sha256(before + _BLANK + behind).hexdigest()
    return before + digest.encode() + behind


def read_record(content: bytes, path: str) -> Record | None:
    """The record of a file, or None if this package did not write it; raises if it was changed."""
    match = _PATTERN.search(content)
    if match is None and not any(trace in content for trace in _TRACES):
        return None
    if match is None or with_digest(content) != content:
        raise LiteRTFileError(
            "The file must be as `export_litert` wrote it: it is corrupted, truncated, or was "
            f"edited since. Received: {path!r} with {len(content)} bytes and another SHA-256"
        )
    text = content[match.start() : match.start() + _LARGEST].decode(
        "utf-8", "replace"
    )
    try:
        return _checked_record(text)
    except (
        ValueError,
        TypeError,
        KeyError,
        RecursionError,
    ) as error:
        raise LiteRTFileError(
            "The record in the file must be as `export_litert` writes it, and this one was changed "
            f"and its digest too. Received: {path!r}, {type(error).__name__}: {error}"
        ) from None


def _checked_record(text: str) -> Record:
    """The record at the start of a text, with the names of inputs and outputs in lists."""
    record = dict(json.JSONDecoder().raw_decode(text)[0])
    for key in ("route", "model"):
        if not isinstance(record.get(key) or "", str):
            raise ValueError("other values")
    for kind in ("input", "output"):
        names = [end["name"] for end in record[f"{kind}s"]]
        if not names or len(set(names)) < len(names):
            raise ValueError("other values")
        if not all(isinstance(name, str) for name in names):
            raise ValueError("other values")
        record[f"{kind}_names"] = names
    return record
