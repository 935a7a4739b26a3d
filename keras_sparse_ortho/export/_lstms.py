"""Which LSTMs of a model LiteRT's fused operator computes, and what stands for them in a trace.

Converters turn an LSTM into a loop, or into its steps one by one. A placeholder that they leave as
it is stands for it in the trace; `_fused_lstm.py` puts the operator in its place.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import keras
import numpy as np

from keras_sparse_ortho._interception import intercepted, observe
from keras_sparse_ortho._types import Nested, Tensor
from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.kernels import walk

LSTM_MARK = (
    "kso_lstm_"  # of extra outputs of a trace: a number and an end follow
)
GATES = 4
_OFFSET = (
    1000.0  # of a placeholder's constants, which no bound of an activation is
)

CallOfLayer: TypeAlias = Callable[..., Tensor]
"""A recurrent layer's `call`: sequences, and by name its states, mask and `training`."""


class LstmPlan(NamedTuple):
    """Which LSTMs of a plain model the operator computes.

    Attributes:
        quarters: For each kernel of theirs, by path, the matrices of the operator, one a gate.
        loops: Why the others are computed step by step, by path of the layer.
    """

    quarters: dict[str, list[np.ndarray]]
    loops: dict[str, str]


NO_LSTMS = LstmPlan({}, {})


class TracedLstm(NamedTuple):
    """A call of an LSTM in a trace: its sequences, the placeholder of its output, its cell."""

    sequences: Tensor
    output: Tensor
    cell: keras.layers.LSTMCell


class LstmWeights(NamedTuple):
    """The weights of one call of an LSTM, as the operator takes them.

    Attributes:
        owner: int. The number of the cell, which calls of one layer share.
        path: str. The path of the cell, which cells of several models may share.
        kernels: Four arrays `(units, inputs)`: input, forget, cell and output gate.
        recurrent_kernels: Four arrays `(units, units)`.
        biases: Four arrays `(units,)`.
    """

    owner: int
    path: str
    kernels: list[np.ndarray]
    recurrent_kernels: list[np.ndarray]
    biases: list[np.ndarray]


def plan_of_lstms(model: keras.Model, inputs: Nested) -> LstmPlan:
    """Which LSTMs of a plain model the operator computes, by one call of it.

    Args:
        model: The plain model.
        inputs: Its inputs in that call.
    """
    layers = _lstms(model)
    plan = LstmPlan({}, {})
    if not layers:
        return plan

    def note(
        layer: keras.layers.LSTM,
        call: CallOfLayer,
        sequences: Tensor,
        initial_state: Sequence[Tensor] | None = None,
        mask: Tensor | None = None,
        training: bool = False,
    ) -> Tensor:
        reason = why_not_fused(layer, initial_state, mask)
        if reason is None:
            weights = weights_of(layer.cell)
            plan.quarters[layer.cell.kernel.path] = weights.kernels
            recurrent = layer.cell.recurrent_kernel
            plan.quarters[recurrent.path] = weights.recurrent_kernels
        else:
            plan.loops[layer.path] = reason
        return call(
            sequences,
            initial_state=initial_state,
            mask=mask,
            training=training,
        )

    with keras.StatelessScope(), observe(layers, note):
        model(inputs, training=False)
    return plan


def why_not_fused(
    layer: keras.layers.LSTM,
    initial_state: Sequence[Tensor] | None,
    mask: Tensor | None,
) -> str | None:
    """Why the operator does not compute a call of an LSTM; None if it does."""
    cell = layer.cell
    if type(layer) is not keras.layers.LSTM:
        return f"{type(layer).__name__} is a subclass of LSTM"
    if type(cell) is not keras.layers.LSTMCell:
        return f"its cell is a {type(cell).__name__}"
    if cell.activation is not keras.activations.tanh:
        return "its activation is not tanh"
    if cell.recurrent_activation is not keras.activations.sigmoid:
        return "its recurrent_activation is not sigmoid"
    if mask is not None:
        return "it has a mask"
    if initial_state is not None:
        return "it has an initial_state"
    if layer.stateful:
        return "it has stateful=True"
    if layer.return_state:
        return "it has return_state=True"
    return None


