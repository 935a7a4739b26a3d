"""`BlockSparseLayer`, which holds, and computes with, the live blocks of a kernel."""

import dataclasses
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import keras
import numpy as np

from keras_sparse_ortho._checks import (
    as_text,
    check_density,
    check_number,
    check_seed,
    is_integer,
    other_keywords,
)
from keras_sparse_ortho._keras_internals import (
    Axes,
    DeferredVariables,
    Read,
    check_assignments,
    check_given,
    create_along,
    stand_in_name_scope,
)
from keras_sparse_ortho._types import Config, Tensor, TensorLike
from keras_sparse_ortho._values import assign, to_numpy
from keras_sparse_ortho.errors import LayoutError, NotPrunableError
from keras_sparse_ortho.initializers import numpy_dtype
from keras_sparse_ortho.kernels import KernelLayout, SparseLayer, kernel_layouts
from keras_sparse_ortho.layers._block_grid import (
    LARGEST,
    BlockGrid,
    Counts,
    block_axes,
    check_block,
    checked_counts,
)
from keras_sparse_ortho.layers._block_operands import (
    BlockOperands,
    WholeKernel,
    stack,
)
from keras_sparse_ortho.layers._drawn_blocks import (
    EXACT_ORTHOGONAL,
    BlockInitializer,
    checked_initializer,
    draw_blocks,
)
from keras_sparse_ortho.layers._live_blocks import LiveBlocks
from keras_sparse_ortho.layers._wrapped_layer import no_dense_update
from keras_sparse_ortho.parametrizations import (
    FakeQuantization,
    checked_quantizer,
    digest,
    quantized_value,
    why_needs_dense,
)

ops = keras.ops

_BLOCK_ARGUMENTS = ("density", "block", "counts", "gain", "seed", "quantizer")
"""The arguments that the namesake does not have."""

_FUNCTIONS: dict[str, Any] = {
    "activation": keras.activations,
    "bias_initializer": keras.initializers,
    "kernel_regularizer": keras.regularizers,
    "bias_regularizer": keras.regularizers,
    "activity_regularizer": keras.regularizers,
    "kernel_constraint": keras.constraints,
    "bias_constraint": keras.constraints,
}
"""The arguments that are functions, each with the module that restores and serializes it."""


