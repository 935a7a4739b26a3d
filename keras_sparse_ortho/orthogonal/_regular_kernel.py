"""Exactly orthogonal kernels of regular blocks in any layout, without their dense form."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_sparse_ortho.orthogonal._block import Block
from keras_sparse_ortho.orthogonal._bounds import default_layout
from keras_sparse_ortho.orthogonal._layout import KernelLayout
from keras_sparse_ortho.orthogonal._regular_blocks import RegularBlocks
from keras_sparse_ortho.orthogonal._regular_draw import draw_regular
from keras_sparse_ortho.orthogonal._rotations import AngleLaw, check_angles


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
    """Draws an exactly orthogonal kernel of regular blocks straight into its live blocks.

    The kernel is that of `exact_orthogonal(shape, density, structure=structure, ...)` for the same
    seed, to the bit. It takes about the memory of the live blocks and 1.3 float64 copies of them;
    no array of the size of the dense kernel is ever made.

    A convolution has the same live blocks, over channels, at all its taps. Its values stand at the
    center tap, where they make the kernel exactly orthogonal; the live entries of other taps are
    zeros that training may move. Only the center is stored: a kernel of `(taps, k r, c)` for each
    output block begins with zeros elsewhere.

    Args:
        shape: Kernel shape in Keras layout.
        density: Live fraction, in (0, 1]; the nearest that regular blocks can have is taken, see
            `RegularBlocks.density`.
        structure: `Block(rows, cols, regular=True)`.
        gain: Scale of the kernel.
        seed: Integer, NumPy generator, or `None` for fresh randomness. The same integer gives the
            same kernel on every machine.
        layout: Meaning of the axes. Default: `(*spatial, in, out)`. Each group, gate and batch
            entry has a matrix of its own: `blocks[batch, part]`.
        angles: Law of the rotation angles [radians], as in `exact_orthogonal`.
        dtype: Floating type of the blocks. All arithmetic is in float64.

    Raises:
        DensityError: A density outside (0, 1], or less than half the least one; the message names
            the nearest two, the least and the largest.
        LayoutError: A shape that does not fit the layout or the blocks.
        ValueError: A structure of other kinds.

    Limits: orthogonality holds at initialization; training does not keep it.

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
            "Live blocks are stored alone only where all block lines have equally many: give "
            f"Block(rows, cols, regular=True). Received: structure={structure!r}"
        )
    if not np.issubdtype(np.dtype(dtype), np.floating):
        raise ValueError(f"`dtype` must be a NumPy floating type. Received: dtype={dtype!r}")
    if not math.isfinite(gain):
        raise ValueError(f"`gain` must be finite. Received: gain={gain!r}")
    shape = tuple(int(size) for size in shape)
    canonical = (layout or default_layout(shape)).canonical_shape(shape)
    structure.check(canonical)
    fan_in = structure.fan_in(canonical, structure.live_count(canonical, density))
    rows, cols = structure.rows, structure.cols
    rng, law = np.random.default_rng(seed), check_angles(angles)
    return draw_regular(canonical, rows, cols, fan_in, gain, rng, law, dtype)
