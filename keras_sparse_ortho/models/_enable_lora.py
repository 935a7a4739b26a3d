"""`enable_lora`: a sparse model that is trained on by updates of low rank, and stays sparse."""

from __future__ import annotations

from typing import Any

import keras

from keras_sparse_ortho._checks import check_seed
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.kernels import Selection, choose, derived_seed, storages_of
from keras_sparse_ortho.layers import PrunableLayer
from keras_sparse_ortho.models._prunable_weights import check_built, prunable_weights
from keras_sparse_ortho.models._rewrite import rewrite
from keras_sparse_ortho.models._same_function import SameFunction
from keras_sparse_ortho.parametrizations import FixedMask, LowRankAdaptation, Parametrization


def enable_lora(
    model: keras.Model,
    rank: int,
    alpha: float | None = None,
    *,
    include: Selection = None,
    exclude: Selection = None,
    seed: int | None = None,
    in_place: bool = False,
) -> keras.Model:
    """Freezes the sparse kernels of a model, and trains an update of low rank under their masks.

    A kernel `W` with mask `M` becomes `W_e = M * (W + (alpha / rank) A B)`, of which `A` and `B`
    are trained (`LowRankAdaptation`). Optimizer slots are kept for these alone. `strip` adds the
    update to the kernel: zeros stay zero, where Keras' own `layer.enable_lora` makes the kernel
    dense when it is merged.

    Args:
        model: A built model with fixed masks, e.g. from `prune`.
        rank: Columns of `A` and rows of `B`.
        alpha: Scale of the update. Default: `rank`, for a factor of 1.
        include: Which kernels, as for `sparsify`. Default: all with a fixed mask. The others are
            trained as before; set `trainable = False` where they are not to be.
        exclude: Which kernels not.
        seed: For `A`, another one derived for each kernel.
        in_place: Changes the given model itself, not a copy. For subclassed models that cannot be
            copied; the error says so.

    Returns:
        A new model, not compiled, with equal outputs. The given one stays as it was.

    Raises:
        NotPrunableError: A model that is not built or has no masks; a kernel whose mask is not
            fixed, or in compact storage or live blocks (`to_masked` first).
        UnknownWeightError: An `include` or `exclude` that names nothing.
        ValueError: A rank larger than a kernel. The model is as it was then.

    Example:

    >>> import keras
    >>> import keras_sparse_ortho as kso
    >>> dense = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, name="hidden")])
    >>> pruned = kso.prune(dense, 0.25)
    >>> model = kso.enable_lora(pruned, rank=4, seed=0)
    >>> sorted(variable.name for variable in model.trainable_variables)
    ['bias', 'kernel_lora_a', 'kernel_lora_b']
    >>> kso.prunable_weights(kso.strip(model))
    [<hidden/kernel shape=(64, 64), density=0.25>]

    Reference:

    - Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (ICLR 2022), arXiv 2106.09685
    """
    check_built(model)
    check_seed(seed)
    sparse = [weight for weight in prunable_weights(model) if weight.storage is not None]
    if not sparse:
        raise NotPrunableError(
            "`enable_lora` is for kernels with masks: make the model sparse first, with "
            "keras_sparse_ortho.prune, or call Keras' own `enable_lora` of the dense layers. "
            f"Received: model={model.name!r}"
        )
    chosen = choose(sparse, include, exclude)
    for weight in chosen:
        _refuse_other_storage(weight.storage)
    variables = {id(weight.variable) for weight in chosen}

    def held(storage: Any) -> Parametrization:
        mask, drawn_by = storage.mask_value(), storage.drawn_by
        if id(storage.weight.variable) not in variables:
            return FixedMask(mask=mask, initializer=drawn_by)
        own = None if seed is None else derived_seed(seed, storage.weight.path)
        return LowRankAdaptation(rank, mask=mask, initializer=drawn_by, alpha=alpha, seed=own)

    def replace(layer: Any, path: str, own: Any) -> Any:
        storages = storages_of(layer)
        if not variables & {id(storage.weight.variable) for storage in storages.values()}:
            return None
        for storage in storages.values():  # also of those that are left out
            _refuse_other_storage(storage)
        table = {key: held(storage) for key, storage in storages.items()}
        wrapper = PrunableLayer(own.to_dense_layer(), table, name=own.name, trainable=own.trainable)
        wrapper.build()
        return wrapper

    same = SameFunction(model)

    def complete(new: Any) -> Any:
        same.check(new)
        return new

    return rewrite(model, replace, complete, in_place=in_place)


def _refuse_other_storage(storage: Any) -> None:
    if type(storage) is FixedMask:
        return
    way = "Convert the model with keras_sparse_ortho.to_masked first."
    if not storage.movable:
        way = "Finish training with the other parametrization, strip the model, and prune that."
    raise NotPrunableError(
        f"`enable_lora` needs fixed masks over dense kernels. {way} "
        f"Received: '{storage.weight.path}' with {type(storage).__name__}"
    )
