"""Structures: `Block` and `NByM`, how they are drawn, and the regular blocks of highest score."""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from keras_sparse_ortho._checks import is_integer, other_keywords
from keras_sparse_ortho._foreign_names import for_value
from keras_sparse_ortho.errors import LayoutError
from keras_sparse_ortho.orthogonal._counts import (
    apportion,
    largest_mask,
    live_count,
    unmask_at_random,
)
from keras_sparse_ortho.orthogonal._eoi import (
    DrawOptions,
    cos_sin,
    covering_rotations,
    draw_until,
    pairs_of,
    random_orthogonal,
    unite,
    write_orthogonal,
)
from keras_sparse_ortho.orthogonal._kernel import (
    KernelLayout,
    Structure,
    center_of,
    default_layout,
    describe,
)
from keras_sparse_ortho.orthogonal._regular_blocks import RegularBlocks, draw_regular
from keras_sparse_ortho.orthogonal._regular_pattern import (
    block_count,
    fan_step,
    few_counts,
    from_blocks,
    matched_by_score,
    to_blocks,
)

StructureLike = Structure | str | tuple[int, int]
"""A structure, or a short form of one: `"2:4"`, `"32x32"` or `(32, 32)`."""

_PADDED = 1.05  # a padded side relative to the side: what the padding may cost
_LARGEST = 2**16  # kernels are padded to whole groups
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
            raise ValueError(f"`regular` must be a bool. Received: regular={self.regular!r}")

    def divides(self, canonical_shape: Sequence[int]) -> bool:
        """Whether inputs and outputs can be divided into blocks, regular ones with padding."""
        *_, inputs, outputs = canonical_shape
        sides = (inputs, self.rows, outputs), (outputs, self.cols, inputs)
        uneven = [one for one in sides if one[0] % one[1]]
        if not self.regular or len(uneven) != 1:
            return not uneven
        side, width, other = uneven[0]
        count = block_count(side, width)
        return block_count(side, count) == width and count * width <= min(_PADDED * side, other)

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
        if max(self.rows, self.cols) % min(self.rows, self.cols):
            raise ValueError(f"One of `rows` and `cols` must divide the other. Received: {self}")
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
        size = batch * parts * inputs * outputs // unit
        at_center = min(live_count(density, size) * unit, count)
        shares = self._shares(canonical_shape, at_center, count, options)
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
        if len({len(line) for line in self.live}) != 1 or {*"".join(self.live)} - {*"01"}:
            raise ValueError(f"Blocks are equal strings of 0 and 1. Received: {self.live!r:.200}")

    def __str__(self) -> str:
        return "\n".join(self.live).translate({48: ".", 49: "#"})

    @classmethod
    def of_mask(cls, mask: np.ndarray, block: Block) -> "GivenBlocks":
        """The blocks of a mask of the canonical shape that have a live entry."""
        mask = mask.reshape(*mask.shape[:2], -1, *mask.shape[-2:])
        found = to_blocks(mask, block.rows, block.cols).any(axis=(2, 4, 6))
        lines = np.concatenate(np.concatenate(found), axis=-1).astype(int)
        return cls(block.rows, block.cols, tuple("".join(map(str, line)) for line in lines))

    @property
    def array(self) -> np.ndarray:
        """Bool `(I, J)`."""
        return np.array([[digit == "1" for digit in line] for line in self.live])

    def check(self, canonical_shape: Sequence[int]) -> None:
        super().check(canonical_shape)
        batch, parts, *_, inputs, outputs = canonical_shape
        sides = inputs // self.rows, batch * parts * outputs // self.cols
        if sides != self.array.shape:
            raise LayoutError(
                f"The kernel has {sides[0]} x {sides[1]} blocks of {self.rows} x {self.cols}, and "
                f"each must be given. Received: an array of shape {self.array.shape}"
            )

    def unit(self, canonical_shape: Sequence[int]) -> int:
        return round(self.array.mean() * math.prod(canonical_shape))

    least = covering = most = unit

    def draw(
        self, canonical_shape: Sequence[int], count: int, density: float, options: DrawOptions
    ) -> tuple[np.ndarray, np.ndarray]:
        batch, parts, *_ = canonical_shape
        kernel, mask = np.zeros(canonical_shape), np.zeros(canonical_shape, dtype=bool)
        shares = np.split(self.array, batch * parts, axis=1)
        for live, matrix in zip(shares, np.ndindex(batch, parts), strict=True):
            drawn = options.gain * draw_on(live, self.rows, self.cols, options.rng)
            kernel[(*matrix, *center_of(canonical_shape))] = drawn
            mask[matrix] = live.repeat(self.rows, axis=0).repeat(self.cols, axis=1)
        return kernel, mask


