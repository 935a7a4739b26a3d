"""In which storage the weights of a model are held."""

from collections.abc import Mapping
from typing import Any

from keras_sparse_ortho.errors import LayoutError, NotPrunableError
from keras_sparse_ortho.initializers import AnyDraw, BlockDraw
from keras_sparse_ortho.layers import BlockSparseLayer, block_layer_like
from keras_sparse_ortho.parametrizations import CompactMask, FixedMask, Parametrization

STORAGES = {"masked": FixedMask, "compact": CompactMask, "auto": CompactMask}


def mask_class(storage: str) -> type[FixedMask]:
    """The parametrization that holds a mask in a storage; of `"auto"` where there are no blocks.

    Raises:
        ValueError: A storage that is not known.
    """
    if storage not in STORAGES:
        raise ValueError(f"`storage` must be one of {sorted(STORAGES)}. Received: {storage=}")
    return STORAGES[storage]


def in_storage(parametrization: Parametrization, storage: str) -> Parametrization:
    """The parametrization, or with `"compact"` that of the same mask in compact storage.

    Raises:
        NotPrunableError: Compact storage for a parametrization that needs the dense raw weight.
    """
    kind = mask_class(storage)
    if storage == "auto":
        raise ValueError(
            '`storage` of a parametrization is "masked" or "compact"; live blocks are layers of '
            "their own, see keras_sparse_ortho.to_blocks. Received: storage='auto'"
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
    layer: Any, weights: Mapping[str, str], draws: Mapping[str, AnyDraw]
) -> BlockSparseLayer | None:
    """The new layer, built, or `None` where the layer or its draw has no such form.

    Neither the dense kernel nor its mask is ever made.

    Args:
        layer: The plain layer.
        weights: The paths of its weights that are to be sparse, by their names below it.
        draws: By path what was drawn.
    """
    drawn = draws.get(weights.get("kernel", ""))
    if not isinstance(drawn, BlockDraw) or len(weights) > 1:
        return None
    matrices, (rows, cols) = drawn.blocks.blocks.shape[:2], drawn.blocks.blocks.shape[-2:]
    if matrices != (1, 1) or drawn.initializer.layout is not None:
        return None
    try:
        density = drawn.blocks.density
        new = block_layer_like(layer, density=density, block=(rows, cols), seed=0)
    except (NotPrunableError, LayoutError):
        return None
    new.trainable = layer.trainable

    new.build_like(layer)
    new.set_blocks(drawn.blocks.with_taps()[0, 0], drawn.blocks.inputs_of[0, 0])
    new.mark_as_drawn()
    return new
