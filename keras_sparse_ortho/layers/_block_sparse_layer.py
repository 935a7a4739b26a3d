"""`BlockSparseLayer`: a layer that holds its kernel as live blocks, and computes with these."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any, ClassVar

import keras
import numpy as np

from keras_sparse_ortho._checks import check_density, check_number, check_seed, is_integer, told
from keras_sparse_ortho._keras_internals import (
    Axes,
    Read,
    check_assignments,
    check_given,
    create_along,
)
from keras_sparse_ortho._other_names import other_keywords
from keras_sparse_ortho._values import assign, to_numpy
from keras_sparse_ortho.errors import LayoutError, NotPrunableError
from keras_sparse_ortho.initializers import are_weights_set_later, numpy_dtype
from keras_sparse_ortho.kernels import KernelLayout, Storage
from keras_sparse_ortho.layers._block_grid import (
    LARGEST,
    BlockAxes,
    BlockGrid,
    check_block,
    pattern_of,
)
from keras_sparse_ortho.layers._block_products import BlockOperands, WholeKernel
from keras_sparse_ortho.layers._live_blocks import LiveBlocks
from keras_sparse_ortho.orthogonal import Block, clear_padding, regular_blocks, slots_of
from keras_sparse_ortho.parametrizations import (
    FakeQuantization,
    checked_quantizer,
    digest,
    quantized_value,
)

ops = keras.ops
_EXACT_ORTHOGONAL = "exact_orthogonal"
_OWN = ("density", "block", "inputs_of", "gain", "seed", "quantizer")
_QUANTIZATION = (
    "Keras' quantization needs a dense kernel. Strip the model first (keras_sparse_ortho.strip), "
    "and quantize the plain one"
)


class BlockSparseLayer(keras.layers.Layer):
    """Base of the layers that hold, and compute with, the live blocks of a kernel only.

    The kernel, seen as a matrix of inputs x outputs, is cut into blocks of `r x c`: `I` input by
    `J` output blocks. Each output block has `k` live ones, each input block is used `J k / I`
    times. There are three variables for it: `blocks` `(J, k, *taps, r, c)`, which are trained, and
    `inputs_of` `(J, k)` and `slots_of` `(I, J k / I)`, the two lists of where they stand.
    Subclasses name the Keras layer that they replace (`namesake`), call `_add_kernel` in `build`,
    and implement `call`. For the arguments see `BlockSparseDense`.
    """

    namesake: ClassVar[Any]

    @other_keywords()
    def __init__(
        self,
        *,
        density: float | None = None,
        block: int | tuple[int, int] = 32,
        inputs_of: Any = None,
        activation: Any = None,
        kernel_initializer: Any = "exact_orthogonal",
        bias_initializer: Any = "zeros",
        kernel_regularizer: Any = None,
        bias_regularizer: Any = None,
        activity_regularizer: Any = None,
        kernel_constraint: Any = None,
        bias_constraint: Any = None,
        gain: float = 1.0,
        seed: int | None = None,
        quantizer: FakeQuantization | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(activity_regularizer=activity_regularizer, **kwargs)
        if (density is None) == (inputs_of is None):
            raise ValueError(
                "A layer of live blocks needs either a `density` or `inputs_of`. "
                f"Received: density={density!r}, inputs_of={inputs_of!r}"
            )
        if getattr(self.dtype_policy, "quantization_mode", None) is not None:
            raise NotPrunableError(
                f"The layer '{self.name}' cannot be quantized: {_QUANTIZATION}. "
                f"Received: dtype={self.dtype_policy.name!r}"
            )
        self._wanted = None if density is None else check_density(density)
        self.block = check_block(block)
        self._given = None if inputs_of is None else np.asarray(inputs_of)
        self.gain = check_number("gain", gain)
        self.seed = check_seed(seed)
        self._draw_seed = random.randrange(2**31) if self.seed is None else self.seed
        self.kernel_initializer = _restored(kernel_initializer, self._given is not None)
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)
        self.kernel_constraint = keras.constraints.get(kernel_constraint)
        _check_regularizer(self.kernel_regularizer)
        self.quantizer = checked_quantizer(quantizer)
        self._grid: BlockGrid | None = None
        self._whole = WholeKernel()
        self._drawn_digest: int | None = None
        self.activation = keras.activations.get(activation)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.bias_regularizer = keras.regularizers.get(bias_regularizer)
        self.bias_constraint = keras.constraints.get(bias_constraint)
        self.bias: Any = None

    def _add_kernel(
        self, shape: tuple[int, ...], layout: KernelLayout, bias_shape: tuple[int, ...] | None
    ) -> None:
        """Makes the variables for a kernel of the namesake's shape, and a bias."""
        *taps, inputs, outputs = layout.canonical_shape(shape)[2:]
        try:
            grid = self._fitting_grid(inputs, outputs, tuple(taps))
            if grid.live > LARGEST:
                raise LayoutError(
                    f"A kernel has at most {LARGEST} live entries. Received: {grid.live}"
                )
            self._grid = grid
        except ValueError as error:
            raise type(error)(f"The layer '{self.name}': {error}") from None
        self._kernel_shape, self._layout = shape, layout
        values, pattern = _drawn(
            self._grid, self.kernel_initializer, self._given, self.gain, self._draw_seed, layout
        )
        axes = BlockAxes.at(self.path, self._grid)
        self.blocks = create_along(
            lambda: self.add_weight(
                name="blocks",
                shape=self.grid.blocks_shape,
                initializer=constant(values),
                regularizer=_on_columns(self.grid, self.kernel_regularizer),
                constraint=_on_columns(self.grid, self.kernel_constraint, back=True),
            ),
            axes.blocks,
        )
        self.inputs_of = self._add_indices("inputs_of", pattern, axes.inputs_of)
        slots = slots_of(pattern, self._grid.in_blocks)
        self.slots_of = self._add_indices("slots_of", slots, axes.slots_of)
        check_assignments(self.inputs_of, self._check_inputs)
        check_assignments(self.slots_of, self._check_slots)
        if self.kernel_initializer == _EXACT_ORTHOGONAL and not are_weights_set_later():
            self._drawn_digest = digest(_as_stored(values, self.variable_dtype))
        if bias_shape is not None:
            self.bias = self.add_weight(
                name="bias",
                shape=bias_shape,
                initializer=self.bias_initializer,
                regularizer=self.bias_regularizer,
                constraint=self.bias_constraint,
            )

    def _features(self, input_shape: Any, axis: int) -> int:
        """The size of an axis of the inputs, which the kernel has to know."""
        known = isinstance(input_shape, list | tuple)
        sizes: dict[int, Any] = dict(enumerate(input_shape)) if known else {}
        size: Any = sizes.get(axis % max(len(sizes), 1) if axis < 0 else axis)
        if not is_integer(size) or size < 1:
            raise LayoutError(
                f"The layer '{self.name}' needs inputs with a known size of axis {axis}. "
                f"Received: input_shape={told(input_shape)}"
            )
        return int(size)

    def _fitting_grid(self, inputs: int, outputs: int, taps: tuple[int, ...]) -> BlockGrid:
        if self._given is None:
            assert self._wanted is not None
            return BlockGrid.for_density(inputs, outputs, self.block, self._wanted, taps)
        fan_in = self._given.shape[1] if self._given.ndim == 2 else 0
        grid = BlockGrid(inputs, outputs, *self.block, fan_in=fan_in, taps=taps)
        grid.check_sides()
        grid.check_pattern(self._given)
        return grid

    def _add_indices(self, name: str, value: np.ndarray, axes: Axes | None) -> Any:
        settings = {"dtype": "int32", "trainable": False, "autocast": False}
        return create_along(
            lambda: self.add_weight(
                name=name, shape=value.shape, initializer=constant(value), **settings
            ),
            axes,
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
        """Sets values and places of the live blocks, `(J, k, *taps, r, c)` and `(J, k)`."""
        pattern = self.grid.check_pattern(inputs_of)
        if tuple(blocks.shape) != self.grid.blocks_shape:
            raise ValueError(
                f"The blocks of '{self.name}' have the shape {self.grid.blocks_shape}. "
                f"Received: blocks of shape {tuple(blocks.shape)}"
            )
        assign(self.blocks, blocks)
        assign(self.inputs_of, pattern)
        assign(self.slots_of, slots_of(pattern, self.grid.in_blocks))

    # --- what a call computes with ---------------------------------------------------------------

    def operands(self) -> BlockOperands:
        """The live blocks; all of them inside a scope that gives the whole kernel."""
        whole = self._whole.operands(self.grid, self.compute_dtype)
        live = BlockOperands(self.grid, self.blocks, self.inputs_of, self.slots_of)
        found = live if whole is None else whole
        if self.quantizer is None:
            return found
        blocks = self.quantizer(ops.convert_to_tensor(found.blocks), self._quantized_outputs)
        return dataclasses.replace(found, blocks=blocks)

    def set_quantizer(self, quantizer: FakeQuantization) -> None:
        """Lets the live blocks of a built layer be quantized, see the argument `quantizer`."""
        if self.quantizer is not None:
            raise NotPrunableError(
                f"The layer '{self.name}' is quantized already. Received: {self.quantizer!r}"
            )
        self.quantizer = checked_quantizer(quantizer)

    @property
    def _quantized_outputs(self) -> tuple[int, ...]:
        """The shape of one number for each output, which broadcasts to that of the blocks."""
        lines, _, *inside, cols = self.grid.blocks_shape
        return (lines, 1, *(1 for _ in inside), cols)

    # --- the dense kernel ------------------------------------------------------------------------

    def kernel_value(self, *, quantized: bool = True) -> np.ndarray:
        """The kernel in the shape that the namesake has, as a NumPy array (bfloat16 as float32)."""
        pattern = to_numpy(self.inputs_of)
        blocks = to_numpy(self.blocks)
        if quantized:
            blocks = quantized_value(self.quantizer, blocks, self._quantized_outputs)
        return self._shaped(self.grid.kernel(blocks, pattern))

    def mask_value(self) -> np.ndarray:
        """Which entries of that kernel are live."""
        return self._shaped(self.grid.mask(to_numpy(self.inputs_of)))

    def _shaped(self, matrix: np.ndarray) -> np.ndarray:
        """The matrix of the grid in the shape that the namesake's kernel has."""
        return self._layout.from_canonical(matrix[None, None], self._kernel_shape)

    def _matrix(self, kernel: np.ndarray) -> np.ndarray:
        """The reverse of `_shaped`."""
        return self._layout.to_canonical(kernel)[0, 0]

    def set_kernel(self, kernel: Any, mask: Any) -> None:
        """Sets the live blocks from a dense kernel and a mask that fits the layer."""
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
        grid, pattern = pattern_of(self._matrix(mask), self.block)
        if grid != self.grid:
            raise LayoutError(
                f"The layer '{self.name}' has {self.grid.fan_in} live blocks in each line. "
                f"Received: a mask of {grid.fan_in}"
            )
        self.set_blocks(grid.blocks(self._matrix(kernel), pattern), pattern)

    def storages(self) -> dict[str, Storage]:
        return {} if self._grid is None else {"kernel": LiveBlocks(self)}

    # --- whether it is still as drawn ------------------------------------------------------------

    def mark_as_drawn(self) -> None:
        """Notes that the live blocks are what an orthogonal initializer has drawn."""
        self._drawn_digest = digest(to_numpy(self.blocks))

    def is_as_drawn(self) -> bool:
        """Whether the live blocks are, bit by bit, what an orthogonal initializer has drawn."""
        drawn = self._drawn_digest
        return drawn is not None and drawn == digest(to_numpy(self.blocks))

    def get_build_config(self) -> dict[str, Any]:
        return {**super().get_build_config(), "drawn_digest": self._drawn_digest}

    def build_from_config(self, config: dict[str, Any]) -> None:
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
        """Checks where the blocks stand before anything is changed."""
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
        """Raises unless input blocks, from a file or an argument, are a regular pattern."""
        try:
            self.grid.check_pattern(given(self.inputs_of))
        except ValueError as error:
            raise ValueError(
                f"What is loaded into or set in the layer '{self.name}' is damaged, or of another "
                f"model: {error}"
            ) from None

    def _check_slots(self, given: Read) -> None:
        """The same for the second list of the places, once the first is right."""
        slots = given(self.slots_of)
        wanted = slots_of(given(self.inputs_of), self.grid.in_blocks)
        if not np.array_equal(slots, wanted):
            lines = enumerate(zip(slots, wanted, strict=False))
            at = next((k for k, (one, other) in lines if not np.array_equal(one, other)), None)
            found = f"shape {slots.shape}" if at is None else f"slots_of[{at}] = {slots[at]}"
            raise ValueError(
                f"What is loaded into or set in the layer '{self.name}' is damaged, or of another "
                "model: `slots_of` must list where `inputs_of` names each input block. "
                f"Received: other slots, {found}"
            )

    # --- the namesake ----------------------------------------------------------------------------

    def dense_layer(self) -> keras.layers.Layer:
        """The namesake with the same settings, not built; `fill_dense_layer` gives it weights."""
        config = {key: value for key, value in self.get_config().items() if key not in _OWN}
        if self.kernel_initializer == _EXACT_ORTHOGONAL:
            del config["kernel_initializer"]
        return self.namesake.from_config(config)

    def fill_dense_layer(self, plain: keras.layers.Layer) -> None:
        """Sets the weights of a layer from `dense_layer`, which is built if need be."""
        if not plain.built:
            plain.build(self.get_build_config()["input_shape"])
        weights = {variable.name: variable for variable in plain.weights}
        assign(weights["kernel"], self.kernel_value())
        if self.bias is not None:
            assign(weights["bias"], to_numpy(ops.cast(self.bias, "float32")))

    def to_dense_layer(self) -> keras.layers.Layer:
        plain = self.dense_layer()
        self.fill_dense_layer(plain)
        return plain

    def build_like(self, plain: Any) -> None:
        """Builds the layer, if need be, for the inputs of a plain one, and copies its bias."""
        if not self.built:
            self.build(plain.get_build_config()["input_shape"])
        if self.bias is not None:
            # A copy: on JAX `fit` frees the arrays of its model, which may not be shared.
            assign(self.bias, ops.copy(plain.bias.value))

    # --- Keras -----------------------------------------------------------------------------------

    def quantize(self, *args: Any, **kwargs: Any) -> None:
        # Keras' own type: `Model.quantize` warns of such layers, and leaves them as they are.
        raise NotImplementedError(
            f"The layer '{self.name}' cannot be quantized: {_QUANTIZATION}. "
            f"Received: quantize of {type(self).__name__}"
        )

    def enable_lora(self, *args: Any, **kwargs: Any) -> None:
        raise NotPrunableError(
            f"LoRA cannot be enabled on '{self.name}': its update of the kernel is dense, and the "
            "layer has no dense kernel. Strip the model first (keras_sparse_ortho.strip), and "
            f"enable it on the plain layer. Received: enable_lora of {type(self).__name__}"
        )

    def get_config(self) -> dict[str, Any]:
        config = {
            **super().get_config(),
            "kernel_initializer": _serialized(self.kernel_initializer),
            "kernel_regularizer": keras.regularizers.serialize(self.kernel_regularizer),
            "kernel_constraint": keras.constraints.serialize(self.kernel_constraint),
            "density": self._wanted,
            "block": self.block,
            "inputs_of": None if self._given is None else self._given.tolist(),
            "gain": self.gain,
            "seed": self.seed,
            "activation": keras.activations.serialize(self.activation),
            "bias_initializer": keras.initializers.serialize(self.bias_initializer),
            "bias_regularizer": keras.regularizers.serialize(self.bias_regularizer),
            "bias_constraint": keras.constraints.serialize(self.bias_constraint),
        }
        if self.quantizer is not None:
            config["quantizer"] = keras.saving.serialize_keras_object(self.quantizer)
        regularizer = keras.regularizers.serialize(self.activity_regularizer)
        return {**config, "activity_regularizer": regularizer}


# --- initializers, regularizers, constraints and files --------------------------------------------


def _restored(initializer: Any, places_given: bool) -> Any:
    """`"exact_orthogonal"` as it is, or an initializer of Keras that fits live blocks."""
    if initializer == _EXACT_ORTHOGONAL:
        if places_given:
            raise ValueError(
                "Exactly orthogonal values come with their places: with `inputs_of` give another "
                'initializer, such as "lecun_normal". '
                f"Received: kernel_initializer={initializer!r}"
            )
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


def _serialized(initializer: Any) -> Any:
    """For `get_config`."""
    if initializer == _EXACT_ORTHOGONAL:
        return initializer
    return keras.initializers.serialize(initializer)


def _check_regularizer(regularizer: Any) -> None:
    """Refuses a regularizer that compares outputs, whose live entries are not aligned."""
    if isinstance(regularizer, keras.regularizers.OrthogonalRegularizer):
        raise NotPrunableError(
            "The outputs of a layer of live blocks read different inputs, so that their kernels "
            "cannot be compared entry by entry. Leave the regularizer out. "
            f"Received: kernel_regularizer={regularizer!r}"
        )


def _drawn(
    grid: BlockGrid,
    initializer: Any,
    inputs_of: np.ndarray | None,
    gain: float,
    seed: int,
    layout: KernelLayout,
) -> tuple[np.ndarray, np.ndarray]:
    """Values `(J, k, *taps, r, c)` and places `(J, k)` of the live blocks."""
    if are_weights_set_later():
        pattern = grid.draw_pattern(seed) if inputs_of is None else inputs_of
        return np.zeros(grid.blocks_shape, dtype=np.float32), pattern
    if initializer == _EXACT_ORTHOGONAL:
        structure = Block(grid.rows, grid.cols, regular=True)
        gates = KernelLayout(inputs=(-2,), outputs=(-1,), gates=layout.gates)
        drawn = regular_blocks(
            grid.shape, grid.density, structure, gain=gain, seed=seed, layout=gates
        )
        return grid.side_by_side(drawn)
    pattern = grid.draw_pattern(seed) if inputs_of is None else grid.check_pattern(inputs_of)
    columns = to_numpy(initializer(grid.columns_shape, dtype="float32"))
    columns = columns * _fan_correction(grid, initializer)
    blocks = _as_blocks(grid, columns)
    clear_padding(blocks, pattern, grid.inputs, grid.outputs)  # which no gradient reaches
    return blocks, pattern


def _fan_correction(grid: BlockGrid, initializer: Any) -> float:
    """The factor by which the live fan-out changes a draw whose fan-out is all outputs."""
    mode = getattr(initializer, "mode", None)
    if mode not in ("fan_out", "fan_avg"):
        return 1.0
    fan_in, all_out = grid.fan_in * grid.rows, grid.outputs
    live_out = grid.fan_out * grid.cols
    if mode == "fan_out":
        return float(np.sqrt(all_out / live_out))
    return float(np.sqrt((fan_in + all_out) / (fan_in + live_out)))


def _on_columns(grid: BlockGrid, function: Any, back: bool = False) -> Callable[[Any], Any] | None:
    """A regularizer or constraint of the live kernel `(*taps, k r, outputs)`, for its blocks."""
    if function is None:
        return None

    def applied(blocks: Any) -> Any:
        columns = ops.transpose(blocks, grid.columns_order())
        found = function(ops.reshape(columns, grid.columns_shape))
        return _as_blocks(grid, found) if back else found

    return applied


def _as_blocks(grid: BlockGrid, columns: Any) -> Any:
    """The live kernel `(*taps, k r, outputs)` as blocks, of NumPy or a backend."""
    split = (*grid.taps, grid.fan_in, grid.rows, grid.out_blocks, grid.cols)
    order = tuple(int(axis) for axis in np.argsort(grid.columns_order()))
    if isinstance(columns, np.ndarray):
        return columns.reshape(split).transpose(order)
    return ops.transpose(ops.reshape(columns, split), order)


def constant(value: np.ndarray) -> Callable[..., Any]:
    """An initializer that gives one array."""

    def initializer(shape: Any, dtype: Any = None) -> Any:
        return ops.cast(ops.convert_to_tensor(value), dtype)

    return initializer


def _as_stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """Values as `to_numpy` reads them back from a variable of a dtype."""
    stored = values.astype(numpy_dtype(dtype))
    return stored.astype(np.float32) if dtype == "bfloat16" else stored
