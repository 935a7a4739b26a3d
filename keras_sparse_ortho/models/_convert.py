"""`convert` and `strip`: the same model in another storage, and as plain Keras layers."""

from collections.abc import Callable, Iterator
from typing import Any

import keras

from keras_sparse_ortho._keras_internals import maps_one_tensor
from keras_sparse_ortho._values import assign
from keras_sparse_ortho.errors import LayoutError, NotPrunableError
from keras_sparse_ortho.initializers import SparseInitializer
from keras_sparse_ortho.kernels import PrunableWeight, storages_of, walk
from keras_sparse_ortho.layers import plain_layer, why_no_block_form
from keras_sparse_ortho.models._apply import Plan, Target, blocks_like, check_storage, mask_of, verb
from keras_sparse_ortho.models._at_density import warn_unless_at_density
from keras_sparse_ortho.models._rewrite import check_built, prunable_weights
from keras_sparse_ortho.models._saved_layers import lists_its_layers
from keras_sparse_ortho.parametrizations import (
    CompactMask,
    LowRankSoftThreshold,
    refuse_compact,
    refuse_unless_fixed,
)


@verb
def convert(
    model: keras.Model, storage: str, *, block: int | tuple[int, int] | None = None
) -> Plan:
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
        storage: `"masked"`, `"compact"` or `"blocks"`.
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
    check_storage(storage)
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
    held: list[tuple[PrunableWeight, Any]] = [(weight, weight.storage) for weight in weights]
    if storage == "masked":
        return [weight for weight, own in held if own.movable and own.compact]
    for weight, own in held:
        refuse_unless_fixed(own, f"{weight.path!r} with {type(own).__name__}")
        if own.parametrization is not None:
            refuse_compact(weight)
    return [w for w, own in held if not isinstance(own.parametrization, CompactMask)]


def _fit_for_blocks(model: Any, weights: list[PrunableWeight], block: Any) -> list[PrunableWeight]:
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
                if not own.fixed:
                    raise NotPrunableError(
                        "live blocks are for masks that are fixed, or whose schedule has ended. "
                        f"Received: {type(own).__name__}"
                    )
            masks = {key: mask_of(own) for key, own in held.items()}
            blocks_like(layer.layer, masks, dict.fromkeys(held, block), held)
        except (NotPrunableError, LayoutError) as error:
            reasons.append(f"{path or layer.name!r}: {error}")
        else:
            found += [known[id(own.weight.variable)] for own in held.values()]
    if not found:
        raise NotPrunableError(
            "No layer of the model can compute on live blocks. Make masks of blocks: "
            "keras_sparse_ortho.sparsify(model, density, structure=Block(32, 32, regular=True)). "
            f"Received: {'; '.join(reasons) or 'a model without masks'}"
        )
    return found


L = keras.layers


@verb
def strip(model: keras.Model) -> Plan:
    """Removes every wrapper: a plain Keras model with effective weights and equal outputs.

    Each wrapped weight `w` becomes its effective weight `w_e`, whose dead entries are exactly 0,
    each layer of live blocks the dense layer of Keras whose place it took. A product of two thin
    factors (`parametrizations.LowRankSoftThreshold`) becomes two layers, in a Sequential model of
    the layer's name, where these are smaller. Sparse initializers become Keras' default. The result
    is not compiled, and loads without this package. `strip.in_place` changes the model itself.

    Args:
        model: Model, built, with or without wrapped layers.

    Raises NotPrunableError for a model that is not built; for a weight whose mask was never set,
    because `callbacks.UpdateMasks` was not among the callbacks; for a result with other weights, or
    (compared on one sample, where layers are not Keras' own) other outputs. The model is then as it
    was. A DensityWarning says if training has left another density than the one asked for.

    Limits: the masks are gone, so training the result makes it dense. Train the wrapped model.

    Examples:
        >>> import keras, numpy as np, keras_sparse_ortho as kso
        >>> dense = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        >>> plain = strip(kso.sparsify(dense, 0.25, seed=0))
        >>> type(plain.layers[0]).__name__, int(np.count_nonzero(plain.layers[0].get_weights()[0]))
        ('Dense', 8)
    """
    check_built(model)
    held = _finished_storages(model)
    if not all(storage.movable for storage in held):  # fixed masks have their density
        warn_unless_at_density(model)
    in_graphs = {id(layer) for layer in _layers_of_graphs(model)}  # a layer alone is in none

    def around(layer: Any, own: Any, make: Callable[[], Any]) -> Any:
        new = _thin_layers(own) if id(layer) in in_graphs else None
        if new is None:
            new = plain_layer(own)  # not `make`: of two kernels of one path the plan has one
            plain = own if new is None else new
            for name, value in list(vars(plain).items()):
                if isinstance(value, SparseInitializer):
                    setattr(plain, name, keras.initializers.GlorotUniform())
        return new

    weights = [w for w in prunable_weights(model, unregistered=True) if w.storage is not None]
    targets = {weight.path: Target("dense") for weight in weights}
    return Plan(weights, targets, keeps_function=True, around=around)


