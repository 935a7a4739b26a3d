"""Masks in which each output of a depthwise kernel keeps a live entry."""

import math
from collections.abc import Sequence

import numpy as np

from keras_sparse_ortho.orthogonal._counts import largest_mask, largest_masks
from keras_sparse_ortho.orthogonal._kernel import KernelLayout, default_layout


def depthwise_outputs(shape: Sequence[int], layout: KernelLayout | None = None) -> int:
    """Number of outputs of a kernel whose outputs all read the taps of one input; else 0.

    These are depthwise kernels, those of convolutions with as many groups as inputs, and those on
    inputs of one channel. Few entries make an output, so that ranks of single entries empty many.

    Args:
        shape: Shape of the kernel.
        layout: KernelLayout. Meaning of its axes. Default: `(*spatial, in, out)`.
    """
    layout = layout or default_layout(shape)
    batch, parts, *taps, inputs, outputs = layout.canonical_shape(shape)
    if inputs > 1 or math.prod(taps) == 1:
        return 0
    return batch * parts * outputs


def floored_masks(
    scores: Sequence[np.ndarray], layouts: Sequence[KernelLayout | None], count: int
) -> list[np.ndarray]:
    """As `largest_masks`, but each output of a depthwise kernel keeps its largest entry.

    If that is more than `count` entries, the largest ones among these are live.

    Args:
        scores: Arrays of the kernels' shapes.
        layouts: Their layouts, `None` for `(*spatial, in, out)`.
        count: int. Live entries of all masks together.
    """
    # Most kernels are not depthwise: they pay for no arrays of floors.
    outputs = sum(
        depthwise_outputs(score.shape, layout)
        for score, layout in zip(scores, layouts, strict=True)
    )
    if outputs == 0:
        return largest_masks(scores, count)
    floors = [_floor(score, layout) for score, layout in zip(scores, layouts, strict=True)]
    lowest = min(np.min(score) for score in scores)
    below_all = np.nextafter(lowest, -np.inf)
    pairs = list(zip(scores, floors, strict=True))
    if outputs >= count:
        return largest_masks([np.where(floor, score, below_all) for score, floor in pairs], count)
    others = largest_masks(
        [np.where(floor, below_all, score) for score, floor in pairs], count - outputs
    )
    return [mask | floor for mask, floor in zip(others, floors, strict=True)]


def floored_mask(scores: np.ndarray, layout: KernelLayout | None, count: int) -> np.ndarray:
    """As `floored_masks`, of one kernel."""
    return floored_masks([scores], [layout], count)[0]


def floored_columns(scores: np.ndarray, count: int) -> np.ndarray:
    """As `floored_mask`, of matrices `(M, k, outputs)` whose columns are the outputs."""
    outputs = scores.shape[0] * scores.shape[2]
    if count < outputs:
        return largest_mask(scores, count)
    strongest = scores.argmax(axis=1)[:, None]
    below_all = np.nextafter(scores.min(), -np.inf)
    others = scores.copy()
    np.put_along_axis(others, strongest, below_all, axis=1)
    mask = largest_mask(others, count - outputs)
    np.put_along_axis(mask, strongest, True, axis=1)
    return mask


def _floor(scores: np.ndarray, layout: KernelLayout | None) -> np.ndarray:
    """A mask of the largest entry of each output of a depthwise kernel; else of none."""
    floor = np.zeros(scores.shape, bool)
    if not depthwise_outputs(scores.shape, layout):
        return floor
    layout = layout or default_layout(scores.shape)
    canonical = layout.to_canonical(scores)
    batch, parts, *_, outputs = canonical.shape
    by_output = canonical.reshape(batch, parts, -1, outputs)
    largest = np.zeros(by_output.shape, bool)
    np.put_along_axis(largest, by_output.argmax(axis=2)[:, :, None], True, axis=2)
    return np.ascontiguousarray(
        layout.from_canonical(largest.reshape(canonical.shape), scores.shape)
    )
