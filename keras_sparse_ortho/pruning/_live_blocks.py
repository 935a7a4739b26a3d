"""A layer of live blocks in the place of one whose kernel was drawn as such."""

from collections.abc import Mapping
from typing import Any

import keras

from keras_sparse_ortho._values import assign
from keras_sparse_ortho.errors import LayoutError, NotPrunableError
from keras_sparse_ortho.initializers import AnyDraw, BlockDraw
from keras_sparse_ortho.layers import BlockSparseLayer, block_layer_like


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

    new.build(layer.get_build_config()["input_shape"])
    new.set_blocks(drawn.blocks.with_taps()[0, 0], drawn.blocks.inputs_of[0, 0])
    new.mark_as_drawn()
    if new.bias is not None:
        # A copy: on JAX `fit` frees the arrays of its model, which may not be shared.
        assign(new.bias, keras.ops.copy(layer.bias.value))
    return new
