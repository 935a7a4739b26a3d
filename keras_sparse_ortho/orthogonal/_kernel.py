"""Exactly orthogonal kernels of every shape: EOI in each matrix of a layout, on one or all taps."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from keras_sparse_ortho.errors import DensityError
from keras_sparse_ortho.orthogonal._bounds import check_feasible, default_layout, matrix_shape
from keras_sparse_ortho.orthogonal._counts import apportion, live_count, unmask_at_random
from keras_sparse_ortho.orthogonal._layout import KernelLayout
from keras_sparse_ortho.orthogonal._matrix_plan import MatrixPlan
from keras_sparse_ortho.orthogonal._options import check_options, density_at_center
from keras_sparse_ortho.orthogonal._polyphase import Polyphase
from keras_sparse_ortho.orthogonal._rotations import AngleLaw, Rotations, check_angles
from keras_sparse_ortho.orthogonal._structure import Structure, center_of


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
    norms: str | None = None,
    taps: str = "center",
    dtype: type = np.float32,
) -> tuple[np.ndarray, np.ndarray]:
    """Draws a sparse kernel that is exactly orthogonal, and its mask (EOI).

    For a matrix with `n` the shorter and `m` the longer side, `[I | 0]` (`n x m`) is multiplied
    by random Givens rotations `G_1 G_2 ... G_t` while its live entries fit the density, and
    transposed if the kernel is tall, so that

        K^T K = gain^2 I   (tall or square)    or    K K^T = gain^2 I   (wide).

    The first `m - n` rotations give every empty column an entry (the covering start): an output
    of zeros has no gradient under ReLU and would stay dead. This takes `m` live entries
    instead of `n`; of a lower count as many columns as it allows are covered, see
    `covering_count` and `dead_outputs`.

    Entries that are missing to exactly `round(density * size)` are then unmasked at random; their
    value is zero, so the kernel stays orthogonal, and training may move them.

    A convolution gets one such matrix for each group at its center tap `(k - 1) // 2` and zeros
    elsewhere (delta-orthogonal); the random unmasking goes over the whole kernel. With stride 1
    and circular padding (and no fewer outputs than inputs) it keeps the norm of its input.

    Other convolutions are orthogonal, too. With `taps="shift"` the entry `H[i, o]` of a matrix
    stands at a tap of its own,

        K[u, i, o] = H[i, o]   where   u = a(i) + b(o),    i.e.   K(z) = S_a(z) H S_b(z)

    with random shifts `a` and `b` inside the window; with `taps="cascade"` rotations and shifts by
    one tap take turns, so that an entry may stand at several taps. `H` has the count of the kernel
    and so `taps` times its density. With strides in the `layout`, the inputs of `H` are the
    `(phase, input)` pairs that a strided convolution sees, and under circular padding it keeps the
    norm of its input (`inputs <= outputs`, so counted), or else its adjoint does.

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
        center_density: Density of the matrix at the center tap: `None` (that of the kernel),
            `"more_nonzeros"` (`min(density * taps, 1, sqrt(density))`), or a number. It is
            lowered where the center alone would exceed the kernel's count, and lifted to what
            covers all columns, where that count allows.
        structure: Pattern of the live entries, kept by all matrices and taps: `Block(rows, cols)`,
            also with `regular=True`, `NByM(n, m)`, `ConstantFan(side)`; default: none. The number
            of live entries is then the nearest that the structure can have. Not with `rotations`.
        start: `"covering"`, or `"published"`: `[I | 0]` as in the paper, with kernels and masks as
            this package drew them before there was another. At low densities it leaves outputs
            of kernels that widen zero.
        norms: `"equal"`: all outputs of a wide matrix have the same norm, `gain^2 in / out`
            squared, by chosen angles; `None`: as random rotations make them. Outputs of square and
            tall matrices have equal norms anyway. See `least_count` for what it takes.
        taps: `"center"`, `"shift"` or `"cascade"`; all the same for kernels of one tap.
        dtype: Floating type of the kernel. All arithmetic is in float64.

    Returns:
        The kernel and its bool mask, both of shape `shape`.

    Raises:
        DensityError: A density outside (0, 1], or one of fewer entries than `least_count`.
            With a structure, less than its least or more than its largest density.
        LayoutError: A shape that does not fit the layout or the structure.
        ValueError: Unknown options, or such that exclude each other.

    Limits: orthogonality holds at initialization; training does not keep it. At the center tap a
    convolution with strides is no exact isometry; take other taps. These need circular padding:
    under zero padding each shift loses what leaves the border, and after 10 linear layers with
    `taps="shift"` the norm left is 0.35 of it (4 x 4 maps), 0.61 (7 x 7), 0.81 (14 x 14) and 0.90
    (28 x 28), with `"cascade"` somewhat less; the center tap keeps all of it. So without circular
    padding shifts are for networks that normalize, the center tap for deep ones that do not.

    Example:

    >>> kernel, mask = exact_orthogonal((64, 128), 0.1, seed=0)
    >>> int(mask.sum()), bool(np.allclose(kernel @ kernel.T, np.eye(64), atol=1e-6))
    (819, True)
    >>> kernel, _ = exact_orthogonal((64, 128), 0.1, seed=0, norms="equal")
    >>> bool(np.allclose((kernel**2).sum(axis=0), 64 / 128, atol=1e-6))
    True

    Reference:

    - Nowak et al., "Sparser, Better, Deeper, Stronger" (ICML 2024), arXiv 2406.01755
    - Xiao et al., "Dynamical Isometry and a Mean Field Theory of CNNs" (ICML 2018) for the
      delta-orthogonal embedding, arXiv 1806.05393
    """
    shape = tuple(int(size) for size in shape)
    layout = default_layout(shape) if layout is None else layout
    angles = check_angles(angles)
    if not math.isfinite(gain):
        raise ValueError(f"`gain` must be finite. Received: gain={gain!r}")
    check_options(start, norms, taps, center_density, structure, rotations)
    canonical_shape = layout.canonical_shape(shape)
    rng = np.random.default_rng(seed)
    if structure is not None:
        if density is None:
            raise DensityError(
                f"A `structure` needs a `density`. Received: structure={structure}, density=None"
            )
        structure.check(canonical_shape)
        entries = structure.live_count(canonical_shape, density)
        window = math.prod(canonical_shape[2:-2])
        drawn = structure.draw(
            canonical_shape,
            entries,
            density_at_center(float(density), window, center_density),
            gain,
            rng,
            angles,
            cover=start == "covering",
        )
        values, live = (np.ascontiguousarray(layout.from_canonical(v, shape)) for v in drawn)
        return values.astype(dtype, copy=False), live
    sequence = _as_rotations(rotations, layout.matrices(shape), shape)
    if density is None and sequence is None:
        raise DensityError("`density` may only be None with explicit `rotations`.")

    plan = MatrixPlan(gain, rng, angles, sequence, start == "covering", norms)
    if math.prod(canonical_shape[2:-2]) == 1:
        taps = "center"
    count: int | None = None
    if density is None:
        counts = [math.prod(matrix_shape(shape, layout, taps))]
    else:
        count = check_feasible(shape, density, layout, norms, taps)
        counts = _counts(shape, float(density), layout, count, center_density, plan, taps)
    kernel: np.ndarray = np.zeros(canonical_shape, dtype=dtype)
    if taps == "center" and canonical_shape[-2:] == (1, 1):  # all at once: depthwise ones are many
        signs: tuple[Any, ...] = (..., *center_of(canonical_shape), 0, 0)
        plan.write_signs(kernel[signs])
    else:
        for k, index in enumerate(np.ndindex(canonical_shape[:2])):
            part = kernel[index]
            if taps == "center":
                plan.write(part[center_of(canonical_shape)], counts[k])
            else:
                # The side that strides divide into phases comes first.
                part = np.swapaxes(part, -1, -2) if layout.transposed else part
                spread = plan.write_shifted if taps == "shift" else plan.write_cascade
                spread(part, Polyphase.of(shape, layout), counts[k], layout.transposed)
    kernel = np.ascontiguousarray(layout.from_canonical(kernel, shape))
    mask = kernel != 0
    if count is not None:
        unmask_at_random(mask, count, rng)
    return kernel, mask


def _counts(
    shape: tuple[int, ...],
    density: float,
    layout: KernelLayout,
    count: int,
    center_density: float | str | None,
    plan: MatrixPlan,
    taps: str,
) -> list[int]:
    """How many entries the support of each matrix may take."""
    matrices = layout.matrices(shape)
    size = math.prod(matrix_shape(shape, layout, taps))
    if taps != "center":
        most = matrices * size if taps == "shift" else count
        return apportion(min(most, count), [1.0] * matrices)
    window = math.prod(shape) // (matrices * size)
    wanted = live_count(density_at_center(density, window, center_density), matrices * size)
    least = matrices * plan.least(*layout.matrix_shape(shape))
    return apportion(min(max(wanted, least), count), [1.0] * matrices)


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
