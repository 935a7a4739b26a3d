"""`to_blocks`: layers that compute on live blocks, in the place of those with masks of blocks."""

from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._values import assign
from keras_sparse_ortho.errors import LayoutError, NotPrunableError
from keras_sparse_ortho.initializers import ExactOrthogonal
from keras_sparse_ortho.kernels import walk
from keras_sparse_ortho.layers import BlockSparseLayer, PrunableLayer, block_layer_like
from keras_sparse_ortho.models._conversion import SlotConversion, convert_model, dense_slot
from keras_sparse_ortho.models._prunable_weights import check_built
from keras_sparse_ortho.orthogonal import Block
from keras_sparse_ortho.parametrizations import FixedMask


def to_blocks(model: keras.Model, block: int | tuple[int, int] | None = None) -> keras.Model:
    """The model with layers of live blocks wherever its masks and layers allow.

    A wrapped `Dense`, `EinsumDense`, `Conv1D`, `Conv2D` or `Conv3D` whose mask `M` is one of
    regular blocks becomes a `layers.BlockSparseDense`, ...: of its kernel only the live blocks are
    left, and a step takes little more than the live fraction of the time of a dense one where the
    layer is wide. Outputs are equal, and training goes on as it would have: where the model is
    compiled, the optimizer's step count and moments come along. Other layers stay as they are.

    Args:
        model: A built model with fixed masks, masked or compact, e.g. from
            `sparsify(..., structure=Block(32, 32, regular=True))`.
        block: `(r, c)`, or one integer for both, where the masks do not tell which blocks they were
            drawn with.

    Returns:
        A new model, compiled as `model` is. A model written as a class is changed in place, and
        returned, with a new optimizer.

    Raises:
        NotPrunableError: A model that is not built, or none of whose layers can be converted; the
            message says why not.
        ValueError: An optimizer that keeps anything else of a weight than arrays of its shape, as
            Adafactor does. Nothing has been changed then.

    Limits: metrics, and states of random generators, start anew. Optimizers that treat whole
    kernels in a way of their own (Muon) and constraints of single outputs see live entries only.

    Example:

    >>> import keras
    >>> import keras_sparse_ortho as kso
    >>> dense = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, name="hidden")])
    >>> masked = kso.sparsify(dense, 0.25, structure=kso.Block(16, 16, regular=True), seed=0)
    >>> blocks = kso.to_blocks(masked)
    >>> type(blocks.layers[0]).__name__, masked.count_params(), blocks.count_params()
    ('BlockSparseDense', 8256, 1096)
    >>> kso.prunable_weights(blocks)
    [<hidden/kernel shape=(64, 64), density=0.25>]
    """
    check_built(model)
    plans, reasons = _plans(model, block)
    if not plans:
        raise NotPrunableError(
            "No layer of the model can compute on live blocks. Draw masks of regular blocks: "
            "keras_sparse_ortho.sparsify(model, density, structure=Block(32, 32, regular=True)). "
            f"Received: {'; '.join(reasons) or 'a model without masks'}"
        )
    return _convert(model, plans)


def blocks_where_possible(model: Any) -> Any:
    """As `to_blocks`; the model itself if none of its layers can be converted."""
    plans, _ = _plans(model, None)
    return _convert(model, plans) if plans else model


def _plans(model: Any, block: Any) -> tuple[dict[int, BlockSparseLayer], list[str]]:
    """The new layers by `id` of the wrapped ones, and why others have none."""
    plans: dict[int, BlockSparseLayer] = {}
    reasons = []
    for layer, path in walk(model, ""):
        if isinstance(layer, PrunableLayer):
            try:
                plans[id(layer)] = _block_layer_for(layer, block)
            except (NotPrunableError, LayoutError) as error:
                reasons.append(f"'{path or layer.name}': {error}")
    return plans, reasons


def _convert(model: Any, plans: dict[int, BlockSparseLayer]) -> Any:
    def replace(layer: Any, path: str, own: Any) -> Any:
        new = plans.get(id(layer))
        if new is not None:
            _fill(new, own)
        return new

    slots = {
        id(layer.parametrizations["kernel"].weight.variable): _slot_conversion(layer, new)
        for layer, _ in walk(model, "")
        if (new := plans.get(id(layer))) is not None
    }
    return convert_model(model, replace, slots)


def _block_layer_for(wrapper: PrunableLayer, block: Any) -> BlockSparseLayer:
    """The layer of live blocks for a wrapped one, not built, or an error that says why not."""
    table = wrapper.parametrizations
    own = table.get("kernel")
    if len(table) != 1 or not isinstance(own, FixedMask):
        raise NotPrunableError(
            "live blocks are for a single kernel with a fixed mask. "
            f"Received: {[type(other).__name__ for other in table.values()]}"
        )
    drawn_by = own.drawn_by
    structure = drawn_by.structure if isinstance(drawn_by, ExactOrthogonal) else None
    if block is None and isinstance(structure, Block) and structure.regular:
        block = structure.rows, structure.cols
    if block is None:
        raise NotPrunableError(
            "its mask was not drawn with Block(rows, cols, regular=True); give `block` if it is one"
            f" of such blocks. Received: structure={structure}"
        )
    mask = own.mask_value()  # not the nonzero entries: live ones may be zero, as at other taps
    new = block_layer_like(wrapper.layer, density=float(mask.mean()), block=block, seed=0)
    new.check_mask(mask, own.weight.layout)
    new.trainable = wrapper.trainable
    return new


def _fill(new: BlockSparseLayer, wrapper: PrunableLayer) -> None:
    """Gives the new layer the weights of the wrapped one."""
    if not new.built:
        new.build(wrapper.layer.get_build_config()["input_shape"])
    own = wrapper.parametrizations["kernel"]
    new.set_kernel(own.weight.value(), own.mask_value())
    if isinstance(own, FixedMask) and own.is_as_drawn():
        new.mark_as_drawn()
    if new.bias is not None:
        assign(new.bias, keras.ops.copy(wrapper.layer.bias.value))


def _slot_conversion(wrapper: PrunableLayer, new: BlockSparseLayer) -> SlotConversion:
    own = wrapper.parametrizations["kernel"]
    shape, live = own.weight.shape, np.flatnonzero(own.mask_value())

    def convert(slot: np.ndarray, start: float) -> np.ndarray:
        compact = slot.shape != shape
        return new.as_blocks(dense_slot(slot, start, shape, live) if compact else slot)

    return convert
