"""`convert`: the same sparse model in another storage."""

from typing import Any

import keras

from keras_sparse_ortho.errors import LayoutError, NotPrunableError
from keras_sparse_ortho.kernels import PrunableWeight, storages_of, walk
from keras_sparse_ortho.layers import why_no_block_form
from keras_sparse_ortho.models._apply import Plan, Target, blocks_like, mask_of, verb
from keras_sparse_ortho.models._prunable_weights import check_built, prunable_weights
from keras_sparse_ortho.parametrizations import CompactMask, refuse_compact, refuse_unless_fixed

_STORAGES = ("masked", "compact", "blocks")


@verb
def convert(
    model: keras.Model, storage: str, *, block: int | tuple[int, int] | None = None
) -> Plan:
    """Stores the fixed masks of a model in another way; outputs stay equal.

    - `"masked"`: a dense kernel `K` with its mask `M` (`parametrizations.FixedMask`).
    - `"compact"`: `values = vec(K)[M]` and their indices only (`parametrizations.CompactMask`): at
      density 0.1 a fifth of the weights' memory, and a tenth of the optimizer's.
    - `"blocks"`: layers that compute on the live blocks of `M` alone (`layers.BlockSparseDense` and
      the like, for Dense, EinsumDense, convolutions, LSTM and GRU): where they are wide, a step
      takes little more than the live fraction of the time of a dense one. Layers whose masks are
      not of regular blocks stay as they are.

    Training goes on as it would have: where the model is compiled, the optimizer's step count comes
    along, and moments and averages of live entries. Those of the others are zero.

    Args:
        model: A built model with fixed masks, in any of these storages.
        storage: `"masked"`, `"compact"` or `"blocks"`.
        block: `(r, c)`, or one integer for both: the blocks of `"blocks"`, where the masks do not
            tell with which they were drawn.

    Returns:
        A new model, compiled as `model` is. The given one stays as it was; `convert.in_place`
        changes the model itself.

    Raises:
        NotPrunableError: A model that is not built or has no masks; with `"compact"` a
            parametrization that needs the dense raw weight, as learnt thresholds and scheduled
            masks do; with `"blocks"` a model none of whose layers can be converted, with the
            reasons.
        ValueError: An optimizer that keeps anything else of a weight than arrays of its shape, as
            Adafactor does.

    Limits: metrics and random generators are reset. On live blocks, optimizers that treat whole
    kernels specially (Muon) and constraints of single outputs see live entries only.

    Example:

    >>> import keras
    >>> import keras_sparse_ortho as kso
    >>> dense = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, name="hidden")])
    >>> masked = kso.sparsify(dense, 0.25, structure=kso.Block(16, 16, regular=True), seed=0)
    >>> compact, blocks = kso.convert(masked, "compact"), kso.convert(masked, "blocks")
    >>> [weight.name for weight in compact.weights]
    ['kernel_values', 'bias', 'kernel_indices']
    >>> type(blocks.layers[0]).__name__, masked.count_params(), blocks.count_params()
    ('BlockSparseDense', 8256, 1096)
    """
    if storage not in _STORAGES:
        raise ValueError(f"`storage` must be one of {list(_STORAGES)}. Received: {storage=}")
    check_built(model)
    weights = [weight for weight in prunable_weights(model) if weight.storage is not None]
    quantized = [w.path for w in weights if w.storage is not None and w.storage.quantizer]
    if quantized:
        raise NotPrunableError(
            "A quantized model cannot be converted to another storage, as its weights would be "
            "rounded: convert it before keras_sparse_ortho.quantize_aware. "
            f"Received: quantized weights {quantized[:5]}"
        )
    if not weights:
        raise NotPrunableError(
            "There is nothing to convert: make the model sparse first, with "
            f"keras_sparse_ortho.sparsify. Received: model={model.name!r}"
        )
    if storage == "blocks":
        weights = _fit_for_blocks(model, weights, block)
    else:
        weights = _fit_for_masks(weights, storage)
    targets = {weight.path: Target(storage, block=block) for weight in weights}  # type: ignore[arg-type]
    return Plan(weights, targets, keeps_function=True, keeps_training=True)


def _fit_for_masks(weights: list[PrunableWeight], storage: str) -> list[PrunableWeight]:
    """The kernels that are not in dense or compact storage yet."""
    held: list[tuple[PrunableWeight, Any]] = [(weight, weight.storage) for weight in weights]
    if storage == "masked":
        return [weight for weight, own in held if own.movable and own.compact]
    for weight, own in held:
        refuse_unless_fixed(own, f"'{weight.path}' with {type(own).__name__}")
        if own.parametrization is not None:
            refuse_compact(weight)
    return [w for w, own in held if not isinstance(own.parametrization, CompactMask)]


def _fit_for_blocks(model: Any, weights: list[PrunableWeight], block: Any) -> list[PrunableWeight]:
    """The kernels of wrapped layers that have a form on live blocks."""
    known = {id(weight.variable): weight for weight in weights}
    found, reasons = [], []
    for layer, path in walk(model, ""):
        held = storages_of(layer)
        if not any(own.parametrization is not None for own in held.values()):
            continue
        try:
            if (reason := why_no_block_form(layer.layer)) is not None:
                raise NotPrunableError(f"{reason}. Received: {type(layer.layer).__name__}")
            for own in held.values():
                if not own.movable:
                    raise NotPrunableError(
                        f"live blocks are for fixed masks. Received: {type(own).__name__}"
                    )
            masks = {key: mask_of(own) for key, own in held.items()}
            blocks_like(layer.layer, masks, dict.fromkeys(held, block), held)
        except (NotPrunableError, LayoutError) as error:
            reasons.append(f"'{path or layer.name}': {error}")
        else:
            found += [known[id(own.weight.variable)] for own in held.values()]
    if not found:
        raise NotPrunableError(
            "No layer of the model can compute on live blocks. Draw masks of regular blocks: "
            "keras_sparse_ortho.sparsify(model, density, structure=Block(32, 32, regular=True)). "
            f"Received: {'; '.join(reasons) or 'a model without masks'}"
        )
    return found
