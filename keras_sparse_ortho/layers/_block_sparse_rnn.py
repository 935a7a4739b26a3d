"""`BlockSparseRNN` and its cells: LSTM and GRU whose gates hold and compute live blocks only."""

from typing import Any, ClassVar

import keras

from keras_sparse_ortho._checks import check_integer, other_keywords
from keras_sparse_ortho._keras_internals import stand_in_name_scope
from keras_sparse_ortho._values import assign
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.kernels import KernelLayout, Storage, derived_seed
from keras_sparse_ortho.layers._block_grid import Counts
from keras_sparse_ortho.layers._block_products import product_of_rows
from keras_sparse_ortho.layers._block_sparse_layer import BlockSparseLayer, OnBlocks
from keras_sparse_ortho.layers._live_blocks import LiveBlocks
from keras_sparse_ortho.parametrizations import why_needs_dense

ops = keras.ops
_KERNELS = ("kernel", "recurrent_kernel")

_Cell: Any = object


class BlockSparseGates(BlockSparseLayer):
    """`x -> x K` for the kernel `K` of all gates, `(inputs, gates * units)`, a part of a cell."""

    namesake, settings = keras.layers.Dense, ("units", "use_bias")

    def __init__(self, gates: int, units: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.gates, self.units, self.use_bias = gates, gates * units, False
        self.supports_masking = True

    def _layout_of(self, plain: Any) -> KernelLayout:
        return KernelLayout.recurrent(self.gates)

    def call(self, inputs: Any) -> Any:
        lead = ops.shape(inputs)[:-1]
        x = product_of_rows(ops.reshape(inputs, (-1, self.grid.inputs)), self.operands())
        return ops.reshape(x, (*lead, self.grid.outputs))

    def storages(self) -> dict[str, Storage]:
        return {}  # that of the cell


class GatesOnBlocks(_Cell):
    """Base of both cells, which replaces dense kernels of gates by live blocks."""

    gates: ClassVar[int]
    in_one: ClassVar[bool] = True  # the layers inside are parts of the cell; see `walk`

    @other_keywords()
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
                f"The cell '{self.name}' cannot compute on live blocks: {reason}. "
                f"Received: {type(self).__name__}"
            )
        self._blocks: dict[str, tuple[Any, Any, Any]] = {
            "kernel": (density, block, counts),
            "recurrent_kernel": (recurrent_density, recurrent_block, recurrent_counts),
        }
        self.gain = gain
        self.takes_products = False  # whether a call is given products instead of inputs

    def add_weight(self, shape: Any = None, initializer: Any = None, **kwargs: Any) -> Any:
        name = kwargs.get("name", "")
        density, block, counts = self._blocks.get(name, (None, None, None))
        if density is None:  # else it becomes a layer of blocks
            return super().add_weight(shape=shape, initializer=initializer, **kwargs)
        made = BlockSparseGates(
            self.gates,
            self.units,
            density=density,
            block=block,
            counts=counts,
            kernel_regularizer=kwargs.get("regularizer"),
            kernel_constraint=kwargs.get("constraint"),
            gain=self.gain,
            seed=None if self.seed is None else derived_seed(self.seed, name),
            dtype=self.dtype_policy,
            trainable=self.trainable,
            name=name,
        )
        made.build((None, shape[0]))
        return made

    def products(self, inputs: Any, training: bool = False) -> Any:
        """Inputs `(.., features)` times the kernel, for all steps at once."""
        if training and self.dropout > 0:
            steps = inputs[:, 0, :] if len(inputs.shape) > 2 else inputs
            mask = self.get_dropout_mask(steps)
            inputs = inputs * (mask[:, None] if len(inputs.shape) > 2 else mask)
        products, bias = _product(inputs, self.kernel), self.bias
        if bias is None:
            return products
        return products + (bias if len(bias.shape) == 1 else bias[0])  # a GRU's is of two products

    def _read(self, inputs: Any, training: bool) -> Any:
        return inputs if self.takes_products else self.products(inputs, training)

    def on_blocks(self) -> dict[str, BlockSparseGates]:
        made = {name: getattr(self, name, None) for name in _KERNELS}
        return {name: own for name, own in made.items() if isinstance(own, BlockSparseGates)}

    def get_config(self) -> dict[str, Any]:
        names = ("density", "block", "counts")
        own: dict[str, Any] = dict(zip(names, self._blocks["kernel"], strict=True))
        recurrent = zip(names, self._blocks["recurrent_kernel"], strict=True)
        own |= {f"recurrent_{name}": value for name, value in recurrent}
        own = {name: own[name] for name in own if "counts" not in name or own[name]}
        return {**super().get_config(), **own, "gain": self.gain}


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

    def call(self, inputs: Any, states: Any, training: bool = False) -> Any:
        hidden, carry = states
        both = self._read(inputs, training) + _product(hidden, self.recurrent_kernel)
        parts = ops.split(both, 4, axis=-1)
        opened = self.recurrent_activation
        carry = opened(parts[1]) * carry + opened(parts[0]) * self.activation(parts[2])
        hidden = opened(parts[3]) * self.activation(carry)
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

    def call(self, inputs: Any, states: Any, training: bool = False) -> Any:
        hidden = states[0] if isinstance(states, list | tuple) else states
        given = ops.split(self._read(inputs, training), 3, axis=-1)
        remembered = _product(hidden, self.recurrent_kernel)
        if self.bias is not None:
            remembered = remembered + self.bias[1]
        inner = ops.split(remembered, 3, axis=-1)
        kept = self.recurrent_activation(given[0] + inner[0])
        read = self.recurrent_activation(given[1] + inner[1])
        hidden = kept * hidden + (1 - kept) * self.activation(given[2] + read * inner[2])
        return hidden, [hidden] if isinstance(states, list | tuple) else hidden


