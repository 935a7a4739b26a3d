"""Kernels of a `ScannedStack`: what their axes mean, and those that are stored as live blocks."""

import dataclasses
from collections.abc import Callable

import numpy as np

from keras_sparse_ortho.kernels import KernelLayout, PrunableWeight
from keras_sparse_ortho.layers._layers_in_stack import LayersInStack


def stacked_layout(layout: KernelLayout | None, rank: int) -> KernelLayout:
    """The layout of kernels of one layout and rank that are stacked along a new first axis."""
    layout = KernelLayout.convolution() if layout is None else layout
    inputs, outputs, batch = (
        tuple(axis % rank + 1 for axis in axes)
        for axes in (layout.inputs, layout.outputs, layout.batch)
    )
    return dataclasses.replace(layout, inputs=inputs, outputs=outputs, batch=(0, *batch))


class StackedKernel:
    """The `StoredKernel` of a stack of layers whose variables do not have its dense form.

    Args:
        inside: The layers.
        weight: The kernel of the layer that stands for all.
    """

    def __init__(self, inside: LayersInStack, weight: PrunableWeight) -> None:
        stored = weight.stored
        assert stored is not None
        self.variable = inside.stacked_like(weight.variable)
        self.shape = (inside.depth, *stored.shape)
        self.layout = stacked_layout(stored.layout, len(stored.shape))
        self.live = inside.depth * stored.live
        self._each = inside.at_each
        self._value: Callable[[], np.ndarray] = stored.value
        self._mask_value: Callable[[], np.ndarray] = stored.mask_value

    def value(self) -> np.ndarray:
        """The dense kernels (bfloat16 as float32)."""
        return np.stack(self._each(self._value))

    def mask_value(self) -> np.ndarray:
        """Which of their entries are live."""
        return np.stack(self._each(self._mask_value))

    def is_as_drawn(self) -> bool:
        """Whether they are what an orthogonal initializer has drawn: a stack does not know."""
        return False
