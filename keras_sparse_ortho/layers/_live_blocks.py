"""`LiveBlocks`, the storage of a kernel on live blocks: its form, places, moves and slots."""

import keras
import numpy as np

from keras_sparse_ortho._optimizer_slots import move_slots, moved
from keras_sparse_ortho._types import Optimizer, TensorLike
from keras_sparse_ortho._values import assign, to_numpy
from keras_sparse_ortho.errors import LayoutError
from keras_sparse_ortho.initializers import ExactOrthogonal
from keras_sparse_ortho.kernels import DenseGradient, PrunableWeight, Storage
from keras_sparse_ortho.layers._block_grid import pattern_of
from keras_sparse_ortho.orthogonal import Block, RegularBlocks, fan_step
from keras_sparse_ortho.parametrizations import FakeQuantization, digest


class LiveBlocks(Storage):
    """The kernel of a built layer. Its places are blocks, `(I, J)` or `(parts, I, J)`.

    Args:
        layer: BlockSparseLayer that holds the live blocks.
        owner: Layer that users know as the owner of the kernel. Default: `layer`.
    """

    form_name = "blocks"
    compact = True
    movable = True
    in_blocks = True

    # Any: the file of BlockSparseLayer imports this one.
    def __init__(
        self, layer: keras.layers.Layer, owner: keras.layers.Layer | None = None
    ) -> None:
        self._layer = layer
        self.place_size = layer.grid.live // layer.grid.live_blocks
        self._weight = PrunableWeight(
            "kernel", layer.blocks, owner or layer, layer.layout, storage=self
        )

    @property
    def weight(self) -> PrunableWeight:
        return self._weight

    @property
    def shape(self) -> tuple[int, ...]:
        return self._layer.kernel_shape

    @property
    def live(self) -> int:
        return self._layer.grid.live

    @property
    def block_size(self) -> tuple[int, int]:
        return self._layer.grid.rows, self._layer.grid.cols

    @property
    def least_density(self) -> float:
        """The least density of a kernel of such blocks, of which the others are multiples."""
        grid = self._layer.grid
        if grid.counts is not None:
            return 1.0 / (grid.in_blocks * grid.out_blocks)
        return (
            fan_step(grid.in_blocks, grid.out_blocks // self._layer.parts)
            / grid.in_blocks
        )

    @property
    def quantizer(self) -> FakeQuantization | None:
        return self._layer.quantizer

    def value(self) -> np.ndarray:
        return self._layer.kernel_value()

    def raw_value(self, *, copy: bool = True) -> np.ndarray:
        return self._layer.kernel_value(quantized=False)

    def mask_value(self) -> np.ndarray:
        return self._layer.mask_value()

    def assign_raw(self, value: TensorLike) -> None:
        assign(self._layer.blocks, self.slot_from_dense(to_numpy(value)))

    def set_kernel(self, kernel: np.ndarray, mask: np.ndarray) -> None:
        """Sets the live blocks from a dense kernel and a mask that fits the layer."""
        layer = self._layer
        grid, pattern = pattern_of(layer.matrix(mask), layer.block, layer.parts)
        if grid != layer.grid:
            raise LayoutError(
                f"The layer {layer.name!r} has other numbers of live blocks in its lines. "
                f"Received: a mask of {grid.live_blocks} blocks, for {layer.grid.live_blocks}"
            )
        layer.set_blocks(grid.blocks(layer.matrix(kernel), pattern), pattern)

    def set_drawn(self, drawn: RegularBlocks) -> None:
        """Sets regular blocks as they were drawn."""
        blocks, inputs_of = self._layer.grid.side_by_side(drawn)
        self._layer.set_blocks(blocks, inputs_of)
        self.mark_as_drawn()

    def support(self) -> list[keras.Variable]:
        return [self._layer.inputs_of, self._layer.slots_of]

    @property
    def drawn_by(self) -> ExactOrthogonal:
        layer = self._layer
        structure = Block(*layer.block, regular=layer.grid.counts is None)
        return ExactOrthogonal(
            layer.density, layer.gain, seed=layer.seed, structure=structure
        )

    def is_as_drawn(self) -> bool:
        drawn_digest = self._layer.drawn_digest
        return drawn_digest is not None and drawn_digest == digest(
            to_numpy(self._layer.blocks)
        )

    def mark_as_drawn(self) -> None:
        """Notes that the live blocks are as an orthogonal initializer drew them."""
        self._layer.drawn_digest = digest(to_numpy(self._layer.blocks))

    def live_places(self) -> np.ndarray:
        is_live = np.ones(self._layer.grid.places_shape, bool)
        return self.place_sums(self._at_places(is_live)) > 0

    def live_sums(self) -> np.ndarray:
        magnitudes = np.abs(to_numpy(self._layer.blocks))
        block_axes = tuple(
            range(len(self._layer.grid.places_shape), magnitudes.ndim)
        )
        return self.place_sums(self._at_places(magnitudes.sum(axis=block_axes)))

    def place_sums(self, gradient: np.ndarray) -> np.ndarray:
        block_axes = tuple(range(2, gradient.ndim))
        sums = np.asarray(np.abs(gradient).sum(axis=block_axes)).T
        parts = self._layer.parts
        if parts == 1:
            return sums
        return np.stack(np.split(sums, parts, axis=1))

    def move(self, live: np.ndarray, optimizer: Optimizer | None) -> None:
        pattern, source = self.moves(live)
        new_blocks = moved(to_numpy(self._layer.blocks), source, 0.0)
        self._layer.set_blocks(new_blocks, pattern)
        move_slots(optimizer, self._layer.blocks, source)

    def moves(self, live: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns `inputs_of` for these live blocks, and where each was before.

        Args:
            live: bool array of the shape of `live_places`.

        Returns:
            `inputs_of`, and the slot of each live block before, -1 for new ones.
        """
        grid = self._layer.grid
        if self._layer.parts > 1:
            live = np.concatenate([*live], axis=-1)
        pattern = grid.pattern(live)
        lines = grid.of_outputs.of_slots
        old_slots = np.full(live.T.shape, -1)
        old_slots[lines, to_numpy(self._layer.inputs_of).ravel()] = np.arange(
            pattern.size
        )
        return pattern, old_slots[lines, pattern.ravel()].reshape(pattern.shape)

    def dense_gradient(self) -> DenseGradient:
        # The slots of the kernel of all blocks, `(J, I, *taps, r, c)`, and of its regularizer.
        whole_kernel = self._layer.whole_kernel_variable()

        def values() -> list[np.ndarray]:
            blocks = to_numpy(self._layer.blocks)
            return [self._at_places(blocks), blocks]

        return DenseGradient(
            variables=[whole_kernel, self._layer.blocks],
            values=values,
            collect=lambda gradient, of_blocks: (
                gradient + self._at_places(of_blocks)
            ),
        )

    def _at_places(self, values: np.ndarray) -> np.ndarray:
        return self._layer.grid.at_places(
            values, to_numpy(self._layer.inputs_of)
        )

    def slot_to_dense(self, slot: np.ndarray, start: float) -> np.ndarray:
        layer = self._layer
        kernel = layer.shaped(
            layer.grid.kernel(slot, to_numpy(layer.inputs_of))
        )
        return np.where(
            self.mask_value(), kernel, np.asarray(start, kernel.dtype)
        )

    def slot_from_dense(self, slot: np.ndarray) -> np.ndarray:
        layer = self._layer
        return layer.grid.blocks(layer.matrix(slot), to_numpy(layer.inputs_of))
