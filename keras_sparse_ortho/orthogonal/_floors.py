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
    batch, part_count, *taps, inputs, outputs = layout.canonical_shape(shape)
    is_pointwise = math.prod(taps) == 1
    if inputs > 1 or is_pointwise:
        return 0
    return batch * part_count * outputs


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
        floor = _floor(score, layout)
        floors.append(floor)
    if outputs >= count:
        above_floors = [~floor for floor in floors]
        scores_of_floors = _lowered(scores, above_floors)
        return largest_masks(scores_of_floors, count)
    scores_above_floors = _lowered(scores, floors)
    masks_above_floors = largest_masks(scores_above_floors, count - outputs)
    masks = []
    for mask, floor in zip(masks_above_floors, floors, strict=True):
        masks.append(mask | floor)
    return masks


def _lowered(
    scores: Sequence[np.ndarray], masks: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Scores in which the entries of the masks are below all others."""
    lowest = min(np.min(score) for score in scores)
    below_all = np.nextafter(lowest, -np.inf)
    lowered = []
    for score, mask in zip(scores, masks, strict=True):
        lowered.append(np.where(mask, below_all, score))
    return lowered


def floored_mask(
    scores: np.ndarray,
    layout: KernelLayout | None,
    count: int,
) -> np.ndarray:
    """As `floored_masks`, of one kernel."""
    masks = floored_masks([scores], [layout], count)
    return masks[0]


def floored_columns(scores: np.ndarray, count: int) -> np.ndarray:
    """As `floored_mask`, of matrices `(M, k, outputs)` whose columns are the outputs."""
    matrices, _, outputs = scores.shape
    floor_count = matrices * outputs
    if count < floor_count:
        return largest_mask(scores, count)
    lowest = np.min(scores)
    below_all = np.nextafter(lowest, -np.inf)
    strongest = scores.argmax(axis=1, keepdims=True)
    above_floors = scores.copy()
    np.put_along_axis(above_floors, strongest, below_all, axis=1)
    mask = largest_mask(above_floors, count - floor_count)
    np.put_along_axis(mask, strongest, True, axis=1)
    return mask


def _floor(scores: np.ndarray, layout: KernelLayout | None) -> np.ndarray:
    """A mask of the largest entry of each output of a depthwise kernel; else of none."""
    is_depthwise = depthwise_outputs(scores.shape, layout) > 0
    if not is_depthwise:
        return np.zeros(scores.shape, bool)
    if layout is None:
        layout = default_layout(scores.shape)
    canonical = layout.to_canonical(scores)
    batch, part_count, *_, outputs = canonical.shape
    by_output = canonical.reshape(batch, part_count, -1, outputs)
    strongest = by_output.argmax(axis=2, keepdims=True)
    is_strongest = np.zeros(by_output.shape, bool)
    np.put_along_axis(is_strongest, strongest, True, axis=2)
    canonical_mask = is_strongest.reshape(canonical.shape)
    mask = layout.from_canonical(canonical_mask, scores.shape)
    return np.ascontiguousarray(mask)
