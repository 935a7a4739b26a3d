"""How few live entries an exactly orthogonal kernel can have, and which outputs they leave dead."""

import math
from collections.abc import Sequence

import numpy as np

from keras_sparse_ortho.errors import DensityError
from keras_sparse_ortho.orthogonal._counts import check_density, live_count
from keras_sparse_ortho.orthogonal._layout import KernelLayout


def default_layout(shape: Sequence[int]) -> KernelLayout:
    """`(in, out)` for matrices, `(*spatial, in, out)` beyond: Keras' own reading of a shape."""
    if len(shape) < 2:
        raise DensityError(
            f"Only kernels of rank 2 and more can be orthogonal. Received: shape={tuple(shape)}"
        )
    return KernelLayout.convolution()


def least_count(shape: Sequence[int], layout: KernelLayout | None = None) -> int:
    """Fewest live entries of an exactly orthogonal kernel: `min(in, out)` for each matrix."""
    layout = default_layout(shape) if layout is None else layout
    return layout.matrices(shape) * min(layout.matrix_shape(shape))


def least_density(shape: Sequence[int], layout: KernelLayout | None = None) -> float:
    """Least live fraction that an exactly orthogonal kernel of this shape can have.

    Each of the `n` rows of an `n x m` matrix with orthonormal rows needs an entry, so it is
    `n / (n m) = 1 / m`, and `1 / (m * taps)` for a convolution.

    Args:
        shape: Kernel shape in Keras layout.
        layout: Meaning of the axes. Default: `(*spatial, in, out)`.

    Example:

    >>> least_density((100, 400)), least_density((3, 3, 16, 32))
    (0.0025, 0.003472222222222222)
    """
    return least_count(shape, layout) / math.prod(shape)


def covering_count(
    shape: Sequence[int], layout: KernelLayout | None = None, *, inputs: bool = False
) -> int:
    """Fewest live entries of an exactly orthogonal kernel none of whose outputs is dead.

    That is `out` for each matrix; with fewer, `out - count` outputs of a wide one stay zero.

    Args:
        shape: Kernel shape in Keras layout.
        layout: Meaning of the axes. Default: `(*spatial, in, out)`.
        inputs: Whether no input may be dead either: `max(in, out)` for each matrix.

    Example:

    >>> covering_count((100, 400)), covering_count((400, 100))
    (400, 100)
    >>> covering_count((400, 100), inputs=True), covering_count((3, 3, 16, 32))
    (400, 32)
    """
    layout = default_layout(shape) if layout is None else layout
    rows, columns = layout.matrix_shape(shape)
    return layout.matrices(shape) * (max(rows, columns) if inputs else columns)


def dead_outputs(kernel: np.ndarray, layout: KernelLayout | None = None) -> int:
    """Number of outputs of a kernel, or of its mask, that have no nonzero entry.

    A unit after ReLU that is zero for every input gets no gradient (`relu'(0) = 0`): unless its
    bias or its normalization moves it, it never becomes alive.

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


def check_feasible(shape: Sequence[int], density: float, layout: KernelLayout) -> float:
    """Refuses a density that leaves fewer entries than an orthogonal kernel needs."""
    value = check_density(density)
    count, least = live_count(value, math.prod(shape)), least_count(shape, layout)
    if count < least:
        raise DensityError(
            f"A kernel of shape {tuple(shape)} is exactly orthogonal only from {least} live "
            f"entries on: the least density is {least / math.prod(shape):.6g}. "
            f"Received: density={density!r} ({count} entries)"
        )
    return value