def _layers_of_graphs(model: Any) -> Iterator[Any]:
    """The layers that functional and Sequential models hold, whose classes do not make them."""
    for layer in model.layers if isinstance(model, keras.Model) and lists_its_layers(model) else []:
        yield layer
        if isinstance(layer, keras.Model):
            yield from _layers_of_graphs(layer)


def _finished_storages(model: Any) -> list[Any]:
    found = []
    for layer, path in walk(model, ""):
        for key, storage in storages_of(layer).items():
            found.append(storage)
            if (reason := storage.unfinished()) is not None:
                raise NotPrunableError(
                    f"The weight '{path}/{key}' cannot be stripped: {reason}. "
                    f"Received: {type(storage).__name__}"
                )
    return found


def _thin_layers(wrapper: Any) -> Any:
    """Returns `Sequential([Dense(k), layer])`, built, for a kernel `(m, k) @ (k, n)`, or `None`."""
    # For Dense, and the kernel on the inputs of LSTM, GRU and SimpleRNN. `None` if there are no
    # factors, they are not smaller than their product, or the layer is called with a mask or
    # states, or returns states, which a Sequential model cannot pass on.
    layer: Any = getattr(wrapper, "layer", None)
    if type(layer) is L.Dense:
        key = "kernel"
    elif type(layer) in (L.LSTM, L.GRU, L.SimpleRNN):
        if layer.return_state or layer.stateful:
            return None
        key = f"{layer.cell.name}/kernel"
    else:
        return None
    low_rank = storages_of(wrapper).get(key)
    if not isinstance(low_rank, LowRankSoftThreshold) or not maps_one_tensor(wrapper):
        return None
    left, right = low_rank.factors()
    if not 0 < left.size + right.size < low_rank.weight.size:
        return None
    settings = {"dtype": layer.dtype_policy, "trainable": wrapper.trainable}
    thin = L.Dense(left.shape[1], use_bias=False, name=f"{layer.name}_thin", **settings)
    second = type(layer).from_config(layer.get_config())
    both = keras.Sequential([thin, second], name=layer.name, trainable=wrapper.trainable)
    both.build(layer.get_build_config()["input_shape"])
    assign(thin.kernel, left)
    parametrizations = {id(p.layer_variable): p for p in wrapper.parametrizations.values()}
    effective = {key: p.current() for key, p in parametrizations.items()}
    effective[id(low_rank.weight.variable)] = right
    for old, new in zip(wrapper.layer_weights, second.weights, strict=True):
        # A copy: on JAX `fit` frees the arrays of its model.
        assign(new, keras.ops.copy(effective.get(id(old), old.value)))
        parametrization = parametrizations.get(id(old))
        trained = old if parametrization is None else parametrization.trained_variable
        new.trainable = trained.trainable
    thin.kernel.trainable = low_rank.trained_variable.trainable
    return both