@dataclasses.dataclass(frozen=True)
class NByM(Structure):
    """At most `n` live entries among every `m` consecutive inputs, for each output.

    `NByM(2, 4)` is the 2:4 pattern of sparse tensor cores. At density `n / m` every group has
    exactly `n`; a lower density is sparser within the pattern.

    Construction: the inputs of each group of `m` are split at random into `m / n` classes of `n`,
    and so are the outputs; each class of inputs and its outputs get a sparse orthogonal matrix. At
    the other taps of a convolution `n` random inputs of each output have entries of zero. With
    fewer outputs than classes, inputs of the other classes are dead at the center tap. If `m` does
    not divide the inputs, the last group is shorter: 3 inputs are one group of `NByM(2, 4)`, with
    at most 2 live entries.

    Args:
        n: Most live entries of a group. Divides `m`.
        m: Consecutive inputs of a group.

    Examples:
        >>> from keras_sparse_ortho.orthogonal import exact_orthogonal
        >>> kernel, mask = exact_orthogonal((64, 128), 0.5, seed=0, structure=NByM(2, 4))
        >>> {int(live) for live in mask.reshape(16, 4, 128).sum(axis=1).flat}
        {2}
    """

    n: int
    m: int

    def __post_init__(self) -> None:
        self._check_sides("n", "m")
        if self.m % self.n or self.m > _LARGEST:
            raise ValueError(f"`n` must divide an `m` of at most {_LARGEST:,}. Received: {self}")

    def in_groups(self, array: np.ndarray, fill: Any = 0) -> np.ndarray:
        """`(..., inputs, outputs)` as `(..., groups, m, outputs)`; `fill` pads the last group."""
        *outer, inputs, outputs = array.shape
        padding = np.full((*outer, -inputs % self.m, outputs), fill, array.dtype)
        return np.concatenate([array, padding], axis=-2).reshape(*outer, -1, self.m, outputs)

    def largest(self, scores: np.ndarray, count: int) -> np.ndarray:
        """The mask of the `count` largest entries, at most `n` of each group of `m`.

        If `count` is more, groups differ by one entry at most, so that none gets one back later.
        """
        share = count / scores.size * self.m
        most, fewest = (max(self.n, n) for n in (math.ceil(share - 1e-9), math.floor(share + 1e-9)))
        ranked = self.strongest(scores, min(most, self.m))
        if most > fewest:
            first = self.strongest(scores, fewest) > -1.0
            ranked = np.where(first, ranked + (scores.max() + 1.0), ranked)
        return largest_mask(ranked, count)

    def strongest(self, scores: np.ndarray, most: int) -> np.ndarray:
        """Scores of the `most` largest entries of each group, the first of equals; -2 elsewhere."""
        *outer, inputs, outputs = scores.shape
        groups = self.in_groups(scores, -3.0)
        at = self.m - most
        least = np.partition(groups, at, axis=-2)[..., at : at + 1, :]
        kept = groups >= least
        if np.count_nonzero(kept) > most * least.size:
            larger, equal = groups > least, groups == least
            room = most - np.sum(larger, axis=-2, keepdims=True)
            kept = larger | (equal & (np.cumsum(equal, axis=-2) <= room))
        return np.where(kept, groups, -2.0).reshape(*outer, -1, outputs)[..., :inputs, :]

    def _class_sizes(self, inputs: int, outputs: int) -> tuple[list[int], list[int]]:
        """Inputs and outputs of each class: in proportion, so that all of the shorter side fit."""
        groups, rest = divmod(inputs, self.m)
        parts = apportion(rest, [1.0] * (self.m // self.n))
        rows = [groups * self.n + part for part in parts]
        return rows, apportion(outputs, rows)

    def unit(self, canonical_shape: Sequence[int]) -> int:
        return 1

    def least(self, canonical_shape: Sequence[int]) -> int:
        batch, parts, *_, inputs, outputs = canonical_shape
        return batch * parts * min(inputs, outputs)

    def covering(self, canonical_shape: Sequence[int]) -> int:
        """The longer side of the matrix of each class."""
        batch, parts, *_, inputs, outputs = canonical_shape
        sizes = zip(*self._class_sizes(inputs, outputs), strict=True)
        return batch * parts * sum(max(rows, share) for rows, share in sizes if share)

    def most(self, canonical_shape: Sequence[int]) -> int:
        """`n` of every `m` entries; at the center tap those of the classes."""
        batch, parts, *taps, inputs, outputs = canonical_shape
        groups, rest = divmod(inputs, self.m)
        elsewhere = outputs * (groups * self.n + min(rest, self.n))
        center = sum(map(math.prod, zip(*self._class_sizes(inputs, outputs), strict=True)))
        return batch * parts * ((math.prod(taps) - 1) * elsewhere + center)

    def draw(
        self, canonical_shape: Sequence[int], count: int, density: float, options: DrawOptions
    ) -> tuple[np.ndarray, np.ndarray]:
        batch, parts, *taps, inputs, outputs = canonical_shape
        at_center = live_count(density, batch * parts * inputs * outputs)
        at_center = min(at_center, count, self.most((batch, parts, inputs, outputs)))
        shares = self._shares(canonical_shape, at_center, count, options)
        kernel = np.zeros(canonical_shape)
        allowed = np.zeros(canonical_shape, dtype=bool)
        if taps:
            keys: np.ndarray = self.in_groups(options.rng.random(canonical_shape), np.inf)
            ranks = keys.argsort(axis=-2).argsort(axis=-2)
            padded = (ranks < self.n).reshape(batch, parts, *taps, -1, outputs)
            allowed[...] = padded[..., :inputs, :]
        center = center_of(canonical_shape)
        for share, matrix in zip(shares, np.ndindex(batch, parts), strict=True):
            index = (*matrix, *center)
            self._write(kernel[index], allowed[index], share, options)
        mask = kernel != 0
        within = mask[allowed]
        unmask_at_random(within, count, options.rng)
        mask[allowed] = within
        return kernel, mask

    def _write(
        self, kernel: np.ndarray, allowed: np.ndarray, count: int, options: DrawOptions
    ) -> None:
        """Fills one zeroed matrix, and the mask of the entries that its classes allow."""
        inputs, outputs = kernel.shape
        rows, sizes = self._class_sizes(inputs, outputs)
        allowed[...] = False
        # The shuffled place of an input within its group decides its class.
        groups = inputs // self.m
        places = np.argsort(options.rng.random((groups, self.m)), axis=1)
        places += np.arange(0, groups * self.m, self.m)[:, None]
        order = np.argsort(options.rng.random(outputs))
        rest = groups * self.m + np.argsort(options.rng.random(inputs % self.m))
        of_rest = np.split(rest, np.cumsum([size - groups * self.n for size in rows])[:-1])
        shares = np.split(order, np.cumsum(sizes)[:-1])
        counts = [min(pair) for pair in zip(rows, sizes, strict=True)]
        if options.cover:
            full = [max(n, share) if share else 0 for n, share in zip(rows, sizes, strict=True)]
            counts = _raise_towards(counts, full, count)
        most = [n * share for n, share in zip(rows, sizes, strict=True)]
        counts = _raise_towards(counts, most, count)
        for k, share in enumerate(shares):
            if not len(share):
                continue
            part = np.zeros((rows[k], len(share)))
            write_orthogonal(part, counts[k], options)
            own = places[:, k * self.n : (k + 1) * self.n].reshape(-1)
            index = np.ix_(np.concatenate([own, of_rest[k]]), share)
            kernel[index] = part
            allowed[index] = True


def as_structure(given: Any) -> Any:
    """The structure for `"2:4"`, `"8x8"` or `(8, 8)`; anything else is returned as it is."""
    if isinstance(given, str):
        parts = re.fullmatch(r"(\d+) ?([:xX]) ?(\d+)", given)
        if parts is None:
            raise ValueError(
                '`structure` as text must be "n:m", such as "2:4", or "rows x cols", such as '
                f'"32x32".{for_value("structure", given)} Received: structure={given!r}'
            )
        sides = int(parts[1]), int(parts[3])
        return NByM(*sides) if parts[2] == ":" else Block(*sides)
    if isinstance(given, list | tuple) and len(given) == 2 and all(map(is_integer, given)):
        return Block(*map(int, given))
    return given


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
        raise ValueError(f"`dtype` must be a NumPy floating type. Received: dtype={dtype!r}")
    shape = tuple(int(size) for size in shape)
    canonical = (layout or default_layout(shape)).canonical_shape(shape)
    structure.check(canonical)
    fan_in = structure.fan_in(canonical, structure.live_count(canonical, density))
    options = DrawOptions(np.random.default_rng(seed), gain)
    return draw_regular(canonical, structure.rows, structure.cols, fan_in, options, dtype)


def block_unit(block: Block, canonical_shape: Sequence[int]) -> int:
    """Entries by which blocks that are live at all taps can be more or less."""
    if block.regular:
        return block.unit(canonical_shape)
    return math.prod(canonical_shape[2:-2]) * block.rows * block.cols


def best_blocks(
    block: Block, scores: np.ndarray, count: int, rng: np.random.Generator, *, few: bool = True
) -> np.ndarray:
    """The mask of blocks with `count` live entries whose scores have (nearly) the largest sum."""
    # `scores` are canonical, `count` is a multiple of `block_unit`, `rng` decides between equals.
    # For `few`, lines have at most 6 different counts on either side: layers of live blocks compute
    # with few groups of lines.
    batch, parts, *taps, inputs, outputs = shape = scores.shape
    over_taps = scores.reshape(batch * parts, math.prod(taps), inputs, outputs).sum(axis=1)
    by_block = to_blocks(over_taps, block.rows, block.cols)
    sums = by_block.sum(axis=(2, 4), dtype=np.float64)
    matrices, rows, cols = sums.shape
    nothing = np.zeros((rows, cols), dtype=bool)
    if block.regular:
        fan_in = block.fan_in(shape, count)
        fans = np.full(rows, cols * fan_in // rows), np.full(cols, fan_in)
        live = np.stack([matched_by_score(nothing, *fans, matrix, rng) for matrix in sums])
    else:
        side_by_side = np.concatenate([*sums], axis=1)
        chosen = largest_mask(side_by_side, count // block_unit(block, shape))
        counts = chosen.sum(axis=1), chosen.sum(axis=0)
        if few and max(len({*side.tolist()}) for side in counts) > _MOST_COUNTS:
            inputs_, outputs_ = (few_counts(side, _MOST_COUNTS) for side in counts)
            nothing = np.zeros_like(chosen)
            chosen = matched_by_score(nothing, inputs_, outputs_, side_by_side, rng)
        live = np.stack(np.split(chosen, matrices, axis=1))
    whole = np.broadcast_to(live[:, :, None, :, None], by_block.shape)
    mask = from_blocks(whole, *shape[-2:]).reshape(batch, parts, *(1 for _ in taps), *shape[-2:])
    return np.broadcast_to(mask, shape).copy()


def draw_on(live: np.ndarray, rows: int, cols: int, rng: np.random.Generator) -> np.ndarray:
    """A matrix `(I r, J c)` on the live blocks of a bool `(I, J)`, see `GivenBlocks`."""
    size = math.gcd(rows, cols)
    pieces = live.repeat(rows // size, axis=0).repeat(cols // size, axis=1)
    is_wide = pieces.shape[1] > pieces.shape[0]
    pieces = pieces.T if is_wide else pieces
    lines, groups = pieces.shape
    first, to = (np.argsort(rng.random(side)) for side in pieces.shape)
    found = maximum_bipartite_matching(csr_array(pieces.T[np.ix_(to, first)]), perm_type="column")
    if found.min() < 0:
        blocks = np.zeros((*live.shape, rows, cols))
        scale = np.sqrt(max(cols / rows, 1.0) / live.sum(axis=0)[np.nonzero(live)[1]])
        own = random_orthogonal(len(scale), max(rows, cols), rng)[:, :rows, :cols]
        blocks[live] = scale[:, None, None] * own
        return blocks.transpose(0, 2, 1, 3).reshape(live.shape[0] * rows, -1)
    matrix, support = np.zeros((lines, size, groups, size)), np.zeros_like(pieces)
    matrix[first[found], :, to] = random_orthogonal(groups, size, rng)
    support[first[found], to] = True
    tried = np.zeros(lines, dtype=bool)
    while not tried.all():  # lines of small supports, empty ones first, with those they grow by
        line = int((support.sum(axis=1) + rng.random(lines) + pieces.size * tried).argmin())
        union = support | support[line]
        fits = ~(union & ~(pieces & pieces[line])).any(axis=1)
        grown = np.where(fits, 2 * union.sum(axis=1) - support.sum(axis=1), 0)
        other = int((grown + rng.random(lines)).argmax())
        tried[line] = True
        if grown[other] > support[line].sum():
            cos, sin = (turn[:, None, None] for turn in cos_sin(size, rng))
            x, y = matrix[line].copy(), matrix[other].copy()
            matrix[line], matrix[other] = cos * x + sin * y, cos * y - sin * x
            support[line] = support[other] = union[other]
            tried[other] = tried[line] = False
    flat = matrix.reshape(lines * size, -1)
    return flat.T if is_wide else flat


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
    """An orthogonal `(inputs, outputs)` matrix of at most `limit` live blocks."""
    # The lines of the longer side are rotated; in a square matrix those of smaller blocks.
    rng = options.rng
    (n, a), (m, b), wide = _sides(inputs, outputs, block)
    groups, lines = n // a, m // b
    matrix = np.zeros((lines, b, n))
    bits = [0] * lines
    if a <= b:
        # A line holds up to b / a groups, dealt out so that as many lines as possible are live.
        dense = random_orthogonal(min(groups, lines), b, rng)
        for group in range(groups):
            slot, line = divmod(group, lines)
            part = dense[line][:, slot * a : (slot + 1) * a]
            matrix[line, :, group * a : (group + 1) * a] = part
            bits[line] |= 1 << group
    else:
        each = a // b
        for group, part in enumerate(random_orthogonal(groups, a, rng)):
            part = part.reshape(each, b, a)
            matrix[group * each : (group + 1) * each, :, group * a : (group + 1) * a] = part
            bits[group * each : (group + 1) * each] = [1 << group] * each
    if lines > 1:
        # Lines that begin with blocks come first; if some are empty, the others have one each.
        filled = sum(line != 0 for line in bits)
        spare = limit - sum(map(int.bit_count, bits))
        covered = lines if options.cover else filled
        sequence = covering_rotations(filled, covered, filled + spare, rng)
        unite(bits, sequence)
        sequence = np.concatenate([sequence, draw_until(bits, limit, rng)])
        # Row `k` of one line with row `k` of the other, by an angle each.
        cos, sin = (v.reshape(-1, b, 1) for v in cos_sin(len(sequence) * b, rng))
        for (i, j), c, s in zip(pairs_of(sequence), cos, sin, strict=True):
            x, y = matrix[i], matrix[j]
            matrix[i], matrix[j] = c * x + s * y, c * y - s * x
    flat = matrix.reshape(m, n)
    return flat.T if wide else flat


def _raise_towards(counts: list[int], most: list[int], total: int) -> list[int]:
    """Raises `counts` towards `most` in proportion to the difference, up to a sum of `total`."""
    missing = [full - count for full, count in zip(most, counts, strict=True)]
    more = min(total - sum(counts), sum(missing))
    if more <= 0:
        return counts
    return [count + add for count, add in zip(counts, apportion(more, missing), strict=True)]
