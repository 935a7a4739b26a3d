"""Files that are whole or not there: written aside, then renamed."""

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Iterator
from typing import TextIO


@contextlib.contextmanager
def written_aside(path: str | pathlib.Path) -> Iterator[TextIO]:
    """Opens a new text file that takes the place of `path` when all of it has been written.

    An error, a full disk or a kill on the way leaves what stood there before. A link keeps
    pointing where it does; what is no regular file, such as a pipe, is written to directly.

    Example:

    >>> import tempfile
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "table.csv"
    >>> with written_aside(file) as stream:
    ...     _ = stream.write("new")
    >>> file.read_text()
    'new'
    """
    target = pathlib.Path(path).resolve()
    if target.exists() and not target.is_file():
        with target.open("w", newline="", encoding="utf-8") as stream:
            yield stream
        return
    # Of the name a part, as names may be as long as the file system allows.
    descriptor, name = tempfile.mkstemp(f".{target.name[-32:]}.part", ".", target.parent)
    aside = pathlib.Path(name)
    try:
        with open(descriptor, "w", newline="", encoding="utf-8") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        aside.chmod(target.stat().st_mode if target.exists() else 0o666 & ~_umask())
        aside.replace(target)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
