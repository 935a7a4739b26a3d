"""How few live entries an exactly orthogonal kernel can have, and which outputs they leave dead."""

import math
from collections.abc import Sequence

import numpy as np

from keras_sparse_ortho._checks import check_density
from keras_sparse_ortho.errors import DensityError
from keras_sparse_ortho.orthogonal._counts import live_count
from keras_sparse_ortho.orthogonal._equal_norms import equal_norms_count
from keras_sparse_ortho.orthogonal._layout import KernelLayout


def default_layout(shape: Sequence[int]) -> KernelLayout:
    """`(in, out)` for matrices, `(*spatial, in, out)` beyond: Keras' own reading of a shape."""
    if len(shape) < 2:
        raise DensityError(
            f"Only kernels of rank 2 and more can be orthogonal. Received: shape={tuple(shape)}"
        )
    return KernelLayout.convolution()


def matrix_shape(shape: Sequence[int], layout: KernelLayout, taps: str) -> tuple[int, int]:
    """Inputs and outputs of the matrix that is to be orthogonal."""
    return layout.matrix_shape(shape) if taps == "center" else layout.polyphase_shape(shape)


def least_count(
    shape: Sequence[int],
    layout: KernelLayout | None = None,
    *,
    norms: str | None = None,
    taps: str = "center",
) -> int:
    """Fewest live entries of an exactly orthogonal kernel.

    `min(in, out)` for each matrix. With `norms="equal"` a wide matrix needs
    `out + 2 (in - gcd(in, out))` entries from `out = 2 in` on, and somewhat more before that; no
    equal-norm matrix has fewer (the proof stands in `_equal_norms.py`). With `taps` other than
    `"center"` the inputs of a strided convolution count once for each phase.

    Args:
        shape: Kernel shape in Keras layout.
        layout: Meaning of the axes. Default: `(*spatial, in, out)`.
        norms: As in `exact_orthogonal`.
        taps: As in `exact_orthogonal`.

    Example:

    >>> least_count((100, 256)), least_count((100, 256), norms="equal")
    (100, 448)
    >>> least_count((3, 3, 8, 64), KernelLayout.convolution(strides=2), taps="shift")
    32
    """
    layout = default_layout(shape) if layout is None else layout
    inputs, outputs = matrix_shape(shape, layout, taps)
    if norms == "equal" and inputs < outputs:
        return layout.matrices(shape) * equal_norms_count(inputs, outputs)
    return layout.matrices(shape) * min(inputs, outputs)


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
    shape: Sequence[int],
    layout: KernelLayout | None = None,
    *,
    taps: str = "center",
    inputs: bool = False,
) -> int:
    """Fewest live entries of an exactly orthogonal kernel none of whose outputs is dead.

    That is `out` for each matrix; with fewer, `out - count` outputs of a wide one stay zero.

    Args:
        shape: Kernel shape in Keras layout.
        layout: Meaning of the axes. Default: `(*spatial, in, out)`.
        taps: As in `exact_orthogonal`.
        inputs: Whether no input may be dead either: `max(in, out)` for each matrix.

    Example:

    >>> covering_count((100, 400)), covering_count((400, 100))
    (400, 100)
    >>> covering_count((400, 100), inputs=True), covering_count((3, 3, 16, 32))
    (400, 32)
    """
    layout = default_layout(shape) if layout is None else layout
    rows, columns = matrix_shape(shape, layout, taps)
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


def check_feasible(
    shape: Sequence[int], density: float, layout: KernelLayout, norms: str | None, taps: str
) -> int:
    """The live count at a density; refuses one that is less than an orthogonal kernel needs."""
    size = math.prod(shape)
    count = live_count(check_density(density), size)
    least = least_count(shape, layout, norms=norms, taps=taps)
    if count >= least:
        return count
    text = (
        f"A kernel of shape {tuple(shape)} is exactly orthogonal"
        f"{' with outputs of equal norms' if norms else ''} only from {least} live entries on: "
        f"the least density is {least / size:.6g}. "
    )
    covering = covering_count(shape, layout, taps=taps)
    if norms and count >= covering:
        text += f"With norms=None all outputs are live from {covering / size:.6g} on. "
    elif taps != "center" and count >= least_count(shape, layout):
        text += 'With taps="center" this density is possible, as strides do not count there. '
    raise DensityError(f"{text}Received: density={density!r} ({count} entries)")
