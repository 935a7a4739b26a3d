"""`BlockSparseGates`: the kernel of the gates of a recurrent cell, on live blocks."""

import dataclasses
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho.errors import LayoutError
from keras_sparse_ortho.kernels import KernelLayout, Storage
from keras_sparse_ortho.layers._block_grid import BlockGrid
from keras_sparse_ortho.layers._block_products import product_of_rows
from keras_sparse_ortho.layers._block_sparse_layer import BlockSparseLayer
from keras_sparse_ortho.layers._live_blocks import LiveBlocks

ops = keras.ops


class BlockSparseGates(BlockSparseLayer):
    """`x -> x K` for the kernel `K` of all gates, `(inputs, gates * units)`, a part of a cell.

    The gates stand side by side. Each is a matrix of regular blocks, so that all of them are one.
    """

    namesake = keras.layers.Dense

    def __init__(self, gates: int, units: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.gates = gates
        self.units = units
        self.supports_masking = True

    def build(self, input_shape: Any) -> None:
        shape = (self._features(input_shape, -1), self.gates * self.units)
        self._add_kernel(shape, KernelLayout.recurrent(self.gates), None)
        self.built = True

    def _fitting_grid(self, inputs: int, outputs: int, taps: tuple[int, ...]) -> BlockGrid:
        if outputs % self.block[1]:
            raise LayoutError(
                f"The units of a gate must be a multiple of the {self.block[1]} outputs of a "
                f"block. Received: {outputs} units"
            )
        one = super()._fitting_grid(inputs, outputs, taps)
        return dataclasses.replace(one, outputs=self.gates * outputs)

    def _shaped(self, matrix: np.ndarray) -> np.ndarray:
        return matrix

    def _matrix(self, kernel: np.ndarray) -> np.ndarray:
        return kernel

    def call(self, inputs: Any) -> Any:
        lead = ops.shape(inputs)[:-1]
        x = product_of_rows(ops.reshape(inputs, (-1, self.grid.inputs)), self.operands())
        return ops.reshape(x, (*lead, self.grid.outputs))

    def compute_output_shape(self, input_shape: Any) -> tuple[int | None, ...]:
        return (*input_shape[:-1], self.gates * self.units)

    def storages(self) -> dict[str, Storage]:
        return {}


class GateBlocks(LiveBlocks):
    """The kernel of `BlockSparseGates`; its places are the blocks of each gate, `(gates, I, J)`."""

    def __init__(self, layer: BlockSparseGates, owner: Any) -> None:
        super().__init__(layer)
        self._weight = dataclasses.replace(self._weight, owner=owner)

    @property
    def least_density(self) -> float:
        grid = self._layer.grid
        one = dataclasses.replace(grid, outputs=self._layer.units)
        return float(one.fan_in_step / one.in_blocks)

    def live_places(self) -> np.ndarray:
        return self._by_gate(super().live_places())

    def live_sums(self) -> np.ndarray:
        return self._by_gate(super().live_sums())

    def place_sums(self, gradient: Any) -> np.ndarray:
        return self._by_gate(super().place_sums(gradient))

    def moves(self, live: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return super().moves(live.swapaxes(0, 1).reshape(live.shape[1], -1))

    def _by_gate(self, places: np.ndarray) -> np.ndarray:
        return places.reshape(len(places), self._layer.gates, -1).swapaxes(0, 1)
