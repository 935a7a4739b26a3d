"""Multiply-adds of every kernel for one sample, from the shapes that really flow."""

import collections
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from keras_sparse_ortho._checks import as_text
from keras_sparse_ortho._interception import observe
from keras_sparse_ortho._keras_internals import ConvLSTMCell, from_zero_states
from keras_sparse_ortho.kernels import PrunableWeight, are_experts, is_table, walk
from keras_sparse_ortho.layers import BlockSparseConv, BlockSparseDense, BlockSparseEinsumDense
from keras_sparse_ortho.orthogonal import einsum_axes

L = keras.layers


def count_flops(
    model: Any, weights: Sequence[PrunableWeight], sample: Any = None
) -> dict[int, int]:
    """Multiply-adds for one sample by `id(variable)`, summed over all calls of shared layers.

    The model is traced once in inference with a batch of one. A kernel of `size` entries, applied
    at `positions` pixels or timesteps, costs `size * positions`. Weights of layers without a rule
    (`kernel_positions`) are left out; all are if model and `sample` leave a dimension open.
    """
    specs = input_specs(model) if sample is None else _specs_of(sample)
    if specs is None:
        return {}
    calls = _calls(model, {id(weight.owner): weight.owner for weight in weights}, specs)
    table: dict[int, int] = {}
    for weight in weights:
        positions = [kernel_positions(weight.owner, *call) for call in calls[id(weight.owner)]]
        known = [count for count in positions if count is not None]
        if known and len(known) == len(positions):
            table[id(weight.variable)] = weight.size * sum(known)
    return table


def _calls(model: Any, owners: Mapping[int, Any], specs: Any) -> dict[int, list[tuple[Any, Any]]]:
    """The first input and output of each call of layers, both by `id`, in one trace of a model."""
    # The fused kernels of LSTM and GRU never call the cell, and a scan calls it once for all steps:
    # a cell is counted where its RNN layer is called.
    recurrent = [layer for layer, _ in walk(model, "") if isinstance(layer, L.RNN)]
    cells = {id(layer): getattr(layer.cell, "cells", [layer.cell]) for layer in recurrent}
    inside = {id(cell) for group in cells.values() for cell in group}
    observed = [owner for key, owner in owners.items() if key not in inside] + recurrent
    calls: dict[int, list[tuple[Any, Any]]] = collections.defaultdict(list)

    def note(layer: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        outputs = call(*args, **kwargs)
        first_input = keras.tree.flatten([*args, *kwargs.values()])[0]
        first_output = keras.tree.flatten(outputs)[0]
        for counted in cells.get(id(layer), [layer]):
            calls[id(counted)].append((first_input, first_output))
        return outputs

    with from_zero_states(model), observe(observed, note):
        try:
            _Trace(model)(specs)
        except ValueError:
            raise
        except Exception as error:  # of a model from a file, whatever its layers do with settings
            raise ValueError(
                f"The model {model.name!r} cannot be called on inputs of its shape, from which "
                f"multiplications are counted. Received: {type(error).__name__}: {as_text(error)}"
            ) from error
    return calls


class _Trace(keras.layers.Layer):
    """Calls a model it does not track, so that a symbolic call traces all of it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model = lambda: model

    def call(self, inputs: Any) -> Any:
        # In training `RandomCrop` cuts at places that JAX cannot trace.
        return self._model()(inputs, training=False)


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
    return keras.tree.map_structure(
        lambda array: keras.KerasTensor(
            (1, *array.shape[1:]), dtype=keras.backend.standardize_dtype(array.dtype)
        ),
        sample,
    )


@functools.singledispatch
def kernel_positions(layer: Any, inputs: Any, outputs: Any) -> int | None:
    """Counts the positions of a sample at which a layer applies its kernels; `None` if unknown.

    Dispatches on the class of `layer`, subclasses included; `inputs` and `outputs` are the first
    tensors of a call with a batch of one. Register custom layers:
    `kernel_positions.register(MyLayer, lambda layer, inputs, outputs: ...)`.
    """
    if is_table(layer):
        return 0  # it is looked up, or added
    # Experts get all tokens of a batch, (tokens, features).
    return inputs.shape[0] if are_experts(layer) else None


def _places(layer: Any, shape: Sequence[int]) -> int:
    """Pixels of a tensor `(batch, *places, channels)`, or with the channels first."""
    first = getattr(layer, "data_format", "channels_last") == "channels_first"
    return math.prod(shape[2:] if first else shape[1:-1])


def _einsum_dense(layer: Any, inputs: Any, outputs: Any) -> int:
    data, kernel, _ = einsum_axes(layer.equation, len(inputs.shape))
    # Every input axis that the kernel does not have repeats it; the batch is one.
    pairs = zip(data, inputs.shape, strict=True)
    return math.prod(size for letter, size in pairs if letter not in kernel)


def _conv_lstm_cell(layer: Any, inputs: Any, outputs: Any) -> int:
    # Tensors of the RNN layer: both kernels apply at all places of the state, in every step.
    places = outputs.shape[-len(inputs.shape) + 2 :]
    return int(inputs.shape[1]) * _places(layer, (1, *places))


_RULES: dict[Callable[[Any, Any, Any], int], tuple[Any, ...]] = {
    lambda layer, inputs, outputs: 0: (L.Embedding,),  # a look-up
    lambda layer, inputs, outputs: _places(layer, inputs.shape): (
        *(L.Dense, BlockSparseDense),
        *(L.Conv1DTranspose, L.Conv2DTranspose, L.Conv3DTranspose),
    ),
    lambda layer, inputs, outputs: _places(layer, outputs.shape): (
        *(L.Conv1D, L.Conv2D, L.Conv3D, L.DepthwiseConv1D, L.DepthwiseConv2D),
        *(L.SeparableConv1D, L.SeparableConv2D, BlockSparseConv),
    ),
    _einsum_dense: (L.EinsumDense, BlockSparseEinsumDense),
    # Inputs of the RNN layer: (batch, timesteps, features).
    lambda layer, inputs, outputs: int(inputs.shape[1]): (L.LSTMCell, L.GRUCell, L.SimpleRNNCell),
    _conv_lstm_cell: (ConvLSTMCell,),
}
for _rule, _kinds in _RULES.items():
    for _kind in _kinds:
        kernel_positions.register(_kind, _rule)
