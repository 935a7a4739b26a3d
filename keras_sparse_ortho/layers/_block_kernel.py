"""`BlockKernel`: a layer that holds a kernel as its live blocks."""

import random
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._backend import to_numpy
from keras_sparse_ortho._checks import check_density, check_seed
from keras_sparse_ortho._optimizer_slots import moved
from keras_sparse_ortho.errors import LayoutError, NotPrunableError
from keras_sparse_ortho.initializers import are_weights_set_later
from keras_sparse_ortho.kernels import KernelLayout, StoredKernel
from keras_sparse_ortho.layers._block_functions import (
    EXACT_ORTHOGONAL,
    check_kernel_functions,
    draw_blocks,
    on_columns,
    restore_initializer,
    serialize_initializer,
)
from keras_sparse_ortho.layers._block_grid import BlockGrid, check_block, pattern_of
from keras_sparse_ortho.layers._block_operands import BlockOperands, WholeKernel
from keras_sparse_ortho.layers._given_values import giving
from keras_sparse_ortho.layers._stored_blocks import StoredBlocks, as_stored, check_stored
from keras_sparse_ortho.orthogonal import slots_of
from keras_sparse_ortho.parametrizations import digest

ops = keras.ops


class BlockKernel(keras.layers.Layer):
    """Base of `BlockSparseLayer`: the variables of a kernel of live blocks, its values and file.

    Arguments are those of `BlockSparseLayer`.
    """

    def __init__(
        self,
        *,
        density: float | None,
        block: int | tuple[int, int],
        inputs_of: Any,
        kernel_initializer: Any,
        kernel_regularizer: Any,
        kernel_constraint: Any,
        gain: float,
        seed: int | None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if (density is None) == (inputs_of is None):
            raise ValueError(
                "A layer of live blocks needs either a `density` or `inputs_of`. "
                f"Received: density={density!r}, inputs_of={inputs_of!r}"
            )
        self._wanted = None if density is None else check_density(density)
        self.block = check_block(block)
        self._given = None if inputs_of is None else np.asarray(inputs_of)
        self.gain = float(gain)
        self.seed = check_seed(seed)
        self._draw_seed = random.randrange(2**31) if self.seed is None else self.seed
        self.kernel_initializer = restore_initializer(kernel_initializer, self._given is not None)
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)
        self.kernel_constraint = keras.constraints.get(kernel_constraint)
        check_kernel_functions(self.kernel_regularizer)
        self._grid: BlockGrid | None = None
        self._whole = WholeKernel()
        self._drawn_digest: int | None = None

    def _add_blocks(self, shape: tuple[int, ...], layout: KernelLayout) -> None:
        """Makes the variables for a kernel of the namesake's shape."""
        *taps, inputs, outputs = layout.canonical_shape(shape)[2:]
        try:
            self._grid = self._fitting_grid(inputs, outputs, tuple(taps))
        except ValueError as error:
            raise type(error)(f"The layer '{self.name}': {error}") from None
        self._kernel_shape, self._layout = shape, layout
        values, pattern = draw_blocks(
            self._grid, self.kernel_initializer, self._given, self.gain, self._draw_seed
        )
        self.blocks = self.add_weight(
            name="blocks",
            shape=self._grid.blocks_shape,
            initializer=giving(values),
            regularizer=on_columns(self._grid, self.kernel_regularizer),
            constraint=on_columns(self._grid, self.kernel_constraint, back=True),
        )
        self.inputs_of = self._add_indices("inputs_of", pattern)
        self.slots_of = self._add_indices("slots_of", slots_of(pattern, self._grid.in_blocks))
        if self.kernel_initializer == EXACT_ORTHOGONAL and not are_weights_set_later():
            self._drawn_digest = digest(as_stored(values, self.variable_dtype))

    def _fitting_grid(self, inputs: int, outputs: int, taps: tuple[int, ...]) -> BlockGrid:
        if self._given is None:
            assert self._wanted is not None
            return BlockGrid.for_density(inputs, outputs, self.block, self._wanted, taps)
        fan_in = self._given.shape[1] if self._given.ndim == 2 else 0
        grid = BlockGrid(inputs, outputs, *self.block, fan_in=fan_in, taps=taps)
        grid.check_sides()
        grid.check_pattern(self._given)
        return grid

    def _add_indices(self, name: str, value: np.ndarray) -> Any:
        return self.add_weight(
            name=name,
            shape=value.shape,
            dtype="int32",
            trainable=False,
            autocast=False,
            initializer=giving(value),
        )

    @property
    def grid(self) -> BlockGrid:
        """The kernel's blocks; a layer that is not built has none yet."""
        if self._grid is None:
            raise NotPrunableError(
                f"The layer '{self.name}' has no blocks before it is built. Received: "
                f"{type(self).__name__} that is not built"
            )
        return self._grid

    @property
    def density(self) -> float | None:
        """Live fraction, exactly; before the layer is built the one that was asked for."""
        return self._wanted if self._grid is None else self._grid.density

    def set_blocks(self, blocks: Any, inputs_of: Any) -> None:
        """Sets values and places of the live blocks, `(J, k, *taps, r, c)` and `(J, k)`.

        Raises:
            ValueError: Blocks of another shape, places that are not regular both ways.
        """
        pattern = self.grid.check_pattern(inputs_of)
        if tuple(blocks.shape) != self.grid.blocks_shape:
            raise ValueError(
                f"The blocks of '{self.name}' have the shape {self.grid.blocks_shape}. "
                f"Received: blocks of shape {tuple(blocks.shape)}"
            )
        self.blocks.assign(blocks)
        self.inputs_of.assign(pattern)
        self.slots_of.assign(slots_of(pattern, self.grid.in_blocks))

    def move_blocks(self, inputs_of: Any) -> np.ndarray:
        """Moves live blocks: those that stay keep their values, new ones are zero.

        Moments in an optimizer do not move with them; `callbacks.SET` and `RigL` move these, too.

        Returns:
            `(J, k)` integers: for each block the flat slot `j k + l` where it was, -1 for new ones.
        """
        before = ops.convert_to_numpy(self.inputs_of)
        slots = np.full((self.grid.out_blocks, self.grid.in_blocks), -1)
        lines = np.arange(self.grid.out_blocks)[:, None]
        slots[lines, before] = np.arange(before.size).reshape(before.shape)
        source = slots[lines, self.grid.check_pattern(inputs_of)]
        self.set_blocks(moved(ops.convert_to_numpy(self.blocks), source, 0.0), inputs_of)
        return source

    # --- what a call computes with ---------------------------------------------------------------

    def operands(self) -> BlockOperands:
        """The live blocks; all of them inside a scope that has a value for `whole_kernel`."""
        whole = self._whole.operands(self.grid, self.compute_dtype)
        live = BlockOperands(self.grid, self.blocks, self.inputs_of, self.slots_of)
        return live if whole is None else whole

    @property
    def whole_kernel(self) -> Any:
        """A variable `(J, I, *taps, r, c)` without a value, for gradients of dead blocks."""
        return self._whole.variable(self.grid, self.variable_dtype)

    # --- the dense kernel ------------------------------------------------------------------------

    def kernel_value(self) -> np.ndarray:
        """The kernel in the shape that the namesake has, as a NumPy array (bfloat16 as float32)."""
        pattern = ops.convert_to_numpy(self.inputs_of)
        return self._shaped(self.grid.kernel(to_numpy(self.blocks), pattern))

    def mask_value(self) -> np.ndarray:
        """Which entries of that kernel are live."""
        return self._shaped(self.grid.mask(ops.convert_to_numpy(self.inputs_of)))

    def _shaped(self, matrix: np.ndarray) -> np.ndarray:
        return self._layout.from_canonical(matrix[None, None], self._kernel_shape)

    def set_kernel(self, kernel: Any, mask: Any) -> None:
        """Sets the live blocks from a dense kernel and its mask, both in the namesake's shape.

        Raises:
            LayoutError: A mask that is not one of whole blocks, as many in each line as the layer
                has; a kernel that is not zero outside.
        """
        kernel, mask = np.asarray(kernel), np.asarray(mask, dtype=bool)
        for name, given in (("kernel", kernel), ("mask", mask)):
            if given.shape != self._kernel_shape:
                raise LayoutError(
                    f"The {name} of '{self.name}' has the shape {self._kernel_shape}. "
                    f"Received: {name} of shape {given.shape}"
                )
        if lost := int(np.count_nonzero(kernel[~mask])):
            raise LayoutError(
                f"The kernel for '{self.name}' must be zero outside the mask. "
                f"Received: {lost} nonzero entries outside"
            )
        grid, pattern = pattern_of(self._layout.to_canonical(mask)[0, 0], self.block)
        if grid != self.grid:
            raise LayoutError(
                f"The layer '{self.name}' has {self.grid.fan_in} live blocks in each line. "
                f"Received: a mask of {grid.fan_in}"
            )
        self.set_blocks(grid.blocks(self._layout.to_canonical(kernel)[0, 0], pattern), pattern)

    def check_mask(self, mask: np.ndarray, layout: KernelLayout | None) -> None:
        """Refuses a mask that is not one of whole regular blocks; the layer need not be built.

        Raises:
            LayoutError: The reason.
        """
        pattern_of((layout or KernelLayout.convolution()).to_canonical(mask)[0, 0], self.block)

    def as_blocks(self, kernel: np.ndarray) -> np.ndarray:
        """What an array of the dense kernel's shape holds at the live blocks."""
        matrix = self._layout.to_canonical(kernel)[0, 0]
        return self.grid.blocks(matrix, ops.convert_to_numpy(self.inputs_of))

    def as_kernel(self, blocks: np.ndarray, fill: float = 0.0) -> np.ndarray:
        """The reverse of `as_blocks`, with `fill` where no block is live."""
        kernel = self._shaped(self.grid.kernel(blocks, ops.convert_to_numpy(self.inputs_of)))
        return np.where(self.mask_value(), kernel, np.asarray(fill, kernel.dtype))

    def stored_kernels(self) -> dict[str, StoredKernel]:
        """What `prunable_weights` lists: the kernel, by the name that it has in the namesake."""
        return {"kernel": StoredBlocks(self)}

    # --- whether it is still orthogonal ----------------------------------------------------------

    def mark_as_drawn(self) -> None:
        """Notes that the live blocks are what an orthogonal initializer has drawn."""
        self._drawn_digest = digest(to_numpy(self.blocks))

    def is_as_drawn(self) -> bool:
        """Whether the live blocks are, bit by bit, what an orthogonal initializer has drawn."""
        drawn = self._drawn_digest
        return drawn is not None and drawn == digest(to_numpy(self.blocks))

    def get_build_config(self) -> dict[str, Any]:
        """Input shape, and what tells whether loaded blocks are as they were drawn."""
        return {**super().get_build_config(), "drawn_digest": self._drawn_digest}

    def build_from_config(self, config: dict[str, Any]) -> None:
        """Builds for that shape."""
        config = dict(config)
        drawn_digest = config.pop("drawn_digest", None)
        super().build_from_config(config)
        self._drawn_digest = drawn_digest

    # --- files -----------------------------------------------------------------------------------

    def save_own_variables(self, store: Any) -> None:
        """By name, so that a file can be checked."""
        for variable in self.weights:
            store[variable.name] = variable

    def load_own_variables(self, store: Any) -> None:
        """Checks where the blocks stand before anything is changed.

        Raises:
            ValueError: A file with other variables, or with indices that are out of range, doubled
                or not regular both ways.
        """
        check_stored(self, store)
        for variable in self.weights:
            variable.assign(store[variable.name])

    def get_config(self) -> dict[str, Any]:
        """What the kernel needs."""
        return {
            **super().get_config(),
            "kernel_initializer": serialize_initializer(self.kernel_initializer),
            "kernel_regularizer": keras.regularizers.serialize(self.kernel_regularizer),
            "kernel_constraint": keras.constraints.serialize(self.kernel_constraint),
            "density": self._wanted,
            "block": self.block,
            "inputs_of": None if self._given is None else self._given.tolist(),
            "gain": self.gain,
            "seed": self.seed,
        }
