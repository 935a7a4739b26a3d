"""`to_compact`, `to_masked` and `to_blocks`: the same sparse model in another storage."""

import functools
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._keras_internals import compile_like, refuse_other_slots
from keras_sparse_ortho._optimizer_slots import copy_slots
from keras_sparse_ortho.errors import LayoutError, NotPrunableError
from keras_sparse_ortho.initializers import weights_set_later
from keras_sparse_ortho.kernels import PrunableWeight, storages_of, walk
from keras_sparse_ortho.layers import (
    PrunableLayer,
    block_layer_like,
    check_block,
    check_mask,
    plain_layer,
    why_no_block_form,
)
from keras_sparse_ortho.models._prunable_weights import check_built, prunable_weights
from keras_sparse_ortho.models._rewrite import Replace, rewrite
from keras_sparse_ortho.models._same_function import SameFunction
from keras_sparse_ortho.orthogonal import Block
from keras_sparse_ortho.parametrizations import CompactMask, FixedMask, refuse_compact


def to_compact(model: keras.Model, *, in_place: bool = False) -> keras.Model:
    """The model with fixed masks in compact storage: live values and their indices only.

    A kernel `K` with mask `M` becomes `values = vec(K)[M]` and `indices`, as
    `parametrizations.CompactMask` describes. Outputs are equal, and training goes on as it would
    have: where the model is compiled, the optimizer's step count comes along, and moments and
    averages of live entries (those of the others are zero).

    Args:
        model: A built model with wrapped layers, all of them with `FixedMask` or `CompactMask`.
        in_place: Changes the given model itself, not a copy. For subclassed models that cannot be
            copied; the error says so.

    Returns:
        A new model, compiled as `model` is. The given one stays as it was.

    Raises:
        NotPrunableError: A model that is not built or has no masks; a weight whose parametrization
            needs the dense raw weight, as learnt thresholds and scheduled masks do; one that
            `CompactMask` refuses.
        ValueError: An optimizer that keeps anything else of a weight than arrays of its shape, as
            Adafactor does. Nothing has been changed then.

    Limits: metrics and random generators are reset.

    Example:

    >>> import keras
    >>> import keras_sparse_ortho as kso
    >>> dense = keras.Sequential([keras.Input((64,)), keras.layers.Dense(100, name="hidden")])
    >>> masked = kso.sparsify(dense, 0.1, seed=0)
    >>> compact = kso.to_compact(masked)
    >>> [weight.name for weight in compact.weights]
    ['kernel_values', 'bias', 'kernel_indices']
    >>> masked.count_params() - compact.count_params()  # 12,800 for kernel and mask, 1,280 now
    11520
    """
    check_built(model)
    weights = [w for w in prunable_weights(model) if w.parametrization is not None]
    _refuse_dense(model, weights)
    for weight in weights:
        if not weight.parametrization.movable:
            raise NotPrunableError(
                "Compact storage is for masks that are fixed: other parametrizations need the "
                "dense raw weight. "
                f"Received: '{weight.path}' with {type(weight.parametrization).__name__}"
            )
        refuse_compact(weight)
    changing = [w for w in weights if not w.parametrization.compact]
    return _masks_as(CompactMask, model, changing, in_place)


def to_masked(model: keras.Model, *, in_place: bool = False) -> keras.Model:
    """The model in dense storage with masks: the reverse of `to_compact` and of `to_blocks`.

    Values and indices, or live blocks, become a dense kernel and its mask
    (`parametrizations.FixedMask`), and moments and averages in the optimizer dense ones, zero where
    the mask is.

    Args:
        model: A built model with wrapped layers, or with layers of live blocks.
        in_place: Changes the given model itself, not a copy. For subclassed models that cannot be
            copied; the error says so.

    Returns:
        A new model, compiled as `model` is. The given one stays as it was.

    Raises:
        NotPrunableError: A model that is not built or has no wrapped layers.
        ValueError: As for `to_compact`.

    Limits: metrics and random generators are reset.

    Example:

    >>> import keras
    >>> import keras_sparse_ortho as kso
    >>> dense = keras.Sequential([keras.Input((64,)), keras.layers.Dense(100, name="hidden")])
    >>> compact = kso.sparsify(dense, 0.1, storage="compact", seed=0)
    >>> sorted(weight.name for weight in kso.to_masked(compact).weights)
    ['bias', 'kernel', 'kernel_mask']
    """
    check_built(model)
    movable = [w for w in prunable_weights(model) if w.storage is not None and w.storage.movable]
    _refuse_dense(model, movable or [w for w in prunable_weights(model) if w.parametrization])
    changing = [w for w in movable if w.storage and w.storage.compact]
    return _masks_as(FixedMask, model, changing, in_place)


