"""Recurrent layers as LiteRT runs them fast, in loops or step by step.

A loop of Keras moves its tensors more often than it computes: 28 operations a step for a GRU that
returns all outputs, and here 22. Without a loop they are 14 for 18: one product has the inputs of
all steps. In a loop that would be a tenth faster, and take five times the memory in LiteRT Micro.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import keras

from keras_sparse_ortho._interception import stand_in, with_settings
from keras_sparse_ortho._types import Tensor
from keras_sparse_ortho.kernels import has_dropout_rates, walk

Step: TypeAlias = Callable[[Any, Tensor, Sequence[Tensor]], list[Tensor]]
"""A cell, the products of its inputs in one step, and its states -> the states after that step.

The first state is the output.
"""


@contextlib.contextmanager
def with_short_steps(model: keras.Model) -> Iterator[None]:
    """Inside, and in this thread, recurrent layers compute as LiteRT's converters can write them.

    On TensorFlow: without cuDNN. On JAX: without loops, too.
    """
    # litert-converter 0.5 lacks loops.
    has_loops = keras.backend.backend() != "jax"
    with contextlib.ExitStack() as stack:
        for layer, _ in walk(model, ""):
            if isinstance(layer, keras.layers.RNN):
                cell = _without_dropout(layer.cell)
                unroll = layer.unroll or not has_loops
                plain = stand_in(
                    layer, use_cudnn=False, unroll=unroll, cell=cell
                )
                inner_loop = functools.partial(_inner_loop, plain)
                settings = with_settings(
                    layer, inner_loop=inner_loop, cell=cell
                )
                stack.enter_context(settings)
        yield


def _without_dropout(cell: Any) -> Any:
    """A cell that draws no dropout masks. Keras draws them in inference, too, and a file would."""
    if isinstance(cell, keras.layers.StackedRNNCells):
        cells = [_without_dropout(inner) for inner in cell.cells]
        return stand_in(cell, cells=cells)
    if not has_dropout_rates(cell):
        return cell
    return stand_in(cell, dropout=0.0, recurrent_dropout=0.0)


def _inner_loop(
    layer: keras.layers.RNN,
    sequences: Tensor,
    initial_state: Sequence[Tensor],
    mask: Tensor | Sequence[Tensor | None] | None,
    training: bool = False,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """In place of a layer's `inner_loop`: its last output, all outputs, and its last states."""
    masks = keras.tree.flatten(mask)
    has_mask = any(tensor is not None for tensor in masks)
    if has_mask or not _has_short_steps(layer, sequences):
        return layer.inner_loop(
            sequences=sequences,
            initial_state=initial_state,
            mask=mask,
            training=training,
        )
    cell = layer.cell
    step = functools.partial(_STEPS[type(cell)], cell)
    by_step = keras.ops.transpose(sequences, (1, 0, 2))
    if layer.go_backwards:
        by_step = keras.ops.flip(by_step, axis=0)
    states = list(initial_state)
    if layer.unroll:
        products = _products(cell, by_step)
        return _one_by_one(step, products, states, layer.return_sequences)

    def step_of_inputs(
        inputs: Tensor, states: Sequence[Tensor]
    ) -> list[Tensor]:
        return step(_products(cell, inputs), states)

    return _loop(step_of_inputs, by_step, states, layer.return_sequences)


def _products(cell: Any, inputs: Tensor) -> Tensor:
    """The products of the inputs of one or of all steps with the cell's kernel."""
    products = keras.ops.matmul(inputs, cell.kernel)
    if not cell.use_bias:
        return products
    bias = cell.bias
    if isinstance(cell, keras.layers.GRUCell):
        bias = bias[0]
    return products + bias


def _has_short_steps(layer: keras.layers.RNN, sequences: Tensor) -> bool:
    """Whether this file knows the steps of a layer, and their number."""
    cell = layer.cell
    if type(cell) not in _STEPS or layer.stateful:
        return False
    if isinstance(cell, keras.layers.GRUCell) and not cell.reset_after:
        return False
    # A subclass may loop in another way.
    has_loop_of_keras = type(layer).inner_loop in _LOOPS_OF_KERAS
    return has_loop_of_keras and None not in sequences.shape


