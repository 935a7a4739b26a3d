"""The rows of calibration data that judge what is made of the others."""

from collections.abc import Iterable

import keras

from keras_sparse_ortho._data import samples
from keras_sparse_ortho._types import Nested, Tensor
from keras_sparse_ortho.calibration._moments import HOLD_OUT


def held_out_batches(batches: Iterable[Nested]) -> list[Nested]:
    """One row in four, which no moments have seen; of a batch with fewer rows the last one.

    Neighbours of equal shapes are put together as long as they have no more rows than a whole
    batch: a pass over few rows costs as much as one over many where operations run one by one.

    Args:
        batches: The inputs of a model, batch by batch: tensors, in lists or dicts.
    """
    merged: list[Nested] = []
    most_rows = 0
    for batch in batches:
        most_rows = max(most_rows, _rows_in(batch))
        rows = keras.tree.map_structure(_held_out, batch)
        if merged and _fit_together(merged[-1], rows, most_rows):
            merged[-1] = keras.tree.map_structure(
                _concatenated, merged[-1], rows
            )
        else:
            merged.append(rows)
    return merged


def _held_out(tensor: Tensor) -> Tensor:
    start = min(HOLD_OUT, tensor.shape[0]) - 1
    return tensor[start::HOLD_OUT]


def _concatenated(tensor: Tensor, other: Tensor) -> Tensor:
    return keras.ops.concatenate([tensor, other])


def _rows_in(batch: Nested) -> int:
    return samples((batch, None, None))


def _fit_together(batch: Nested, other: Nested, most_rows: int) -> bool:
    if _rows_in(batch) + _rows_in(other) > most_rows:
        return False
    return _shapes_of_samples(batch) == _shapes_of_samples(other)


def _shapes_of_samples(batch: Nested) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape[1:]) for tensor in keras.tree.flatten(batch)]