class OnBlocks:
    """Refuses methods of Keras' layers that need a dense kernel."""

    def quantize(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise no_dense_update(self, "quantize")

    def enable_lora(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise no_dense_update(self, "enable_lora")


class BlockSparseLayer(OnBlocks, SparseLayer, keras.layers.Layer):
    """Base of the layers that hold, and compute with, the live blocks of a kernel only.

    Of `I` input by `J` output blocks of `r x c` each output block has `k` live ones. Three
    variables hold them: `blocks` `(J, k, *taps, r, c)`, which are trained, and the lists of their
    places `inputs_of` `(J, k)` and `slots_of` `(I, J k / I)`. With `counts` the `N` live blocks are
    numbered by groups of lines with equal counts, and these are `(N, *taps, r, c)`, `(N,)` and
    `(N,)`. Subclasses name the Keras layer that they replace (`namesake`) and its `settings`,
    attributes of the same names, and implement `call`. The arguments are as `BlockSparseDense`'s.
    """

    namesake: ClassVar[type[keras.layers.Layer]]
    settings: ClassVar[tuple[str, ...]]

    _features_axis = -1
    """The axis of the inputs' features."""

    _checks_features = True
    """Whether the size of that axis must be known; for the others Keras checks the inputs."""

    awaits_values = False
    """Whether the live blocks are set after `build`, which then draws none."""

    @other_keywords
    def __init__(
        self,
        *,
        density: float,
        block: int | tuple[int, int] = 32,
        counts: Counts | None = None,
        kernel_initializer: BlockInitializer = EXACT_ORTHOGONAL,
        gain: float = 1.0,
        seed: int | None = None,
        quantizer: FakeQuantization | None = None,
        **kwargs: Any,
    ) -> None:
        functions = {"bias_initializer": "zeros", **kwargs}
        super().__init__(
            **{
                name: value
                for name, value in kwargs.items()
                if name not in _FUNCTIONS
            }
        )
        if getattr(self.dtype_policy, "quantization_mode", None) is not None:
            raise NotPrunableError(str(no_dense_update(self, "quantize")))
        for name, module in _FUNCTIONS.items():
            setattr(self, name, module.get(functions.get(name)))
        reason = why_needs_dense(
            self.kernel_regularizer, self.kernel_constraint
        )
        if reason is not None:
            raise NotPrunableError(
                f"The layer {self.name!r} cannot be on blocks: {reason}"
            )
        self._asked_density = check_density(density)
        self.block = check_block(block)
        self.counts = None if counts is None else checked_counts(counts)
        self.gain = check_number("gain", gain)
        self.seed = check_seed(seed)
        self._draw_seed = (
            random.randrange(2**31) if self.seed is None else self.seed
        )
        self.kernel_initializer = checked_initializer(kernel_initializer)
        self.quantizer = (
            None if quantizer is None else checked_quantizer(quantizer)
        )
        self._grid: BlockGrid | None = None
        self._whole_kernel = WholeKernel()
        self.drawn_digest: int | None = (
            None  # of live blocks that were drawn orthogonal
        )
        self.bias: keras.Variable | None = None

    def build(self, input_shape: Sequence[int | None]) -> None:
        """Learns the shapes from a layer of Keras, and creates the live blocks."""
        if self._checks_features:
            self._check_features(input_shape)
        plain = self._plain()
        # It knows the shapes, and gets no values.
        with DeferredVariables().creating():
            plain.build(input_shape)
        self.layout = self._layout_of(plain)
        self.kernel_shape = tuple(plain.kernel.shape)
        self._add_kernel()
        if plain.bias is not None:
            self.bias = self.add_weight(
                name="bias",
                shape=plain.bias.shape,
                initializer=self.bias_initializer,
                regularizer=self.bias_regularizer,
                constraint=self.bias_constraint,
            )
        self.input_spec = plain.input_spec
        self.built = True

    def compute_output_shape(
        self, input_shape: Sequence[int | None]
    ) -> tuple[int | None, ...]:
        return tuple(self._plain().compute_output_shape(tuple(input_shape)))

    def _layout_of(self, plain: keras.layers.Layer) -> KernelLayout:
        return kernel_layouts(plain)["kernel"] or KernelLayout.convolution()

    def _add_kernel(self) -> None:
        """Draws the live blocks and creates the variables that hold them."""
        _, self.parts, *taps, inputs, outputs = self.layout.canonical_shape(
            self.kernel_shape
        )
        try:
            grid = self._fitting_grid(inputs, outputs, tuple(taps))
            values, pattern = self._drawn(grid)
        except ValueError as error:
            raise type(error)(f"The layer {self.name!r}: {error}") from None
        self._grid = grid
        blocks_axes, inputs_axes, slots_axes = block_axes(self.path, grid)
        self.blocks = self._add_along(
            blocks_axes,
            "blocks",
            values,
            regularizer=self.kernel_regularizer,
            constraint=self.kernel_constraint,
        )
        self.inputs_of = self._add_indices(inputs_axes, "inputs_of", pattern)
        self.slots_of = self._add_indices(
            slots_axes, "slots_of", grid.slots_of(pattern)
        )
        check_assignments(self.inputs_of, self._check_inputs)
        check_assignments(self.slots_of, self._check_slots)
        is_orthogonal = (
            self.kernel_initializer == EXACT_ORTHOGONAL and self.counts is None
        )
        if is_orthogonal and not self.awaits_values:
            stored = values.astype(numpy_dtype(self.variable_dtype))
            if self.variable_dtype == "bfloat16":
                stored = stored.astype(np.float32)  # as it is read back
            self.drawn_digest = digest(stored)

    def _add_indices(
        self, axes: Axes | None, name: str, value: np.ndarray
    ) -> keras.Variable:
        return self._add_along(
            axes, name, value, dtype="int32", trainable=False, autocast=False
        )

    def _add_along(
        self, axes: Axes | None, name: str, value: np.ndarray, **settings: Any
    ) -> keras.Variable:
        """A variable with a value, cut along axes of the device mesh."""
        return create_along(
            lambda: self.add_weight(
                name=name,
                shape=value.shape,
                initializer=constant(value),
                **settings,
            ),
            axes,
        )

    def _check_features(self, input_shape: Sequence[int | None]) -> None:
        """Refuses inputs with no size of an axis that the kernel has to know."""
        axis = self._features_axis
        try:
            size = input_shape[axis]
        except (TypeError, IndexError, KeyError):
            size = None
        if not is_integer(size) or size < 1:
            raise LayoutError(
                f"The layer {self.name!r} needs inputs with a known size of axis {axis}. "
                f"Received: input_shape={as_text(input_shape)}"
            )

    def _fitting_grid(
        self, inputs: int, outputs: int, taps: tuple[int, ...]
    ) -> BlockGrid:
        """The grid of all parts (gates), which stand side by side; each is of regular blocks."""
        rows, cols = self.block
        if self.parts > 1 and outputs % cols:
            raise LayoutError(
                f"The units of a gate must be a multiple of the {cols} outputs of a "
                f"block. Received: {outputs} units"
            )
        all_outputs = self.parts * outputs
        if self.counts is None:
            density = self._asked_density
            grid_of_part = BlockGrid.for_density(
                inputs, outputs, self.block, density, taps
            )
            grid = dataclasses.replace(grid_of_part, outputs=all_outputs)
        else:
            grid = BlockGrid(
                inputs, all_outputs, rows, cols, taps=taps, counts=self.counts
            )
            grid.check_sides()
        live = math.prod(grid.blocks_shape)  # `grid.live` lists all lines
        if live > LARGEST:
            raise LayoutError(
                f"A kernel has at most {LARGEST} live entries. Received: {live}"
            )
        return grid

    def _drawn(self, grid: BlockGrid) -> tuple[np.ndarray, np.ndarray]:
        """Values `(J, k, *taps, r, c)` and places `(J, k)` of the live blocks, or by slot."""
        if self.awaits_values:
            return np.zeros(grid.blocks_shape, np.float32), grid.draw_pattern(
                self._draw_seed
            )
        return draw_blocks(
            grid,
            self.kernel_initializer,
            gain=self.gain,
            seed=self._draw_seed,
            gates=self.layout.gates,
        )

    @property
    def grid(self) -> BlockGrid:
        """Which blocks are live; NotPrunableError before the layer is built."""
        if self._grid is None:
            raise NotPrunableError(
                f"The layer {self.name!r} has no blocks before it is built. Received: "
                f"{type(self).__name__} that is not built"
            )
        return self._grid

    @property
    def density(self) -> float:
        """Live fraction, exactly; before the layer is built the one that was asked for."""
        return self._asked_density if self._grid is None else self._grid.density

    def set_blocks(self, blocks: TensorLike, inputs_of: np.ndarray) -> None:
        """Sets values and places of the live blocks, of the shapes of these variables."""
        pattern = self.grid.check_pattern(inputs_of)
        assign(self.blocks, blocks)
        assign(self.inputs_of, pattern)
        assign(self.slots_of, self.grid.slots_of(pattern))

    def whole_kernel_variable(self) -> keras.Variable:
        """Stands for the kernel with all its blocks: the layer computes with a value in a scope."""
        return self._whole_kernel.variable(self.grid, self.variable_dtype)

    def operands(self) -> BlockOperands:
        """The live blocks, rounded; all of them inside a scope that gives the whole kernel."""
        operands = self._whole_kernel.operands(self.grid, self.compute_dtype)
        if operands is None:
            operands = BlockOperands(
                self.grid, self.blocks, self.inputs_of, self.slots_of
            )
        if self.quantizer is None:
            return operands
        blocks = operands.blocks_by_slot
        inner_axes = (1,) * (len(operands.grid.taps) + 2)
        pieces = [
            self.quantizer(
                piece, (piece.shape[0], *inner_axes, piece.shape[-1])
            )
            for piece in operands.grid.of_outputs.pieces(blocks)
        ]
        return dataclasses.replace(
            operands, blocks=stack(pieces, blocks.shape[1:])
        )

    def set_quantizer(
        self, quantizer: FakeQuantization | Mapping[str, FakeQuantization]
    ) -> None:
        """Rounds the live blocks; a dict names the kernel."""
        if isinstance(quantizer, Mapping):
            quantizer = quantizer["kernel"]
        self.quantizer = quantizer

    def kernel_value(self, *, quantized: bool = True) -> np.ndarray:
        """The kernel in the shape that the namesake has, as a NumPy array (bfloat16 as float32)."""
        kernel = self.grid.kernel(
            to_numpy(self.blocks), to_numpy(self.inputs_of)
        )
        if quantized:
            outputs = (1,) * (kernel.ndim - 1) + kernel.shape[-1:]
            kernel = quantized_value(self.quantizer, kernel, outputs)
        return self.shaped(kernel)

    def mask_value(self) -> np.ndarray:
        """The mask of the kernel."""
        return self.shaped(self.grid.mask(to_numpy(self.inputs_of)))

    def shaped(self, matrix: np.ndarray) -> np.ndarray:
        """The matrix of the grid in the shape that the namesake's kernel has."""
        parts = np.stack(np.split(matrix, self.parts, axis=-1))
        return self.layout.from_canonical(parts[None], self.kernel_shape)

    def matrix(self, kernel: np.ndarray) -> np.ndarray:
        """The reverse of `shaped`."""
        return np.concatenate([*self.layout.to_canonical(kernel)[0]], axis=-1)

    def storages(self) -> dict[str, LiveBlocks]:
        return {} if self._grid is None else {"kernel": LiveBlocks(self)}

    def get_build_config(self) -> Config:
        return {**super().get_build_config(), "drawn_digest": self.drawn_digest}

    def build_from_config(self, config: Config) -> None:
        config = dict(config)
        drawn_digest = config.pop("drawn_digest", None)
        super().build_from_config(config)
        self.drawn_digest = drawn_digest

    def save_own_variables(self, store: Any) -> None:
        """By name, so that a file can be checked."""
        for variable in self.weights:
            store[variable.name] = variable

    def load_own_variables(self, store: Any) -> None:
        own_shapes = {
            variable.name: tuple(variable.shape) for variable in self.weights
        }
        names = list(store.keys())
        stored_shapes = {name: tuple(store[name].shape) for name in names}
        if stored_shapes != own_shapes:
            raise ValueError(
                f"The file does not fit the layer {self.name!r}, which has {own_shapes}. "
                f"Received: {stored_shapes}"
            )
        check_given(
            self.weights, [store[variable.name] for variable in self.weights]
        )
        for variable in self.weights:
            assign(variable, store[variable.name])

    def set_weights(self, weights: list[np.ndarray]) -> None:
        check_given(self.weights, weights)
        super().set_weights(weights)

    def _check_inputs(self, read: Read) -> None:
        try:
            self.grid.check_pattern(read(self.inputs_of))
        except ValueError as error:
            raise self._damaged(str(error)) from None

    def _check_slots(self, read: Read) -> None:
        slots = read(self.slots_of)
        right_slots = self.grid.slots_of(read(self.inputs_of))
        if not np.array_equal(slots, right_slots):
            raise self._damaged(
                "`slots_of` must list where `inputs_of` names each input block. "
                f"Received: other slots, of shape {slots.shape}"
            )

    def _damaged(self, reason: str) -> ValueError:
        return ValueError(
            f"The values loaded into or set in the layer {self.name!r} are damaged, or of another "
            f"model: {reason}"
        )

    def to_dense_layer(self) -> keras.layers.Layer:
        """The namesake with the same settings and weights."""
        plain = self._plain()
        stand_in_name_scope(plain, self)
        plain.build(self.get_build_config()["input_shape"])
        weights = {variable.name: variable for variable in plain.weights}
        assign(weights["kernel"], self.kernel_value())
        weights["kernel"].trainable = self.blocks.trainable
        if self.bias is not None:
            assign(weights["bias"], to_numpy(ops.cast(self.bias, "float32")))
            weights["bias"].trainable = self.bias.trainable
        return plain

    def _plain(self) -> keras.layers.Layer:
        config = {
            key: value
            for key, value in self.get_config().items()
            if key not in _BLOCK_ARGUMENTS
        }
        if self.kernel_initializer == EXACT_ORTHOGONAL:
            del config["kernel_initializer"]
        return self.namesake.from_config(config)

    def build_like(self, plain: keras.layers.Layer) -> None:
        """Builds the layer for the inputs of a plain one, and copies its bias.

        The live blocks are zeros until its `storages()` set them.
        """
        self.awaits_values = True
        stand_in_name_scope(self, plain)
        self.build(plain.get_build_config()["input_shape"])
        if self.bias is not None:
            # A copy: on JAX `fit` frees the arrays of its model, which may not be shared.
            assign(self.bias, ops.copy(plain.bias.value))
            self.bias.trainable = plain.bias.trainable

    def get_config(self) -> Config:
        serialize = keras.saving.serialize_keras_object
        config = {**super().get_config(), "density": self._asked_density}
        for name in ("block", "gain", "seed", *self.settings):
            config[name] = getattr(self, name)
        for name, module in _FUNCTIONS.items():
            config[name] = module.serialize(getattr(self, name))
        config["kernel_initializer"] = serialize(self.kernel_initializer)
        if self.counts is not None:
            config["counts"] = self.counts
        if self.quantizer is not None:
            config["quantizer"] = serialize(self.quantizer)
        return config

    @classmethod
    def from_config(cls, config: Config) -> "BlockSparseLayer":
        return cls(
            **{
                name: value
                for name, value in config.items()
                if name != "inputs_of"
            }
        )


def constant(value: np.ndarray) -> Callable[..., Tensor]:
    """An initializer of one value."""

    def initializer(shape: Sequence[int], dtype: str | None = None) -> Tensor:
        return ops.cast(ops.convert_to_tensor(value), dtype)

    return initializer
