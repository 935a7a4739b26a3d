"""The shortest stretch of the operations of a file that holds a share of its error."""

from collections.abc import Sequence
from typing import NamedTuple


class TensorError(NamedTuple):
    """The error of one tensor of activations, or one kernel, that is rounded alone.

    Attributes:
        kind: str. "activations" or "kernel".
        name: str. Its name in the file.
        operations: The places of the operations that write or read it.
        size: int. The entries of a kernel, else 0.
        error: float. The relative squared error of the outputs.
    """

    kind: str
    name: str
    operations: tuple[int, ...]
    size: int
    error: float


def shortest_stretch(
    errors: Sequence[TensorError], operations: int, share: float
) -> range:
    """The shortest run of operations that holds a share of the error; then that of least weights.

    A tensor is in a run if all operations that write or read it are.
    """
    total = sum(tensor.error for tensor in errors)
    shortest = range(operations)
    cost = operations + 1, 0
    if share == 0.0 or total == 0.0:
        return range(0)
    for start in range(operations):
        inside = [
            tensor for tensor in errors if min(tensor.operations) >= start
        ]
        inside.sort(key=lambda tensor: max(tensor.operations))
        error = 0.0
        entries = 0
        for tensor in inside:
            error += tensor.error
            entries += tensor.size
            # Sums in another order differ in their last digits.
            if error >= share * total * (1 - 1e-9):
                stretch = range(start, max(tensor.operations) + 1)
                if (len(stretch), entries) < cost:
                    shortest = stretch
                    cost = len(stretch), entries
                break
    return shortest