@contextlib.contextmanager
def placeholders(model: keras.Model, calls: list[TracedLstm]) -> Iterator[None]:
    """Inside, and in this thread, placeholders stand for the LSTMs that the operator computes.

    Args:
        model: The plain model.
        calls: To which each call of such an LSTM is added.
    """
    with contextlib.ExitStack() as stack:
        for layer in _lstms(model):
            function = _placeholder_of(layer, calls)
            stack.enter_context(intercepted(layer, "call", function))
        yield


def _placeholder_of(
    layer: keras.layers.LSTM, calls: list[TracedLstm]
) -> CallOfLayer:
    """The function that answers in place of a layer's `call`."""

    def call(
        plain: CallOfLayer,
        sequences: Tensor,
        initial_state: Sequence[Tensor] | None = None,
        mask: Tensor | None = None,
        training: bool = False,
    ) -> Tensor:
        if why_not_fused(layer, initial_state, mask) is not None:
            return plain(
                sequences,
                initial_state=initial_state,
                mask=mask,
                training=training,
            )
        ops = keras.ops
        if layer.go_backwards:
            sequences = ops.flip(sequences, axis=1)
        # A converter can neither fold it, nor share it with another one.
        constants = np.arange(1, layer.units + 1, dtype=np.float32) / 7
        constants = constants + np.float32(_OFFSET * (len(calls) + 1))
        sums = ops.sum(sequences, axis=-1, keepdims=True)
        output = ops.maximum(sums, constants)
        calls.append(TracedLstm(sequences, output, layer.cell))
        if layer.return_sequences:
            return output
        return output[:, -1]

    return call


def weights_of(cell: keras.layers.LSTMCell, owner: int = 0) -> LstmWeights:
    """The weights of a cell, apart by gate. Keras has the gates in the operator's order."""
    bias = np.zeros(GATES * cell.units, np.float32)
    if cell.use_bias:
        bias = to_numpy(cell.bias.value)
    return LstmWeights(
        owner=owner,
        path=cell.kernel.path.rpartition("/")[0],
        kernels=_by_gate(to_numpy(cell.kernel.value)),
        recurrent_kernels=_by_gate(to_numpy(cell.recurrent_kernel.value)),
        biases=_by_gate(bias),
    )


def _by_gate(value: np.ndarray) -> list[np.ndarray]:
    """A weight in four parts; a kernel's are transposed."""
    return np.split(np.asarray(value, np.float32).T, GATES)


def save_lstms(calls: Sequence[TracedLstm], file: Path) -> None:
    """Writes the weights of traced LSTMs as an NPZ file, for `read_lstms`."""
    arrays: dict[str, Any] = {}
    owners: dict[int, int] = {}  # by `id` of the cell
    for number, call in enumerate(calls):
        owner = owners.setdefault(id(call.cell), len(owners))
        weights = weights_of(call.cell, owner)
        arrays[f"{number}_owner"] = np.array(owner)
        arrays[f"{number}_path"] = np.array(weights.path)
        arrays[f"{number}_kernels"] = np.stack(weights.kernels)
        arrays[f"{number}_recurrent"] = np.stack(weights.recurrent_kernels)
        arrays[f"{number}_biases"] = np.stack(weights.biases)
    np.savez(file, **arrays)


def read_lstms(file: Path) -> list[LstmWeights]:
    """The weights of the LSTMs of a trace, in the order of their calls."""
    calls: list[LstmWeights] = []
    with np.load(file) as arrays:
        while f"{len(calls)}_path" in arrays:
            number = len(calls)
            weights = LstmWeights(
                owner=int(arrays[f"{number}_owner"]),
                path=str(arrays[f"{number}_path"]),
                kernels=list(arrays[f"{number}_kernels"]),
                recurrent_kernels=list(arrays[f"{number}_recurrent"]),
                biases=list(arrays[f"{number}_biases"]),
            )
            calls.append(weights)
    return calls


def _lstms(model: keras.Model) -> list[keras.layers.LSTM]:
    """The LSTMs of a model, each once."""
    layers = {}
    for layer, _ in walk(model, ""):
        if isinstance(layer, keras.layers.LSTM):
            layers[id(layer)] = layer
    return list(layers.values())