CELLS: dict[Any, Any] = {
    keras.layers.LSTM: BlockSparseLSTMCell,
    keras.layers.GRU: BlockSparseGRUCell,
}


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class BlockSparseRNN(OnBlocks, keras.layers.RNN):
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

    def __init__(self, cell: Any, **kwargs: Any) -> None:
        if not isinstance(cell, GatesOnBlocks) or kwargs.get("stateful"):
            raise NotPrunableError(
                "Recurrent layers on live blocks take a BlockSparseLSTMCell or BlockSparseGRUCell, "
                "and keep no state between batches. Received: cell of type "
                f"{type(cell).__name__}, stateful={kwargs.get('stateful', False)}"
            )
        super().__init__(cell, **kwargs)
        self.input_spec = keras.layers.InputSpec(ndim=3)

    def inner_loop(
        self, sequences: Any, initial_state: Any, mask: Any, training: bool = False
    ) -> Any:
        mask = mask[0] if isinstance(mask, list | tuple) else mask
        products = self.cell.products(sequences, training)
        self.cell.takes_products = True
        try:
            return super().inner_loop(products, initial_state, mask, training)
        finally:
            self.cell.takes_products = False

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        # Built first, the cell would lack the layer's name, by which torch tells the parameters of
        # Bidirectional apart.
        cell = {key: value for key, value in config["cell"].items() if key != "build_config"}
        return {**config, "cell": cell}

    def storages(self) -> dict[str, Storage]:
        cell = self.cell
        return {f"{cell.name}/{k}": LiveBlocks(own, cell) for k, own in cell.on_blocks().items()}

    def get_build_config(self) -> dict[str, Any]:
        drawn = {key: own.drawn_digest for key, own in self.cell.on_blocks().items()}
        return {**super().get_build_config(), "drawn_digests": drawn}

    def build_from_config(self, config: dict[str, Any]) -> None:
        config = dict(config)
        drawn = config.pop("drawn_digests", {})
        super().build_from_config(config)
        for key, own in self.cell.on_blocks().items():
            own.drawn_digest = drawn.get(key)

    def to_dense_layer(self) -> Any:
        kind = next(plain for plain, cell in CELLS.items() if isinstance(self.cell, cell))
        config = kind(1).cell.get_config()
        known = {key: value for key, value in self.cell.get_config().items() if key in config}
        plain = kind(**{**known, **_of_layer(self)})
        plain.cell.name = self.cell.name
        stand_in_name_scope(plain, self)
        plain.build((None, None, _features(self.cell)))
        own = {variable.name: variable for variable in self.cell._trainable_variables}
        for variable in plain.cell.weights:
            gates = self.cell.on_blocks().get(variable.name)
            # A copy: on JAX `fit` frees the arrays of its model.
            value = ops.copy(own[variable.name].value) if gates is None else gates.kernel_value()
            assign(variable, value)
            source = own[variable.name] if gates is None else gates.blocks
            variable.trainable = source.trainable
        return plain

    def build_like(self, plain: Any) -> None:
        stand_in_name_scope(self, plain)
        self.build((None, None, _features(plain.cell)))
        given = {variable.name: variable for variable in plain.cell.weights}
        for variable in self.cell.weights:
            if variable.name in given:
                assign(variable, ops.copy(given[variable.name].value))
                variable.trainable = given[variable.name].trainable


def recurrent_like(
    plain: Any, sizes: dict[str, tuple[float, Any, Any]], seed: int | None
) -> BlockSparseRNN:
    """The layer on blocks, not built, for an LSTM or GRU, from (density, block, counts) by name."""
    config = {**plain.cell.get_config(), "seed": seed}
    for name, prefix in zip(_KERNELS, ("", "recurrent_"), strict=True):
        density, block, counts = sizes.get(name, (None, 32, None))
        config |= {f"{prefix}density": density, f"{prefix}block": block, f"{prefix}counts": counts}
    return BlockSparseRNN(CELLS[type(plain)](**config), **_of_layer(plain))


def why_no_gates(cell: Any) -> str | None:
    """Why an LSTM or GRU cell cannot compute on live blocks; `None` if it can."""
    if cell.recurrent_dropout > 0 or cell.implementation == 1:
        return "with `recurrent_dropout` or implementation=1 each gate reads other inputs"
    if not getattr(cell, "reset_after", True):
        return "it has reset_after=False"
    kernel = why_needs_dense(cell.kernel_regularizer, cell.kernel_constraint)
    return kernel or why_needs_dense(cell.recurrent_regularizer, cell.recurrent_constraint)


def _of_layer(layer: Any) -> dict[str, Any]:
    config = keras.layers.RNN.get_config(layer)
    del config["cell"]
    return {**config, "activity_regularizer": layer.activity_regularizer}


def _features(cell: Any) -> int:
    kernel = cell.kernel
    return int(kernel.grid.inputs if isinstance(kernel, BlockSparseGates) else kernel.shape[0])


def _product(x: Any, kernel: Any) -> Any:
    return kernel(x) if isinstance(kernel, BlockSparseGates) else ops.matmul(x, kernel)
