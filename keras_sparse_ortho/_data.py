"""Data as `fit` takes it: its first batches, or the n-th batch, the same in every run."""

import itertools
import math
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._checks import check_integer
from keras_sparse_ortho._keras_internals import warn_user
from keras_sparse_ortho._types import Tensor
from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.kernels import derived_seed

_NO_BATCH = "The data must have at least one batch. Received: none"
# Data sets and generators may be endless: of these, "all" batches are at most so many.
MOST_ROWS = 100_000
_MOST_BYTES = 4 * 2**30
_WIDTH = 4  # bytes of a number, where its type does not say

Batch = tuple[Any, Any, Any]
"""`(x, y, sample_weight)`, the last two may be `None`."""


def first_batches(
    data: Any,
    *,
    batch_size: int = 128,
    batches: int | None = 1,
    shuffle: bool = True,
    seed: int | None = None,
) -> list[Batch]:
    """The first batches (`None`: all) of anything that `fit` takes; samples of arrays are drawn."""
    if batches is not None:
        check_integer("batches", batches)
    check_integer("batch_size", batch_size)
    source = _source(data)
    if not isinstance(source, _Arrays):
        items = map(_unpacked, source.items())
        taken = (
            _bounded(items)
            if batches is None
            else [*itertools.islice(items, batches)]
        )
        if not taken:
            raise ValueError(_NO_BATCH)
        return taken
    order = np.arange(source.count)
    if shuffle:
        seed = random.randrange(2**31) if seed is None else seed
        order = np.random.default_rng(seed).permutation(source.count)
    starts = range(0, source.count, batch_size)[:batches]
    return [source.rows(order[start : start + batch_size]) for start in starts]


def all_rows(data: Any, seconds: float = math.inf) -> Batch:
    """All rows of any data, in their order, as arrays.

    Args:
        data: Data as `fit` takes it. Data sets and generators may be endless, so at most the first
            100,000 rows, or 4 GiB, of these are read, with a warning.
        seconds: float. When to stop reading a data set or generator.
    """
    source = _source(data)
    if isinstance(source, _Arrays):
        return source.rows(np.arange(source.count))
    batches = _bounded(map(_unpacked, source.items()), seconds)
    if not batches:
        raise ValueError(_NO_BATCH)
    return _concatenated(batches)


def _concatenated(batches: list[Batch]) -> Batch:
    """One batch of the rows of all, as arrays."""

    def joined(*parts: Any) -> Any:
        if parts[0] is None:
            return None
        arrays = [
            to_numpy(one) if keras.ops.is_tensor(one) else np.asarray(one)
            for one in parts
        ]
        return np.concatenate(arrays)

    try:
        batch: Batch = keras.tree.map_structure(joined, *batches)
    except (ValueError, TypeError) as error:
        raise ValueError(
            "All batches must have one structure, and rows of one shape: pad rows of different "
            f"lengths. Received: {error}"
        ) from None
    return batch


def _bounded(items: Iterator[Batch], seconds: float = math.inf) -> list[Batch]:
    """Batches up to a number of rows, of bytes and of seconds; warns if there may be more."""
    start = time.monotonic()
    batches: list[Batch] = []
    rows = size = 0
    for batch in items:
        batches.append(batch)
        rows += samples(batch)
        size += sum(_bytes_of(leaf) for leaf in keras.tree.flatten(batch))
        late = time.monotonic() - start > seconds
        if rows >= MOST_ROWS or size >= _MOST_BYTES or late:
            warn_user(
                "Only the first rows of the data set or generator were read, which may be endless. "
                "Pass arrays to use all rows, or take fewer: `dataset.take(100)`. "
                f"Received: {rows} rows so far, {size / 2**20:.0f} MiB"
            )
            break
    return batches


def _bytes_of(leaf: Any) -> int:
    """The bytes of an array; 0 for `None`, and for text."""
    size: int = math.prod(getattr(leaf, "shape", (0,)))
    width = getattr(getattr(leaf, "dtype", None), "itemsize", None)
    return size * (width or _WIDTH)


