"""The values that live blocks start from: exactly orthogonal ones, or those of an initializer."""

import math
from typing import TypeAlias

import keras
import numpy as np

from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.kernels import KernelLayout
from keras_sparse_ortho.layers._block_grid import BlockGrid
from keras_sparse_ortho.orthogonal import (
    Block,
    clear_padding,
    random_orthogonal,
    regular_blocks,
)

EXACT_ORTHOGONAL = "exact_orthogonal"

BlockInitializer: TypeAlias = str | keras.initializers.Initializer
"""`"exact_orthogonal"`, or an initializer of Keras."""


def checked_initializer(initializer: BlockInitializer) -> BlockInitializer:
    """Returns `"exact_orthogonal"`, or an initializer of Keras that fits live blocks.

    Raises ValueError for one that draws whole kernels.
    """
    if initializer == EXACT_ORTHOGONAL:
        return initializer
    restored = keras.initializers.get(initializer)
    draws_whole_kernels = isinstance(
        restored, keras.initializers.Orthogonal | keras.initializers.Identity
    )
    is_sparse = hasattr(restored, "sample")
    if not callable(restored) or draws_whole_kernels or is_sparse:
        raise ValueError(
            'A kernel of live blocks starts from "exact_orthogonal", or from an initializer of '
            "Keras that draws all entries alike. "
            f"Received: kernel_initializer={initializer!r}"
        )
    return restored


def draw_blocks(
    grid: BlockGrid,
    initializer: BlockInitializer,
    *,
    gain: float,
    seed: int,
    gates: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Draws the live blocks of a grid.

    Regular blocks are exactly orthogonal together. With `counts`, each block is orthogonal and
    scaled by the fan of its output block.

    Args:
        grid: BlockGrid, with the gates of a recurrent kernel side by side.
        initializer: As `checked_initializer` returns it.
        gain: float. Scale of orthogonal blocks.
        seed: int. Seed of the places and the orthogonal values.
        gates: int. Parts of the outputs that are orthogonal by themselves.

    Returns:
        Values of the shape `grid.blocks_shape`, and `inputs_of`.
    """
    if initializer == EXACT_ORTHOGONAL and grid.counts is None:
        drawn = regular_blocks(
            grid.shape,
            grid.density,
            Block(grid.rows, grid.cols, regular=True),
            gain=gain,
            seed=seed,
            layout=KernelLayout(inputs=(-2,), outputs=(-1,), gates=gates),
        )
        return grid.side_by_side(drawn)
    pattern = grid.draw_pattern(seed)
    lines = grid.of_outputs
    groups = []
    for group in lines.groups:  # each output sees its own live fan
        fan_in = lines.counts[group[0]]
        if isinstance(initializer, str):
            blocks = _orthogonal_group(grid, fan_in, len(group), gain, seed)
        else:
            blocks = _initialized_group(grid, fan_in, len(group), initializer)
        groups.append(blocks.reshape(-1, *grid.taps, grid.rows, grid.cols))
    values = np.concatenate(groups).astype(np.float32)
    # No gradient reaches the padding.
    clear_padding(
        values, pattern.ravel(), lines.of_slots, grid.inputs, grid.outputs
    )
    return values.reshape(grid.blocks_shape), pattern


def _orthogonal_group(
    grid: BlockGrid, fan_in: int, line_count: int, gain: float, seed: int
) -> np.ndarray:
    """Orthogonal blocks at the center tap, `(blocks, taps, r, c)`."""
    block_count = line_count * fan_in
    tap_count = math.prod(grid.taps)
    rng = np.random.default_rng([seed, fan_in])
    matrices = random_orthogonal(block_count, max(grid.rows, grid.cols), rng)
    scale = gain * np.sqrt(max(grid.cols / grid.rows, 1.0) / fan_in)
    blocks = np.zeros((block_count, tap_count, grid.rows, grid.cols))
    blocks[:, tap_count // 2] = scale * matrices[:, : grid.rows, : grid.cols]
    return blocks


def _initialized_group(
    grid: BlockGrid,
    fan_in: int,
    line_count: int,
    initializer: keras.initializers.Initializer,
) -> np.ndarray:
    """Blocks of a kernel of the live inputs that an initializer draws, `(J, k, *taps, r, c)`."""
    shape = (*grid.taps, fan_in * grid.rows, line_count * grid.cols)
    columns = to_numpy(initializer(shape, dtype="float32"))
    columns = columns * _fan_correction(grid, fan_in, initializer)
    blocks = columns.reshape(
        *grid.taps, fan_in, grid.rows, line_count, grid.cols
    )
    return blocks.transpose(np.argsort(grid.columns_order()))


def _fan_correction(
    grid: BlockGrid, count: int, initializer: keras.initializers.Initializer
) -> float:
    """The factor by which the live fan-out changes a draw whose fan-out is all outputs."""
    mode = getattr(initializer, "mode", None)
    if mode == "fan_avg":
        fan_in = count * grid.rows
    elif mode == "fan_out":
        fan_in = 0
    else:
        return 1.0
    fan_out = grid.live_blocks / grid.in_blocks * grid.cols
    return float(np.sqrt((fan_in + grid.outputs) / (fan_in + fan_out)))
