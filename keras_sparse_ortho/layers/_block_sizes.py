"""Sizes of blocks by the kind of device: which to choose from, and which were slow there."""

import dataclasses
import functools
from collections.abc import Mapping

from keras_sparse_ortho import _backend
from keras_sparse_ortho._keras_internals import warn_user
from keras_sparse_ortho.layers._block_grid import BlockGrid
from keras_sparse_ortho.layers._product_choice import GATHERED, block_products

_NO_ROWS: Mapping[int, int] = {}


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Measured sizes of blocks on one kind of device, by the shorter side of a block.

    Args:
        sides: tuple of int. The sides that `storage="blocks"` tries, the fastest first.
        slow_from: dict from a side to rows of a batch: from so many on, a training step on blocks
            of this side or less was not faster than the dense one by a tenth.
    """

    sides: tuple[int, ...]
    slow_from: Mapping[int, int]


# A new measurement changes a line here, and nothing else.
_ON_CPU = BlockSizes(  # benchmarks/results/blocks.md
    sides=(128, 64, 32, 16), slow_from=_NO_ROWS
)
# benchmarks/results/gpu.md, an H100. Larger blocks are faster there, too, so a model has the same
# blocks wherever it is made.
_ON_GPU = BlockSizes(sides=(128, 64, 32, 16), slow_from={32: 1024, 64: 4096})
_BY_KIND = {"cpu": _ON_CPU, "gpu": _ON_GPU}


def block_sizes(kind: str | None = None) -> BlockSizes:
    """The sizes on a kind of device, those on a CPU for one that was not measured.

    Args:
        kind: str. `"cpu"` or `"gpu"`. Default: that of the device that the backend computes on.
    """
    return _BY_KIND.get(kind or _backend.device_kind(), _ON_CPU)


def why_slow(kind: str, block: tuple[int, int], rows: int) -> str | None:
    """Why training on blocks is slow on a kind of device, and what to do; `None` if it is not.

    Args:
        kind: str. The kind of device.
        block: `(r, c)`.
        rows: int. Rows of a batch, or tokens.
    """
    sizes = block_sizes(kind)
    fastest = sizes.sides[0]
    for side, slow_rows in sorted(sizes.slow_from.items()):
        if min(block) <= side and rows >= slow_rows:
            return (
                f"On a {kind.upper()} a training step on blocks of {side} or "
                f"less took about as long as the dense one from {slow_rows} "
                f"rows in a batch on. Take blocks of {fastest}, by "
                f"structure=Block({fastest}, {fastest}), or smaller batches. "
                f"Received: blocks of {block[0]} x {block[1]} and {rows} rows"
            )
    return None


def warn_if_slow(grid: BlockGrid, rows: object) -> None:
    """Warns once where a gradient of gathered products is computed on blocks that are slow there.

    Only training computes gradients, whoever wrote its loop. Kernels have not been measured.

    Args:
        grid: BlockGrid of the kernel.
        rows: Rows of the batch, if they are known.
    """
    kind = _backend.device_kind()
    # Before anything that torch.compile could not trace.
    if not block_sizes(kind).slow_from:
        return
    if isinstance(rows, int) and block_products() == GATHERED:
        _warn_once(kind, (grid.rows, grid.cols), rows)


@functools.cache
def _warn_once(kind: str, block: tuple[int, int], rows: int) -> None:
    reason = why_slow(kind, block, rows)
    if reason is not None:
        warn_user(reason)
