"""`LiveBlocks`, the storage of a kernel on live blocks: its form, places, moves and slots."""

from typing import Any

import numpy as np

from keras_sparse_ortho._optimizer_slots import move_slots, moved
from keras_sparse_ortho._values import assign, to_numpy
from keras_sparse_ortho.errors import LayoutError
from keras_sparse_ortho.initializers import ExactOrthogonal
from keras_sparse_ortho.kernels import DenseGradient, PrunableWeight, Storage
from keras_sparse_ortho.layers._block_grid import pattern_of
from keras_sparse_ortho.orthogonal import Block, RegularBlocks, fan_step
from keras_sparse_ortho.parametrizations import digest


class LiveBlocks(Storage):
    """The kernel of a built layer. Its places are blocks, `(I, J)` or `(parts, I, J)`."""

    form_name = "blocks"
    compact = movable = in_blocks = True
    weight: Any = None
    shape: tuple[int, ...] = ()
    live = 0

    def __init__(self, layer: Any, owner: Any = None) -> None:
        self._layer = layer
        self.shape, self.live = layer._kernel_shape, layer.grid.live
        self.block = layer.grid.rows, layer.grid.cols  # inputs and outputs of a block
        self.place_size = layer.grid.live // layer.grid.live_blocks
        owner, layout = owner or layer, layer._layout
        self.weight = PrunableWeight("kernel", layer.blocks, owner, layout, storage=self)

    @property
    def block_size(self) -> tuple[int, int]:
        return self.block

    @property
    def least_density(self) -> float:
        """The least density of a kernel of such blocks, of which the others are multiples."""
        grid = self._layer.grid
        if grid.counts:
            return 1.0 / (grid.in_blocks * grid.out_blocks)
        return fan_step(grid.in_blocks, grid.out_blocks // self._layer.parts) / grid.in_blocks

    @property
    def quantizer(self) -> Any:
        return self._layer.quantizer

    def value(self) -> np.ndarray:
        return self._layer.kernel_value()

    def raw_value(self, *, copy: bool = True) -> np.ndarray:
        return self._layer.kernel_value(quantized=False)

    def mask_value(self) -> np.ndarray:
        return self._layer.mask_value()

    def assign_raw(self, value: Any) -> None:
        assign(self._layer.blocks, self.slot_from_dense(to_numpy(value)))

    def set_kernel(self, kernel: Any, mask: Any) -> None:
        """Sets the live blocks from a dense kernel and a mask that fits the layer."""
        layer, kernel, mask = self._layer, np.asarray(kernel), np.asarray(mask, dtype=bool)
        grid, pattern = pattern_of(layer.matrix(mask), layer.block, layer.parts)
        if grid != layer.grid:
            raise LayoutError(
                f"The layer '{layer.name}' has other numbers of live blocks in its lines. "
                f"Received: a mask of {grid.live_blocks} blocks, for {layer.grid.live_blocks}"
            )
        layer.set_blocks(grid.blocks(layer.matrix(kernel), pattern), pattern)

    def set_drawn(self, drawn: RegularBlocks) -> None:
        self._layer.set_blocks(*self._layer.grid.side_by_side(drawn))
        self.mark_as_drawn()

    def support(self) -> list[Any]:
        return [self._layer.inputs_of, self._layer.slots_of]

    @property
    def drawn_by(self) -> ExactOrthogonal:
        layer = self._layer
        structure = Block(*layer.block, regular=layer.grid.counts is None)
        return ExactOrthogonal(layer.density, layer.gain, seed=layer.seed, structure=structure)

    def is_as_drawn(self) -> bool:
        drawn = self._layer.drawn_digest
        return drawn is not None and drawn == digest(to_numpy(self._layer.blocks))

    def mark_as_drawn(self) -> None:
        self._layer.drawn_digest = digest(to_numpy(self._layer.blocks))

    def live_places(self) -> np.ndarray:
        return self.place_sums(self._whole(np.ones(self._layer.grid.places_shape, bool))) > 0

    def live_sums(self) -> np.ndarray:
        blocks, lead = np.abs(to_numpy(self._layer.blocks)), len(self._layer.grid.places_shape)
        return self.place_sums(self._whole(blocks.sum(axis=tuple(range(lead, blocks.ndim)))))

    def place_sums(self, gradient: Any) -> np.ndarray:
        sums = np.asarray(np.abs(gradient).sum(axis=tuple(range(2, gradient.ndim)))).T
        parts = self._layer.parts
        return sums if parts == 1 else np.stack(np.split(sums, parts, axis=1))

    def move(self, live: Any, optimizer: Any) -> None:
        pattern, source = self.moves(live)
        self._layer.set_blocks(moved(to_numpy(self._layer.blocks), source, 0.0), pattern)
        move_slots(optimizer, self._layer.blocks, source)

    def moves(self, live: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`inputs_of` for these live blocks, and the slot of each of them before, -1 for new."""
        grid = self._layer.grid
        live = live if self._layer.parts == 1 else np.concatenate([*live], axis=-1)
        pattern, lines = grid.pattern(live), grid.of_outputs.of_slots
        slots = np.full(live.T.shape, -1)
        slots[lines, to_numpy(self._layer.inputs_of).ravel()] = np.arange(pattern.size)
        return pattern, slots[lines, pattern.ravel()].reshape(pattern.shape)

    def dense_gradient(self) -> DenseGradient:
        # The slots of the kernel of all blocks, `(J, I, *taps, r, c)`, and of its regularizer.
        whole = self._layer._whole.variable(self._layer.grid, self._layer.variable_dtype)

        def values() -> list[Any]:
            blocks = to_numpy(self._layer.blocks)
            return [self._whole(blocks), blocks]

        return DenseGradient(
            variables=[whole, self._layer.blocks],
            values=values,
            collect=lambda gradient, of_blocks: gradient + self._whole(of_blocks),
        )

    def _whole(self, blocks: np.ndarray) -> np.ndarray:
        return self._layer.grid.at_places(blocks, to_numpy(self._layer.inputs_of))

    def slot_to_dense(self, slot: np.ndarray, start: float) -> np.ndarray:
        layer = self._layer
        kernel = layer.shaped(layer.grid.kernel(slot, to_numpy(layer.inputs_of)))
        return np.where(self.mask_value(), kernel, np.asarray(start, kernel.dtype))

    def slot_from_dense(self, slot: np.ndarray) -> np.ndarray:
        layer = self._layer
        return layer.grid.blocks(layer.matrix(slot), to_numpy(layer.inputs_of))
