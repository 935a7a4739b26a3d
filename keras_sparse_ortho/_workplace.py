"""The folder in which the files of an export stand until they are handed over."""

import contextlib
import errno
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

# As much of a file's name goes into that of the folder: names have a limit.
_PART = 24
_OWNER = "owner.json"
# What the libraries on the way say of a full disk, each with an error of its own.
_FULL = ("No space left on device", "Disk quota exceeded", "File too large")


@contextlib.contextmanager
def workplace(place: Path, name: str) -> Iterator[Path]:
    """A hidden folder in `place`, on the same file system, removed at the end.

    What an export that was killed has left for the same name is removed first.

    Args:
        place: The folder of the file to be written.
        name: What is written, such as the file's name.

    Raises:
        OSError: Where nothing can be written. `ENOSPC`, whatever library noticed it, if the disk
            is full.
    """
    prefix = f".{name[:_PART]}-kso-"
    _remove_what_the_dead_left(place, prefix)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=place, ignore_cleanup_errors=True) as made:
        folder = Path(made).absolute()
        try:
            owner = {"host": socket.gethostname(), "pid": os.getpid()}
            (folder / _OWNER).write_text(json.dumps(owner))
            yield folder
        except Exception as error:
            if not isinstance(error, OSError) and is_full(folder, [str(error)]):
                raise no_room(place, str(error)) from error
            raise


def is_full(folder: Path, reasons: Iterable[str]) -> bool:
    """Whether failures are those of a full disk: by what they say, or as nothing is left."""
    if any(text in reason for reason in reasons for text in _FULL):
        return True
    return shutil.disk_usage(folder).free == 0


def no_room(place: Path, reason: str) -> OSError:
    """The error for a disk that is full."""
    free = shutil.disk_usage(place).free
    return OSError(
        errno.ENOSPC,
        "There is no room for the files of the export, which stand beside the file to be written "
        "until one is handed over: a copy of the model, and a file for each route. Free some, or "
        f"write to another disk. Received: {free} free bytes in {str(place)!r}; {reason[:300]}",
    )


def _remove_what_the_dead_left(place: Path, prefix: str) -> None:
    for folder in place.glob(f"{_literal(prefix)}*"):
        try:
            owner = json.loads((folder / _OWNER).read_text())
            if owner["host"] == socket.gethostname() and not _is_alive(owner["pid"]):
                shutil.rmtree(folder, ignore_errors=True)
        except (OSError, ValueError, KeyError, TypeError):
            continue  # not ours, or not to be read


def _literal(prefix: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in prefix)


def _is_alive(pid: int) -> bool:
    if os.name == "nt":  # os.kill would end the process there
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user
        return True
    return True