def rows_at(x: Tensor, index: Any) -> Any:
    return keras.tree.map_structure(lambda array: array[index], x)


class BatchSource:
    """The n-th batch of some data, in any order of calls; of arrays, samples drawn for it."""

    def __init__(self, data: Any, batch_size: int, seed: int) -> None:
        self._batch_size = check_integer("batch_size", batch_size)
        self._seed = seed
        self._source = _source(data)
        if isinstance(self._source, _Iterable) and not self._source.restarts:
            raise ValueError(
                "A generator cannot start again, as a resumed run must: pass the function that "
                "returns it. "
                f"Received: data of type {type(data).__name__}"
            )

    def batch(self, number: int) -> Batch:
        """The batch of this number, modulo how many there are, as `(x, y, sample_weight)`."""
        if not isinstance(self._source, _Arrays):
            return _unpacked(self._source.item(number))
        rng = np.random.default_rng(derived_seed(self._seed, f"batch/{number}"))
        size = min(self._batch_size, self._source.count)
        return self._source.rows(
            np.sort(rng.choice(self._source.count, size, replace=False))
        )


def is_batched(data: Any) -> bool:
    """Whether data come in batches, not as arrays or structures of them."""
    structure = isinstance(data, tuple | list | dict) or data is None
    return not structure and (
        callable(data) or _is_iterator(data) or _is_dataset(data)
    )


def samples(batch: Batch) -> int:
    return int(keras.tree.flatten(batch[0])[0].shape[0])


class _Arrays:
    """Arrays of `count` samples: `x`, `(x, y)` or `(x, y, sample_weight)`."""

    def __init__(self, data: Any) -> None:
        parts = data if isinstance(data, tuple) else (data,)
        leaves = [
            leaf for leaf in keras.tree.flatten(parts) if leaf is not None
        ]
        batched = [
            leaf for leaf in leaves if _is_dataset(leaf) or _is_iterator(leaf)
        ]
        if batched:
            raise ValueError(
                "A data set or generator has its own targets: pass it alone. "
                f"Received: a tuple with a {type(batched[0]).__name__} in it"
            )
        if not 1 <= len(parts) <= 3:
            raise ValueError(
                "Pass arrays as `x`, `(x, y)` or `(x, y, sample_weight)`. "
                f"Received: a tuple of {len(parts)}"
            )
        for leaf in leaves:
            _refuse_sparse(leaf)
        self._parts = keras.tree.map_structure(_sliceable, parts)
        shapes = [
            leaf.shape
            for leaf in keras.tree.flatten(self._parts)
            if leaf is not None
        ]
        lengths = {int(shape[0]) if shape else 0 for shape in shapes}
        if len(lengths) != 1 or 0 in lengths:
            raise ValueError(
                "Inputs, targets and sample weights must be arrays of the same number of samples, "
                f"at least one. Received: {sorted(lengths)} samples"
            )
        (self.count,) = lengths

    def rows(self, index: np.ndarray) -> Batch:
        def taken(array: Any) -> Any:
            if array is None or isinstance(array, np.ndarray):
                return None if array is None else array[index]
            # Files that are read as arrays need sorted positions.
            order = np.argsort(index)
            return np.asarray(array[index[order]])[np.argsort(order)]

        return _unpacked(keras.tree.map_structure(taken, self._parts))


