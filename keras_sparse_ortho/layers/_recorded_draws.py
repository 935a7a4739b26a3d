"""Kernels that are drawn while a wrapped layer is built, with their masks."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._keras_internals import in_stateless_scope
from keras_sparse_ortho.initializers import (
    KernelLayout,
    SparseInitializer,
    are_weights_set_later,
)
from keras_sparse_ortho.kernels import PrunableWeight, initializer_attribute, kernel_layouts, walk


class _Recorder:
    """Draws as a sparse initializer does, along the axes of the layer, and keeps the mask."""

    def __init__(self, initializer: SparseInitializer, layout: KernelLayout | None) -> None:
        self.initializer = initializer
        self.layout = layout if initializer.layout is None else None
        # By shape: a layer may have several weights from one initializer, which for a shape gives
        # the same values at every call.
        self.masks: dict[tuple[int, ...], np.ndarray] = {}

    def __call__(self, shape: Any, dtype: Any = None) -> Any:
        # In a scope that only traces, Keras asks for a placeholder each time the value is read.
        if are_weights_set_later() or in_stateless_scope():
            return keras.ops.zeros(shape, dtype=dtype)
        kernel, mask = self.initializer.sample(shape, dtype, self.layout)
        self.masks[tuple(shape)] = mask
        return keras.ops.convert_to_tensor(kernel)


class RecordedDraws(list[tuple[Any, str, _Recorder]]):
    """Recorders, each with the layer and the name of the attribute in which it stands."""

    def mask_of(self, weight: PrunableWeight) -> Any:
        """What gives the mask of a weight, `None` if its initializer is not recorded."""
        attribute = initializer_attribute(weight.owner, weight.variable.name)
        for owner, name, recorder in self:
            if owner is weight.owner and name == attribute:
                return functools.partial(recorder.masks.__getitem__, weight.shape)
        return None


@contextlib.contextmanager
def recorded_draws(layer: Any) -> Iterator[RecordedDraws]:
    """Inside, the sparse initializers of a layer that is not built yet record what they draw.

    Without it a kernel would be drawn twice: an initializer in a layer gives no mask, so that it
    would have to draw again for the mask, and it knows a shape only, not the axes of the layer.
    A layer whose variables are created now and initialized later (in a scope of Keras that only
    traces shapes) keeps the recorders until then.
    """
    draws = RecordedDraws()
    with contextlib.ExitStack() as stack:
        for inner, _ in walk(layer, ""):
            if inner.built:
                continue
            layouts = {
                initializer_attribute(inner, name): layout
                for name, layout in kernel_layouts(inner).items()
            }
            for attribute, value in list(vars(inner).items()):
                # Private ones are patterns, of which layers such as MultiHeadAttention make copies.
                is_own = attribute.endswith("_initializer") and not attribute.startswith("_")
                if is_own and isinstance(value, SparseInitializer):
                    recorder = _Recorder(value, layouts.get(attribute))
                    draws.append((inner, attribute, recorder))
                    stack.callback(setattr, inner, attribute, value)
                    setattr(inner, attribute, recorder)
        yield draws
