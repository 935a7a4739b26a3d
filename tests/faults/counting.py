"""What is counted, and children that are watched."""

import contextlib
import dataclasses
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

OK, FOREIGN, WRONG = 0, 3, 4


@dataclasses.dataclass
class Count:
    """One line of the table."""

    part: str
    runs: int = 0
    wrong: int = 0  # a result that is not what it should be, and no error
    lost: int = (
        0  # what stood there before is gone, and nothing whole is in its place
    )
    hangs: int = 0
    crashes: int = 0  # of the caller
    foreign: int = 0  # errors outside the promised types
    notes: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    def take(self, status: int | None) -> None:
        """Counts what a watched child answered; see `watched`."""
        self.runs += 1
        if status is None:
            self.hangs += 1
        elif status < 0:
            self.crashes += 1
        elif status == WRONG:
            self.wrong += 1
        elif status != OK:
            self.foreign += 1


def started(work: Callable[[], None], output: Path) -> int:
    """Forks; the child works in a group of its own. Its process id."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.setpgid(0, 0)
        sink = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        work()
        status = OK
    except SystemExit as leaving:
        status = int(leaving.code or 0)
    except BaseException:
        traceback.print_exc()
        status = FOREIGN
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def ended(
    child: int, seconds: float, answers: Path | None = None
) -> int | None:
    """The status of a child, negative for a signal; None if it had to be killed.

    With a file of answers, the time starts anew with each of them.
    """
    size, since = 0, time.monotonic()
    while time.monotonic() - since < seconds:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if answers and (now := answers.stat().st_size) != size:
            size, since = now, time.monotonic()
        time.sleep(0.01)
    kill(child)
    return None


def kill(child: int) -> None:
    """kill -9, and nothing else: what the process has started lives on."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, 0)


def watched(
    work: Callable[[], None], output: Path, seconds: float = 120
) -> int | None:
    """The status of a child that does the work; None for one that hangs."""
    return ended(started(work, output), seconds)


@contextlib.contextmanager
def timed(part: str) -> Iterator[Count]:
    """A line of the table with its seconds."""
    count, start = Count(part), time.monotonic()
    yield count
    count.seconds = time.monotonic() - start
    print(f"{part}: {count}", flush=True)


def status_of(key: str) -> int:
    """Bytes of this process, by the name that /proc has for them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(
        1024 * int(line.split()[1])
        for line in lines
        if line.startswith(f"{key}:")
    )
