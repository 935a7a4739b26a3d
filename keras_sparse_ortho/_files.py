"""Files that are complete or absent: atomic writes, staging folders, tables checked on reading."""

import contextlib
import errno
import json
import os
import pathlib
import re
import secrets
import shutil
import socket
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TextIO

_NAME_PART = 24  # characters of a file's name that go into the name of its staging folder
# How the libraries that write files report a full disk, each by another error class.
_DISK_FULL = (
    "No space left on device",
    "Disk quota exceeded",
    "File too large",
)
_MOST_TIMES, ALWAYS_UNPACKED = 100, 1 << 28  # of a compressed file
_NO_SPACE = "Not enough disk space for the export"
_LONGEST = 200  # characters of a file's content that an error message shows

Row = tuple[str, dict[str, Any]]
"""Where the row is (`"entry 3"`), and its columns."""


def path_of(argument: str, value: Any) -> pathlib.Path:
    """The path that an argument names; ValueError for other values, such as None."""
    if not isinstance(value, str | os.PathLike):
        raise ValueError(
            f"`{argument}` must be a path, a string or a `pathlib.Path`. "
            f"Received: {argument}={value!r:.200}"
        )
    return pathlib.Path(value)


def check_not_an_input(
    argument: str, path: pathlib.Path, inputs: Mapping[str, Any]
) -> None:
    """Raises ValueError if the file to write is one of those to read: it would be lost.

    Args:
        argument: str. Name of the argument that says where to write.
        path: Path. The file to write; links to an input count as the input.
        inputs: dict. Paths of the files that are read, by argument; `None` for none.
    """
    if not path.exists():
        return
    for name, source in inputs.items():
        if (
            source is not None
            and os.path.exists(source)
            and os.path.samefile(path, source)
        ):
            raise ValueError(
                f"`{argument}` must name another file than `{name}`, which would be replaced. "
                f"Received: {argument}={str(path)!r}, {name}={str(source)!r}"
            )


def check_unpacked_size(name: str, packed: int, unpacked: int) -> None:
    """Raises ValueError for a compressed file that would take far more memory than its size.

    A few megabytes of it may stand for gigabytes of zeros. Files of data or weights rarely shrink
    to a hundredth.

    Args:
        name: str. The file, for the message.
        packed: int. Its size in bytes.
        unpacked: int. Bytes in it: as its directory says, or as far as it was read.
    """
    if unpacked > max(ALWAYS_UNPACKED, _MOST_TIMES * packed):
        raise ValueError(
            f"A compressed file may hold {_MOST_TIMES} times its own size, or {ALWAYS_UNPACKED} "
            "bytes. If you trust it, decompress it first, and pass the result. "
            f"Received: {name!r} of {packed} bytes, which holds {unpacked} bytes or more"
        )


def check_archive(path: str | os.PathLike[str]) -> None:
    """Raises ValueError if the members of a zip archive would take far more memory than its size.

    The sizes are those in its directory; `zipfile` reads no more than these.
    """
    with zipfile.ZipFile(path) as archive:
        unpacked = sum(member.file_size for member in archive.infolist())
    check_unpacked_size(str(path), os.path.getsize(path), unpacked)


@contextlib.contextmanager
def atomic_write(path: str | pathlib.Path) -> Iterator[TextIO]:
    """Opens a text file that replaces `path`, or a link's target, once it is complete."""
    with _atomic(path, "", newline="", encoding="utf-8") as stream:
        yield stream


def atomic_write_bytes(path: str | pathlib.Path, content: bytes) -> None:
    """Writes a file that is complete or absent; see `atomic_write`."""
    with _atomic(path, "b") as stream:
        stream.write(content)


