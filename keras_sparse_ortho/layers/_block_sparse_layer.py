"""`BlockSparseLayer`, which holds, and computes with, the live blocks of a kernel."""

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

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
from keras_sparse_ortho._values import assign, to_numpy
from keras_sparse_ortho.errors import LayoutError, NotPrunableError
from keras_sparse_ortho.initializers import are_weights_set_later, numpy_dtype
from keras_sparse_ortho.kernels import KernelLayout, Storage, kernel_layouts
from keras_sparse_ortho.layers._block_grid import (
    LARGEST,
    BlockGrid,
    Counts,
    block_axes,
    check_block,
    checked_counts,
)
from keras_sparse_ortho.layers._block_products import BlockOperands, WholeKernel, stacked
from keras_sparse_ortho.layers._live_blocks import LiveBlocks
from keras_sparse_ortho.layers._wrapped_layer import no_dense_update
from keras_sparse_ortho.orthogonal import Block, clear_padding, random_orthogonal, regular_blocks
from keras_sparse_ortho.parametrizations import (
    FakeQuantization,
    checked_quantizer,
    digest,
    quantized_value,
    why_needs_dense,
)

ops = keras.ops
_EXACT_ORTHOGONAL = "exact_orthogonal"
_OWN = ("density", "block", "counts", "gain", "seed", "quantizer")
_FUNCTIONS: dict[str, Any] = {  # arguments by the module that restores and serializes them
    "activation": keras.activations,
    "bias_initializer": keras.initializers,
    "kernel_regularizer": keras.regularizers,
    "bias_regularizer": keras.regularizers,
    "activity_regularizer": keras.regularizers,
    "kernel_constraint": keras.constraints,
    "bias_constraint": keras.constraints,
}


class OnBlocks:
    """Refuses methods of Keras' layers that need a dense kernel."""

    def quantize(self, *args: Any, **kwargs: Any) -> None:
        raise no_dense_update(self, "quantize")

    def enable_lora(self, *args: Any, **kwargs: Any) -> None:
        raise no_dense_update(self, "enable_lora")


