"""Which tensors of a LiteRT file hold a kernel of Keras, and whether its zeros are zeros there."""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from keras_sparse_ortho.export._litert_file import StoredWeight
from keras_sparse_ortho.export._sparse_encoding import decode

# So far may an entry be from the kernel's, as a fraction of it, and in steps of integers.
_ROUNDING, _STEPS = 1e-3, 0.51
# So many of its live entries a kernel must have in a tensor that is said to hold it.
_SHARE = 0.75
# And so many entries must agree where others could have been made to.
_LEAST = 8
# What is looked at before all of it is: entries, and rows.
_SAMPLE, _FEW = 4096, 64
_CHUNK = 256


@dataclasses.dataclass(frozen=True)
class KernelsInFile:
    """What became of the zeros of kernels in a file.

    Attributes:
        lost: What to say of a kernel some of whose zeros are none in the tensor that holds it;
            None if there is no such kernel.
        absent: Paths of the kernels that no tensor holds.
    """

    lost: str | None
    absent: tuple[str, ...]


def find_kernels_in_file(
    kernels: Iterable[tuple[str, np.ndarray]], weights: Iterable[StoredWeight]
) -> KernelsInFile:
    """Look for every kernel among the tensors of a file by its live values, and for its zeros.

    A tensor holds a kernel `K` of the same size if, with the axes in some order, merged or split,

        T = s K  at the entries where K is live,

    but for rounding, where `s` is 1, or a number for each entry of the first or the last axis of
    the tensor (a normalization that the converter has folded into the kernel). It holds a part if
    its rows along some axis are rows of the kernel: a slice, a look-up at fixed places. All zeros
    of the kernel, or of the part, must be zeros of the tensor then.

    A kernel that no tensor holds was computed with other constants to something else: a table of
    positions to which a bias is added, or which is normalized.

    Args:
        kernels: Path and value of each kernel (rank 2 or more) of the plain Keras model.
        weights: What `stored_weights` gives for the file.
    """
    missing = [(path, value) for path, value in kernels if not value.all()]
    if not missing:
        return KernelsInFile(None, ())
    tensors = [_Tensor(weight) for weight in weights]
    largest = max(float(np.abs(value).max()) for _, value in missing) or 1.0
    for search in (_equal, _multiple, _part, functools.partial(_nothing, largest=largest)):
        taken, left = [], []
        for path, kernel in missing:
            places = list(search(kernel, tensors))
            if not places:
                left.append((path, kernel))
                continue
            # Kernels that have much in common: the one that agrees in most entries is its own.
            most = max(place.share for place in places)
            best = min((p for p in places if p.share == most), key=lambda place: place.lost)
            if best.lost:
                return KernelsInFile(_complaint(path, kernel, best), ())
            taken.append(best.tensor)
        # Equal kernels may have become one tensor, but none is found in two ways.
        tensors = [tensor for tensor in tensors if tensor not in taken]
        missing = left
    return KernelsInFile(None, tuple(path for path, _ in missing))


def dense_values(weight: StoredWeight) -> np.ndarray:
    """The entries of a tensor as float32, in its shape."""
    values = weight.values.astype("float32", copy=False)
    if weight.values.dtype.kind in "iu":
        values = values - np.float32(weight.zero)
    if weight.sparsity is not None:
        values = decode(weight.sparsity, values, weight.about.shape)
    return values * np.float32(weight.scale) if weight.values.dtype.kind in "iu" else values


class _Tensor:
    """A tensor of the file; its values are made dense when they are needed."""

    def __init__(self, weight: StoredWeight) -> None:
        self._weight = weight
        self.name, self.shape = weight.about.name, weight.about.shape
        self.size = weight.about.size
        # By how much neighbouring values differ, as one number or along a dimension.
        self.step = np.float32(weight.scale if weight.values.dtype.kind in "iu" else 0.0)

    @functools.cached_property
    def values(self) -> np.ndarray:
        return dense_values(self._weight)


@dataclasses.dataclass(frozen=True)
class _Place:
    """A tensor that holds a kernel: the share of entries that agree, and the zeros that do not."""

    tensor: _Tensor
    share: float
    lost: int


def _complaint(path: str, kernel: np.ndarray, place: _Place) -> str:
    zeros = kernel.size - np.count_nonzero(kernel)
    return (
        f"kernel '{path}' has {zeros} zeros of {kernel.size}, of which {place.lost} are none in "
        f"its tensor '{place.tensor.name}'"
    )