def _one_by_one(
    step: Callable[[Tensor, Sequence[Tensor]], list[Tensor]],
    by_step: Tensor,
    states: list[Tensor],
    has_all_outputs: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Writes every step.

    Args:
        step: A row of `by_step`, and states -> states.
        by_step: Inputs or their products, `(steps, batch, features)`.
        states: The first states, each `(batch, units)`.
        has_all_outputs: bool. Whether outputs of all steps are asked for.

    Returns:
        The last output; all outputs, `(batch, steps, units)`, or the last one as the only step;
        and the last states.
    """
    outputs = []
    for row in keras.ops.unstack(by_step, axis=0):
        states = step(row, states)
        outputs.append(states[0])
    if not has_all_outputs:
        return states[0], states[0][:, None], states
    return states[0], keras.ops.stack(outputs, axis=1), states


def _loop(
    step: Callable[[Tensor, Sequence[Tensor]], list[Tensor]],
    by_step: Tensor,
    states: list[Tensor],
    has_all_outputs: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Repeats a step in a loop of TensorFlow; arguments and answer are those of `_one_by_one`."""
    import tensorflow as tf

    count = by_step.shape[0]
    outputs = []
    if has_all_outputs:
        # Any values, as each step is written; zeros would be stored in the file.
        shape = (count, *states[0].shape)
        outputs = [tf.broadcast_to(by_step[..., :1], shape)]

    def is_before_end(time: Tensor, *_: Tensor) -> Tensor:
        return time < count

    def body(
        time: Tensor, states: list[Tensor], outputs: list[Tensor]
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        states = step(tf.gather(by_step, time), states)
        start = (time, 0, 0)
        outputs = [
            keras.ops.slice_update(array, start, states[0][None])
            for array in outputs
        ]
        return time + 1, states, outputs

    _, states, outputs = tf.while_loop(
        is_before_end, body, (tf.constant(0), states, outputs)
    )
    if not has_all_outputs:
        return states[0], states[0][:, None], states
    return states[0], tf.transpose(outputs[0], (1, 0, 2)), states


def _simple_step(
    cell: keras.layers.SimpleRNNCell, products: Tensor, states: Sequence[Tensor]
) -> list[Tensor]:
    """One step: h' = f(x K + b + h R)."""
    [hidden] = states
    return [
        cell.activation(
            products + keras.ops.matmul(hidden, cell.recurrent_kernel)
        )
    ]


def _gru_step(
    cell: keras.layers.GRUCell, products: Tensor, states: Sequence[Tensor]
) -> list[Tensor]:
    """One step.

    (z, r, g) = x K + b,    (z', r', g') = h R + b',
    h' = u h + (1 - u) tanh(g + sigmoid(r + r') g'),    u = sigmoid(z + z')
    """
    ops = keras.ops
    [hidden] = states
    state_products = ops.matmul(hidden, cell.recurrent_kernel)
    if cell.use_bias:
        state_products = state_products + cell.bias[1]
    update_x, reset_x, candidate_x = ops.split(products, 3, axis=-1)
    update_h, reset_h, candidate_h = ops.split(state_products, 3, axis=-1)
    update = cell.recurrent_activation(update_x + update_h)
    reset = cell.recurrent_activation(reset_x + reset_h)
    candidate = cell.activation(candidate_x + reset * candidate_h)
    return [update * hidden + (1 - update) * candidate]


def _lstm_step(
    cell: keras.layers.LSTMCell, products: Tensor, states: Sequence[Tensor]
) -> list[Tensor]:
    """One step.

    (i, f, g, o) = x K + b + h R,
    c' = sigmoid(f) c + sigmoid(i) tanh(g),    h' = sigmoid(o) tanh(c')
    """
    ops = keras.ops
    hidden, carry = states
    summed = products + ops.matmul(hidden, cell.recurrent_kernel)
    input_gate, forget_gate, candidate, output_gate = ops.split(
        summed, 4, axis=-1
    )
    sigmoid = cell.recurrent_activation
    carry = sigmoid(forget_gate) * carry
    carry = carry + sigmoid(input_gate) * cell.activation(candidate)
    return [sigmoid(output_gate) * cell.activation(carry), carry]


_STEPS: dict[type, Step] = {
    keras.layers.SimpleRNNCell: _simple_step,
    keras.layers.GRUCell: _gru_step,
    keras.layers.LSTMCell: _lstm_step,
}
_LOOPS_OF_KERAS = {
    keras.layers.RNN.inner_loop,
    keras.layers.LSTM.inner_loop,
    keras.layers.GRU.inner_loop,
}
