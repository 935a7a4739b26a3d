"""Exactly orthogonal kernels of every shape: EOI in each matrix of a layout, on one or all taps."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_sparse_ortho._checks import is_integer
from keras_sparse_ortho._other_names import other_keywords
from keras_sparse_ortho.orthogonal._block import Block
from keras_sparse_ortho.orthogonal._counts import (
    apportion,
    check_feasible,
    default_layout,
    live_count,
    matrix_shape,
    unmask_at_random,
)
from keras_sparse_ortho.orthogonal._eoi import write_orthogonal
from keras_sparse_ortho.orthogonal._layout import KernelLayout
from keras_sparse_ortho.orthogonal._n_by_m import NByM
from keras_sparse_ortho.orthogonal._regular_blocks import RegularBlocks, draw_regular
from keras_sparse_ortho.orthogonal._rotations import AngleLaw, DrawOptions, check_angles
from keras_sparse_ortho.orthogonal._structure import Structure, center_of

StructureLike = Structure | str | tuple[int, int]
"""A structure, or a short form of one: `"2:4"`, `"32x32"` or `(32, 32)`."""


@other_keywords()
def exact_orthogonal(
    shape: Sequence[int],
    density: float,
    *,
    gain: float = 1.0,
    seed: int | np.random.Generator | None = None,
    layout: KernelLayout | None = None,
    angles: AngleLaw = None,
    structure: StructureLike | None = None,
    start: str = "covering",
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
    instead of `n`; a lower count covers as many columns as it allows, see `dead_outputs`. Entries
    that are missing to exactly `round(density * size)` are then unmasked at random; their value is
    zero, so the kernel stays orthogonal, and training may move them.

    A convolution gets one such matrix for each group at its center tap `(k - 1) // 2` and zeros
    elsewhere (delta-orthogonal); the random unmasking covers the whole kernel. The center tap has
    the density of the kernel, or more if covering all columns takes more. With stride 1
    and circular padding (and no fewer outputs than inputs) it keeps the norm of its input.

    With `taps="shift"` each entry `H[i, o]` of the matrix is placed at one of the taps,

        K[u, i, o] = H[i, o]   where   u = a(i) + b(o),    i.e.   K(z) = S_a(z) H S_b(z)

    with random shifts `a` and `b` inside the window. `H` has the count of the kernel and so `taps`
    times its density. With strides in the `layout`, the inputs of `H` are the `(phase, input)`
    pairs that a strided convolution reads; under circular padding the convolution, or its adjoint
    if it has fewer outputs than these inputs, keeps the norm of its input. Under zero padding each
    shift loses what leaves the border: after 10 linear layers 0.35 (4 x 4 maps) to 0.90 (28 x 28)
    of the norm is left, where the center tap keeps all of it.

    Args:
        shape: Kernel shape in Keras layout, e.g. `(in, out)` or `(*spatial, in / groups, out)`.
        density: Live fraction, in (0, 1].
        gain: Scale of the kernel.
        seed: Integer, NumPy generator, or `None` for fresh randomness. The same integer gives the
            same kernel and mask on every machine.
        layout: Meaning of the axes. Default: `(*spatial, in, out)`.
        angles: Law of the rotation angles [radians]: `None` (uniform on the circle), a number, a
            `(low, high)` range, or a callable `(rng, count) -> angles`.
        structure: Pattern of the live entries in all matrices and taps: `Block(rows, cols)`,
            also with `regular=True`, `NByM(n, m)`; default: none. The number of live entries is
            then the nearest that the structure allows.
        start: `"covering"`, or `"published"`: `[I | 0]` as in the paper. At low densities that
            leaves outputs of wide kernels zero.
        taps: `"center"`, or `"shift"`; the same for kernels of one tap.
        dtype: Floating type of the kernel. All arithmetic is in float64.

    Returns:
        The kernel and its bool mask, both of shape `shape`.

    Raises:
        DensityError: A density outside (0, 1], or fewer entries than `least_count`.
            With a structure, less than its least or more than its largest density.
        LayoutError: A shape that does not fit the layout or the structure.
        ValueError: Unknown or mutually exclusive options.

    Limits: orthogonality holds at initialization; training does not keep it. With strides the
    center tap is not an exact isometry; use `taps="shift"` and circular padding.

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
    rng = np.random.default_rng(seed)
    options = DrawOptions(rng, gain, check_angles(angles), start == "covering")
    pattern: Structure | None = as_structure(structure)
    check_options(start, taps, pattern)
    canonical_shape = layout.canonical_shape(shape)
    if pattern is not None:
        pattern.check(canonical_shape)
        live_entries = pattern.live_count(canonical_shape, density)
        drawn = pattern.draw(canonical_shape, live_entries, float(density), options)
        values, live = (np.ascontiguousarray(layout.from_canonical(v, shape)) for v in drawn)
        return values.astype(dtype, copy=False), live
    if math.prod(canonical_shape[2:-2]) == 1:
        taps = "center"
    count = check_feasible(shape, density, layout, taps)
    matrices, sides = layout.matrices(shape), matrix_shape(shape, layout, taps)
    size = matrices * math.prod(sides)
    most = min(size, count)  # entries that the supports of the matrices may have
    if taps == "center":
        least = matrices * (max(sides) if options.cover else min(sides))
        most = min(max(live_count(density, size), least), count)
    center = center_of(canonical_shape)
    kernel: np.ndarray = np.zeros(canonical_shape, dtype=dtype)
    if taps == "center" and canonical_shape[-2:] == (1, 1):  # all at once: depthwise ones are many
        index: tuple[Any, ...] = (..., *center, 0, 0)
        signs = rng.random(kernel[index].shape) < 0.5
        kernel[index] = np.where(signs, gain, -gain)
    else:
        counts = apportion(most, [1.0] * matrices)
        for matrix, entries in zip(np.ndindex(canonical_shape[:2]), counts, strict=True):
            part = kernel[matrix]
            if taps == "center":
                write_orthogonal(part[center], entries, options)
                continue
            out: np.ndarray = np.zeros(layout.polyphase_shape(shape), dtype=dtype)
            write_orthogonal(out, entries, options)
            if layout.transposed:  # the side that has the phases comes first
                part, out = part.swapaxes(-1, -2), out.T
            _write_shifted(part, out, layout.tap_strides(shape), rng)
    kernel = np.ascontiguousarray(layout.from_canonical(kernel, shape))
    mask = kernel != 0
    unmask_at_random(mask, count, rng)
    return kernel, mask


@other_keywords()
def regular_blocks(
    shape: Sequence[int],
    density: float,
    structure: Block,
    *,
    gain: float = 1.0,
    seed: int | np.random.Generator | None = None,
    layout: KernelLayout | None = None,
    angles: AngleLaw = None,
    dtype: Any = np.float64,
) -> RegularBlocks:
    """Draws an exactly orthogonal kernel of regular blocks as its live blocks alone.

    The kernel is that of `exact_orthogonal(shape, density, structure=structure, ...)` for the same
    seed, bit for bit, but no array of the size of the dense kernel is made: memory is that of the
    live blocks and 1.3 float64 copies of them. `structure` is a `Block(rows, cols, regular=True)`;
    the other arguments and errors are those of `exact_orthogonal`. Returns a `RegularBlocks`.

    A convolution has the same live blocks, over channels, at all its taps. Its values are at the
    center tap, where they make the kernel exactly orthogonal, and only these are stored; the live
    entries of other taps are zeros that training may move.

    Example:

    >>> drawn = regular_blocks((128, 256), 0.25, Block(16, 16, regular=True), seed=0)
    >>> drawn.blocks.shape, drawn.inputs_of.shape, drawn.slots_of.shape
    ((1, 1, 16, 2, 16, 16), (1, 1, 16, 2), (1, 1, 8, 4))
    >>> kernel = drawn.dense()[0, 0]
    >>> bool(np.allclose(kernel @ kernel.T, np.eye(128), atol=1e-12))
    True
    """
    if not isinstance(structure, Block) or not structure.regular:
        raise ValueError(
            "`structure` must be Block(rows, cols, regular=True): other live blocks cannot be "
            f"stored without the dense kernel. Received: structure={structure!r}"
        )
    if not np.issubdtype(np.dtype(dtype), np.floating):
        raise ValueError(f"`dtype` must be a NumPy floating type. Received: dtype={dtype!r}")
    shape = tuple(int(size) for size in shape)
    canonical = (layout or default_layout(shape)).canonical_shape(shape)
    structure.check(canonical)
    fan_in = structure.fan_in(canonical, structure.live_count(canonical, density))
    options = DrawOptions(np.random.default_rng(seed), gain, check_angles(angles))
    return draw_regular(canonical, structure.rows, structure.cols, fan_in, options, dtype)


def as_structure(given: Any, *, regular: bool = False) -> Any:
    """The structure that a short form stands for; anything else is returned as it is.

    >>> as_structure("2:4"), as_structure((4, 1)), as_structure("8x8", regular=True)
    (NByM(n=2, m=4), Block(rows=4, cols=1), Block(rows=8, cols=8, regular=True))
    """
    if isinstance(given, str):
        parts = re.fullmatch(r"(\d+) ?([:xX]) ?(\d+)", given)
        if parts is None:
            raise ValueError(
                '`structure` as text must be "n:m", such as "2:4", or "rows x cols", such as '
                f'"32x32". Received: structure={given!r}'
            )
        sides = int(parts[1]), int(parts[3])
        return NByM(*sides) if parts[2] == ":" else Block(*sides, regular=regular)
    if isinstance(given, list | tuple) and len(given) == 2 and all(map(is_integer, given)):
        return Block(*map(int, given), regular=regular)
    return given


def check_options(start: str, taps: str, structure: Structure | None = None) -> None:
    """Refuses unknown options, and mutually exclusive ones."""
    if start not in ("covering", "published"):
        raise ValueError(f'`start` must be "covering" or "published". Received: start={start!r}')
    if taps not in ("center", "shift"):
        raise ValueError(f'`taps` must be "center" or "shift". Received: taps={taps!r}')
    if taps != "center" and structure is not None:
        raise ValueError(
            f'A `structure` needs taps="center". Received: taps={taps!r}, structure={structure}'
        )


def _write_shifted(
    part: np.ndarray, matrix: np.ndarray, strides: Sequence[int], rng: np.random.Generator
) -> None:
    """Spreads a matrix over the taps of a zeroed kernel: `K(z) = S_a(z) H S_b(z)`.

    A row `(phase, channel)` has a place for each tap of its phase, see `to_polyphase`. Row `i` is
    shifted by `a(i)`, uniform over the lower half of its places, then column `o` by a `b(o)` that
    is uniform over all shifts that keep its live entries in the window.

    `part` is `(*taps, channels, columns)`, the matrix `(phases * channels, columns)`.
    """
    *taps, channels, _ = part.shape
    reached = [min(k, s) for k, s in zip(taps, strides, strict=True)]
    phase = np.indices(reached).reshape(len(reached), -1).repeat(channels, axis=1)
    window, step = np.array([taps, strides]).reshape(2, -1, 1)
    places = -(-(window - phase) // step)
    row_shift = (rng.random(places.shape) * (places // 2 + 1)).astype(np.int64)
    column, row = np.nonzero(matrix.T)  # sorted by columns
    place = row_shift[:, row]
    begins = np.flatnonzero(np.diff(column, prepend=-1))
    low = np.minimum.reduceat(place, begins, axis=1)
    room = np.minimum.reduceat(places[:, row] - 1 - place, begins, axis=1)
    shift = (rng.random(low.shape) * (low + room + 1)).astype(np.int64) - low
    place += np.repeat(shift, np.diff(begins, append=len(column)), axis=1)
    part[(*(step * place + phase[:, row]), row % channels, column)] = matrix[row, column]
