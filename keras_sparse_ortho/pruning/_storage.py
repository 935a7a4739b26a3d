"""In which storage the weights of a model are held."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_sparse_ortho.errors import LayoutError, NotPrunableError
from keras_sparse_ortho.initializers import AnyDraw, BlockDraw, Draw
from keras_sparse_ortho.layers import BlockSparseLayer, block_layer_like
from keras_sparse_ortho.parametrizations import CompactMask, FixedMask, Parametrization

STORAGES = {
    "masked": FixedMask,
    "compact": CompactMask,
    "auto": CompactMask,
    "blocks": CompactMask,
}


def mask_class(storage: str, *, masks_are_given: bool = False) -> type[FixedMask]:
    """The parametrization that holds a mask in a storage, where that has no live blocks.

    Raises:
        ValueError: A storage that is not known; `"blocks"`, which chooses masks, for given ones.
    """
    if masks_are_given and storage == "blocks":
        raise ValueError(
            'storage="blocks" chooses which blocks are live; masks that are given are stored as '
            'live blocks, where they are of regular ones, by storage="auto". '
            f"Received: {storage=}"
        )
    if storage not in STORAGES:
        raise ValueError(f"`storage` must be one of {sorted(STORAGES)}. Received: {storage=}")
    return STORAGES[storage]


def in_storage(parametrization: Parametrization, storage: str) -> Parametrization:
    """The parametrization, or with `"compact"` that of the same mask in compact storage.

    Raises:
        NotPrunableError: Compact storage for a parametrization that needs the dense raw weight.
    """
    kind = mask_class(storage)
    if storage in ("auto", "blocks"):
        raise ValueError(
            '`storage` of a parametrization is "masked" or "compact"; live blocks are layers of '
            f"their own, see keras_sparse_ortho.to_blocks. Received: {storage=}"
        )
    if not kind.compact or parametrization.compact:
        return parametrization
    if not parametrization.movable:
        raise NotPrunableError(
            "Compact storage is for masks that are fixed: other parametrizations need the dense "
            f"raw weight. Received: storage={storage!r}, {type(parametrization).__name__}"
        )
    return parametrization.of_class(kind)  # type: ignore[attr-defined]


def on_live_blocks(
    layer: Any, weights: Mapping[str, str], draws: Mapping[str, AnyDraw], values: Any
) -> BlockSparseLayer | None:
    """The new layer, built, or `None` where the layer or its draw has no such form.

    Where the kernel is drawn, neither it nor its mask is ever made.

    Args:
        layer: The plain layer.
        weights: The paths of its weights that are to be sparse, by their names below it.
        draws: By path what was drawn.
        values: Gives the kernel of a path, to be kept where none was drawn.
    """
    path = weights.get("kernel", "")
    drawn = draws.get(path)
    if len(weights) > 1:
        return None
    if isinstance(drawn, BlockDraw):
        block, density = drawn.blocks.blocks.shape[-2:], drawn.blocks.density
        if drawn.blocks.blocks.shape[:2] != (1, 1) or drawn.initializer.layout is not None:
            return None
    elif isinstance(drawn, Draw) and drawn.block is not None:
        block, density = drawn.block, drawn.live / drawn.mask.size
    else:
        return None
    try:
        new = block_layer_like(layer, density=density, block=tuple(block), seed=0)
    except (NotPrunableError, LayoutError):
        return None
    new.trainable = layer.trainable

    new.build_like(layer)
    if isinstance(drawn, BlockDraw):
        new.set_blocks(drawn.blocks.with_taps()[0, 0], drawn.blocks.inputs_of[0, 0])
        new.mark_as_drawn()
    else:
        kernel = values(path) if drawn.kernel is None else drawn.kernel
        new.set_kernel(np.where(drawn.mask, kernel, 0.0), drawn.mask)
    return new
