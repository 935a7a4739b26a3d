"""`StackedKernel`: the storage of the live blocks of all layers in a `ScannedStack`."""

import dataclasses
from typing import Any

import numpy as np

from keras_sparse_ortho._optimizer_slots import move_slots, moved
from keras_sparse_ortho._values import assign, to_numpy
from keras_sparse_ortho.kernels import DenseGradient, KernelLayout, PrunableWeight, Storage
from keras_sparse_ortho.orthogonal import RegularBlocks, slots_of


def stacked_layout(layout: KernelLayout | None, rank: int) -> KernelLayout:
    """The layout of kernels of one layout and rank that are stacked along a new first axis."""
    layout = KernelLayout.convolution() if layout is None else layout
    inputs, outputs, batch = (
        tuple(axis % rank + 1 for axis in axes)
        for axes in (layout.inputs, layout.outputs, layout.batch)
    )
    return dataclasses.replace(layout, inputs=inputs, outputs=outputs, batch=(0, *batch))


class StackedKernel(Storage):
    """The kernels of live blocks of all layers in a stack, along a new first axis.

    What it does with all of them, `LiveBlocks` does with that of the layer that stands for all,
    which gets the weights of each in turn.
    """

    compact = movable = in_blocks = True

    def __init__(self, stack: Any, inside: Any, weight: PrunableWeight) -> None:
        one: Any = weight.storage
        self._one, self._inside = one, inside
        self.place_size = one.place_size
        self._weight = dataclasses.replace(
            weight,
            variable=inside.stacked_like(weight.variable),
            owner=stack,
            layout=stacked_layout(weight.layout, len(weight.shape)),
            storage=self,
        )

    @property
    def weight(self) -> PrunableWeight:
        return self._weight

    @property
    def shape(self) -> tuple[int, ...]:
        return (self._inside.depth, *self._one.shape)

    @property
    def block(self) -> tuple[int, int]:
        found: tuple[int, int] = self._one.block
        return found

    @property
    def least_density(self) -> float:
        return float(self._one.least_density)

    @property
    def live(self) -> int:
        return int(self._inside.depth * self._one.live)

    @property
    def drawn_by(self) -> Any:
        return self._one.drawn_by

    def value(self) -> np.ndarray:
        return self._stacked(lambda k: self._one.value())

    def mask_value(self) -> np.ndarray:
        return self._stacked(lambda k: self._one.mask_value())

    def support(self) -> list[Any]:
        return [self._inside.stacked_like(variable) for variable in self._one.support()]

    def assign_raw(self, value: Any) -> None:
        rows = to_numpy(value)
        self._inside.at_each(lambda k: self._one.assign_raw(rows[k]), changes=True)

    def set_kernel(self, kernel: Any, mask: Any) -> None:
        self._inside.at_each(lambda k: self._one.set_kernel(kernel[k], mask[k]), changes=True)

    def set_drawn(self, drawn: RegularBlocks) -> None:
        blocks = drawn.with_taps()

        def of_one(k: int) -> None:
            self._one.weight.owner.set_blocks(blocks[k, 0], drawn.inputs_of[k, 0])

        self._inside.at_each(of_one, changes=True)

    # --- dynamic sparse training -----------------------------------------------------------------

    def live_places(self) -> np.ndarray:
        return self._stacked(lambda k: self._one.live_places())

    def live_sums(self) -> np.ndarray:
        return self._stacked(lambda k: self._one.live_sums())

    def place_sums(self, gradient: Any) -> np.ndarray:
        return np.stack([self._one.place_sums(one) for one in gradient])

    def move(self, live: Any, optimizer: Any) -> None:
        pairs = self._inside.at_each(lambda k: self._one.moves(live[k]))
        patterns, sources = map(np.stack, zip(*pairs, strict=True))
        first = np.arange(len(sources)).reshape(-1, 1, 1) * sources[0].size
        source = np.where(sources < 0, -1, sources + first)
        variable, in_blocks = self.weight.variable, live.shape[1]
        places = np.stack([slots_of(pattern, in_blocks) for pattern in patterns])
        assign(variable, moved(to_numpy(variable), source, 0.0))
        for own, value in zip(self.support(), (patterns, places), strict=False):
            assign(own, value)
        move_slots(optimizer, variable, source)

    def dense_gradient(self) -> DenseGradient:
        one = self._one.dense_gradient()
        whole, blocks = one.variables

        def values() -> list[Any]:
            return [self._stacked(lambda k: one.values()[0]), to_numpy(self.weight.variable)]

        def collect(gradient: Any, of_blocks: Any) -> np.ndarray:
            return self._stacked(lambda k: one.collect(gradient[k], of_blocks[k]))

        variables = [self._inside.in_scopes(whole), self._inside.stacked_like(blocks)]
        return DenseGradient(variables=variables, values=values, collect=collect)

    # --- optimizer slots in another storage ------------------------------------------------------

    def slot_to_dense(self, slot: np.ndarray, start: float) -> np.ndarray:
        return self._stacked(lambda k: self._one.slot_to_dense(slot[k], start))

    def slot_from_dense(self, slot: np.ndarray) -> np.ndarray:
        return self._stacked(lambda k: self._one.slot_from_dense(slot[k]))

    def _stacked(self, read: Any) -> np.ndarray:
        return np.stack(self._inside.at_each(read))
