"""Whether the zeros of kernels are zeros in a LiteRT file."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from keras_sparse_ortho.export._flatbuffer import StoredWeight

# A tensor with this part of a kernel's live entries, that lost at most this part of its zeros, and
# whose magnitudes are correlated so, is the kernel.
_LIVE, _LOST, _ALIKE = 0.75, 0.01, 0.5
_CHUNK = 256  # rows that are matched at once


class ZerosInFile(NamedTuple):
    """A message about a kernel that lost zeros, or None; the kernels that no tensor holds."""

    lost: str | None
    absent: tuple[str, ...]


def find_zeros(
    kernels: Iterable[tuple[str, np.ndarray]], weights: Iterable[StoredWeight]
) -> ZerosInFile:
    """Looks for the zeros of every kernel among the tensors of a file.

    A tensor of equal size holds a kernel if it is zero, for some order of axes, wherever the kernel
    is. It holds a part of it (a slice, or rows at constant indices) if this is true of each of its
    rows and one of the kernel. A tensor that is zero nearly everywhere there has lost some. A
    kernel that no tensor holds was combined with other constants.
    """
    missing = [(path, value) for path, value in kernels if not value.all()]
    tensors = [(one.about.name, one.values) for one in weights] if missing else []
    absent = []
    for path, kernel in missing:
        lost, name = min(
            ((_lost(kernel.squeeze(), values), name) for name, values in tensors),
            default=(kernel.size, ""),
        )
        zeros = kernel.size - np.count_nonzero(kernel)
        if lost == kernel.size and not any(_is_part(one, kernel.squeeze()) for _, one in tensors):
            absent.append(path)
        elif 0 < lost < kernel.size:
            return ZerosInFile(
                f"kernel '{path}' has {zeros} zeros of {kernel.size}, of which {lost} are not zero "
                f"in its tensor '{name}'",
                (),
            )
    return ZerosInFile(None, tuple(absent))


def _lost(kernel: np.ndarray, tensor: np.ndarray) -> int:
    """How many zeros of a kernel its tensor lacks; the size of the kernel for other tensors."""
    if tensor.size != kernel.size:
        return kernel.size
    found = [kernel.size]
    for order in _orders(kernel.shape, tensor.shape):
        own = kernel.transpose(order).reshape(tensor.shape)
        live, lost = own != 0, int(np.count_nonzero(tensor[own == 0]))
        kept = np.count_nonzero(tensor[live])
        few = lost <= max(1, _LOST * np.count_nonzero(~live)) and kept >= _LIVE * live.sum()
        # Other kernels may have such zeros as well; their values are unlike.
        if few and (lost == 0 or np.corrcoef(abs(own).flat, abs(tensor).flat)[0, 1] > _ALIKE):
            found.append(lost)
    return min(found)


def _is_part(tensor: np.ndarray, kernel: np.ndarray) -> bool:
    """Whether each row of a tensor, along an axis, has the zeros of a row of a kernel."""
    tensor, kernel = tensor != 0, kernel != 0
    ends = [_rows(tensor, 0), _rows(tensor, -1)]
    for axis, values in itertools.product(range(kernel.ndim), [*ends, *(one.T for one in ends)]):
        rows = _rows(kernel, axis)
        if values.shape[1] == rows.shape[1] > 1 and values.any() and not values.all():
            live = rows.T.astype("float32")
            chunks = (values[k : k + _CHUNK] for k in range(0, len(values), _CHUNK))
            if all(
                ((one @ (1 - live) == 0) & (one @ live >= _LIVE * live.sum(0))).any(1).all()
                for one in chunks
            ):
                return True
    return False


def _orders(shape: Sequence[int], target: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The orders of axes from which a reshape that joins or splits axes leads to a shape."""
    ends = set(np.cumprod(target).tolist()) - {1}
    for order in itertools.permutations(range(len(shape))):
        mine = set(np.cumprod([shape[axis] for axis in order]).tolist())
        if mine <= ends or ends <= mine:
            yield order


def _rows(array: np.ndarray, axis: int) -> np.ndarray:
    """The entries of an axis as the rows of a matrix."""
    return np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1)
