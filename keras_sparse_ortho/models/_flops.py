"""Multiply-adds of every kernel for one sample, from the shapes that really flow."""

import contextlib
import functools
import math
from collections.abc import Sequence
from typing import Any

import keras

from keras_sparse_ortho._checks import told
from keras_sparse_ortho._keras_internals import ConvLSTMCell, from_zero_states, replaced
from keras_sparse_ortho.kernels import PrunableWeight, are_experts, is_table, walk
from keras_sparse_ortho.layers import (
    BlockSparseConv,
    BlockSparseDense,
    BlockSparseEinsumDense,
)

L = keras.layers


def count_flops(
    model: Any, weights: Sequence[PrunableWeight], sample: Any = None
) -> dict[int, int]:
    """Multiply-adds for one sample by `id(variable)`, summed over all calls of shared layers.

    The model is traced once in inference with a batch of one, without computing anything. A kernel
    of `size` entries, applied at `positions` pixels or timesteps, costs `size * positions`. Weights
    of layers without a rule (`kernel_positions`) are left out, and all of them if the model has
    dimensions besides the batch that are not fixed, unless a `sample`, a batch of its inputs, fixes
    them.
    """
    specs = input_specs(model) if sample is None else _specs_of(sample)
    if specs is None:
        return {}
    # The fused kernels of LSTM and GRU never call the cell, and a scan calls it once for all steps:
    # a cell is counted where its RNN layer is called.
    noted = {id(weight.owner): [id(weight.owner)] for weight in weights}
    layers = [layer for layer, _ in walk(model, "")]
    for layer in layers:
        if isinstance(layer, L.RNN):
            cells = [id(cell) for cell in getattr(layer.cell, "cells", [layer.cell])]
            noted[id(layer)] = [key for key in cells if noted.pop(key, None)]
    calls: dict[int, list[tuple[Any, Any]]] = {}
    with from_zero_states(model), contextlib.ExitStack() as stack:
        for layer in layers:
            if id(layer) in noted:
                hook = functools.partial(_noting_call, layer.call, calls, noted[id(layer)])
                stack.enter_context(replaced(layer, "call", hook))
        try:
            _Trace(model)(specs)
        except ValueError:
            raise
        except Exception as error:  # of a model from a file, whatever its layers do with settings
            raise ValueError(
                f"The model '{model.name}' cannot be called on inputs of its shape, from which "
                f"multiplications are counted. Received: {type(error).__name__}: {told(error)}"
            ) from error
    table: dict[int, int] = {}
    for weight in weights:
        made = calls.get(id(weight.owner), [])
        positions = [kernel_positions(weight.owner, *call) for call in made]
        known = [count for count in positions if count is not None]
        if known and len(known) == len(positions):
            table[id(weight.variable)] = weight.size * sum(known)
    return table


class _Trace(keras.layers.Layer):
    """Calls a model it does not track, so that a symbolic call traces all of it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model = lambda: model

    def call(self, inputs: Any) -> Any:
        # In training `RandomCrop` cuts at places that JAX cannot trace.
        return self._model()(inputs, training=False)


def _noting_call(
    call: Any, calls: dict[int, list[tuple[Any, Any]]], noted: list[int], *args: Any, **kwargs: Any
) -> Any:
    """Stands in for a layer's `call`, and notes its first input and output."""
    outputs = call(*args, **kwargs)
    first = args[0] if args else next(iter(kwargs.values()))
    for key in noted:
        calls.setdefault(key, []).append(
            (keras.tree.flatten(first)[0], keras.tree.flatten(outputs)[0])
        )
    return outputs


def input_specs(model: Any) -> Any:
    """Symbolic inputs of batch one, in the structure of the model's input, or `None`."""
    inputs = open_specs(model)
    if inputs is None or any(None in tensor.shape[1:] for tensor in keras.tree.flatten(inputs)):
        return None
    return _specs_of(inputs)


