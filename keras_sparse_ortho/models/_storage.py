"""`to_compact` and `to_masked`: the same sparse model in another storage."""

from typing import Any

import keras
import numpy as np

from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.initializers import ExactOrthogonal
from keras_sparse_ortho.kernels import PrunableWeight, walk
from keras_sparse_ortho.layers import BlockSparseLayer, PrunableLayer
from keras_sparse_ortho.models._conversion import SlotConversion, convert_model, dense_slot
from keras_sparse_ortho.models._prunable_weights import check_built, prunable_weights
from keras_sparse_ortho.orthogonal import Block
from keras_sparse_ortho.parametrizations import CompactMask, FixedMask, refuse_compact


def to_compact(model: keras.Model) -> keras.Model:
    """The model with fixed masks in compact storage: live values and their indices only.

    A kernel `K` with mask `M` becomes `values = vec(K)[M]` and `indices`, as
    `parametrizations.CompactMask` describes. Outputs are equal, and training goes on as it would
    have: where the model is compiled, the optimizer's step count comes along, and moments and
    averages of live entries (those of the others are zero).

    Args:
        model: A built model with wrapped layers, all of them with `FixedMask` or `CompactMask`.

    Returns:
        A new model, compiled as `model` is. A model written as a class is changed in place, and
        returned, with a new optimizer.

    Raises:
        NotPrunableError: A model that is not built or has no masks; a weight whose parametrization
            needs the dense raw weight, as learnt thresholds and scheduled masks do; one that
            `CompactMask` refuses.
        ValueError: An optimizer that keeps anything else of a weight than arrays of its shape, as
            Adafactor does. Nothing has been changed then.

    Limits: metrics, and states of random generators, start anew.

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
    for weight in _wrapped(model):
        if not isinstance(weight.parametrization, FixedMask):
            raise NotPrunableError(
                "Compact storage is for masks that are fixed: other parametrizations need the "
                "dense raw weight. "
                f"Received: '{weight.path}' with {type(weight.parametrization).__name__}"
            )
        refuse_compact(weight)
    return _Conversion(model, CompactMask).convert()


def to_masked(model: keras.Model) -> keras.Model:
    """The model in dense storage with masks: the reverse of `to_compact` and of `to_blocks`.

    Values and indices, or live blocks, become a dense kernel and its mask
    (`parametrizations.FixedMask`), and moments and averages in the optimizer dense ones, zero where
    the mask is.

    Args:
        model: A built model with wrapped layers, or with layers of live blocks.

    Returns:
        A new model, compiled as `model` is. A model written as a class is changed in place, and
        returned, with a new optimizer.

    Raises:
        NotPrunableError: A model that is not built or has no wrapped layers.
        ValueError: As for `to_compact`.

    Limits: metrics, and states of random generators, start anew.

    Example:

    >>> import keras
    >>> import keras_sparse_ortho as kso
    >>> dense = keras.Sequential([keras.Input((64,)), keras.layers.Dense(100, name="hidden")])
    >>> compact = kso.sparsify(dense, 0.1, storage="compact", seed=0)
    >>> sorted(weight.name for weight in kso.to_masked(compact).weights)
    ['bias', 'kernel', 'kernel_mask']
    """
    check_built(model)
    if not any(isinstance(layer, BlockSparseLayer) for layer, _ in walk(model, "")):
        _wrapped(model)
    return _Conversion(model, FixedMask).convert()


def _wrapped(model: Any) -> list[PrunableWeight]:
    found = [w for w in prunable_weights(model) if w.parametrization is not None]
    if not found:
        raise NotPrunableError(
            "There is nothing to convert: make the model sparse first, with "
            f"keras_sparse_ortho.sparsify. Received: model={model.name!r}"
        )
    return found


class _Conversion:
    """One conversion between masked and compact storage."""

    def __init__(self, model: Any, kind: type[FixedMask]) -> None:
        self._model = model
        self._kind = kind
        self._slots: dict[int, SlotConversion] = {}

    def convert(self) -> Any:
        for layer, _ in walk(self._model, ""):
            if isinstance(layer, PrunableLayer):
                for weight in layer.prunable_weights:
                    self._convert_slots(weight)
            elif isinstance(layer, BlockSparseLayer) and not self._kind.compact:
                self._slots[id(layer.blocks)] = layer.as_kernel
        return convert_model(self._model, self._replace, self._slots)

    def _convert_slots(self, weight: PrunableWeight) -> None:
        """Notes a variable whose slots are of another shape afterwards."""
        old, compact = weight.parametrization, self._kind.compact
        if not isinstance(old, FixedMask) or old.compact == compact:
            return
        shape, live = weight.shape, np.flatnonzero(old.mask_value())

        def convert(slot: np.ndarray, start: float) -> np.ndarray:
            return slot.reshape(-1)[live] if compact else dense_slot(slot, start, shape, live)

        self._slots[id(weight.variable)] = convert

    def _replace(self, layer: Any, path: str, own: Any) -> Any:
        if isinstance(own, BlockSparseLayer):
            return None if self._kind.compact else _masked(own)
        if not isinstance(own, PrunableLayer):
            return None
        table = own.parametrizations
        fixed = {key: held for key, held in table.items() if isinstance(held, FixedMask)}
        if all(held.compact == self._kind.compact for held in fixed.values()):
            return None
        given = {
            key: self._kind(mask=held.mask_value(), initializer=held.initializer)
            for key, held in fixed.items()
        }
        own.release()
        wrapper = PrunableLayer(
            own.layer, given, name=own.name, trainable=own.trainable, dtype=own.dtype_policy
        )
        wrapper.build()
        for key, held in wrapper.parametrizations.items():
            assert isinstance(held, FixedMask)
            held.settle()
            held.keep_origin_of(fixed[key])
        return wrapper


def _masked(layer: BlockSparseLayer) -> PrunableLayer:
    """The wrapped layer of Keras in whose place a layer of live blocks stands."""
    rows, cols = layer.block
    drawn_by = ExactOrthogonal(
        layer.density, layer.gain, seed=layer.seed, structure=Block(rows, cols, regular=True)
    )
    mask = FixedMask(mask=layer.mask_value(), initializer=drawn_by)
    wrapper = PrunableLayer(layer.to_dense_layer(), mask, trainable=layer.trainable)
    wrapper.build()
    return wrapper
