"""Converting a whole model, with its optimizer, from one storage of its weights to another."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from keras_sparse_ortho._keras_internals import compile_like, refuse_other_slots
from keras_sparse_ortho._optimizer_slots import copy_slots
from keras_sparse_ortho.initializers import weights_set_later
from keras_sparse_ortho.kernels import walk
from keras_sparse_ortho.layers import BlockSparseLayer, PrunableLayer
from keras_sparse_ortho.models._rewrite import Replace, rewrite
from keras_sparse_ortho.models._same_function import SameFunction
from keras_sparse_ortho.parametrizations import CompactMask, FixedMask

SlotConversion = Callable[[np.ndarray, float], np.ndarray]
"""From a slot's array, and the value that it started from, to that of the new variable."""


def convert_model(model: Any, replace: Replace, slots: Mapping[int, SlotConversion]) -> Any:
    """Replaces layers, and carries compilation and the optimizer's state over.

    Args:
        model: A built model.
        replace: See `rewrite`.
        slots: By `id` of the variables whose slots get another shape.

    Raises:
        NotPrunableError: A result that would have other weights or compute something else.
        ValueError: An optimizer that keeps what cannot be converted. The model is as it was then.
    """
    optimizer = getattr(model, "optimizer", None)
    if not getattr(optimizer, "built", False):
        optimizer = None
    else:
        refuse_other_slots(optimizer, [v for v in model.trainable_variables if id(v) in slots])
    before = _trained(model)
    same = SameFunction(model)

    def complete(new: Any) -> Any:
        same.check(new)
        if compile_like(new, model) and optimizer is not None:
            new.optimizer.build(new.trainable_variables)
            partners = {id(old): now for old, now in zip(before, _trained(new), strict=True)}
            copy_slots(optimizer, new.optimizer, partners, slots)
        return new

    with weights_set_later():
        return rewrite(model, replace, complete=complete)


def dense_slot(
    slot: np.ndarray, start: float, shape: tuple[int, ...], live: np.ndarray
) -> np.ndarray:
    """A slot of live values, by their flat places, in the kernel's shape."""
    dense = np.full(shape, start, dtype=slot.dtype)
    dense.reshape(-1)[live] = slot
    return dense


def _trained(model: Any) -> list[Any]:
    """The weights but for masks and indices, in an order that storage does not change."""
    left_out = {id(variable) for layer, _ in walk(model, "") for variable in _places(layer)}
    return [variable for variable in model.weights if id(variable) not in left_out]


def _places(layer: Any) -> Iterable[Any]:
    """The variables of a layer that say where its live entries stand."""
    if isinstance(layer, BlockSparseLayer):
        return [layer.inputs_of, layer.slots_of]
    table = layer.parametrizations if isinstance(layer, PrunableLayer) else {}
    return [
        own.indices if isinstance(own, CompactMask) else own.mask
        for own in table.values()
        if isinstance(own, FixedMask)
    ]
