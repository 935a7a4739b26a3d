"""Extra batches from data of many kinds, the n-th one being the same in every run."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho.kernels import derived_seed


class BatchSource:
    """The n-th batch of some data, whatever was asked for before.

    Args:
        data: A tuple of arrays (or lists or dicts of arrays) `(x, y)` or `(x, y, sample_weight)`,
            from which samples are drawn; a `keras.utils.PyDataset`; a collection of batches that
            can be iterated over anew; or a function that returns an iterator.
        batch_size: How many samples to draw from arrays.
        seed: For the samples.

    Raises:
        ValueError: Data of another kind; arrays of different lengths.
    """

    def __init__(self, data: Any, batch_size: int, seed: int) -> None:
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(
                f"`batch_size` must be a whole number of samples. Received: {batch_size=}"
            )
        self._batch_size = batch_size
        self._seed = seed
        self._arrays: Any = None
        self._data: Any = None
        self._running: Iterator[Any] | None = None
        self._next = 0
        self._length: int | None = None
        if isinstance(data, tuple) or hasattr(data, "shape"):
            self._arrays = keras.tree.map_structure(
                _sliceable, data if isinstance(data, tuple) else (data,)
            )
            parts = [part for part in keras.tree.flatten(self._arrays) if part is not None]
            lengths = {part.shape[0] if part.shape else None for part in parts}
            if None in lengths or len(lengths) != 1 or not 1 <= len(self._arrays) <= 3:
                raise ValueError(
                    "`data` as a tuple must be (x, y) or (x, y, sample_weight), arrays of as many "
                    f"samples each. Received: {len(self._arrays)} parts of lengths {lengths}"
                )
            self._length = lengths.pop()
            if not self._length:
                raise ValueError("`data` must hold samples. Received: arrays of length 0")
        elif isinstance(data, keras.utils.PyDataset) or callable(data) or _restarts(data):
            self._data = data
        else:
            raise ValueError(
                "`data` must be a tuple of arrays, a PyDataset, a collection of batches that can "
                "be iterated over anew, or a function that returns a generator. A generator "
                "itself cannot start again, and a list holds batches, not arrays. "
                f"Received: data of type {type(data).__name__}"
            )

    def batch(self, number: int) -> tuple[Any, Any, Any]:
        """The batch of this number, as `(x, y, sample_weight)`; it starts over after the last."""
        return keras.utils.unpack_x_y_sample_weight(self._item(number))

    def _item(self, number: int) -> Any:
        if self._arrays is not None:
            assert self._length is not None
            rng = np.random.default_rng(derived_seed(self._seed, f"batch/{number}"))
            count = min(self._batch_size, self._length)
            # Sorted: files that are read as arrays ask for that.
            chosen = np.sort(rng.choice(self._length, count, replace=False))
            return keras.tree.map_structure(
                lambda array: None if array is None else array[chosen], self._arrays
            )
        if isinstance(self._data, keras.utils.PyDataset):
            length = self._data.num_batches
            return self._data[number if length is None else number % length]
        return self._iterated(number)

    def _iterated(self, number: int) -> Any:
        if self._length is not None:
            number %= self._length
        # Updates ask for one batch after the other: the running iterator spares a start from zero.
        if self._running is None or self._next > number:
            self._running = iter(self._data() if callable(self._data) else self._data)
            self._next = 0
        while True:
            try:
                item = next(self._running)
            except StopIteration:
                self._running = None
                if not self._next:
                    raise ValueError("`data` must hold a batch. Received: none") from None
                self._length = self._next
                return self._iterated(number)
            self._next += 1
            if self._next > number:
                return item


def _restarts(data: Any) -> bool:
    """Whether it can be iterated over again and again, and is no list of arrays by mistake."""
    if isinstance(data, list):
        return bool(data) and not hasattr(data[0], "shape")
    return hasattr(data, "__iter__") and not hasattr(data, "__next__")


def _sliceable(part: Any) -> Any:
    """What can be indexed by an array of positions along its first axis."""
    if part is None or isinstance(part, np.ndarray):
        return part
    if keras.ops.is_tensor(part):
        return keras.ops.convert_to_numpy(part)
    if hasattr(part, "shape") and hasattr(part, "__getitem__") and not hasattr(part, "iloc"):
        return part  # a file that is read piece by piece
    return np.asarray(part)
