"""Which budgets TFMOT can meet in blocks and in m of n."""

from collections.abc import Mapping, Sequence
from typing import Any

from keras_sparse_ortho.errors import BudgetError, NotPrunableError


def refuse_structure(
    paths: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    live: int,
    size: int,
    options: Mapping[str, Any],
) -> None:
    """Raises if TFMOT's wrapper with these options would leave another density than the budget.

    With `sparsity_m_by_n` it asks no schedule: `m` of `n` consecutive entries are zero. With
    `block_size` it ranks blocks of 2-D kernels; a kernel that is one block high or wide fails in
    the middle of training.

    Raises:
        BudgetError: A density that cannot be had.
        NotPrunableError: A kernel that cannot be pruned so.
    """
    m_by_n = options.get("sparsity_m_by_n")
    if m_by_n:
        zeros, length = m_by_n
        meant = 1 - zeros / length
        if abs(live - meant * size) > 1:
            raise BudgetError(
                f"With sparsity_m_by_n={tuple(m_by_n)} TFMOT leaves the density {meant:.6g} in "
                "every layer, whatever the schedule. Take density="
                f"{meant:.6g} with budget='uniform', or another pattern. "
                f"Received: density={live / size:.6g} for {list(paths)}"
            )
    high, wide = options.get("block_size", (1, 1))
    if (high, wide) == (1, 1):
        return
    for path, shape in zip(paths, shapes, strict=True):
        blocks = [-(-side // block) for side, block in zip(shape, (high, wide), strict=False)]
        if len(shape) != 2 or min(blocks) < 2:
            raise NotPrunableError(
                "TFMOT prunes blocks of 2-D kernels that are at least two blocks high and two "
                f"blocks wide. `exclude` the others. Received: block_size={(high, wide)}, "
                f"{path!r} of shape {shape}"
            )
        if live * blocks[0] * blocks[1] < 0.5 * size:
            raise BudgetError(
                f"The budget leaves '{path}' less than half a block of its "
                f"{blocks[0] * blocks[1]}, and TFMOT keeps at least one. Ask for a higher density "
                f"or smaller blocks. Received: density={live / size:.6g}, block_size={(high, wide)}"
            )
