"""`"blocks"`: layers that hold, and compute with, the live blocks of their kernels only."""

from collections.abc import Mapping
from typing import NamedTuple, TypeGuard

import keras
import numpy as np

from keras_sparse_ortho.errors import LayoutError, NotPrunableError
from keras_sparse_ortho.initializers import AnyDraw, BlockDraw, Draw
from keras_sparse_ortho.kernels import KernelLayout
from keras_sparse_ortho.layers import (
    BlockLayer,
    Counts,
    PrunableLayer,
    block_layer_like,
    check_block,
    pattern_of,
    why_no_block_form,
)
from keras_sparse_ortho.orthogonal import Block
from keras_sparse_ortho.storages._storage_form import (
    StorageForm,
    register_storage,
)
from keras_sparse_ortho.storages._target import KernelChange, quantizer_of


class _Grid(NamedTuple):
    """The numbers that a layer on blocks needs of a kernel before it is built."""

    density: float
    block: tuple[int, int]
    counts: Counts | None  # of live blocks in each line; `None` for equal ones


@register_storage
class BlockForm(StorageForm):
    """A layer that computes on live blocks, such as `layers.BlockSparseDense`."""

    name = "blocks"
    keeps_dense_kernel = False
    fallback = "compact"

    def why_not(
        self, layer: keras.layers.Layer, changes: Mapping[str, KernelChange]
    ) -> str | None:
        plain = _layer_inside(layer)
        reason = why_no_block_form(plain)
        if reason is not None:
            return f"{reason}. Received: {type(plain).__name__}"
        for change in changes.values():
            storage = change.weight.storage
            if storage is not None and not storage.fixed:
                return (
                    "live blocks are for masks that are fixed, or whose schedule has ended. "
                    f"Received: {type(storage).__name__}"
                )
        try:
            _unbuilt_layer(plain, changes)
        except (NotPrunableError, LayoutError) as error:
            return str(error)
        return None

    def form(
        self, layer: keras.layers.Layer, changes: Mapping[str, KernelChange]
    ) -> keras.layers.Layer:
        """A layer on live blocks, with the values of the given one."""
        plain = _layer_inside(layer)
        block_layer = _unbuilt_layer(plain, changes)
        block_layer.trainable = layer.trainable
        block_layer.build_like(plain)
        storages = block_layer.storages()
        for name, change in changes.items():
            storage = storages[name]
            storage.weight.variable.trainable = change.weight.variable.trainable
            draw = change.mask_draw
            if _is_drawn_in_place(draw):
                storage.set_drawn(draw.blocks)
                continue
            kernel = draw.kernel
            if kernel is None:
                kernel = change.raw_value()
            storage.set_kernel(np.where(draw.mask, kernel, 0.0), draw.mask)
            if draw.fresh:
                storage.mark_as_drawn()
        quantizer = quantizer_of(changes)
        if quantizer is not None:
            block_layer.set_quantizer(quantizer)
        return block_layer


def _layer_inside(layer: keras.layers.Layer) -> keras.layers.Layer:
    """The plain layer in a wrapper; a layer without a wrapper itself."""
    return layer.layer if isinstance(layer, PrunableLayer) else layer


def _unbuilt_layer(
    plain: keras.layers.Layer, changes: Mapping[str, KernelChange]
) -> BlockLayer:
    """The layer on blocks for a plain one; NotPrunableError or LayoutError says why not."""
    kernels = {
        name.rpartition("/")[2]: _grid_of(change)
        for name, change in changes.items()
    }
    return block_layer_like(
        plain,
        density={name: grid.density for name, grid in kernels.items()},
        block={name: grid.block for name, grid in kernels.items()},
        counts={name: grid.counts for name, grid in kernels.items()},
        seed=0,
    )


def _grid_of(change: KernelChange) -> _Grid:
    draw = change.mask_draw
    block = _block_of(change, draw)
    if _is_drawn_in_place(draw):
        *_, rows, cols = draw.blocks.blocks.shape
        return _Grid(draw.blocks.density, (rows, cols), None)
    layout = change.weight.layout or KernelLayout.convolution()
    # The mask, not the nonzero entries: live ones may be zero, at other taps.
    matrices = layout.to_canonical(draw.mask)[0]
    side_by_side = np.concatenate([*matrices], axis=-1)
    grid, _ = pattern_of(side_by_side, check_block(block), len(matrices))
    return _Grid(grid.density, block, grid.counts)


def _block_of(change: KernelChange, draw: AnyDraw) -> tuple[int, int]:
    """The size of blocks: of the target, of the draw, or of the initializer that drew."""
    if change.target.block is not None:
        return change.target.block
    if isinstance(draw, Draw) and draw.block is not None:
        return draw.block
    structure = getattr(draw.initializer, "structure", None)
    if isinstance(structure, Block):
        return structure.rows, structure.cols
    raise NotPrunableError(
        "its mask was not drawn with Block(rows, cols); give `block` if it is one of such "
        f"blocks. Received: structure={structure}"
    )


def _is_drawn_in_place(draw: AnyDraw) -> TypeGuard[BlockDraw]:
    """Whether a draw is of regular blocks along the axes of its layer."""
    return isinstance(draw, BlockDraw) and draw.initializer.layout is None
