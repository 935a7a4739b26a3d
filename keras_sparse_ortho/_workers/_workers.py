"""`Workers`: what the processes that train one model do together."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from keras_sparse_ortho.errors import WorkerError

T = TypeVar("T")


class Workers:
    """The processes of a training; this one alone, unless a subclass says otherwise.

    All methods but `count` and `rank` are to be called by every worker, in the same order.

    Args:
        count: How many there are.
        rank: Which one this is, from 0.
    """

    # Whether each has gradients of its own, in NumPy, which `mean` exchanges.
    averages = False

    def __init__(self, count: int = 1, rank: int = 0) -> None:
        self.count = count
        self.rank = rank

    def batch(self, batch: Any) -> Any:
        """What to compute a mean loss on, so that `mean` gives that of all workers' batches."""
        return batch

    def batches(self, batches: Sequence[Any]) -> list[Any]:
        """Several of them, each as `batch` gives it."""
        return list(batches)

    def mean(self, arrays: Sequence[np.ndarray], samples: int) -> list[np.ndarray]:
        """The mean of each array over all workers, each weighted by its number of samples."""
        return list(arrays)

    def gather(self, numbers: np.ndarray) -> np.ndarray:
        """A vector of int32 of each worker, of one length, as `(count, length)`."""
        return numbers[None]

    def hear(self, text: str) -> list[str]:
        """A text of each worker."""
        said = np.frombuffer(text.encode(), np.uint8)
        lengths = self.gather(np.array([said.size], np.int32))[:, 0]
        padded = np.zeros(int(lengths.max()), np.int32)
        padded[: said.size] = said
        pairs = zip(self.gather(padded), lengths, strict=True)
        return [bytes(line[:length].astype(np.uint8)).decode() for line, length in pairs]

    def together(self, action: Callable[[], T]) -> T:
        """Calls a function; where it fails on one worker all of them raise, and none waits.

        Raises:
            WorkerError: It has failed on another worker; here it raises what it does.
        """
        if self.count == 1:
            return action()
        error: Exception | None = None
        try:
            result = action()
        except Exception as raised:
            error = raised
        if not self.gather(np.array([error is not None], np.int32)).any():
            return result
        said = self.hear("" if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        failed = next(rank for rank, text in enumerate(said) if text)
        raise WorkerError(
            f"Worker {failed} of {self.count} has failed, and this one stops with it. "
            f"Received: {said[failed]}"
        )

    def compare(self, when: str, facts: Mapping[str, str]) -> None:
        """Raises on every worker unless all of them have the same facts.

        Args:
            when: For the error: which moment this is.
            facts: From the name of something to what it is like, or a digest of that.

        Raises:
            WorkerError: The facts that differ.
        """
        if self.count == 1:
            return
        text = json.dumps(dict(facts))
        marks = self.gather(_words(text.encode()))
        if (marks == marks[0]).all():
            return
        known = [json.loads(said) for said in self.hear(text)]
        names = dict.fromkeys(name for facts in known for name in facts)
        wrong = [name for name in names if len({facts.get(name) for facts in known}) > 1]
        found = {name: [facts.get(name) for facts in known] for name in wrong[:3]}
        raise WorkerError(
            f"Workers that train one model must agree, and do not {when}: give them the same "
            "model, seeds, callbacks and, where masks follow from data, gradients of all of them. "
            f"Received: {len(wrong)} differences, by worker {found}"
        )


def digest_of(*arrays: np.ndarray) -> str:
    """A text that tells arrays apart, by shape, dtype and every bit."""
    state = hashlib.blake2b(digest_size=8)
    for array in arrays:
        state.update(f"{array.shape}{array.dtype}".encode())
        state.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return state.hexdigest()


def _words(data: bytes) -> np.ndarray:
    return np.frombuffer(hashlib.blake2b(data, digest_size=16).digest(), np.int32)
