"""Structures of blocks: `Block`, `GivenBlocks`, and the blocks of highest score."""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.random import Generator

from keras_sparse_ortho._checks import is_integer, other_keywords
from keras_sparse_ortho._foreign_names import for_value
from keras_sparse_ortho.errors import LayoutError
from keras_sparse_ortho.orthogonal._block_draws import block_orthogonal, draw_on
from keras_sparse_ortho.orthogonal._counts import (
    largest_mask,
    live_count,
    unmask_at_random,
)
from keras_sparse_ortho.orthogonal._eoi import DrawOptions
from keras_sparse_ortho.orthogonal._kernel import (
    KernelLayout,
    Structure,
    center_of,
    default_layout,
    describe,
)
from keras_sparse_ortho.orthogonal._n_by_m import NByM as NByM
from keras_sparse_ortho.orthogonal._regular_blocks import (
    RegularBlocks,
    draw_regular,
)
from keras_sparse_ortho.orthogonal._regular_pattern import (
    BlockGrid,
    block_count,
    fan_step,
    few_counts,
    from_blocks,
    matched_by_score,
    to_blocks,
)

StructureLike = Structure | str | tuple[int, int]
"""A structure, or a short form of one: `"2:4"`, `"32x32"` or `(32, 32)`."""

_MOST_PADDING = (
    1.05  # a padded side relative to the side: what the padding may cost
)
_MOST_COUNTS = 6  # of a side of live blocks: each is a product, which takes time to compile