def to_blocks(
    model: keras.Model, block: int | tuple[int, int] | None = None, *, in_place: bool = False
) -> keras.Model:
    """The model with layers of live blocks wherever its masks and layers allow.

    A wrapped `Dense`, `EinsumDense`, `Conv1D`, `Conv2D`, `Conv3D`, `LSTM` or `GRU` whose mask `M`
    is one of regular blocks becomes a `layers.BlockSparseDense`, ...: of its kernel only the live
    blocks are left, and a step takes little more than the live fraction of the time of a dense one
    where the layer is wide. Outputs are equal, and training goes on as it would have: where the
    model is compiled, the optimizer's step count and moments come along. Other layers stay as they
    are.

    Args:
        model: A built model with fixed masks, masked or compact, e.g. from
            `sparsify(..., structure=Block(32, 32, regular=True))`.
        block: `(r, c)`, or one integer for both, where the masks do not tell which blocks they were
            drawn with.
        in_place: Changes the given model itself, not a copy. For subclassed models that cannot be
            copied; the error says so.

    Returns:
        A new model, compiled as `model` is. The given one stays as it was.

    Raises:
        NotPrunableError: A model that is not built, or none of whose layers can be converted; the
            message says why not.
        ValueError: An optimizer that keeps anything else of a weight than arrays of its shape, as
            Adafactor does. Nothing has been changed then.

    Limits: metrics and random generators are reset. Optimizers that treat whole kernels specially
    (Muon) and constraints of single outputs see live entries only.

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
    return _to_blocks(model, plans, in_place)


def blocks_where_possible(model: Any, in_place: bool = False) -> Any:
    """As `to_blocks`; the model itself if none of its layers can be converted."""
    plans, _ = _plans(model, None)
    return _to_blocks(model, plans, in_place) if plans else model


def _refuse_dense(model: Any, sparse: list[PrunableWeight]) -> None:
    if not sparse:
        raise NotPrunableError(
            "There is nothing to convert: make the model sparse first, with "
            f"keras_sparse_ortho.sparsify. Received: model={model.name!r}"
        )


# --- masks: dense or compact ---------------------------------------------------------------------


def _masks_as(
    kind: type[FixedMask], model: Any, changing: list[PrunableWeight], in_place: bool
) -> Any:
    """The model with fixed masks of one class where `changing` weights are."""
    ids = {id(weight.variable) for weight in changing}

    def replace(layer: Any, path: str, own: Any) -> Any:
        held = storages_of(layer).values()
        changes = any(id(storage.weight.variable) in ids for storage in held)
        return masked_form(own, kind) if changes else None

    return _convert(model, replace, changing, in_place)


def masked_form(layer: Any, kind: type[FixedMask]) -> PrunableLayer:
    """The wrapped layer with fixed masks of a class for one in any storage, which is used up."""
    held = {key: own for key, own in storages_of(layer).items() if own.movable}
    masks = {key: kind(mask=h.mask_value(), initializer=h.drawn_by) for key, h in held.items()}
    as_drawn = {key for key, own in held.items() if own.is_as_drawn()}
    plain = plain_layer(layer)
    wrapper = PrunableLayer(plain, masks, name=layer.name, trainable=layer.trainable)
    wrapper.build()
    for key, own in wrapper.parametrizations.items():
        own.settle()
        if key in as_drawn:
            own.mark_as_drawn()
    return wrapper


# --- live blocks ---------------------------------------------------------------------------------


def _plans(model: Any, block: Any) -> tuple[dict[int, Any], list[str]]:
    """The new layers by `id` of the wrapped ones, and why others have none."""
    plans: dict[int, Any] = {}
    reasons = []
    for layer, path in walk(model, ""):
        if any(own.parametrization is not None for own in storages_of(layer).values()):
            try:
                plans[id(layer)] = block_form(layer, block)
            except (NotPrunableError, LayoutError) as error:
                reasons.append(f"'{path or layer.name}': {error}")
    return plans, reasons


def _to_blocks(model: Any, plans: dict[int, Any], in_place: bool) -> Any:
    def replace(layer: Any, path: str, own: Any) -> Any:
        new = plans.get(id(layer))
        if new is not None:
            fill_block_form(new, own)
        return new

    planned = [layer for layer, _ in walk(model, "") if id(layer) in plans]
    held = (storage for layer in planned for storage in storages_of(layer).values())
    variables = {id(storage.weight.variable) for storage in held}
    changing = [w for w in prunable_weights(model) if id(w.variable) in variables]
    return _convert(model, replace, changing, in_place)


def block_form(wrapper: Any, block: int | tuple[int, int] | None = None) -> Any:
    """The unbuilt layer of live blocks for a wrapped layer, or an error that says why not."""
    if (reason := why_no_block_form(wrapper.layer)) is not None:
        raise NotPrunableError(f"{reason}. Received: {type(wrapper.layer).__name__}")
    density: dict[str, float] = {}
    blocks: dict[str, Any] = {}
    for key, own in storages_of(wrapper).items():
        if not own.movable:
            raise NotPrunableError(
                f"live blocks are for fixed masks. Received: {type(own).__name__}"
            )
        structure = getattr(own.drawn_by, "structure", None)
        found = block
        if found is None and isinstance(structure, Block) and structure.regular:
            found = structure.rows, structure.cols
        if found is None:
            raise NotPrunableError(
                "its mask was not drawn with Block(rows, cols, regular=True); give `block` if it is"
                f" one of such blocks. Received: structure={structure}"
            )
        mask = own.mask_value()  # not the nonzero entries: live ones may be zero, at other taps
        check_mask(mask, check_block(found), own.weight.layout)
        name = key.rpartition("/")[2]
        density[name], blocks[name] = float(mask.mean()), found
    new = block_layer_like(wrapper.layer, density=density, block=blocks, seed=0)
    new.trainable = wrapper.trainable
    return new


def fill_block_form(new: Any, wrapper: Any) -> None:
    """Gives a layer from `block_form` the weights of the wrapped one."""
    new.build_like(wrapper.layer)
    for key, own in storages_of(wrapper).items():
        storage: Any = storages_of(new)[key]
        storage.set_kernel(own.value(), own.mask_value())
        if own.is_as_drawn():
            storage.mark_as_drawn()


# --- the model and its optimizer -----------------------------------------------------------------


def _convert(model: Any, replace: Replace, changing: list[PrunableWeight], in_place: bool) -> Any:
    """Replaces layers, and carries compilation and the optimizer's state over.

    Args:
        model: A built model.
        replace: See `rewrite`.
        changing: The weights that are in another storage afterwards.
        in_place: See `rewrite`.

    Raises:
        NotPrunableError: A result that would have other weights or compute something else.
        ValueError: An optimizer that keeps what cannot be converted. The model is as it was then.
    """
    quantized = [w.path for w in prunable_weights(model) if w.storage and w.storage.quantizer]
    if quantized:
        raise NotPrunableError(
            "A quantized model cannot be converted to another storage, as its weights would be "
            "rounded: convert it before keras_sparse_ortho.quantize_aware. "
            f"Received: quantized weights {quantized[:5]}"
        )
    optimizer = getattr(model, "optimizer", None)
    if not getattr(optimizer, "built", False):
        optimizer = None
    else:
        refuse_other_slots(optimizer, [weight.variable for weight in changing])
    before = _without_support(model)
    same = SameFunction(model)

    def complete(new: Any) -> Any:
        same.check(new)
        if compile_like(new, model) and optimizer is not None:
            new.optimizer.build(new.trainable_variables)
            after = _without_support(new)
            partners = {id(old): now for old, now in zip(before, after, strict=True)}
            storages = {weight.path: weight.storage for weight in prunable_weights(new)}
            converted = {
                id(w.variable): functools.partial(_slot, w.storage, storages[w.path])
                for w in changing
            }
            copy_slots(optimizer, new.optimizer, partners, converted)
        return new

    with weights_set_later():
        return rewrite(model, replace, complete=complete, in_place=in_place)


def _slot(old: Any, new: Any, slot: np.ndarray, start: float) -> np.ndarray:
    """An optimizer's slot of one storage, as another one holds it."""
    converted: np.ndarray = new.slot_from_dense(old.slot_to_dense(slot, start))
    return converted


def _without_support(model: Any) -> list[Any]:
    """The weights but for masks and indices, in an order that storage does not change.

    Kernels are first: on live blocks those of a cell come after its bias.
    """
    own = [storage for layer, _ in walk(model, "") for storage in storages_of(layer).values()]
    support = {id(variable) for storage in own for variable in storage.support()}
    kernels = sorted(prunable_weights(model), key=lambda weight: weight.path)
    first = [weight.variable for weight in kernels]
    left_out = support | {id(variable) for variable in first}
    return first + [variable for variable in model.weights if id(variable) not in left_out]
