"""`BlockSparseRNN` and its cells: LSTM and GRU whose gates hold and compute live blocks only."""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, NoReturn

import keras

from keras_sparse_ortho._checks import check_integer, other_keywords
from keras_sparse_ortho._keras_internals import stand_in_name_scope
from keras_sparse_ortho._types import Config, Tensor
from keras_sparse_ortho._values import assign
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.kernels import (
    KernelLayout,
    SparseLayer,
    WholeLayer,
    derived_seed,
)
from keras_sparse_ortho.layers._block_grid import Counts
from keras_sparse_ortho.layers._block_sparse_layer import (
    BlockSparseLayer,
    OnBlocks,
)
from keras_sparse_ortho.layers._fused_products import (
    fused_product,
    takes_kernels,
)
from keras_sparse_ortho.layers._live_blocks import LiveBlocks
from keras_sparse_ortho.layers._row_products import product_of_rows
from keras_sparse_ortho.parametrizations import (
    FakeQuantization,
    why_needs_dense,
)

ops = keras.ops

_KERNELS = ("kernel", "recurrent_kernel")

_Cell: Any = object  # mypy: the cells below are Keras' own


class _Blocks(NamedTuple):
    """The settings of one kernel of a cell; without a density it is dense."""

    density: float | None
    block: int | tuple[int, int]
    counts: Counts | None


_DENSE = _Blocks(None, 32, None)
# of arguments, by kernel
_PREFIXES = {
    "": "kernel",
    "recurrent_": "recurrent_kernel",
}