class BlockSparseLayer(OnBlocks, keras.layers.Layer):
    """Base of the layers that hold, and compute with, the live blocks of a kernel only.

    Of `I` input by `J` output blocks of `r x c` each output block has `k` live ones. Three
    variables hold them: `blocks` `(J, k, *taps, r, c)`, which are trained, and the lists of their
    places `inputs_of` `(J, k)` and `slots_of` `(I, J k / I)`. With `counts` the `N` live blocks are
    numbered by groups of lines with equal counts, and these are `(N, *taps, r, c)`, `(N,)` and
    `(N,)`. Subclasses name the Keras layer that they replace (`namesake`) and its `settings`,
    attributes of the same names, and implement `call`. The arguments are as `BlockSparseDense`'s.
    """

    namesake: ClassVar[Any]
    settings: ClassVar[tuple[str, ...]]
    _axis: Any = -1  # of the inputs' features; `None` where Keras checks them

    @other_keywords()
    def __init__(
        self,
        *,
        density: float,
        block: int | tuple[int, int] = 32,
        counts: Counts | None = None,
        kernel_initializer: Any = "exact_orthogonal",
        gain: float = 1.0,
        seed: int | None = None,
        quantizer: FakeQuantization | None = None,
        **kwargs: Any,
    ) -> None:
        given = {"bias_initializer": "zeros", **kwargs}
        super().__init__(**{key: value for key, value in kwargs.items() if key not in _FUNCTIONS})
        if getattr(self.dtype_policy, "quantization_mode", None) is not None:
            raise NotPrunableError(str(no_dense_update(self, "quantize")))
        for name, module in _FUNCTIONS.items():
            setattr(self, name, module.get(given.get(name)))
        if reason := why_needs_dense(self.kernel_regularizer, self.kernel_constraint):
            raise NotPrunableError(f"The layer '{self.name}' cannot be on blocks: {reason}")
        self._wanted = check_density(density)
        self.block = check_block(block)
        self.counts = None if counts is None else checked_counts(counts)
        self.gain = check_number("gain", gain)
        self.seed = check_seed(seed)
        self._draw_seed = random.randrange(2**31) if self.seed is None else self.seed
        self.kernel_initializer = _restored(kernel_initializer)
        self.quantizer = None if quantizer is None else checked_quantizer(quantizer)
        self._grid: BlockGrid | None = None
        self._whole = WholeKernel()
        self.drawn_digest: int | None = None  # of live blocks that were drawn orthogonal
        self.bias: Any = None

    def build(self, input_shape: Any) -> None:
        if self._axis is not None:
            self._check_features(input_shape, self._axis)
        plain = self._plain()
        with DeferredVariables().creating():  # it knows the shapes, and gets no values
            plain.build(input_shape)
        self._layout, self._kernel_shape = self._layout_of(plain), tuple(plain.kernel.shape)
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

    def compute_output_shape(self, input_shape: Sequence[int | None]) -> tuple[int | None, ...]:
        return tuple(self._plain().compute_output_shape(tuple(input_shape)))

    def _layout_of(self, plain: Any) -> KernelLayout:
        return kernel_layouts(plain)["kernel"] or KernelLayout.convolution()

    def _add_kernel(self) -> None:
        _, self.parts, *taps, inputs, outputs = self._layout.canonical_shape(self._kernel_shape)
        try:
            self._grid = self._fitting_grid(inputs, outputs, tuple(taps))
            values, pattern = self._drawn()
        except ValueError as error:
            raise type(error)(f"The layer '{self.name}': {error}") from None
        axes = block_axes(self.path, self.grid)
        functions = {"regularizer": self.kernel_regularizer, "constraint": self.kernel_constraint}
        self.blocks = self._add_along(axes[0], "blocks", values, **functions)
        indices = {"dtype": "int32", "trainable": False, "autocast": False}
        slots = self.grid.slots_of(pattern)
        self.inputs_of = self._add_along(axes[1], "inputs_of", pattern, **indices)
        self.slots_of = self._add_along(axes[2], "slots_of", slots, **indices)
        check_assignments(self.inputs_of, self._check_inputs)
        check_assignments(self.slots_of, self._check_slots)
        orthogonal = self.kernel_initializer == _EXACT_ORTHOGONAL and self.counts is None
        if orthogonal and not are_weights_set_later():
            stored = values.astype(numpy_dtype(self.variable_dtype))
            # As it is read back: bfloat16 as float32.
            wide = stored.astype(np.float32) if self.variable_dtype == "bfloat16" else stored
            self.drawn_digest = digest(wide)

    def _add_along(self, axes: Axes | None, name: str, value: np.ndarray, **settings: Any) -> Any:
        options = {"name": name, "shape": value.shape, "initializer": constant(value), **settings}
        return create_along(lambda: self.add_weight(**options), axes)

    def _check_features(self, input_shape: Any, axis: int) -> None:
        """Refuses inputs with no size of an axis that the kernel has to know."""
        try:
            size = input_shape[axis]
        except (TypeError, IndexError, KeyError):
            size = None
        if not is_integer(size) or size < 1:
            raise LayoutError(
                f"The layer '{self.name}' needs inputs with a known size of axis {axis}. "
                f"Received: input_shape={as_text(input_shape)}"
            )

    def _fitting_grid(self, inputs: int, outputs: int, taps: tuple[int, ...]) -> BlockGrid:
        """The grid of all parts (gates), which stand side by side; each is of regular blocks."""
        if self.parts > 1 and outputs % self.block[1]:
            raise LayoutError(
                f"The units of a gate must be a multiple of the {self.block[1]} outputs of a "
                f"block. Received: {outputs} units"
            )
        if self.counts is None:
            one = BlockGrid.for_density(inputs, outputs, self.block, self._wanted, taps)
            grid = dataclasses.replace(one, outputs=self.parts * outputs)
        else:
            whole = self.parts * outputs
            grid = BlockGrid(inputs, whole, *self.block, taps=taps, counts=self.counts)
            grid.check_sides()
        live = math.prod(grid.blocks_shape)  # `grid.live` lists all lines
        if live > LARGEST:
            raise LayoutError(f"A kernel has at most {LARGEST} live entries. Received: {live}")
        return grid

    def _drawn(self) -> tuple[np.ndarray, np.ndarray]:
        """Values `(J, k, *taps, r, c)` and places `(J, k)` of the live blocks, or by slot."""
        grid, seed = self.grid, self._draw_seed
        if are_weights_set_later():
            return np.zeros(grid.blocks_shape, dtype=np.float32), grid.draw_pattern(seed)
        if self.kernel_initializer == _EXACT_ORTHOGONAL and self.counts is None:
            structure = Block(grid.rows, grid.cols, regular=True)
            gates = KernelLayout(inputs=(-2,), outputs=(-1,), gates=self._layout.gates)
            drawn = regular_blocks(
                grid.shape, grid.density, structure, gain=self.gain, seed=seed, layout=gates
            )
            return grid.side_by_side(drawn)
        pattern = grid.draw_pattern(seed)
        lines, found = grid.of_outputs, []
        for group in lines.groups:  # each output sees its own live fan
            fan_in, count = lines.counts[group[0]], len(group)
            if self.kernel_initializer == _EXACT_ORTHOGONAL:
                size, side = count * fan_in, max(self.block)
                own = random_orthogonal(size, side, np.random.default_rng([seed, fan_in]))
                scale = self.gain * np.sqrt(max(grid.cols / grid.rows, 1.0) / fan_in)
                blocks = np.zeros((size, math.prod(grid.taps), *self.block))
                blocks[:, math.prod(grid.taps) // 2] = scale * own[:, : grid.rows, : grid.cols]
            else:
                shape = (*grid.taps, fan_in * grid.rows, count * grid.cols)
                columns = to_numpy(self.kernel_initializer(shape, dtype="float32"))
                columns = columns * _fan_correction(grid, fan_in, self.kernel_initializer)
                blocks = columns.reshape(*grid.taps, fan_in, grid.rows, count, grid.cols)
                blocks = blocks.transpose(np.argsort(grid.columns_order()))
            found.append(blocks.reshape(-1, *grid.taps, grid.rows, grid.cols))
        values = np.concatenate(found).astype(np.float32)
        where = pattern.ravel(), lines.of_slots
        clear_padding(values, *where, grid.inputs, grid.outputs)  # which no gradient reaches
        return values.reshape(grid.blocks_shape), pattern

    @property
    def grid(self) -> BlockGrid:
        if self._grid is None:
            raise NotPrunableError(
                f"The layer '{self.name}' has no blocks before it is built. Received: "
                f"{type(self).__name__} that is not built"
            )
        return self._grid

    @property
    def density(self) -> float:
        """Live fraction, exactly; before the layer is built the one that was asked for."""
        return self._wanted if self._grid is None else self._grid.density

    def set_blocks(self, blocks: Any, inputs_of: Any) -> None:
        """Sets values and places of the live blocks, of the shapes of these variables."""
        pattern = self.grid.check_pattern(inputs_of)
        assign(self.blocks, blocks)
        assign(self.inputs_of, pattern)
        assign(self.slots_of, self.grid.slots_of(pattern))

    def operands(self) -> BlockOperands:
        """The live blocks; all of them inside a scope that gives the whole kernel."""
        whole = self._whole.operands(self.grid, self.compute_dtype)
        live = BlockOperands(self.grid, self.blocks, self.inputs_of, self.slots_of)
        found = live if whole is None else whole
        if self.quantizer is None:
            return found
        blocks, inside = found.by_slot[0], (1,) * (len(found.grid.taps) + 2)
        pieces = [
            self.quantizer(own, (own.shape[0], *inside, own.shape[-1]))
            for own in found.grid.of_outputs.pieces(blocks)
        ]
        return dataclasses.replace(found, blocks=stacked(pieces, blocks.shape[1:]))

    def set_quantizer(self, quantizer: FakeQuantization) -> None:
        self.quantizer = quantizer

    def kernel_value(self, *, quantized: bool = True) -> np.ndarray:
        """The kernel in the shape that the namesake has, as a NumPy array (bfloat16 as float32)."""
        kernel = self.grid.kernel(to_numpy(self.blocks), to_numpy(self.inputs_of))
        if quantized:
            outputs = (1,) * (kernel.ndim - 1) + kernel.shape[-1:]
            kernel = quantized_value(self.quantizer, kernel, outputs)
        return self.shaped(kernel)

    def mask_value(self) -> np.ndarray:
        return self.shaped(self.grid.mask(to_numpy(self.inputs_of)))

    def shaped(self, matrix: np.ndarray) -> np.ndarray:
        """The matrix of the grid in the shape that the namesake's kernel has."""
        parts = np.stack(np.split(matrix, self.parts, axis=-1))
        return self._layout.from_canonical(parts[None], self._kernel_shape)

    def matrix(self, kernel: np.ndarray) -> np.ndarray:
        """The reverse of `shaped`."""
        return np.concatenate([*self._layout.to_canonical(kernel)[0]], axis=-1)

    def storages(self) -> dict[str, Storage]:
        return {} if self._grid is None else {"kernel": LiveBlocks(self)}

    def get_build_config(self) -> dict[str, Any]:
        return {**super().get_build_config(), "drawn_digest": self.drawn_digest}

    def build_from_config(self, config: dict[str, Any]) -> None:
        config = dict(config)
        drawn_digest = config.pop("drawn_digest", None)
        super().build_from_config(config)
        self.drawn_digest = drawn_digest

    def save_own_variables(self, store: Any) -> None:
        """By name, so that a file can be checked."""
        for variable in self.weights:
            store[variable.name] = variable

    def load_own_variables(self, store: Any) -> None:
        wanted = {variable.name: tuple(variable.shape) for variable in self.weights}
        found = {name: tuple(store[name].shape) for name in store.keys()}  # noqa: SIM118
        if found != wanted:
            raise ValueError(
                f"The file does not fit the layer '{self.name}', which has {wanted}. "
                f"Received: {found}"
            )
        check_given(self.weights, [store[variable.name] for variable in self.weights])
        for variable in self.weights:
            assign(variable, store[variable.name])

    def set_weights(self, weights: list[Any]) -> None:
        check_given(self.weights, weights)
        super().set_weights(weights)

    def _check_inputs(self, given: Read) -> None:
        try:
            self.grid.check_pattern(given(self.inputs_of))
        except ValueError as error:
            raise self._damaged(str(error)) from None

    def _check_slots(self, given: Read) -> None:
        slots = given(self.slots_of)
        wanted = self.grid.slots_of(given(self.inputs_of))
        if not np.array_equal(slots, wanted):
            raise self._damaged(
                "`slots_of` must list where `inputs_of` names each input block. "
                f"Received: other slots, of shape {slots.shape}"
            )

    def _damaged(self, reason: str) -> ValueError:
        return ValueError(
            f"The values loaded into or set in the layer '{self.name}' are damaged, or of another "
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

    def _plain(self) -> Any:
        config = {key: value for key, value in self.get_config().items() if key not in _OWN}
        if self.kernel_initializer == _EXACT_ORTHOGONAL:
            del config["kernel_initializer"]
        return self.namesake.from_config(config)

    def build_like(self, plain: Any) -> None:
        """Builds the layer for the inputs of a plain one, and copies its bias."""
        stand_in_name_scope(self, plain)
        self.build(plain.get_build_config()["input_shape"])
        if self.bias is not None:
            # A copy: on JAX `fit` frees the arrays of its model, which may not be shared.
            assign(self.bias, ops.copy(plain.bias.value))
            self.bias.trainable = plain.bias.trainable

    def get_config(self) -> dict[str, Any]:
        serialize = keras.saving.serialize_keras_object
        later = {"counts": self.counts, "quantizer": serialize(self.quantizer)}  # not in all files
        return {
            **super().get_config(),
            **{key: getattr(self, key) for key in ("block", "gain", "seed", *self.settings)},
            **{key: module.serialize(getattr(self, key)) for key, module in _FUNCTIONS.items()},
            "kernel_initializer": serialize(self.kernel_initializer),
            "density": self._wanted,
            **{key: value for key, value in later.items() if value is not None},
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "BlockSparseLayer":
        given = {key: value for key, value in config.items() if key != "inputs_of"}  # older files'
        return cls(**given)


def _restored(initializer: Any) -> Any:
    """`"exact_orthogonal"` as it is, or an initializer of Keras that fits live blocks."""
    if initializer == _EXACT_ORTHOGONAL:
        return initializer
    found = keras.initializers.get(initializer)
    unfit = isinstance(found, keras.initializers.Orthogonal | keras.initializers.Identity)
    if not callable(found) or unfit or hasattr(found, "sample"):
        raise ValueError(
            'A kernel of live blocks starts from "exact_orthogonal", or from an initializer of '
            "Keras that draws all entries alike. "
            f"Received: kernel_initializer={initializer!r}"
        )
    return found


def _fan_correction(grid: BlockGrid, count: int, initializer: Any) -> float:
    """The factor by which the live fan-out changes a draw whose fan-out is all outputs."""
    mode: Any = getattr(initializer, "mode", None)
    fan_in = {"fan_avg": count * grid.rows, "fan_out": 0}.get(mode)
    if fan_in is None:
        return 1.0
    fan_out = grid.live_blocks / grid.in_blocks * grid.cols
    return float(np.sqrt((fan_in + grid.outputs) / (fan_in + fan_out)))


def constant(value: np.ndarray) -> Callable[..., Any]:

    def initializer(shape: Any, dtype: Any = None) -> Any:
        return ops.cast(ops.convert_to_tensor(value), dtype)

    return initializer
