"""Batches for a saliency, from everything that `fit` takes."""

import itertools
import random
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

Batch = tuple[Any, Any, Any]
"""`(x, y, sample_weight)`, the last two may be `None`."""


def batches_of(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int = 128,
    batches: int | None = 1,
    shuffle: bool = True,
    seed: int | None = None,
) -> list[Batch]:
    """The batches that a score is computed on.

    Args:
        x: Arrays (one, or a list or dict of them), a `keras.utils.PyDataset`, or an iterable of
            batches `(x, y)` or `(x, y, sample_weight)`: `tf.data`, a torch `DataLoader`, a
            generator.
        y: Targets, where `x` is arrays.
        sample_weight: Weights of samples, where `x` is arrays.
        batch_size: Samples in a batch, where `x` is arrays.
        batches: How many batches; `None` for all there are.
        shuffle: Whether samples of arrays are drawn at random, without replacement.
        seed: For that.

    Raises:
        ValueError: No data, arrays of different lengths, or targets beside a dataset.
    """
    if batches is not None and (isinstance(batches, bool) or batches < 1):
        raise ValueError(f"`batches` must be at least 1, or None. Received: batches={batches!r}")
    if _is_dataset(x):
        if y is not None or sample_weight is not None:
            raise ValueError(
                "A dataset or generator holds its targets itself: leave `y` and `sample_weight` "
                f"out. Received: x of type {type(x).__name__}"
            )
        source = _indexed(x) if isinstance(x, keras.utils.PyDataset) else iter(x)
        taken = itertools.islice(source, batches)
        found = [keras.utils.unpack_x_y_sample_weight(batch) for batch in taken]
        if not found:
            raise ValueError(f"There must be at least one batch. Received: x={x!r}, empty")
        return found
    arrays = (x, y, sample_weight)
    flat = [leaf for leaf in keras.tree.flatten(arrays) if leaf is not None]
    lengths = {len(leaf) for leaf in flat}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(
            "Inputs, targets and sample weights must have the same number of samples, at least "
            f"one. Received: {sorted(lengths)} samples"
        )
    if batch_size < 1:
        raise ValueError(f"`batch_size` must be at least 1. Received: batch_size={batch_size!r}")
    (count,) = lengths
    order = np.arange(count)
    if shuffle:
        seed = random.randrange(2**31) if seed is None else seed
        order = np.random.default_rng(seed).permutation(count)
    starts = range(0, count, batch_size)[:batches]
    return [_take(arrays, order[start : start + batch_size]) for start in starts]


def samples(batch: Batch) -> int:
    """Samples in a batch."""
    return int(keras.tree.flatten(batch[0])[0].shape[0])


def _is_dataset(x: Any) -> bool:
    if isinstance(x, keras.utils.PyDataset):
        return True
    return hasattr(x, "__iter__") and not (
        isinstance(x, list | tuple | dict) or hasattr(x, "shape") or hasattr(x, "__array__")
    )


def _indexed(dataset: Any) -> Iterator[Any]:
    total = dataset.num_batches
    counter = itertools.count() if total is None else range(total)
    return (dataset[index] for index in counter)


def _take(arrays: Any, index: np.ndarray) -> Any:
    def rows(leaf: Any) -> Any:
        if leaf is None:
            return None
        if keras.ops.is_tensor(leaf):
            leaf = keras.ops.convert_to_numpy(leaf)
        return np.asarray(leaf)[index]

    return keras.tree.map_structure(rows, arrays)