class BlockSparseGates(BlockSparseLayer):
    """`x -> x K` for the kernel `K` of all gates, `(inputs, gates * units)`, a part of a cell."""

    namesake = keras.layers.Dense
    settings = ("units", "use_bias")

    def __init__(self, gates: int, units: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.gates = gates
        self.units = gates * units
        self.use_bias = False
        self.supports_masking = True

    def _layout_of(self, plain: keras.layers.Layer) -> KernelLayout:
        return KernelLayout.recurrent(self.gates)

    def call(self, inputs: Tensor) -> Tensor:
        leading_shape = ops.shape(inputs)[:-1]
        rows = ops.reshape(inputs, (-1, self.grid.inputs))
        product = product_of_rows
        if takes_kernels(rows):
            product = fused_product
        products = product(rows, self.operands())
        return ops.reshape(products, (*leading_shape, self.grid.outputs))

    def storages(self) -> dict[str, LiveBlocks]:
        return {}  # that of the cell


class GatesOnBlocks(WholeLayer, _Cell):
    """Base of both cells, which replaces dense kernels of gates by live blocks."""

    gates: ClassVar[int]

    @other_keywords
    def __init__(
        self,
        units: int,
        *,
        density: float | None = None,
        block: int | tuple[int, int] = 32,
        recurrent_density: float | None = None,
        recurrent_block: int | tuple[int, int] = 32,
        counts: Counts | None = None,
        recurrent_counts: Counts | None = None,
        gain: float = 1.0,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(check_integer("units", units), seed=seed, **kwargs)
        reason = why_no_gates(self)
        if reason is not None:
            raise NotPrunableError(
                f"The cell {self.name!r} cannot compute on live blocks: {reason}. "
                f"Received: {type(self).__name__}"
            )
        self._blocks = {
            "kernel": _Blocks(density, block, counts),
            "recurrent_kernel": _Blocks(
                recurrent_density, recurrent_block, recurrent_counts
            ),
        }
        self.gain = gain
        self.takes_products = (
            False  # whether a call is given products instead of inputs
        )
        self.awaits_values = False  # whether live blocks are set after `build`

    def add_weight(
        self, shape: Any = None, initializer: Any = None, **kwargs: Any
    ) -> keras.Variable | BlockSparseGates:
        """As every layer does; a sparse kernel becomes a layer of blocks."""
        name = kwargs.get("name", "")
        blocks = self._blocks.get(name, _DENSE)
        if blocks.density is None:
            return super().add_weight(
                shape=shape, initializer=initializer, **kwargs
            )
        gates = BlockSparseGates(
            self.gates,
            self.units,
            density=blocks.density,
            block=blocks.block,
            counts=blocks.counts,
            kernel_regularizer=kwargs.get("regularizer"),
            kernel_constraint=kwargs.get("constraint"),
            gain=self.gain,
            seed=None if self.seed is None else derived_seed(self.seed, name),
            dtype=self.dtype_policy,
            trainable=self.trainable,
            name=name,
        )
        gates.awaits_values = self.awaits_values
        gates.build((None, shape[0]))
        return gates

    def products(self, inputs: Tensor, training: bool = False) -> Tensor:
        """Inputs `(.., features)` times the kernel, for all steps at once."""
        if training and self.dropout > 0:
            inputs = self._drop(inputs)
        products = _product(inputs, self.kernel)
        if self.bias is None:
            return products
        if len(self.bias.shape) == 1:
            return products + self.bias
        # A GRU has a bias for each of its products.
        return products + self.bias[0]

    def _drop(self, inputs: Tensor) -> Tensor:
        """Dropout by the same mask in all steps."""
        if len(inputs.shape) == 2:
            return inputs * self.get_dropout_mask(inputs)
        mask = self.get_dropout_mask(inputs[:, 0, :])
        return inputs * mask[:, None]

    def _input_products(self, inputs: Tensor, training: bool) -> Tensor:
        return (
            inputs if self.takes_products else self.products(inputs, training)
        )

    def on_blocks(self) -> dict[str, BlockSparseGates]:
        """The kernels that are live blocks, by name."""
        kernels = {name: getattr(self, name, None) for name in _KERNELS}
        return {
            name: kernel
            for name, kernel in kernels.items()
            if isinstance(kernel, BlockSparseGates)
        }

    def get_config(self) -> Config:
        config = super().get_config()
        for prefix, name in _PREFIXES.items():
            blocks = self._blocks[name]
            config[f"{prefix}density"] = blocks.density
            config[f"{prefix}block"] = blocks.block
            if blocks.counts:
                config[f"{prefix}counts"] = blocks.counts
        return {**config, "gain": self.gain}


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class BlockSparseLSTMCell(GatesOnBlocks, keras.layers.LSTMCell):
    """A `keras.layers.LSTMCell` whose kernels are live blocks, for `BlockSparseRNN`.

        (i, f, g, o) = x K + h R + b,
        c' = sigmoid(f) c + sigmoid(i) tanh(g),    h' = sigmoid(o) tanh(c')

    `K`, `(inputs, 4 units)`, and `R`, `(units, 4 units)`, are a matrix for each gate side by side,
    each of regular blocks and exactly orthogonal.

    Args:
        units: int. As for LSTMCell; a multiple of `c`.
        density, block, counts: Of `K`, as for `BlockSparseDense`; `density=None` for a dense one;
            `counts` are those of all gates side by side.
        recurrent_density, recurrent_block, recurrent_counts: Of `R`.
        gain: float. Scale of exactly orthogonal kernels.
        seed: int. Seed of places and values, and of dropout.
        **kwargs: As for LSTMCell. The initializers are those of dense kernels.

    Raises NotPrunableError for `recurrent_dropout` or `implementation=1`: gates read other inputs.

    Examples:
        >>> import keras
        >>> cell = BlockSparseLSTMCell(64, density=0.5, recurrent_density=0.25, block=16,
        ...                            recurrent_block=16, seed=0)
        >>> layer = BlockSparseRNN(cell)
        >>> shapes = layer(keras.ops.ones((2, 5, 32))).shape, cell.recurrent_kernel.blocks.shape
        >>> [tuple(shape) for shape in shapes]
        [(2, 64), (16, 1, 16, 16)]

    Reference: Narang, Undersander and Diamos (2017), arXiv 1711.02782
    """

    gates = 4

    def call(
        self, inputs: Tensor, states: list[Tensor], training: bool = False
    ) -> tuple[Tensor, list[Tensor]]:
        hidden, carry = states
        products = self._input_products(inputs, training)
        products = products + _product(hidden, self.recurrent_kernel)
        input_gate, forget_gate, candidate, output_gate = ops.split(
            products, 4, axis=-1
        )
        sigmoid = self.recurrent_activation
        carry = sigmoid(forget_gate) * carry + sigmoid(
            input_gate
        ) * self.activation(candidate)
        hidden = sigmoid(output_gate) * self.activation(carry)
        return hidden, [hidden, carry]


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class BlockSparseGRUCell(GatesOnBlocks, keras.layers.GRUCell):
    """A `keras.layers.GRUCell` whose kernels are live blocks, for `BlockSparseRNN`.

        (z, r, g) = x K + b,    (z', r', g') = h R + b',
        h' = u h + (1 - u) tanh(g + sigmoid(r + r') g'),    u = sigmoid(z + z')

    The arguments are those of `BlockSparseLSTMCell` and GRUCell. `reset_after=False`, with two
    kernels in a row, is refused.

    Examples:
        >>> cell = BlockSparseGRUCell(64, recurrent_density=0.25, recurrent_block=16, seed=0)
        >>> layer = BlockSparseRNN(cell)
        >>> layer.build((None, 5, 3))
        >>> [tuple(weight.shape) for weight in layer.trainable_weights]
        [(3, 192), (2, 192), (12, 1, 16, 16)]
    """

    gates = 3

    def call(
        self,
        inputs: Tensor,
        states: Tensor | list[Tensor],
        training: bool = False,
    ) -> tuple[Tensor, Tensor | list[Tensor]]:
        """One step of the cell."""
        has_list = isinstance(states, list | tuple)
        hidden = states[0] if has_list else states
        input_products = self._input_products(inputs, training)
        update_x, reset_x, candidate_x = ops.split(input_products, 3, axis=-1)
        state_products = _product(hidden, self.recurrent_kernel)
        if self.bias is not None:
            state_products = state_products + self.bias[1]
        update_h, reset_h, candidate_h = ops.split(state_products, 3, axis=-1)
        update = self.recurrent_activation(update_x + update_h)
        reset = self.recurrent_activation(reset_x + reset_h)
        candidate = self.activation(candidate_x + reset * candidate_h)
        hidden = update * hidden + (1 - update) * candidate
        return hidden, [hidden] if has_list else hidden


CELLS: dict[Any, Any] = {
    keras.layers.LSTM: BlockSparseLSTMCell,
    keras.layers.GRU: BlockSparseGRUCell,
}


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class BlockSparseRNN(OnBlocks, SparseLayer, keras.layers.RNN):
    """A `keras.layers.LSTM` or `GRU` whose kernels are live blocks.

    Inputs of all steps are multiplied at once, states step by step. Outputs and gradients are those
    of the plain layer with these kernels.

    Args:
        cell: A `BlockSparseLSTMCell` or `BlockSparseGRUCell`.
        **kwargs: As for `keras.layers.RNN`, such as `return_sequences`, `return_state`, `unroll`.

    Raises NotPrunableError for another cell, and `stateful=True`.

    Limits: no cuDNN, and no quantization; make it plain first (`keras_sparse_ortho.strip`).

    Examples:
        >>> import keras, keras_sparse_ortho as kso
        >>> dense = keras.Sequential([keras.Input((8, 64)), keras.layers.GRU(64, name="gru")])
        >>> sparse = kso.sparsify(dense, 0.25, storage="blocks", seed=0)
        >>> type(sparse.layers[0]).__name__, [w.path for w in kso.prunable_weights(sparse)]
        ('BlockSparseRNN', ['gru/gru_cell/kernel', 'gru/gru_cell/recurrent_kernel'])
    """

    def __init__(self, cell: GatesOnBlocks, **kwargs: Any) -> None:
        if not isinstance(cell, GatesOnBlocks) or kwargs.get("stateful"):
            raise NotPrunableError(
                "Recurrent layers on live blocks take a BlockSparseLSTMCell or BlockSparseGRUCell, "
                "and keep no state between batches. Received: cell of type "
                f"{type(cell).__name__}, stateful={kwargs.get('stateful', False)}"
            )
        super().__init__(cell, **kwargs)
        self.input_spec = keras.layers.InputSpec(ndim=3)

    def inner_loop(
        self,
        sequences: Tensor,
        initial_state: list[Tensor],
        mask: Tensor | list[Tensor] | None,
        training: bool = False,
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """As every recurrent layer does, with the products of all inputs first."""
        if isinstance(mask, list | tuple):
            mask = mask[0]
        products = self.cell.products(sequences, training)
        self.cell.takes_products = True
        try:
            return super().inner_loop(products, initial_state, mask, training)
        finally:
            self.cell.takes_products = False

    def get_config(self) -> Config:
        config = super().get_config()
        # Built first, the cell would lack the layer's name, by which torch tells the parameters of
        # Bidirectional apart.
        cell = {
            key: value
            for key, value in config["cell"].items()
            if key != "build_config"
        }
        return {**config, "cell": cell}

    def storages(self) -> dict[str, LiveBlocks]:
        cell = self.cell
        return {
            f"{cell.name}/{name}": LiveBlocks(gates, cell)
            for name, gates in cell.on_blocks().items()
        }

    def set_quantizer(
        self, quantizer: FakeQuantization | Mapping[str, FakeQuantization]
    ) -> NoReturn:
        raise NotPrunableError(
            f"The recurrent layer {self.name!r} on live blocks cannot be rounded: leave it out, "
            f"or strip it first. Received: quantizer={quantizer!r}"
        )

    def get_build_config(self) -> Config:
        digests = {
            name: gates.drawn_digest
            for name, gates in self.cell.on_blocks().items()
        }
        return {**super().get_build_config(), "drawn_digests": digests}

    def build_from_config(self, config: Config) -> None:
        config = dict(config)
        digests = config.pop("drawn_digests", {})
        super().build_from_config(config)
        for name, gates in self.cell.on_blocks().items():
            gates.drawn_digest = digests.get(name)

    def to_dense_layer(self) -> keras.layers.Layer:
        """The plain LSTM or GRU with the same settings and weights."""
        plain_class = next(
            kind for kind, cell in CELLS.items() if isinstance(self.cell, cell)
        )
        arguments = plain_class(1).cell.get_config().keys()
        config = {
            name: value
            for name, value in self.cell.get_config().items()
            if name in arguments
        }
        plain = plain_class(**{**config, **_layer_config(self)})
        plain.cell.name = self.cell.name
        stand_in_name_scope(plain, self)
        plain.build((None, None, _feature_count(self.cell)))
        variables = {
            variable.name: variable
            for variable in self.cell._trainable_variables
        }
        on_blocks = self.cell.on_blocks()
        for variable in plain.cell.weights:
            if variable.name in on_blocks:
                gates = on_blocks[variable.name]
                assign(variable, gates.kernel_value())
                variable.trainable = gates.blocks.trainable
            else:
                _assign_copy(variable, variables[variable.name])
        return plain

    def build_like(self, plain: keras.layers.Layer) -> None:
        """Builds the layer for the inputs of a plain one, and copies its other weights."""
        self.cell.awaits_values = True
        stand_in_name_scope(self, plain)
        self.build((None, None, _feature_count(plain.cell)))
        plain_variables = {
            variable.name: variable for variable in plain.cell.weights
        }
        for variable in self.cell.weights:
            if variable.name in plain_variables:
                _assign_copy(variable, plain_variables[variable.name])


def recurrent_like(
    plain: keras.layers.Layer,
    kernels: Mapping[str, tuple[float, int | tuple[int, int], Counts | None]],
    seed: int | None,
) -> BlockSparseRNN:
    """Returns the layer on blocks, not built, for an LSTM or GRU.

    Args:
        plain: LSTM or GRU.
        kernels: dict from the name of a sparse kernel to its density, block and counts.
        seed: int. Seed of the mask and values, which the layer draws when it is built.
    """
    config = {**plain.cell.get_config(), "seed": seed}
    for prefix, name in _PREFIXES.items():
        density, block, counts = kernels.get(name, _DENSE)
        config[f"{prefix}density"] = density
        config[f"{prefix}block"] = block
        config[f"{prefix}counts"] = counts
    cell = CELLS[type(plain)](**config)
    return BlockSparseRNN(cell, **_layer_config(plain))


def why_no_gates(cell: keras.layers.Layer) -> str | None:
    """Says why an LSTM or GRU cell cannot compute on live blocks; `None` if it can."""
    if cell.recurrent_dropout > 0 or cell.implementation == 1:
        return "with `recurrent_dropout` or implementation=1 each gate reads other inputs"
    if not getattr(cell, "reset_after", True):
        return "it has reset_after=False"
    return why_needs_dense(
        cell.kernel_regularizer, cell.kernel_constraint
    ) or why_needs_dense(cell.recurrent_regularizer, cell.recurrent_constraint)


def _assign_copy(variable: keras.Variable, source: keras.Variable) -> None:
    # On JAX `fit` frees the arrays of its model.
    assign(variable, ops.copy(source.value))
    variable.trainable = source.trainable


def _layer_config(layer: keras.layers.Layer) -> Config:
    """The settings of a recurrent layer without those of its cell."""
    config = keras.layers.RNN.get_config(layer)
    del config["cell"]
    return {**config, "activity_regularizer": layer.activity_regularizer}


def _feature_count(cell: keras.layers.Layer) -> int:
    kernel = cell.kernel
    if isinstance(kernel, BlockSparseGates):
        return kernel.grid.inputs
    return int(kernel.shape[0])


def _product(x: Tensor, kernel: BlockSparseGates | keras.Variable) -> Tensor:
    if isinstance(kernel, BlockSparseGates):
        return kernel(x)
    return ops.matmul(x, kernel)