class _Indexed:
    """A `keras.utils.PyDataset`: all batches, or one by its number modulo how many there are."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def items(self) -> Iterator[Any]:
        length = self._data.num_batches
        numbers = itertools.count() if length is None else range(length)
        return (self._data[number] for number in numbers)

    def item(self, number: int) -> Any:
        length = self._data.num_batches
        if length == 0:
            raise ValueError(_NO_BATCH)
        return self._data[number if length is None else number % length]


class _Iterable:
    """Batches to iterate over: all of them, or one by its number modulo how many there are."""

    def __init__(
        self, start: Callable[[], Iterator[Any]], restarts: bool = True
    ) -> None:
        self.items = start
        self.restarts = restarts
        self._running: Iterator[Any] | None = None
        self._next = 0
        self._length: int | None = None

    def item(self, number: int) -> Any:
        if self._length is not None:
            number %= self._length
        # Batches that are asked for in order are iterated over once.
        if self._running is None or self._next > number:
            self._running = self.items()
            self._next = 0
        while True:
            try:
                item = next(self._running)
            except StopIteration:
                self._running = None
                if not self._next:
                    raise ValueError(_NO_BATCH) from None
                self._length = self._next
                return self.item(number)
            self._next += 1
            if self._next > number:
                return item


def _source(data: Any) -> _Arrays | _Indexed | _Iterable:
    """The kind of data, by how its rows are read."""
    if isinstance(data, tuple | dict) or _is_array(data):
        return _Arrays(data)
    if (
        isinstance(data, list)
        and data
        and not isinstance(data[0], tuple | list | dict)
    ):
        raise ValueError(
            "A list must hold batches, (x, y) each; pass arrays as a tuple, `(x, y)`, and "
            "several inputs as `([a, b], y)`, or `([a, b],)` without labels. "
            f"Received: a list whose first element is a {type(data[0]).__name__}"
        )
    if isinstance(data, keras.utils.PyDataset):
        return _Indexed(data)
    if callable(data):
        return _Iterable(lambda: iter(data()))
    if _is_iterator(data) or _is_dataset(data):
        return _Iterable(lambda: iter(data), restarts=not _is_iterator(data))
    raise ValueError(
        "Pass data as `fit` takes it: an array, a tuple `(x, y)` or `(x, y, sample_weight)` of "
        "arrays, a PyDataset, or an iterable of batches: tf.data, a DataLoader, a list, a "
        "generator, or a function that returns one. "
        f"Received: data of type {type(data).__name__}"
    )


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") or hasattr(value, "__array__")


def _is_iterator(value: Any) -> bool:
    return hasattr(value, "__next__")


def _is_dataset(value: Any) -> bool:
    if isinstance(value, keras.utils.PyDataset):
        return True
    return hasattr(value, "__iter__") and not (
        _is_array(value) or isinstance(value, str | bytes)
    )


def _sliceable(part: Any) -> Any:
    """A part of the data as an object that sorted positions along its first axis can index."""
    if part is None or isinstance(part, np.ndarray):
        return part
    if keras.ops.is_tensor(part):
        return to_numpy(part)
    if (
        hasattr(part, "shape")
        and hasattr(part, "__getitem__")
        and not hasattr(part, "iloc")
    ):
        return part  # a file that is read piece by piece
    return np.asarray(part)


def _refuse_sparse(array: Any) -> None:
    kind = type(array)
    is_sparse = (
        kind.__name__
        in ("SparseTensor", "SparseTensorValue", "BCOO", "RaggedTensor")
        or kind.__module__.startswith("scipy.sparse")
        or "sparse" in str(getattr(array, "layout", ""))  # of torch
    )
    if is_sparse:
        raise ValueError(
            "Data must be dense arrays: convert each batch, with `.toarray()`, `.to_dense()`, "
            "`tf.sparse.to_dense` or, for ragged rows, `.to_tensor()`. "
            f"Received: an array of type {kind.__name__}"
        )


def _unpacked(item: Any) -> Batch:
    """A batch as `(x, y, sample_weight)`; ValueError for anything else."""
    batch: Batch = keras.utils.unpack_x_y_sample_weight(item)
    for leaf in keras.tree.flatten(batch):
        _refuse_sparse(leaf)
    if not all(_is_array(leaf) for leaf in keras.tree.flatten(batch[0])):
        raise ValueError(
            "A batch must be `x`, `(x, y)` or `(x, y, sample_weight)` of arrays. "
            f"Received: inputs of type {type(batch[0]).__name__}"
        )
    shapes = [
        tuple(leaf.shape)
        for leaf in keras.tree.flatten(batch)
        if hasattr(leaf, "shape")
    ]
    if any(shape[:1] == (0,) for shape in shapes):
        raise ValueError(
            "A batch must have at least one row; leave empty ones out of the data set. "
            f"Received: a batch of arrays of the shapes {', '.join(map(str, shapes))}"
        )
    return batch
