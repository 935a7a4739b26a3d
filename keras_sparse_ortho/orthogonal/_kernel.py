"""Exactly orthogonal kernels of every shape: EOI in each matrix of a layout, at the centre tap."""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from keras_sparse_ortho.errors import DensityError
from keras_sparse_ortho.orthogonal._bounds import check_feasible, default_layout
from keras_sparse_ortho.orthogonal._counts import (
    apportion,
    check_density,
    live_count,
    unmask_at_random,
)
from keras_sparse_ortho.orthogonal._eoi import write_orthogonal
from keras_sparse_ortho.orthogonal._layout import KernelLayout
from keras_sparse_ortho.orthogonal._rotations import AngleLaw, Rotations, check_angles
from keras_sparse_ortho.orthogonal._structure import Structure


def exact_orthogonal(
    shape: Sequence[int],
    density: float | None,
    *,
    gain: float = 1.0,
    seed: int | np.random.Generator | None = None,
    layout: KernelLayout | None = None,
    angles: AngleLaw = None,
    rotations: Rotations | Iterable[tuple[int, int, float]] | None = None,
    center_density: float | str | None = None,
    structure: Structure | None = None,
    start: str = "covering",
    dtype: type = np.float32,
) -> tuple[np.ndarray, np.ndarray]:
    """Draws a sparse kernel that is exactly orthogonal, and its mask (EOI).

    For a matrix with `n` the shorter and `m` the longer side, `[I | 0]` (`n x m`) is multiplied
    by random Givens rotations `G_1 G_2 ... G_t` while its live entries fit the density, and
    transposed if the kernel is tall, so that

        K^T K = gain^2 I   (tall or square)    or    K K^T = gain^2 I   (wide).

    The first `m - n` rotations give every empty column an entry (the covering start): an output
    of zeros has no gradient under ReLU and would be dead for ever. This takes `m` live entries
    instead of `n`; of a lower count as many columns as it allows are covered, see
    `covering_count` and `dead_outputs`.

    Entries that are missing to exactly `round(density * size)` are then unmasked at random; their
    value is zero, so the kernel stays orthogonal, and training may move them.

    A convolution gets one such matrix for each group at its centre tap `(k - 1) // 2` and zeros
    elsewhere (delta-orthogonal); the random unmasking goes over the whole kernel. With stride 1
    and circular padding (and no fewer outputs than inputs) it keeps the norm of its input.

    Args:
        shape: Kernel shape in Keras layout, e.g. `(in, out)` or `(*spatial, in / groups, out)`.
        density: Live fraction, in (0, 1]. `None` only with `rotations`: all of them are applied,
            and exactly the nonzero entries are live.
        gain: Scale of the kernel.
        seed: Integer, NumPy generator, or `None` for fresh randomness. The same integer gives the
            same kernel and mask on every machine.
        layout: Meaning of the axes. Default: `(*spatial, in, out)`.
        angles: Law of the rotation angles [radians]: `None` (uniform on the circle), a number, a
            `(low, high)` range, or a callable `(rng, count) -> angles`.
        rotations: Explicit sequence of `(i, j, angle)`, applied as far as it fits the density,
            in place of random and covering ones; for kernels of a single matrix.
        center_density: Density of the matrix at the centre tap: `None` (that of the kernel),
            `"more_nonzeros"` (`min(density * taps, 1, sqrt(density))`), or a number. It is
            lowered where the centre alone would exceed the kernel's count, and lifted to what
            covers all columns, where that count allows.
        structure: Pattern of the live entries, kept by all matrices and taps: `Block(rows, cols)`,
            `NByM(n, m)`, `ConstantFan(side)`; default: none. The number of live entries is then
            the nearest that the structure can have. Not with `rotations`.
        start: `"covering"`, or `"published"`: `[I | 0]` as in the paper, with kernels and masks as
            this package drew them before there was another. At low densities it leaves outputs
            of kernels that widen zero.
        dtype: Floating type of the kernel. All arithmetic is in float64.

    Returns:
        The kernel and its bool mask, both of shape `shape`.

    Raises:
        DensityError: A density outside (0, 1], or less than `least_density(shape, layout)`.
            With a structure, less than its least or more than its largest density.
        LayoutError: A shape that does not fit the layout or the structure.

    Limits: orthogonality holds at initialization; training does not keep it. With strides or
    zero padding a convolution is no longer an exact isometry.

    Example:

    >>> kernel, mask = exact_orthogonal((64, 128), 0.1, seed=0)
    >>> int(mask.sum()), bool(np.allclose(kernel @ kernel.T, np.eye(64), atol=1e-6))
    (819, True)

    Reference:

    - Nowak et al., "Sparser, Better, Deeper, Stronger" (ICML 2024), arXiv 2406.01755
    - Xiao et al., "Dynamical Isometry and a Mean Field Theory of CNNs" (ICML 2018) for the
      delta-orthogonal embedding, arXiv 1806.05393
    """
    shape = tuple(int(size) for size in shape)
    layout = default_layout(shape) if layout is None else layout
    angles = check_angles(angles)
    cover = check_start(start) == "covering"
    if not math.isfinite(gain):
        raise ValueError(f"`gain` must be finite. Received: gain={gain!r}")
    canonical_shape = layout.canonical_shape(shape)
    matrices = layout.matrices(shape)
    if structure is not None:
        if rotations is not None or density is None:
            raise ValueError(
                "A `structure` needs a `density` and draws its own rotations. "
                f"Received: structure={structure}, density={density!r}, rotations={rotations!r}"
            )
        structure.check(canonical_shape)
        count = structure.live_count(canonical_shape, density)
        taps = math.prod(canonical_shape[2:-2])
        centre_density = _centre_density(float(density), taps, center_density)
        rng = np.random.default_rng(seed)
        drawn = structure.draw(canonical_shape, count, centre_density, gain, rng, angles)
        values, live = (np.ascontiguousarray(layout.from_canonical(v, shape)) for v in drawn)
        return values.astype(dtype, copy=False), live
    sequence = _as_rotations(rotations, matrices, shape)
    size = math.prod(shape)
    rng = np.random.default_rng(seed)

    kernel: np.ndarray = np.zeros(canonical_shape, dtype=dtype)
    if density is None:
        if sequence is None:
            raise DensityError("`density` may only be None with explicit `rotations`.")
        count = size
        centre_counts = [math.prod(canonical_shape[-2:])]
    else:
        count = live_count(check_feasible(shape, density, layout), size)
        centre_counts = _centre_counts(shape, float(density), layout, count, center_density, cover)
    centre = tuple((taps - 1) // 2 for taps in canonical_shape[2:-2])
    for k, matrix in enumerate(np.ndindex(canonical_shape[:2])):
        part = kernel[(*matrix, *centre)]
        write_orthogonal(part, centre_counts[k], gain, rng, angles, sequence, cover=cover)
    kernel = np.ascontiguousarray(layout.from_canonical(kernel, shape))
    mask = kernel != 0
    if density is not None:
        unmask_at_random(mask, count, rng)
    return kernel, mask


def check_start(start: str) -> str:
    """Refuses what is not the name of a start."""
    if start not in ("covering", "published"):
        raise ValueError(f'`start` must be "covering" or "published". Received: start={start!r}')
    return start


def _centre_counts(
    shape: tuple[int, ...],
    density: float,
    layout: KernelLayout,
    count: int,
    center_density: float | str | None,
    cover: bool,
) -> list[int]:
    """How many entries the support of each matrix at the centre tap may take."""
    matrices = layout.matrices(shape)
    rows, columns = layout.matrix_shape(shape)
    taps = math.prod(shape) // (matrices * rows * columns)
    target = _centre_density(density, taps, center_density)
    wanted = live_count(target, matrices * rows * columns)
    least = matrices * (max(rows, columns) if cover else min(rows, columns))
    return apportion(min(max(wanted, least), count), [1.0] * matrices)


def _centre_density(density: float, taps: int, center_density: float | str | None) -> float:
    """The density that the matrix at the centre tap is meant to have."""
    if center_density is None:
        return density
    if center_density == "more_nonzeros":
        return min(density * taps, 1.0, math.sqrt(density))
    if isinstance(center_density, str):
        raise ValueError(
            '`center_density` must be None, "more_nonzeros", or a number in (0, 1]. '
            f"Received: center_density={center_density!r}"
        )
    return check_density(center_density, "center_density")


def _as_rotations(
    rotations: Rotations | Iterable[tuple[int, int, float]] | None,
    matrices: int,
    shape: tuple[int, ...],
) -> Rotations | None:
    if rotations is None:
        return None
    if matrices > 1:
        raise ValueError(
            "Explicit `rotations` are for kernels of a single matrix; this layout has "
            f"{matrices} of them. Received: shape={shape}"
        )
    return rotations if isinstance(rotations, Rotations) else Rotations.from_angles(rotations)
