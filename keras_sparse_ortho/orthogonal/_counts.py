"""Exact counts of live entries, the fewest that orthogonal kernels need, and masks of a count."""

import math
from collections.abc import Sequence

import numpy as np

from keras_sparse_ortho._checks import check_density
from keras_sparse_ortho.errors import DensityError
from keras_sparse_ortho.orthogonal._layout import KernelLayout

# Below this share of dead entries, listing them is faster than drawing and rejecting.
_LIST_DEAD_BELOW = 0.25


def live_count(density: float, size: int) -> int:
    """Number of live entries, `round(density * size)`, ties to even (Python's `round`).

    >>> live_count(0.1, 784 * 300)
    23520
    """
    return round(check_density(density) * size)


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Splits `total` in proportion to `weights` by largest remainder, ties to the earlier one.

    The parts are integers that sum to `total`, each within one of its exact share.

    >>> apportion(10, [1, 1, 1])
    [4, 3, 3]
    """
    scale = math.fsum(weights)
    if not scale > 0:
        raise ValueError(f"`weights` must have a positive sum. Received: weights={weights}")
    shares = [total * weight / scale for weight in weights]
    parts = [math.floor(share) for share in shares]
    by_remainder = sorted(range(len(parts)), key=lambda k: (parts[k] - shares[k], k))
    for k in by_remainder[: total - sum(parts)]:
        parts[k] += 1
    return parts


def unmask_at_random(mask: np.ndarray, count: int, rng: np.random.Generator) -> None:
    """Sets uniformly drawn dead entries live, in place, until `mask` has `count` live ones."""
    missing = count - int(np.count_nonzero(mask))
    if missing < 0:
        raise ValueError(
            f"`mask` must have at most {count} live entries. Received: {count - missing} live"
        )
    if missing == 0:
        return
    flat = mask.reshape(-1)
    if not np.shares_memory(flat, mask):
        raise ValueError(
            f"`mask` must be C-contiguous to be filled in place. Received: strides={mask.strides}"
        )
    dead = flat.size - (count - missing)
    if missing == dead:
        flat[:] = True
    elif missing > dead // 2 or dead < _LIST_DEAD_BELOW * flat.size:
        position = np.flatnonzero(~flat)
        # The `missing` smallest of as many random keys: a uniform subset.
        flat[position[np.argpartition(rng.random(dead), missing - 1)[:missing]]] = True
    else:
        while missing:
            # No round draws more than are missing, so no draw has to be taken back.
            flat[(rng.random(missing) * flat.size).astype(np.int64)] = True
            missing = count - int(np.count_nonzero(mask))


def largest_mask(scores: np.ndarray, count: int) -> np.ndarray:
    """A bool mask of the `count` largest entries, ties to the lower flat index."""
    return largest_masks([scores], count)[0]


def largest_masks(scores: Sequence[np.ndarray], count: int) -> list[np.ndarray]:
    """Masks of the `count` largest entries over all arrays; ties go to earlier arrays and indices.

    >>> masks = largest_masks([np.array([1.0, 3.0]), np.array([2.0, 3.0])], 3)
    >>> [mask.tolist() for mask in masks]
    [[False, True], [True, True]]
    """
    flat = [score.reshape(-1) for score in scores]
    size = sum(part.size for part in flat)
    if not 0 <= count <= size:
        raise ValueError(f"`count` must be in [0, {size}]. Received: count={count}")
    if not all(np.isfinite(part).all() for part in flat):
        raise ValueError("Scores must be finite to be ranked. Received: infinite or NaN scores")
    if count in (0, size):
        return [np.full(score.shape, count > 0) for score in scores]
    # A single array is not copied: at this size, allocating costs more than arithmetic.
    values = flat[0] if len(flat) == 1 else np.concatenate(flat)
    # Selection is slow among equal values, as pruned weights are: the smallest ones stay out.
    least = values.min()
    rest = values[values > least]
    if count <= rest.size:
        least = np.partition(rest, rest.size - count)[rest.size - count]
    masks = [part > least for part in flat]
    missing = count - sum(int(np.count_nonzero(mask)) for mask in masks)
    for part, mask in zip(flat, masks, strict=True):
        ties = np.flatnonzero(part == least)[:missing]
        mask[ties] = True
        missing -= ties.size
        if missing == 0:
            break
    return [mask.reshape(score.shape) for mask, score in zip(masks, scores, strict=True)]


def default_layout(shape: Sequence[int]) -> KernelLayout:
    """`(*spatial, in, out)`; refuses vectors."""
    if len(shape) < 2:
        raise DensityError(
            f"Orthogonal kernels need rank 2 or more. Received: shape={tuple(shape)}"
        )
    return KernelLayout.convolution()


def matrix_shape(shape: Sequence[int], layout: KernelLayout, taps: str) -> tuple[int, int]:
    """Inputs and outputs of the orthogonal matrix, which with `"shift"` spans the phases, too."""
    return layout.matrix_shape(shape) if taps == "center" else layout.polyphase_shape(shape)


def least_count(
    shape: Sequence[int],
    layout: KernelLayout | None = None,
    *,
    taps: str = "center",
) -> int:
    """Fewest live entries of an exactly orthogonal kernel: `min(in, out)` for each matrix.

    With `taps="shift"` the inputs of a strided convolution count once for each phase.

    Args:
        shape: Kernel shape in Keras layout.
        layout: Meaning of the axes. Default: `(*spatial, in, out)`.
        taps: As in `exact_orthogonal`.

    Example:

    >>> least_count((100, 256))
    100
    >>> least_count((3, 3, 8, 64), KernelLayout.convolution(strides=2), taps="shift")
    32
    """
    layout = default_layout(shape) if layout is None else layout
    return layout.matrices(shape) * min(matrix_shape(shape, layout, taps))


def covering_count(
    shape: Sequence[int],
    layout: KernelLayout | None = None,
    *,
    taps: str = "center",
    inputs: bool = False,
) -> int:
    """Fewest live entries of an exactly orthogonal kernel without dead outputs: `out` a matrix.

    With `inputs=True` dead inputs are excluded as well: `max(in, out)` for each matrix. The other
    arguments are those of `least_count`.

    >>> covering_count((100, 400)), covering_count((400, 100))
    (400, 100)
    >>> covering_count((400, 100), inputs=True), covering_count((3, 3, 16, 32))
    (400, 32)
    """
    layout = default_layout(shape) if layout is None else layout
    rows, columns = matrix_shape(shape, layout, taps)
    return layout.matrices(shape) * (max(rows, columns) if inputs else columns)


def dead_outputs(kernel: np.ndarray, layout: KernelLayout | None = None) -> int:
    """Number of outputs of a kernel, or of its mask, without a nonzero entry.

    Under ReLU such a unit gets no gradient (`relu'(0) = 0`), so it stays dead unless its bias or
    normalization changes it.

    Args:
        kernel: Kernel in Keras layout.
        layout: Meaning of its axes. Default: `(*spatial, in, out)`.

    Example:

    >>> dead_outputs(np.array([[1.0, 0.0, 0.5], [0.0, 0.0, 2.0]]))
    1
    """
    layout = default_layout(kernel.shape) if layout is None else layout
    live = layout.to_canonical(np.asarray(kernel)) != 0
    batch, parts, *_, outputs = live.shape
    return int((~live.reshape(batch, parts, -1, outputs).any(axis=2)).sum())


def check_feasible(shape: Sequence[int], density: float, layout: KernelLayout, taps: str) -> int:
    """The live count at a density; refuses fewer entries than an orthogonal kernel needs."""
    size = math.prod(shape)
    count = live_count(check_density(density), size)
    least = least_count(shape, layout, taps=taps)
    if count >= least:
        return count
    text = (
        f"An exactly orthogonal kernel of shape {tuple(shape)} needs at least {least} live "
        f"entries: the least density is {least / size:.6g}. "
    )
    if taps != "center" and count >= least_count(shape, layout):
        text += 'With taps="center" this density is possible, as strides do not count there. '
    raise DensityError(f"{text}Received: density={density!r} ({count} entries)")
