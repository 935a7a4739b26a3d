"""`Block`: blocks of entries that are live or dead together."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from keras_sparse_ortho._checks import check_density
from keras_sparse_ortho.errors import DensityError, LayoutError
from keras_sparse_ortho.orthogonal._counts import apportion, live_count, unmask_at_random
from keras_sparse_ortho.orthogonal._eoi import covering_rotations
from keras_sparse_ortho.orthogonal._regular_blocks import draw_regular
from keras_sparse_ortho.orthogonal._regular_pattern import (
    block_count,
    fan_step,
    from_blocks,
    matched_by_score,
    to_blocks,
)
from keras_sparse_ortho.orthogonal._rotations import (
    DrawOptions,
    Rotations,
    Supports,
    cos_sin,
    random_orthogonal,
)
from keras_sparse_ortho.orthogonal._structure import (
    Structure,
    center_of,
    describe,
    positive_integers,
)

_PADDED = 1.05  # a padded side relative to the side: what the padding may cost


@dataclasses.dataclass(frozen=True, repr=False)
class Block(Structure):
    """Blocks of `rows` consecutive inputs by `cols` consecutive outputs, live or dead as a whole.

    Inputs and outputs are the axes of the flattened `(in, out)` kernel, in a convolution the
    channels at each tap.

    Construction: dense orthogonal blocks on the diagonal; then pairs of block lines along the
    longer side are rotated, entry by entry with an angle each, so that both get the union of
    their blocks: first empty lines with others, until none is left, then random pairs. Blocks
    that are missing to the count are unmasked at random; their entries are zeros.

    With `regular=True`, every output block has the same number `k` of live input blocks, and every
    input block the same number of live output blocks; layers that store and multiply live blocks
    alone need this (`regular_blocks`). With `I` input and `J` output blocks, `k` is a multiple of
    `I / gcd(I, J)`. No output and no input is dead, even at the least density. All taps of a
    convolution have the same live blocks, over channels; the matrix is at the center tap, and the
    live entries of other taps are zeros. The shorter side need not be divisible: 1000 outputs of
    `cols=32` are 8 blocks of 32 and 24 of 31, which layers of live blocks pad to 32. The padding is
    at most a twentieth of the side, and of no account.

    Args:
        rows: Inputs in a block.
        cols: Outputs in a block. One of `rows` and `cols` divides the other; with `regular=True`
            any two are possible.
        regular: Whether all block lines have the same number of live blocks.

    Raises:
        LayoutError: When a kernel is drawn that the blocks do not divide, with padding or without.

    Example:

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
        positive_integers(self, "rows", "cols")
        if not isinstance(self.regular, bool):
            raise ValueError(f"`regular` must be a bool. Received: regular={self.regular!r}")
        if not self.regular and max(self.rows, self.cols) % min(self.rows, self.cols):
            raise ValueError(f"One of `rows` and `cols` must divide the other. Received: {self}")

    def divides(self, canonical_shape: Sequence[int]) -> bool:
        """Whether inputs and outputs can be divided into blocks, regular ones with padding."""
        *_, inputs, outputs = canonical_shape
        rows = block_count(inputs, self.rows) * self.rows
        cols = block_count(outputs, self.cols) * self.cols
        if rows == inputs or cols == outputs:
            sides = (inputs, rows, self.rows), (outputs, cols, self.cols)
            (side, padded, width), (other, _, _) = sides if cols == outputs else sides[::-1]
            even = block_count(side, block_count(side, width)) == width
            close = padded <= min(_PADDED * side, other)
            return padded == side or (self.regular and even and close)
        return False

    def check(self, canonical_shape: Sequence[int]) -> None:
        """Refuses inputs or outputs that cannot be divided into blocks."""
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
        *_, inputs, outputs = canonical_shape
        parts = math.gcd(block_count(inputs, self.rows), block_count(outputs, self.cols))
        return math.prod(canonical_shape) // parts

    def fan_in(self, canonical_shape: Sequence[int], count: int) -> int:
        """Live input blocks of each output block of a regular kernel with `count` live entries."""
        *_, inputs, outputs = canonical_shape
        step = fan_step(block_count(inputs, self.rows), block_count(outputs, self.cols))
        return count // self.unit(canonical_shape) * step

    def least(self, canonical_shape: Sequence[int]) -> int:
        """A block line of `a` orthonormal rows needs blocks with `a` columns in all."""
        if self.regular:
            return self.unit(canonical_shape)
        batch, parts, *_, inputs, outputs = canonical_shape
        blocks = min(inputs, outputs) // min(self.rows, self.cols)
        return batch * parts * blocks * self.unit(canonical_shape)

    def covering(self, canonical_shape: Sequence[int]) -> int:
        """A block for each line along the longer side."""
        if self.regular:
            return self.unit(canonical_shape)
        batch, parts, *_, inputs, outputs = canonical_shape
        (n, a), (m, b), _ = _sides(inputs, outputs, self)
        return batch * parts * max(m // b, n // min(a, b)) * self.unit(canonical_shape)

    def live_count(self, canonical_shape: Sequence[int], density: float) -> int:
        """See `Structure.live_count`."""
        step = self.unit(canonical_shape) / math.prod(canonical_shape)
        # All multiples up to the whole kernel are possible: only too low ones are refused.
        if self.regular and round(check_density(density) / step) == 0:
            near = f"the nearest two to this one are {step:.6g} and {2 * step:.6g}"
            near = near if step < 1.0 else "there is no other"
            raise DensityError(
                f"The density of a kernel of {describe(canonical_shape)} with the structure {self} "
                f"must be a multiple of {step:.6g}: the least density is {step:.6g}, the largest "
                f"1; {near}. Received: density={density!r}"
            )
        return super().live_count(canonical_shape, density)

    def draw(
        self, canonical_shape: Sequence[int], count: int, density: float, options: DrawOptions
    ) -> tuple[np.ndarray, np.ndarray]:
        """See `Structure.draw`. Regular blocks always cover."""
        if self.regular:
            fan = self.fan_in(canonical_shape, count)
            drawn = draw_regular(canonical_shape, self.rows, self.cols, fan, options)
            return drawn.dense(), drawn.mask()
        batch, parts, *taps, inputs, outputs = canonical_shape
        unit = self.rows * self.cols
        matrices = batch * parts
        at_center = min(live_count(density, matrices * inputs * outputs // unit), count // unit)
        least = self.least(canonical_shape) // unit
        if options.cover:
            least = max(least, min(self.covering(canonical_shape), count) // unit)
        shares = apportion(max(at_center, least), [1.0] * matrices)

        grid = (inputs // self.rows, outputs // self.cols)
        kernel = np.zeros(canonical_shape)
        live = np.zeros((batch, parts, *taps, *grid), dtype=bool)
        center = center_of(canonical_shape)
        for share, matrix in zip(shares, np.ndindex(batch, parts), strict=True):
            part = _block_orthogonal(inputs, outputs, self, share, options)
            kernel[(*matrix, *center)] = options.gain * part
            blocks = part.reshape(grid[0], self.rows, grid[1], self.cols)
            live[(*matrix, *center)] = (blocks != 0).any(axis=(1, 3))
        unmask_at_random(live, count // unit, options.rng)
        return kernel, live.repeat(self.rows, axis=-2).repeat(self.cols, axis=-1)


def best_regular(
    block: Block,
    scores: np.ndarray,
    count: int,
    rng: np.random.Generator,
    among: np.ndarray | None = None,
) -> np.ndarray:
    """The mask of regular blocks with `count` live entries whose scores have the largest sum.

    `scores` are of the canonical shape, `count` is a multiple of `block.unit`, `rng` decides
    between equals. Only blocks inside `among`, a mask with more live blocks, are taken.
    """
    batch, parts, *taps, inputs, outputs = shape = scores.shape
    over_taps = scores.reshape(batch * parts, math.prod(taps), inputs, outputs).sum(axis=1)
    by_block = to_blocks(over_taps, block.rows, block.cols)
    sums = by_block.sum(axis=(2, 4), dtype=np.float64)
    fan_in = block.fan_in(shape, count)
    _, rows, cols = sums.shape
    fans = np.full(rows, cols * fan_in // rows), np.full(cols, fan_in)
    live = np.zeros_like(by_block, dtype=bool)
    closed = np.zeros(sums.shape, dtype=bool)
    if among is not None:
        given: np.ndarray = among.reshape(batch * parts, -1, inputs, outputs).max(axis=1)
        closed = ~to_blocks(given, block.rows, block.cols).max(axis=(2, 4))
    for blocks, shut, matrix in zip(live, closed, sums, strict=True):
        chosen = matched_by_score(shut, *fans, matrix, rng)
        blocks[...] = chosen[:, None, :, None]
    mask = from_blocks(live, inputs, outputs)
    mask = mask.reshape(batch, parts, *(1 for _ in taps), inputs, outputs)
    return np.broadcast_to(mask, shape).copy()


def _sides(
    inputs: int, outputs: int, block: Block
) -> tuple[tuple[int, int], tuple[int, int], bool]:
    """The shorter side and its block size, the longer side and its block size; whether wide."""
    rows, cols = (inputs, block.rows), (outputs, block.cols)
    wide = outputs > inputs or (outputs == inputs and block.cols <= block.rows)
    return (rows, cols, True) if wide else (cols, rows, False)


def _block_orthogonal(
    inputs: int, outputs: int, block: Block, limit: int, options: DrawOptions
) -> np.ndarray:
    """An orthogonal `(inputs, outputs)` matrix of at most `limit` live blocks.

    `n` is the shorter side, in groups of `a`; `m` the longer one, in lines of `b`, which are
    rotated. In a square matrix the lines are those of the side with the smaller blocks.
    """
    rng, angles = options.rng, options.angles
    (n, a), (m, b), wide = _sides(inputs, outputs, block)
    groups, lines = n // a, m // b
    matrix = np.zeros((lines, b, n))
    bits = [0] * lines
    if a <= b:
        # A line holds up to b / a groups, dealt out so that as many lines as possible are live.
        dense = random_orthogonal(min(groups, lines), b, rng, angles)
        for group in range(groups):
            slot, line = divmod(group, lines)
            part = dense[line][:, slot * a : (slot + 1) * a]
            matrix[line, :, group * a : (group + 1) * a] = part
            bits[line] |= 1 << group
    else:
        each = a // b
        for group, part in enumerate(random_orthogonal(groups, a, rng, angles)):
            part = part.reshape(each, b, a)
            matrix[group * each : (group + 1) * each, :, group * a : (group + 1) * a] = part
            bits[group * each : (group + 1) * each] = [1 << group] * each
    if lines > 1:
        supports = Supports.of(bits)
        pairs: list[tuple[int, int]] = []
        if options.cover:
            # Lines that begin with blocks come first; if some are empty, the others have one each.
            filled = sum(line != 0 for line in bits)
            start = covering_rotations(filled, lines, filled + limit - supports.live, rng)
            supports.apply(start)
            pairs += zip(start.first.tolist(), start.second.tolist(), strict=True)
        done = False
        while not done:  # random pairs, up to the first that takes the support over `limit`
            drawn = Rotations.draw(lines, max(3 * lines, 64), rng)
            applied, done = supports.apply_while_fits(drawn, limit)
            first, second = drawn.first[:applied].tolist(), drawn.second[:applied].tolist()
            pairs += zip(first, second, strict=True)
        # Row `k` of one line with row `k` of the other, by an angle each.
        cos, sin = (v.reshape(-1, b, 1) for v in cos_sin(angles, len(pairs) * b, rng))
        for (i, j), c, s in zip(pairs, cos, sin, strict=True):
            x, y = matrix[i], matrix[j]
            matrix[i], matrix[j] = c * x + s * y, c * y - s * x
    flat = matrix.reshape(m, n)
    return flat.T if wide else flat