def open_specs(model: Any) -> Any:
    """Symbolic inputs with the dimensions that the model leaves open, or `None`."""
    inputs = getattr(model, "input", None) if getattr(model, "inputs", None) else None
    if inputs is not None:
        return inputs
    shape = (model.get_build_config() or {}).get("input_shape")
    if not isinstance(shape, tuple | list) or not shape or isinstance(shape[0], tuple | list):
        return None
    return keras.KerasTensor(tuple(shape), dtype=model.compute_dtype)


def _specs_of(sample: Any) -> Any:
    """Symbolic inputs of batch one with the shapes of a batch."""
    return keras.tree.map_structure(
        lambda array: keras.KerasTensor(
            (1, *array.shape[1:]), dtype=keras.backend.standardize_dtype(array.dtype)
        ),
        sample,
    )


@functools.singledispatch
def kernel_positions(layer: Any, inputs: Any, outputs: Any) -> int | None:
    """At how many positions of a sample a layer applies its kernels; `None` if not known.

    Dispatches on the class of `layer`, subclasses included; `inputs` and `outputs` are the first
    tensors of a call with a batch of one. Register a rule for a custom layer as
    `kernel_positions.register(MyLayer, lambda layer, inputs, outputs: ...)`.
    """
    if is_table(layer):
        return 0  # it is looked up, or added
    # Experts get all tokens of a batch, (tokens, features).
    return None if not are_experts(layer) else inputs.shape[0]


def _places(layer: Any, shape: Sequence[int]) -> int:
    """Pixels of a tensor `(batch, *places, channels)`, or with the channels first."""
    first = getattr(layer, "data_format", "channels_last") == "channels_first"
    return math.prod(shape[2:] if first else shape[1:-1])


def _dense(layer: Any, inputs: Any, outputs: Any) -> int:
    return math.prod(tuple(inputs.shape)[1:-1])


def _embedding(layer: Any, inputs: Any, outputs: Any) -> int:
    return 0  # a look-up


def _convolution(layer: Any, inputs: Any, outputs: Any) -> int:
    return _places(layer, tuple(outputs.shape))


def _transposed_convolution(layer: Any, inputs: Any, outputs: Any) -> int:
    return _places(layer, tuple(inputs.shape))


def _einsum_dense(layer: Any, inputs: Any, outputs: Any) -> int:
    data, kernel = layer.equation.replace(" ", "").split("->")[0].split(",")
    head, dots, tail = data.partition("...")
    shape = tuple(inputs.shape)
    names = [*head, *("." * (len(shape) - len(head) - len(tail)) if dots else ""), *tail]
    # Every input axis that the kernel does not have repeats it; the batch is one.
    return math.prod(size for name, size in zip(names, shape, strict=True) if name not in kernel)


def _recurrent_cell(layer: Any, inputs: Any, outputs: Any) -> int:
    return int(inputs.shape[1])  # those of the RNN layer: (batch, timesteps, features)


def _conv_lstm_cell(layer: Any, inputs: Any, outputs: Any) -> int:
    # Those of the RNN layer; both kernels are applied at all places of the state, in every step.
    state = tuple(outputs.shape)
    if len(state) == len(inputs.shape):  # it returns a sequence of them
        state = (state[0], *state[2:])
    return int(inputs.shape[1]) * _places(layer, state)


_RULES: dict[Any, tuple[Any, ...]] = {
    _dense: (L.Dense, BlockSparseDense),
    _embedding: (L.Embedding,),
    _convolution: (
        *(L.Conv1D, L.Conv2D, L.Conv3D, L.DepthwiseConv1D, L.DepthwiseConv2D),
        *(L.SeparableConv1D, L.SeparableConv2D, BlockSparseConv),
    ),
    _transposed_convolution: (L.Conv1DTranspose, L.Conv2DTranspose, L.Conv3DTranspose),
    _einsum_dense: (L.EinsumDense, BlockSparseEinsumDense),
    _recurrent_cell: (L.LSTMCell, L.GRUCell, L.SimpleRNNCell),
    _conv_lstm_cell: (ConvLSTMCell,),
}
for _rule, _kinds in _RULES.items():
    for _kind in _kinds:
        kernel_positions.register(_kind, _rule)
