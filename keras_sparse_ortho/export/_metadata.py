"""What a file of ours says about itself, and whether it is still the file that was verified.

The record is JSON in a metadata buffer of the flatbuffer, where every LiteRT tool leaves it
alone. It holds the SHA-256 of the whole file with the digest itself taken as zeros, so that a
truncated or altered file is found out before any interpreter, which might crash, sees it.
"""

import hashlib
import json
import re
from typing import Any

import numpy as np

from keras_sparse_ortho.export._errors import LiteRTFileError
from keras_sparse_ortho.export._flatbuffer import read_model, write_model

_NAME = "keras_sparse_ortho"
_BLANK = b"0" * 64
_HEAD = b'{"format": "keras_sparse_ortho/1", "sha256": "'
# True and false take the same number of bytes, so that verification may still flip the setting.
_XNNPACK = {True: b'"xnnpack": true ', False: b'"xnnpack": false'}
_RECORD = re.compile(re.escape(_HEAD) + rb"[0-9a-f]{64}\"")


def attach(content: bytes, record: dict[str, Any]) -> bytes:
    """The file with a record of ours; its digest is blank until `seal`."""
    from ai_edge_litert import schema_py_generated as schema

    model = read_model(content)
    for entry in model.metadata or []:  # of an earlier export
        if entry.name in (_NAME, _NAME.encode()):
            model.buffers[entry.buffer].data = None
    model.metadata = [e for e in model.metadata or [] if e.name not in (_NAME, _NAME.encode())]
    ours = {key: value for key, value in record.items() if key not in ("format", "sha256")}
    text = json.dumps(ours | {"xnnpack": None})[1:].encode()
    text = text.replace(b'"xnnpack": null', _XNNPACK[True])
    buffer, entry = schema.BufferT(), schema.MetadataT()
    buffer.data = np.frombuffer(_HEAD + _BLANK + b'", ' + text, np.uint8)
    entry.name, entry.buffer = _NAME, len(model.buffers)
    model.buffers.append(buffer)
    model.metadata = [*model.metadata, entry]
    return write_model(model)


def seal(content: bytes, xnnpack: bool) -> bytes:
    """The same file with the interpreter's setting and the digest filled in."""
    start = _record_start(content)
    if start is None:
        raise LiteRTFileError("The file has no record of keras_sparse_ortho to seal.")
    at = start + len(_HEAD)
    content = content[:at] + _BLANK + content[at + len(_BLANK) :]
    found = re.compile(b"|".join(_XNNPACK.values())).search(content, at)
    if found is None:
        raise LiteRTFileError("The record of the file does not say whether XNNPACK is used.")
    content = content[: found.start()] + _XNNPACK[xnnpack] + content[found.end() :]
    digest = hashlib.sha256(content).hexdigest().encode()
    return content[:at] + digest + content[at + len(_BLANK) :]


def read_record(content: bytes, path: str) -> dict[str, Any] | None:
    """The record of a file, or None if this package did not write it.

    Raises:
        LiteRTFileError: If the file is not what it was when it was sealed.
    """
    start = _record_start(content)
    if start is None:
        return None
    at = start + len(_HEAD)
    written = content[at : at + len(_BLANK)]
    blank = content[:at] + _BLANK + content[at + len(_BLANK) :]
    found = hashlib.sha256(blank).hexdigest().encode()
    if found != written:
        raise LiteRTFileError(
            "The file must be as `export_litert` wrote it: it is corrupted, truncated, or was "
            f"edited since. Received: {path!r} with {len(content)} bytes and SHA-256 "
            f"{found.decode()[:12]}..., not {written.decode()[:12]}..."
        )
    text = content[start : start + (1 << 20)].decode("utf-8", "replace")
    record, _ = json.JSONDecoder().raw_decode(text)
    return dict(record)


def _record_start(content: bytes) -> int | None:
    found = _RECORD.search(content)
    return None if found is None else found.start()
