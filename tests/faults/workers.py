"""The worker of exports under interrupts, wrong arguments and forks: every answer is its job's."""

import contextlib
import inspect
import os
import random
import sys
from pathlib import Path
from typing import Any

from keras_sparse_ortho.export import JobError, Worker
from tests.faults.counting import WRONG, Count, timed, watched

ECHO = """if True:
    import json, sys
    for line in sys.stdin:
        job = json.loads(line)
        answer = {"number": job["number"], "answer": job["arguments"]}
        print("\\x1e" + json.dumps(answer), flush=True)
"""
WRONG_ARGUMENTS: tuple[tuple[Any, Any], ...] = (
    *((timeout, 1) for timeout in ("60", None, [], b"1", float("nan"), -1.0)),
    *((60.0, value) for value in (b"bytes", {1}, object(), {(): 1}, 1j)),
)


def run(folder: Path, rng: random.Random, share: float) -> list[Count]:
    """Interrupts at any line, wrong arguments, and children of `fork`, each before other jobs."""
    folder.mkdir(parents=True)
    script = folder / "echo.py"
    script.write_text(ECHO)
    kinds = {
        "workers: interrupts": (_interrupted, round(200 * share)),
        "workers: wrong arguments": (
            _with_a_wrong_argument,
            round(100 * share),
        ),
        "workers: forks": (_forked, round(50 * share)),
    }
    return [
        _counted(name, work, max(5, number), script, rng.randrange(1 << 30))
        for name, (work, number) in kinds.items()
    ]


def _counted(
    name: str, work: Any, number: int, script: Path, seed: int
) -> Count:
    """Tries one kind in children of this process."""
    with timed(name) as count:
        for k in range(number):

            def child(k: int = k) -> None:
                Worker.script = script
                with Worker() as worker:
                    for _ in range(random.Random(seed + k).randrange(3)):
                        _ask(worker)
                    work(worker, random.Random(seed + k))
                    for _ in range(3):
                        _ask(worker)

            count.take(watched(child, script.with_name("log"), 60))
    return count


def _ask(worker: Worker) -> None:
    """Leaves the child if a job has another's answer."""
    question = os.urandom(4).hex()
    if worker.run("any", 30.0, x=question) != {"x": question}:
        sys.exit(WRONG)


def _interrupted(worker: Worker, rng: random.Random) -> None:
    """A job with Ctrl-C at some line of it."""
    left = rng.randrange(1, 90)

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename != inspect.getfile(Worker):
            return None
        left -= event == "line"
        if left == 0:
            left = -1
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        worker.run("any", 30.0, x="interrupted")
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)


def _with_a_wrong_argument(worker: Worker, rng: random.Random) -> None:
    timeout, value = rng.choice(WRONG_ARGUMENTS)
    with contextlib.suppress(TypeError, ValueError, JobError):
        worker.run("any", timeout, x=value)


def _forked(worker: Worker, rng: random.Random) -> None:
    """A child that asks and leaves in one of several ways."""
    child = os.fork()
    if child == 0:
        for _ in range(rng.randrange(3)):
            _ask(worker)
        if rng.random() < 0.5:
            worker.close()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        sys.exit(WRONG)
