"""`convert`: the same model with its kernels in another storage."""

from collections.abc import Sequence

import keras

from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.kernels import PrunableWeight, storages_of, walk
from keras_sparse_ortho.models._apply import carry_out
from keras_sparse_ortho.models._plan import Plan
from keras_sparse_ortho.models._prunable_weights import (
    check_built,
    prunable_weights,
)
from keras_sparse_ortho.models._verb import verb
from keras_sparse_ortho.storages import (
    KernelChange,
    StorageForm,
    Target,
    check_storage,
)


def plan_convert(
    model: keras.Model,
    storage: str,
    *,
    block: int | tuple[int, int] | None = None,
) -> Plan:
    """Plans `convert`, with the same arguments."""
    form = check_storage(storage)
    check_built(model)
    weights = [
        weight
        for weight in prunable_weights(model)
        if weight.storage is not None
    ]
    _refuse_quantized(weights)
    if not weights:
        raise NotPrunableError(
            "There is nothing to convert: make the model sparse first, with "
            f"keras_sparse_ortho.sparsify. Received: model={model.name!r}"
        )
    sides = (block, block) if isinstance(block, int) else block
    targets = {weight.path: Target(storage, block=sides) for weight in weights}
    if form.fallback is None:
        weights = _to_convert(form, weights, targets)
    else:
        weights = _that_fit(model, form, weights, targets)
    return Plan(
        weights,
        {weight.path: targets[weight.path] for weight in weights},
        keeps_function=True,
        keeps_training=True,
    )


@verb(plan_convert)
def convert(
    model: keras.Model,
    storage: str,
    *,
    block: int | tuple[int, int] | None = None,
) -> keras.Model:
    """Stores the fixed masks of a model in another way; outputs stay equal.

    - `"masked"`: a dense kernel `K` with its mask `M` (`parametrizations.FixedMask`).
    - `"compact"`: only `values = vec(K)[M]` and their indices (`parametrizations.CompactMask`): at
      density 0.1 a fifth of the weights' memory, and a tenth of the optimizer's.
    - `"blocks"`: layers that compute on the live blocks of `M` alone (`layers.BlockSparseDense` and
      the like, for Dense, EinsumDense, convolutions, LSTM and GRU): where they are wide, a step
      takes little more than the live fraction of a dense one's time. Layers whose masks are not of
      blocks stay.

    A compiled model keeps its compilation, the optimizer its step count, and moments and averages
    of live entries. Those of the others are zero.

    Args:
        model: Model, built, with fixed masks in any storage, or masks of `MagnitudeMask` whose
            schedule has ended.
        storage: str. `"masked"`, `"compact"`, `"blocks"`, or the name of a registered
            `storages.StorageForm`.
        block: int or `(r, c)`. Size of `"blocks"`, where the masks do not tell how they were drawn.

    Returns:
        A new model; `convert.in_place` changes the given one instead.

    Raises:
        NotPrunableError: A model that is not built or has no masks; with `"compact"` a
            parametrization that needs the dense raw weight, as learnt thresholds and scheduled
            masks do; with `"blocks"` a model none of whose layers can be converted, with the
            reasons.
        ValueError: An optimizer that keeps arrays of other shapes than the weight's, as Adafactor
            does.

    Limits: metrics and random generators are reset. On live blocks, optimizers that treat whole
    kernels specially (Muon) and constraints of single outputs see live entries only.

    Examples:
        >>> import keras, keras_sparse_ortho as kso
        >>> dense = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, name="hidden")])
        >>> masked = kso.sparsify(dense, 0.25, structure=kso.Block(16, 16, regular=True), seed=0)
        >>> compact, blocks = kso.convert(masked, "compact"), kso.convert(masked, "blocks")
        >>> [weight.name for weight in compact.weights]
        ['kernel_values', 'bias', 'kernel_indices']
        >>> type(blocks.layers[0]).__name__, masked.count_params(), blocks.count_params()
        ('BlockSparseDense', 8256, 1096)
    """
    return carry_out(model, plan_convert(model, storage, block=block))


def _refuse_quantized(weights: Sequence[PrunableWeight]) -> None:
    quantized_paths = [
        weight.path
        for weight in weights
        if weight.storage is not None and weight.storage.quantizer is not None
    ]
    if quantized_paths:
        raise NotPrunableError(
            "A quantized model cannot be converted to another storage, as its weights would be "
            "rounded: convert it before keras_sparse_ortho.quantize_aware. "
            f"Received: quantized weights {quantized_paths[:5]}"
        )


def _to_convert(
    form: StorageForm,
    weights: Sequence[PrunableWeight],
    targets: dict[str, Target],
) -> list[PrunableWeight]:
    """The weights that another form replaces; refuses weights that cannot have the form."""
    for weight in weights:
        form.refuse_parametrization(weight)
        if weight.parametrization is not None:
            change = KernelChange(weight, targets[weight.path])
            reason = form.why_not(weight.owner, {weight.path: change})
            if reason is not None:
                raise NotPrunableError(reason)
    return [
        weight
        for weight in weights
        if weight.storage is not None and form.replaces(weight.storage)
    ]


def _that_fit(
    model: keras.Model,
    form: StorageForm,
    weights: Sequence[PrunableWeight],
    targets: dict[str, Target],
) -> list[PrunableWeight]:
    """The weights of layers that can have a form; raises with all reasons if none can."""
    by_variable = {id(weight.variable): weight for weight in weights}
    fitting: list[PrunableWeight] = []
    reasons: list[str] = []
    for layer, path in walk(model, ""):
        storages = storages_of(layer)
        if not any(form.replaces(storage) for storage in storages.values()):
            continue
        kernels = {
            name: by_variable[id(storage.weight.variable)]
            for name, storage in storages.items()
        }
        changes = {
            name: KernelChange(weight, targets[weight.path])
            for name, weight in kernels.items()
        }
        reason = form.why_not(layer, changes)
        if reason is None:
            fitting += kernels.values()
        else:
            reasons.append(f"{path or layer.name!r}: {reason}")
    if not fitting:
        raise NotPrunableError(
            "No layer of the model can compute on live blocks. Make masks of blocks: "
            "keras_sparse_ortho.sparsify(model, density, structure=Block(32, 32, regular=True)). "
            f"Received: {'; '.join(reasons) or 'a model without masks'}"
        )
    return fitting
