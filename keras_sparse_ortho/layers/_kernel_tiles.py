"""Sizes of the tiles that one program of a GPU's kernel multiplies.

No GPU has measured them; `benchmarks/gpu.py` does.
"""

import dataclasses
import math

# Products of matrices on tensor cores have no shorter sides in Triton.
_SHORTEST_SIDE = 16
_LONGEST_SIDE = 128
# Below so many programs a kernel leaves processors idle: two for each of an H100's 132.
_PROGRAMS = 256
_SHORTEST_TILE = 32  # shorter tiles read more weights for each row


@dataclasses.dataclass(frozen=True)
class Tile:
    """A program sums products `(rows, depth) x (depth, cols)`; all sides are powers of two.

    Args:
        rows: int. Rows of the tile of the result.
        depth: int. Entries that are summed in one step.
        cols: int. Columns of the tile of the result.
    """

    rows: int
    depth: int
    cols: int

    @property
    def warps(self) -> int:
        """Groups of 32 threads: twice as many for large tiles, whose sums fill the registers."""
        is_large = self.rows * self.cols > _LONGEST_SIDE * _LONGEST_SIDE // 2
        return 8 if is_large else 4


def line_tile(
    batch: int, height: int, width: int, lines: int, item_size: int
) -> Tile:
    """The tile of a product of `batch` rows with blocks of `height x width` in each line."""
    cols = min(_power_of_two(width), _LONGEST_SIDE)
    rows = min(_power_of_two(batch), _LONGEST_SIDE)
    programs_across = lines * math.ceil(width / cols)
    while (
        rows > _SHORTEST_TILE
        and programs_across * math.ceil(batch / rows) < _PROGRAMS
    ):
        rows //= 2
    return Tile(rows, min(_power_of_two(height), _depth(item_size)), cols)


def block_tile(
    batch: int, height: int, width: int, blocks: int, item_size: int
) -> Tile:
    """The tile of the gradient of blocks of `height x width`, a sum over `batch` rows."""
    rows = min(_power_of_two(height), _LONGEST_SIDE)
    cols = min(_power_of_two(width), _LONGEST_SIDE)
    programs = blocks * math.ceil(height / rows) * math.ceil(width / cols)
    if programs < _PROGRAMS:
        rows = min(rows, _LONGEST_SIDE // 2)
        cols = min(cols, _LONGEST_SIDE // 2)
    return Tile(rows, min(_power_of_two(batch), _depth(item_size)), cols)


def _depth(item_size: int) -> int:
    """Entries of 128 bytes, the width of a line of a GPU's cache."""
    return 128 // item_size


def _power_of_two(size: int) -> int:
    """The least power of two that is not below `size`, and at least 16."""
    return max(_SHORTEST_SIDE, 1 << (size - 1).bit_length())
