"""The compressed copy of a file beside it."""

import gzip
import os
from pathlib import Path
from typing import Any

from keras_sparse_ortho.export._errors import LiteRTFileError

# A flatbuffer's offsets are of 31 bits.
_LARGEST = 2**31
_CHUNK = 2**20
_ENDINGS = {"gzip": ".gz", "zstd": ".zst"}


def check_sidecar(sidecar: str) -> None:
    """Refuse an unknown compression, or zstd without its package.

    Raises:
        ValueError: for an unknown one.
        ImportError: if `zstandard` is missing.
    """
    if sidecar not in _ENDINGS:
        raise ValueError(
            f"`sidecar` must be None or one of {sorted(_ENDINGS)}. Received: sidecar={sidecar!r}"
        )
    if sidecar == "zstd":
        _zstandard()


def sidecar_path(target: Path, sidecar: str) -> Path:
    """Where the compressed copy of a file stands."""
    return target.with_name(target.name + _ENDINGS[sidecar])


def write_sidecar(file: Path, target: Path, sidecar: str) -> None:
    """Write the compressed copy of `file` beside `target`: aside first, then renamed."""
    content = file.read_bytes()
    if sidecar == "gzip":
        packed = gzip.compress(content, compresslevel=9, mtime=0)
    else:
        packed = _zstandard().ZstdCompressor(level=19).compress(content)
    aside = file.with_name(file.name + _ENDINGS[sidecar])
    aside.write_bytes(packed)
    os.replace(aside, sidecar_path(target, sidecar))


def is_packed(path: Path) -> bool:
    """Whether the name of a file ends as that of a compressed one."""
    return path.suffix in _ENDINGS.values()


def read_packed(path: Path) -> bytes:
    """The content of a file, unpacked if its name ends as that of a compressed one.

    Raises:
        LiteRTFileError: if it cannot be unpacked.
    """
    if not is_packed(path):
        return path.read_bytes()
    try:
        if path.suffix == _ENDINGS["gzip"]:
            with gzip.open(path) as stream:
                return _unpacked(stream, path)
        with path.open("rb") as file, _zstandard().ZstdDecompressor().stream_reader(file) as stream:
            return _unpacked(stream, path)
    except (ImportError, LiteRTFileError):
        raise
    except Exception as error:  # gzip, zlib and zstandard have errors of their own
        raise LiteRTFileError(
            f"The file must be one that {path.suffix[1:]} can unpack: it is corrupted or "
            f"truncated. Received: {str(path)!r}, {type(error).__name__}: {error}"
        ) from error


def _unpacked(stream: Any, path: Path) -> bytes:
    """What a stream gives, if that is a LiteRT file: little is unpacked of anything else."""
    content = bytearray()
    while chunk := stream.read(_CHUNK):
        content += chunk
        if content[4:8] != b"TFL3"[: max(0, len(content) - 4)]:
            raise LiteRTFileError(
                "A LiteRT file has 'TFL3' in bytes 4 to 7. "
                f"Received: {str(path)!r} with {bytes(content[4:8])!r} there"
            )
        if len(content) > _LARGEST:
            raise LiteRTFileError(
                f"A LiteRT file has less than {_LARGEST} bytes. Received: {str(path)!r}, which "
                "unpacks to more"
            )
    return bytes(content)


def _zstandard():  # type: ignore[no-untyped-def]
    try:
        import zstandard
    except ImportError as error:
        raise ImportError(
            "zstd needs the package zstandard. Install it with: "
            "pip install \"keras-sparse-ortho[litert]\". Received: no module named 'zstandard'",
            name="zstandard",
        ) from error
    return zstandard
