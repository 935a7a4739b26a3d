"""The rule by which `storage="blocks"` chooses the size of a kernel's blocks."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

import keras

from keras_sparse_ortho.kernels import KernelLayout, PrunableWeight
from keras_sparse_ortho.layers import why_no_block_form
from keras_sparse_ortho.orthogonal import Block

# Larger blocks are faster at the same density, at every width and batch that was timed
# (benchmarks/results/blocks.md); smaller ones than 16 gain little or nothing.
_SIZES = (128, 64, 32, 16)
# Fans in multiples of the least ones: at the least, the kernel falls into separate matrices.
_LEAST_TIMES = 2
# What a cell does not know.
_OF_CELL = "it needs an LSTM or GRU layer without states, both of whose kernels fit blocks"
# Larger blocks are taken if they reach this part of the density; smaller ones come nearer.
_NEAR = 0.75


def block_for(
    weight: PrunableWeight, density: float, size: Block | None = None, lift: float = 1.0
) -> Block | None:
    """The regular blocks for a kernel, or `None` if none has so low a density.

    A kernel of `I x J` regular blocks can have the densities `t / gcd(I, J)`. Of blocks of about
    128, 64, 32 and 16, the largest ones are taken with which a `t` of 2 or more is at most
    `density`, and within a quarter of it; else those of about 16, if `t = 1` is at most
    `lift density`. Along the longer side of the kernel they are then made up to 128 long, where
    that leaves the possible densities as they are: so much less has to be gathered.

    Args:
        weight: The kernel.
        density: Live fraction.
        size: The only block to consider.
        lift: By how much the least density may exceed `density`.
    """
    shape = canonical_shape(weight)
    if density == 1.0 or why_no_block_form(weight.owner) is not None:
        return None
    if size is not None:
        size = dataclasses.replace(size, regular=True)
        return size if _fits(size, shape) and _times(shape, size, lift * density) else None
    for side in _SIZES:
        found = [(_times(shape, block, density), block) for block in _fitting(shape, side)]
        close = [
            block
            for times, block in found
            if times >= _LEAST_TIMES and times * _step(shape, block) >= _NEAR * density
        ]
        if close:
            return _widened(shape, close[0])
    least = next((block for _, block in found if _times(shape, block, lift * density)), None)
    return least and _widened(shape, least)


def least_density(weight: PrunableWeight) -> float | None:
    """The least density that the rule finds blocks for; `None` where none divides the kernel."""
    shape = canonical_shape(weight)
    return min((_step(shape, block) for block in _fitting(shape, _SIZES[-1])), default=None)


def why_not_on_blocks(
    weight: PrunableWeight, density: float, size: Block | None = None
) -> str | None:
    """Why a kernel at a density is not on blocks, or on none of one `size`."""
    reason = why_no_block_form(weight.owner)
    if reason is None and block_for(weight, density, size) is not None:
        cell = isinstance(weight.owner, keras.layers.LSTMCell | keras.layers.GRUCell)
        return _OF_CELL if cell else None
    if reason is not None:
        return reason
    *_, inputs, outputs = shape = canonical_shape(weight)
    if size is not None:
        regular = dataclasses.replace(size, regular=True)
        least = _step(shape, regular) if _fits(regular, shape) else None
        blocks = f"blocks of {size.rows} x {size.cols}"
    else:
        least, blocks = least_density(weight), "blocks of about 16"
    if least is None:
        return f"{inputs} x {outputs} cannot be divided into {blocks}"
    return f"blocks have the density {least:.4g} or more" if density < 1.0 else "it is dense"


def canonical_shape(weight: PrunableWeight) -> tuple[int, ...]:
    """The shape of a kernel as `(batch, parts, *taps, inputs, outputs)`."""
    return (weight.layout or KernelLayout.convolution()).canonical_shape(weight.shape)


def _widened(shape: Sequence[int], block: Block) -> Block:
    """Blocks longer along the longer side of the kernel, as long as densities stay as they are."""
    *_, inputs, outputs = shape
    along = "cols" if inputs < outputs else "rows"
    side = getattr(block, along)
    longer = (
        dataclasses.replace(block, **{along: times * side})
        for times in range(_SIZES[0] // side, 1, -1)
    )
    same = (b for b in longer if _fits(b, shape) and b.unit(shape) == block.unit(shape))
    return next(same, block)


def _fits(block: Block, shape: Sequence[int]) -> bool:
    """Whether blocks divide a kernel; gates, which stand side by side, without padded outputs."""
    *_, outputs = shape
    return block.divides(shape) and (shape[1] == 1 or outputs % block.cols == 0)


def _fitting(shape: Sequence[int], size: int) -> list[Block]:
    return [block for block in _blocks(*shape[-2:], size) if _fits(block, shape)]


@functools.lru_cache(maxsize=256)
def _blocks(inputs: int, outputs: int, size: int) -> list[Block]:
    """Blocks of about `size x size` for a matrix: without padding first, then nearest to `size`."""
    near = range(math.ceil(size / 2**0.5), math.ceil(size * 2**0.5))
    found = []
    for rows, cols in itertools.product(near, near):
        if inputs % rows == 0 or outputs % cols == 0:
            block = Block(rows, cols, regular=True)
            if block.divides((inputs, outputs)):
                padded = inputs % rows > 0 or outputs % cols > 0
                distance = abs(math.log(rows / size)) + abs(math.log(cols / size))
                found.append((padded, distance, rows, cols, block))
    return [block for *_, block in sorted(found, key=lambda entry: entry[:-1])]


def _step(shape: Sequence[int], block: Block) -> float:
    """The least density on these blocks, of which the others are multiples."""
    return block.unit(shape) / math.prod(shape)


def _times(shape: Sequence[int], block: Block, density: float) -> int:
    return math.floor(density / _step(shape, block) + 1e-9)