def _orders(shape: Sequence[int], target: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The orders of axes from which a reshape that joins or splits axes leads to a shape."""
    ends = set(np.cumprod(target).tolist()) - {1}
    for order in itertools.permutations(range(len(shape))):
        mine = set(np.cumprod([shape[axis] for axis in order]).tolist())
        if mine <= ends or ends <= mine:
            yield order


def _alike(kernel: np.ndarray, tensors: list[_Tensor]) -> Iterator[tuple[_Tensor, np.ndarray]]:
    """The tensors of a kernel's size, each with the kernel in an order of axes that it may have."""
    kernel = kernel.squeeze()
    arranged: dict[tuple[Any, ...], np.ndarray] = {}
    for tensor in tensors:
        if tensor.size != kernel.size:
            continue
        for order in _orders(kernel.shape, tensor.shape):
            key = (order, tensor.shape)
            if key not in arranged:
                found = kernel.transpose(order).reshape(tensor.shape)
                arranged[key] = np.ascontiguousarray(found)
            yield tensor, arranged[key]


def _equal(kernel: np.ndarray, tensors: list[_Tensor]) -> Iterator[_Place]:
    """The tensors that hold a kernel as it is, but for the order of axes."""
    if not kernel.any():
        return
    for tensor, arranged in _alike(kernel, tensors):
        few = slice(None, None, -(-kernel.size // _SAMPLE))
        some, theirs = arranged.ravel()[few], tensor.values.ravel()[few]
        if some.any() and _share(theirs, some, tensor.step.max()) < _SHARE / 2:
            continue
        share = _share(tensor.values, arranged, tensor.step)
        if share >= _SHARE:
            yield _Place(tensor, share, int(np.count_nonzero(tensor.values[arranged == 0])))


def _multiple(kernel: np.ndarray, tensors: list[_Tensor]) -> Iterator[_Place]:
    """The tensors that hold a kernel times a number for each entry of their first or last axis."""
    for tensor, arranged in _alike(kernel, tensors):
        values, step = tensor.values, np.broadcast_to(tensor.step, tensor.shape)
        for axis in {0, arranged.ndim - 1}:
            few = [slice(None)] * arranged.ndim
            few[axis] = slice(None, None, -(-arranged.shape[axis] // _LEAST))
            likely = tuple(few)
            share = _share_of_multiple(values[likely], arranged[likely], step[likely], axis)
            if share is not None and share < _SHARE / 2:
                continue
            share = _share_of_multiple(values, arranged, step, axis)
            if share is not None and share >= _SHARE:
                yield _Place(tensor, share, int(np.count_nonzero(values[arranged == 0])))
                break


def _part(kernel: np.ndarray, tensors: list[_Tensor]) -> Iterator[_Place]:
    """The tensors whose rows, along some axis, are rows of a kernel."""
    kernel = kernel.squeeze()
    for tensor, axis in itertools.product(tensors, range(kernel.ndim)):
        width = kernel.size // kernel.shape[axis]
        if width == 1 or tensor.size % width or not kernel.any():
            continue
        count = tensor.size // width
        rows = np.moveaxis(kernel, axis, 0).reshape(-1, width)
        shape = [count if k == axis else size for k, size in enumerate(kernel.shape)]
        for order in _orders(shape, tensor.shape):
            values, step = (
                np.moveaxis(
                    array.reshape([shape[k] for k in order]).transpose(np.argsort(order)), axis, 0
                ).reshape(count, width)
                for array in (tensor.values, np.broadcast_to(tensor.step, tensor.shape))
            )
            few = slice(None, None, -(-count // _FEW))
            likely = rows[_nearest(rows, values[few])]
            if likely.any() and _share(values[few], likely, step[few]) < _SHARE / 2:
                continue
            nearest = rows[_nearest(rows, values)]
            if np.count_nonzero(nearest) < _LEAST:
                continue
            share = _share(values, nearest, step)
            if share >= _SHARE:
                yield _Place(tensor, share, int(np.count_nonzero(values[nearest == 0])))
                break


def _nothing(kernel: np.ndarray, tensors: list[_Tensor], largest: float) -> Iterator[_Place]:
    """The tensors that can be a kernel of zeros: nothing in them is of the size of weights."""
    for tensor in tensors if not kernel.any() else ():
        if tensor.size == kernel.size and np.abs(tensor.values).max() <= _ROUNDING * largest:
            yield _Place(tensor, 1.0, int(np.count_nonzero(tensor.values)))


def _share(values: np.ndarray, kernel: np.ndarray, step: Any) -> float:
    """The share of a kernel's live entries that values agree with."""
    live = kernel != 0
    return float(np.count_nonzero(live & _agree(values, kernel, step)) / np.count_nonzero(live))


def _share_of_multiple(
    values: np.ndarray, kernel: np.ndarray, step: np.ndarray, axis: int
) -> float | None:
    """The same for the multiple that is nearest along an axis; None if there is too little."""
    others = tuple(k for k in range(kernel.ndim) if k != axis)
    squares = np.sum(kernel**2, axis=others, keepdims=True)
    scale = np.sum(values * kernel, axis=others, keepdims=True) / np.maximum(squares, 1e-30)
    multiple = scale * kernel
    # The scale is an estimate, off by up to half a step as well.
    agree = (multiple != 0) & _agree(values, multiple, 2 * step)
    # A single entry is a multiple of any other.
    free = np.count_nonzero(scale)
    possible = np.count_nonzero(multiple) - free
    return None if possible < _LEAST else float((np.count_nonzero(agree) - free) / possible)


def _agree(values: np.ndarray, expected: np.ndarray, step: Any) -> np.ndarray:
    """Which values are those expected, but for rounding."""
    close: np.ndarray = np.abs(values - expected) <= _ROUNDING * np.abs(expected) + _STEPS * step
    return close


def _nearest(rows: np.ndarray, values: np.ndarray) -> np.ndarray:
    """For each row of values the index of the row that is nearest to it."""
    squares = np.sum(rows**2, axis=1)
    chunks = range(0, len(values), _CHUNK)
    found = [(squares - 2 * values[k : k + _CHUNK] @ rows.T).argmin(axis=1) for k in chunks]
    return np.concatenate(found)
