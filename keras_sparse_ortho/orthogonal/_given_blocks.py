"""`GivenBlocks`: kernels on given live blocks, exactly orthogonal where these allow it."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from keras_sparse_ortho.errors import LayoutError
from keras_sparse_ortho.orthogonal._eoi import DrawOptions, cos_sin, random_orthogonal
from keras_sparse_ortho.orthogonal._kernel import center_of
from keras_sparse_ortho.orthogonal._regular_pattern import to_blocks
from keras_sparse_ortho.orthogonal._structures import Block


@dataclasses.dataclass(frozen=True, repr=False)
class GivenBlocks(Block):
    """Exactly these blocks are live, at all taps: a string of `0` and `1` for each block of inputs.

    A matrix is drawn exactly orthogonal if its blocks have a matching: for each line along the
    shorter side a live block in a line along the longer side of its own. Then pairs of lines are
    rotated while both have the blocks for it; the other live blocks begin with zeros. Without a
    matching, as where inputs are not used, each block is orthogonal, and scaled by its fan: outputs
    have about the norm `gain`. The matrices of several gates stand side by side.
    """

    live: tuple[str, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "live", tuple(map(str, self.live)))
        if len({len(line) for line in self.live}) != 1 or {*"".join(self.live)} - {*"01"}:
            raise ValueError(
                "Given blocks are strings of 0 and 1 of one length. "
                f"Received: live={self.live!r:.200}"
            )

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
            raise LayoutError(f"There are {sides} blocks. Received: {self.array.shape} given ones")

    def unit(self, canonical_shape: Sequence[int]) -> int:
        """The only count."""
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