@contextlib.contextmanager
def _atomic(
    path: str | pathlib.Path, kind: str, **options: Any
) -> Iterator[Any]:
    """Opens a file beside the target, which it replaces once it is complete."""
    target = pathlib.Path(path).resolve()
    if target.exists() and not target.is_file():  # a pipe or device
        with target.open(f"w{kind}", **options) as stream:
            yield stream
        return
    # Only a part of the name, which may be as long as the file system allows.
    partial = target.with_name(
        f".{secrets.token_hex(8)}.{target.name[-32:]}.part"
    )
    try:
        with partial.open(f"x{kind}", **options) as stream:
            # Before anything is written that others may not read.
            if target.exists():
                partial.chmod(target.stat().st_mode)
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)  # it is there after an error only


@contextlib.contextmanager
def staging(parent: pathlib.Path, name: str) -> Iterator[pathlib.Path]:
    """A hidden folder in `parent` that is removed at the end, as are those of killed processes."""
    _check_utf8(parent / name)
    # Word characters only: TensorFlow takes the path for a glob.
    prefix = re.sub(
        r"[^\w.-]",
        "_",
        f".{name[:_NAME_PART]}-kso-{socket.gethostname()[:32]}-",
    )
    for folder in parent.glob(f"{prefix}*"):
        pid = folder.name.removeprefix(prefix).partition("-")[0]
        if pid.isdecimal() and not _is_alive(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)
    prefix += f"{os.getpid()}-"
    with tempfile.TemporaryDirectory(
        prefix=prefix, dir=parent, ignore_cleanup_errors=True
    ) as made:
        folder = pathlib.Path(made).absolute()
        try:
            yield folder
        except Exception as error:
            if not _says_disk_full(error) and is_full(folder, [str(error)]):
                raise disk_full(parent, str(error)) from error
            raise


def _says_disk_full(error: Exception) -> bool:
    """Whether an error is one of `disk_full` already."""
    return isinstance(error, OSError) and _NO_SPACE in str(error)


def _check_utf8(path: pathlib.Path) -> None:
    """Raises ValueError for a name that the libraries that write the file cannot be given."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ValueError(
            "The names of files and folders are passed on in UTF-8, and this one has characters "
            "that Python could not decode. Set the environment variable PYTHONUTF8=1, or a locale "
            "with UTF-8 (LC_ALL=C.UTF-8), before Python starts. "
            f"Received: {str(path)!a}, read as {sys.getfilesystemencoding()}"
        ) from None


def is_full(folder: pathlib.Path, reasons: Iterable[str]) -> bool:
    """Whether failures come from a full disk: by their messages, or as no byte is left."""
    if any(text in reason for reason in reasons for text in _DISK_FULL):
        return True
    return shutil.disk_usage(folder).free == 0


def disk_full(folder: pathlib.Path, reason: str) -> OSError:
    return OSError(
        errno.ENOSPC,
        f"{_NO_SPACE}: a copy of the model and a file for each route are "
        "kept beside the target until one file is final. Free some space or write to another "
        f"disk. Received: {shutil.disk_usage(folder).free} free bytes in {str(folder)!r}; "
        f"{reason[:300]}",
    )


def _is_alive(pid: int) -> bool:
    if os.name == "nt":  # os.kill would end the process there
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # Another user's process; not a process id.
    except (
        PermissionError,
        OverflowError,
    ):
        return True
    return True


def read_json(path: pathlib.Path, error: type[ValueError]) -> Any:
    """The content of a JSON file in which no name stands twice; `error` if it is anything else."""
    try:
        return json.loads(
            path.read_text(encoding="utf-8-sig"), object_pairs_hook=_unique
        )
    except json.JSONDecodeError as problem:
        raise error(
            f"{path}, line {problem.lineno}: {problem.msg}. Received: a file that is not JSON"
        ) from None
    except (UnicodeDecodeError, RecursionError, ValueError) as problem:
        raise error(
            f"{path}: the file is not readable as JSON in UTF-8. "
            f"Received: {type(problem).__name__}: {shown(str(problem))}"
        ) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands twice in one object")
    return found


def shown(value: Any) -> str:
    """A value from a file for an error message, shortened if it is long."""
    text = value if isinstance(value, str) else repr(value)
    return (
        text
        if len(text) <= _LONGEST
        else f"{text[:_LONGEST]}... ({len(text)} characters)"
    )
