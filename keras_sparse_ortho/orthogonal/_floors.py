"""Masks in which each output of a depthwise kernel keeps a live entry."""

import math
from collections.abc import Sequence

import numpy as np

from keras_sparse_ortho.orthogonal._counts import largest_mask, largest_masks
from keras_sparse_ortho.orthogonal._kernel import KernelLayout, default_layout


def depthwise_outputs(
    shape: Sequence[int], layout: KernelLayout | None = None
) -> int:
    """Number of outputs of a kernel whose outputs all read the taps of one input; else 0.

    These are depthwise kernels, those of convolutions with as many groups as inputs, and those on
    inputs of one channel. Few entries make an output, so that ranks of single entries empty many.

    Args:
        shape: Shape of the kernel.
        layout: KernelLayout. Meaning of its axes. Default: `(*spatial, in, out)`.
    """
    if layout is None:
        layout = default_layout(shape)
    batch, parts, *taps, inputs, outputs = layout.canonical_shape(shape)
    if inputs > 1 or math.prod(taps) == 1:
        return 0
    return batch * parts * outputs


def floored_masks(
    scores: Sequence[np.ndarray],
    layouts: Sequence[KernelLayout | None],
    count: int,
) -> list[np.ndarray]:
    """As `largest_masks`, but each output of a depthwise kernel keeps its largest entry.

    If that is more than `count` entries, the largest ones among these are live.

    Args:
        scores: Arrays of the kernels' shapes.
        layouts: Their layouts, `None` for `(*spatial, in, out)`.
        count: int. Live entries of all masks together.
    """
    # Most kernels are not depthwise: they pay for no arrays of floors.
    outputs = 0
    for score, layout in zip(scores, layouts, strict=True):
        outputs += depthwise_outputs(score.shape, layout)
    if outputs == 0:
        return largest_masks(scores, count)
    floors = []
    for score, layout in zip(scores, layouts, strict=True):
        floors.append(_floor(score, layout))
    lowest = min(np.min(score) for score in scores)
    below_all = np.nextafter(lowest, -np.inf)
    if outputs >= count:
        scores_of_floors = [
            np.where(floor, score, below_all)
            for score, floor in zip(scores, floors, strict=True)
        ]
        return largest_masks(scores_of_floors, count)
    scores_above_floors = [
        np.where(floor, below_all, score)
        for score, floor in zip(scores, floors, strict=True)
    ]
    masks = largest_masks(scores_above_floors, count - outputs)
    return [mask | floor for mask, floor in zip(masks, floors, strict=True)]


def floored_mask(
    scores: np.ndarray,
    layout: KernelLayout | None,
    count: int,
) -> np.ndarray:
    """As `floored_masks`, of one kernel."""
    return floored_masks([scores], [layout], count)[0]


def floored_columns(scores: np.ndarray, count: int) -> np.ndarray:
    """As `floored_mask`, of matrices `(M, k, outputs)` whose columns are the outputs."""
    matrices, _, outputs = scores.shape
    floor_count = matrices * outputs
    if count < floor_count:
        return largest_mask(scores, count)
    strongest = scores.argmax(axis=1, keepdims=True)
    below_all = np.nextafter(scores.min(), -np.inf)
    above_floors = scores.copy()
    np.put_along_axis(above_floors, strongest, below_all, axis=1)
    mask = largest_mask(above_floors, count - floor_count)
    np.put_along_axis(mask, strongest, True, axis=1)
    return mask


def _floor(scores: np.ndarray, layout: KernelLayout | None) -> np.ndarray:
    """A mask of the largest entry of each output of a depthwise kernel; else of none."""
    if depthwise_outputs(scores.shape, layout) == 0:
        return np.zeros(scores.shape, bool)
    if layout is None:
        layout = default_layout(scores.shape)
    canonical = layout.to_canonical(scores)
    batch, parts, *_, outputs = canonical.shape
    by_output = canonical.reshape(batch, parts, -1, outputs)
    index = by_output.argmax(axis=2, keepdims=True)
    is_largest = np.zeros(by_output.shape, bool)
    np.put_along_axis(is_largest, index, True, axis=2)
    canonical_mask = is_largest.reshape(canonical.shape)
    mask = layout.from_canonical(canonical_mask, scores.shape)
    return np.ascontiguousarray(mask)
