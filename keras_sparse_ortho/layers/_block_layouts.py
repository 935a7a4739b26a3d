"""On which devices of a mesh the blocks of a layer lie."""

import dataclasses

from keras_sparse_ortho._keras_internals import Axes, axes_at, mesh_size
from keras_sparse_ortho.errors import LayoutError
from keras_sparse_ortho.layers._block_grid import BlockGrid


@dataclasses.dataclass(frozen=True)
class BlockAxes:
    """The axes of a mesh along which blocks and their places are cut; `None` if nothing says so.

    What a `keras.distribution.LayoutMap` has for the kernel of the layer whose place this one
    takes, `"hidden/kernel"`, holds for its blocks: they are cut by output blocks, so that each
    device has all live blocks of its outputs, along the axis along which the kernel is. An entry
    for `"hidden/blocks"`, `(J, k, *taps, r, c)`, goes first.

    Args:
        blocks: For `(J, k, *taps, r, c)`.
        inputs_of: For `(J, k)`.
        slots_of: For `(I, J k / I)`, which every device has.
    """

    blocks: Axes | None = None
    inputs_of: Axes | None = None
    slots_of: Axes | None = None

    @classmethod
    def at(cls, path: str, grid: BlockGrid) -> "BlockAxes":
        """Those of the layer at a path.

        Raises:
            LayoutError: More devices along the axis than divide the output blocks.
        """
        rank = len(grid.blocks_shape)
        given = axes_at(f"{path}/blocks")
        if given is None:
            kernel = axes_at(f"{path}/kernel")
            if kernel is None:
                return cls()
            used = [axis for axis in reversed(kernel) if axis is not None]
            given = (used[0] if used else None,)
        axis = given[0] if given else None
        if axis is not None and grid.out_blocks % mesh_size(axis):
            raise LayoutError(
                f"The blocks of '{path}' are cut by output blocks, whose number the "
                f"{mesh_size(axis)} devices along '{axis}' must divide. Give '{path}/blocks' an "
                f"entry of its own in the LayoutMap, such as {(None,) * rank}, for blocks that "
                f"every device holds. Received: {grid.out_blocks} output blocks"
            )
        whole = given + (None,) * (rank - len(given))
        return cls(whole, (axis, None), (None, None))