@dataclasses.dataclass(frozen=True, repr=False)
class Block(Structure):
    """Blocks of `rows` consecutive inputs by `cols` consecutive outputs, live or dead as a whole.

    Inputs and outputs are those of the flattened `(in, out)` kernel, in a convolution the channels
    at each tap. Construction: dense orthogonal blocks on the diagonal. Then pairs of block lines
    along the longer side are rotated, each row by its own angle, and both get the union of their
    blocks: first empty lines with others, then random pairs. Missing blocks are unmasked at random;
    their entries are zeros.

    With `regular=True` every output block has `k` live input blocks, and every input block equally
    many live output blocks. For `I` input and `J` output blocks, `k` is a multiple of
    `I / gcd(I, J)`. No output or input is dead, and all taps have the same live blocks. The shorter
    side need not be divisible: 1000 outputs of `cols=32` are 8 blocks of 32 and 24 of 31, which
    layers of live blocks pad to 32. The padding is at most a twentieth of the side.

    Args:
        rows: Inputs in a block.
        cols: Outputs in a block. One of `rows` and `cols` divides the other where a kernel is
            drawn; with `regular=True` any two are possible.
        regular: Whether all block lines have the same number of live blocks.

    Raises LayoutError for a kernel that the blocks do not divide, with padding or without.

    Examples:
        >>> from keras_sparse_ortho.orthogonal import exact_orthogonal
        >>> regular = Block(8, 8, regular=True)
        >>> kernel, mask = exact_orthogonal((64, 128), 0.25, seed=0, structure=regular)
        >>> live = mask.reshape(8, 8, 16, 8).any(axis=(1, 3))
        >>> {int(fan) for fan in live.sum(axis=0)}, {int(fan) for fan in live.sum(axis=1)}
        ({2}, {4})
    """

    rows: int
    cols: int
    regular: bool = dataclasses.field(default=False, kw_only=True)

    def __repr__(self) -> str:
        regular = ", regular=True" if self.regular else ""
        return f"Block(rows={self.rows}, cols={self.cols}{regular})"

    def __post_init__(self) -> None:
        self._check_sides("rows", "cols")
        if not isinstance(self.regular, bool):
            raise ValueError(
                f"`regular` must be a bool. Received: regular={self.regular!r}"
            )

    def divides(self, canonical_shape: Sequence[int]) -> bool:
        """Whether inputs and outputs can be divided into blocks, regular ones with padding."""
        *_, inputs, outputs = canonical_shape
        uneven_inputs = inputs % self.rows > 0
        uneven_outputs = outputs % self.cols > 0
        if not uneven_inputs and not uneven_outputs:
            return True
        if not self.regular or (uneven_inputs and uneven_outputs):
            return False
        if uneven_inputs:
            return _can_be_padded(inputs, self.rows, outputs)
        return _can_be_padded(outputs, self.cols, inputs)

    def check(self, canonical_shape: Sequence[int]) -> None:
        if not self.divides(canonical_shape):
            raise LayoutError(
                f"{self} needs inputs divisible by {self.rows} and outputs divisible by "
                f"{self.cols}; change the layer's sizes or the structure, or `exclude` the layer. "
                f"Received: a kernel of {describe(canonical_shape)}"
            )

    def unit(self, canonical_shape: Sequence[int]) -> int:
        """Entries of a block; with regular blocks, the count at the least fans."""
        unit = self.rows * self.cols
        if not self.regular:
            return unit
        input_blocks, output_blocks = self._block_counts(canonical_shape)
        return math.prod(canonical_shape) // math.gcd(
            input_blocks, output_blocks
        )

    def _block_counts(self, canonical_shape: Sequence[int]) -> tuple[int, int]:
        *_, inputs, outputs = canonical_shape
        return block_count(inputs, self.rows), block_count(outputs, self.cols)

    def fan_in(
        self,
        canonical_shape: Sequence[int],
        count: int,
    ) -> int:
        """Live input blocks of each output block of a regular kernel with `count` live entries."""
        step = fan_step(*self._block_counts(canonical_shape))
        return count // self.unit(canonical_shape) * step

    def least(self, canonical_shape: Sequence[int]) -> int:
        """A block line of `a` orthonormal rows needs blocks with `a` columns in all."""
        if self.regular:
            return self.unit(canonical_shape)
        if max(self.rows, self.cols) % min(self.rows, self.cols):
            raise ValueError(
                f"One of `rows` and `cols` must divide the other. Received: {self}"
            )
        batch, part_count, *_, inputs, outputs = canonical_shape
        blocks = min(inputs, outputs) // min(self.rows, self.cols)
        return batch * part_count * blocks * self.unit(canonical_shape)

    def covering(self, canonical_shape: Sequence[int]) -> int:
        """A block for each line along the longer side."""
        if self.regular:
            return self.unit(canonical_shape)
        batch, part_count, *_ = canonical_shape
        grid = self._grid(canonical_shape)
        lines_of_group = max(grid.group_size // grid.line_size, 1)
        blocks = max(grid.lines, grid.groups * lines_of_group)
        return batch * part_count * blocks * self.unit(canonical_shape)

    def _grid(self, canonical_shape: Sequence[int]) -> BlockGrid:
        input_blocks, output_blocks = self._block_counts(canonical_shape)
        return BlockGrid.of(input_blocks, output_blocks, self.rows, self.cols)

    def draw(
        self,
        canonical_shape: Sequence[int],
        count: int,
        density: float,
        options: DrawOptions,
    ) -> tuple[np.ndarray, np.ndarray]:
        """See `Structure.draw`. Regular blocks always cover."""
        if self.regular:
            fan_in = self.fan_in(canonical_shape, count)
            drawn = draw_regular(
                canonical_shape, self.rows, self.cols, fan_in, options
            )
            return drawn.dense(), drawn.mask()
        batch, part_count, *taps, inputs, outputs = canonical_shape
        unit = self.rows * self.cols
        blocks_at_center = live_count(
            density, batch * part_count * inputs * outputs // unit
        )
        at_center = min(blocks_at_center * unit, count)
        shares = self._shares(canonical_shape, at_center, count, options)
        grid = self._grid(canonical_shape)
        kernel = np.zeros(canonical_shape)
        live_shape = (
            batch,
            part_count,
            *taps,
            *self._block_counts(canonical_shape),
        )
        live = np.zeros(live_shape, dtype=bool)
        center = center_of(canonical_shape)
        for share, matrix in zip(
            shares, np.ndindex(batch, part_count), strict=True
        ):
            index = (*matrix, *center)
            values = block_orthogonal(grid, share, options)
            kernel[index] = options.gain * values
            live[index] = to_blocks(values != 0, self.rows, self.cols).any(
                axis=(1, 3)
            )
        unmask_at_random(live, count // unit, options.rng)
        return kernel, _entries_of(live, self.rows, self.cols)


def _can_be_padded(
    side: int,
    width: int,
    other_side: int,
) -> bool:
    """Whether a side can be cut into blocks of `width` and of one entry less."""
    count = block_count(side, width)
    padded = count * width
    is_least_width = block_count(side, count) == width
    return is_least_width and padded <= min(_MOST_PADDING * side, other_side)


def _entries_of(
    live: np.ndarray,
    rows: int,
    cols: int,
) -> np.ndarray:
    """The mask of the entries of live blocks `(..., I, J)`."""
    return live.repeat(rows, axis=-2).repeat(cols, axis=-1)


@dataclasses.dataclass(frozen=True, repr=False)
class GivenBlocks(Block):
    """Exactly these blocks are live, at all taps: a string of `0` and `1` for each block of inputs.

    A matrix is exactly orthogonal if its blocks have a matching: a live block for each line along
    the shorter side, each in another line along the longer side. Then pairs of lines are rotated
    while both have the blocks for it; other live blocks begin with zeros. Without a matching, as
    where inputs are unused, each block is orthogonal and scaled by its fan: outputs have about the
    norm `gain`. The matrices of several gates stand side by side.
    """

    live: tuple[str, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "live", tuple(map(str, self.live)))
        lengths = {len(line) for line in self.live}
        digits = set("".join(self.live))
        if len(lengths) != 1 or digits - set("01"):
            raise ValueError(
                f"Blocks are equal strings of 0 and 1. Received: {self.live!r:.200}"
            )

    def __str__(self) -> str:
        text = "\n".join(self.live)
        return text.replace("0", ".").replace("1", "#")

    @classmethod
    def of_mask(
        cls,
        mask: np.ndarray,
        block: Block,
    ) -> "GivenBlocks":
        """The blocks of a mask of the canonical shape that have a live entry."""
        inputs, outputs = mask.shape[-2:]
        by_matrix = mask.reshape(math.prod(mask.shape[:2]), -1, inputs, outputs)
        live = to_blocks(by_matrix, block.rows, block.cols).any(axis=(1, 3, 5))
        lines = np.concatenate(live, axis=-1).astype(int)
        return cls(
            block.rows,
            block.cols,
            tuple("".join(map(str, line)) for line in lines),
        )

    @property
    def array(self) -> np.ndarray:
        """Bool `(I, J)`."""
        return np.array(
            [[digit == "1" for digit in line] for line in self.live]
        )

    def check(self, canonical_shape: Sequence[int]) -> None:
        super().check(canonical_shape)
        batch, part_count, *_, inputs, outputs = canonical_shape
        input_blocks = inputs // self.rows
        output_blocks = batch * part_count * outputs // self.cols
        if self.array.shape != (input_blocks, output_blocks):
            raise LayoutError(
                f"The kernel has {input_blocks} x {output_blocks} blocks of "
                f"{self.rows} x {self.cols}, and each must be given. "
                f"Received: an array of shape {self.array.shape}"
            )

    def unit(self, canonical_shape: Sequence[int]) -> int:
        return round(self.array.mean() * math.prod(canonical_shape))

    least = covering = most = unit

    def draw(
        self,
        canonical_shape: Sequence[int],
        count: int,
        density: float,
        options: DrawOptions,
    ) -> tuple[np.ndarray, np.ndarray]:
        """See `Structure.draw`; `count` and `density` are those of the blocks."""
        batch, part_count, *_ = canonical_shape
        center = center_of(canonical_shape)
        kernel = np.zeros(canonical_shape)
        mask = np.zeros(canonical_shape, dtype=bool)
        shares = np.split(self.array, batch * part_count, axis=1)
        for live, matrix in zip(
            shares, np.ndindex(batch, part_count), strict=True
        ):
            values = draw_on(live, self.rows, self.cols, options.rng)
            kernel[(*matrix, *center)] = options.gain * values
            mask[matrix] = _entries_of(live, self.rows, self.cols)
        return kernel, mask


def as_structure(value: Any) -> Any:
    """The structure for `"2:4"`, `"8x8"` or `(8, 8)`; anything else is returned as it is."""
    if isinstance(value, str):
        match = re.fullmatch(r"(\d+) ?([:xX]) ?(\d+)", value)
        if match is None:
            raise ValueError(
                '`structure` as text must be "n:m", such as "2:4", or "rows x cols", such as '
                f'"32x32".{for_value("structure", value)} Received: structure={value!r}'
            )
        before, separator, after = match.groups()
        if separator == ":":
            return NByM(int(before), int(after))
        return Block(int(before), int(after))
    if (
        isinstance(value, list | tuple)
        and len(value) == 2
        and all(map(is_integer, value))
    ):
        rows, cols = value
        return Block(int(rows), int(cols))
    return value


@other_keywords
def regular_blocks(
    shape: Sequence[int],
    density: float,
    structure: Block,
    *,
    gain: float = 1.0,
    seed: int | np.random.Generator | None = None,
    layout: KernelLayout | None = None,
    dtype: Any = np.float64,
) -> RegularBlocks:
    """Draws an exactly orthogonal kernel of regular blocks as its live blocks alone.

    The kernel is that of `exact_orthogonal(shape, density, structure=structure, ...)` for the same
    seed, bit for bit, without a dense array: memory is that of the live blocks and 1.3 float64
    copies of them. `structure` is a `Block(rows, cols, regular=True)`; the other arguments and
    errors are those of `exact_orthogonal`. Returns a `RegularBlocks`.

    Examples:
        >>> drawn = regular_blocks((128, 256), 0.25, Block(16, 16, regular=True), seed=0)
        >>> drawn.blocks.shape, drawn.inputs_of.shape
        ((1, 1, 16, 2, 16, 16), (1, 1, 16, 2))
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
        raise ValueError(
            f"`dtype` must be a NumPy floating type. Received: dtype={dtype!r}"
        )
    shape = tuple(int(size) for size in shape)
    canonical = (layout or default_layout(shape)).canonical_shape(shape)
    structure.check(canonical)
    fan_in = structure.fan_in(
        canonical, structure.live_count(canonical, density)
    )
    options = DrawOptions(np.random.default_rng(seed), gain)
    return draw_regular(
        canonical, structure.rows, structure.cols, fan_in, options, dtype
    )


def block_unit(
    block: Block,
    canonical_shape: Sequence[int],
) -> int:
    """Entries by which blocks that are live at all taps can be more or less."""
    if block.regular:
        return block.unit(canonical_shape)
    return math.prod(canonical_shape[2:-2]) * block.rows * block.cols


def best_blocks(
    block: Block,
    scores: np.ndarray,
    count: int,
    rng: Generator,
    *,
    few: bool = True,
) -> np.ndarray:
    """The mask of blocks with `count` live entries whose scores have (nearly) the largest sum.

    Args:
        block: Block.
        scores: array of a canonical shape.
        count: int. A multiple of `block_unit`.
        rng: NumPy generator, to decide between equals.
        few: bool. Whether lines may have at most 6 different counts on either side: layers of live
            blocks compute with few groups of lines.
    """
    batch, part_count, *taps, inputs, outputs = scores.shape
    by_tap = scores.reshape(
        batch * part_count, math.prod(taps), inputs, outputs
    )
    by_block = to_blocks(by_tap.sum(axis=1), block.rows, block.cols)
    block_scores = by_block.sum(axis=(2, 4), dtype=np.float64)
    if block.regular:
        fan_in = block.fan_in(scores.shape, count)
        live = _best_regular(block_scores, fan_in, rng)
    else:
        blocks = count // block_unit(block, scores.shape)
        live = _best_in_all(block_scores, blocks, rng, few=few)
    entries = np.broadcast_to(live[:, :, None, :, None], by_block.shape)
    mask = from_blocks(entries, inputs, outputs)
    no_taps = (1,) * len(taps)
    mask = mask.reshape(batch, part_count, *no_taps, inputs, outputs)
    return np.broadcast_to(mask, scores.shape).copy()


def _best_regular(
    scores: np.ndarray,
    fan_in: int,
    rng: Generator,
) -> np.ndarray:
    """The live blocks of each matrix, by scores `(matrices, I, J)`."""
    _, rows, cols = scores.shape
    input_fans = np.full(rows, cols * fan_in // rows)
    output_fans = np.full(cols, fan_in)
    nothing = np.zeros((rows, cols), dtype=bool)
    live = []
    for matrix in scores:
        live.append(
            matched_by_score(nothing, input_fans, output_fans, matrix, rng)
        )
    return np.stack(live)


def _best_in_all(
    scores: np.ndarray,
    count: int,
    rng: Generator,
    *,
    few: bool,
) -> np.ndarray:
    """The `count` live blocks of all matrices, by scores `(matrices, I, J)`."""
    side_by_side = np.concatenate(list(scores), axis=1)
    live = largest_mask(side_by_side, count)
    input_fans = live.sum(axis=1)
    output_fans = live.sum(axis=0)
    most_counts = max(len(np.unique(input_fans)), len(np.unique(output_fans)))
    if few and most_counts > _MOST_COUNTS:
        input_fans = few_counts(input_fans, _MOST_COUNTS)
        output_fans = few_counts(output_fans, _MOST_COUNTS)
        nothing = np.zeros_like(live)
        live = matched_by_score(
            nothing, input_fans, output_fans, side_by_side, rng
        )
    return np.stack(np.split(live, len(scores), axis=1))
