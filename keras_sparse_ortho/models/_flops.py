"""Multiply-adds of every kernel for one sample, from the shapes that really flow."""

import collections
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import keras

from keras_sparse_ortho._checks import as_text
from keras_sparse_ortho._interception import observe
from keras_sparse_ortho._keras_internals import from_zero_states
from keras_sparse_ortho._types import Nested, Tensor
from keras_sparse_ortho.kernels import (
    PrunableWeight,
    are_experts,
    is_table,
    walk,
)

PositionRule = Callable[[keras.layers.Layer, Tensor, Tensor], int | None]


class _Call(NamedTuple):
    """The first input and output of a call of a layer."""

    inputs: Tensor
    outputs: Tensor


def count_flops(
    model: keras.layers.Layer,
    weights: Sequence[PrunableWeight],
    sample: Nested = None,
) -> dict[int, int]:
    """Multiply-adds for one sample by `id(variable)`, summed over all calls of shared layers.

    The model is traced once in inference with a batch of one. A kernel of `size` entries, applied
    at `positions` pixels or timesteps, costs `size * positions`. Weights of layers without a rule
    (`kernel_positions`) are left out; all are if model and `sample` leave a dimension open.
    """
    if sample is None:
        specs = input_specs(model)
    else:
        specs = _specs_of(sample)
    if specs is None:
        return {}
    owners = {id(weight.owner): weight.owner for weight in weights}
    calls = _calls(model, owners, specs)
    table: dict[int, int] = {}
    for weight in weights:
        positions = _positions_of_calls(weight.owner, calls[id(weight.owner)])
        if positions is not None:
            table[id(weight.variable)] = weight.size * positions
    return table


def _positions_of_calls(
    layer: keras.layers.Layer, calls: list[_Call]
) -> int | None:
    """The positions in all calls of a layer together; `None` without a rule or a call."""
    total = 0
    for call in calls:
        positions = kernel_positions(layer, call.inputs, call.outputs)
        if positions is None:
            return None
        total += positions
    return total if calls else None


def _calls(
    model: keras.layers.Layer,
    owners: Mapping[int, keras.layers.Layer],
    specs: Nested,
) -> dict[int, list[_Call]]:
    """The calls of layers, by `id`, in one trace of a model.

    The fused kernels of LSTM and GRU never call the cell, and a scan calls it once for all steps:
    a cell is counted where its RNN layer is called.
    """
    recurrent = [
        layer
        for layer, _ in walk(model, "")
        if isinstance(layer, keras.layers.RNN)
    ]
    cells = {
        id(layer): getattr(layer.cell, "cells", [layer.cell])
        for layer in recurrent
    }
    cell_ids = {
        id(cell) for cells_of_layer in cells.values() for cell in cells_of_layer
    }
    observed = [
        owner for owner_id, owner in owners.items() if owner_id not in cell_ids
    ]
    observed += recurrent
    calls: dict[int, list[_Call]] = collections.defaultdict(list)

    def note(
        layer: keras.layers.Layer,
        call: Callable[..., Nested],
        *args: Nested,
        **kwargs: Nested,
    ) -> Nested:
        outputs = call(*args, **kwargs)
        arguments = keras.tree.flatten([*args, *kwargs.values()])
        results = keras.tree.flatten(outputs)
        for counted_layer in cells.get(id(layer), [layer]):
            calls[id(counted_layer)].append(_Call(arguments[0], results[0]))
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

    def __init__(self, model: keras.layers.Layer) -> None:
        super().__init__()
        self._model = lambda: model

    def call(self, inputs: Nested) -> Nested:
        # In training `RandomCrop` cuts at places that JAX cannot trace.
        return self._model()(inputs, training=False)


def input_specs(model: keras.layers.Layer) -> Nested:
    """Symbolic inputs of batch one, in the structure of the model's input, or `None`."""
    inputs = open_specs(model)
    if inputs is None:
        return None
    if any(None in tensor.shape[1:] for tensor in keras.tree.flatten(inputs)):
        return None
    return _specs_of(inputs)


def open_specs(model: keras.layers.Layer) -> Nested:
    """Symbolic inputs with the dimensions that the model leaves open, or `None`."""
    if getattr(model, "inputs", None):
        inputs = getattr(model, "input", None)
        if inputs is not None:
            return inputs
    build_config = model.get_build_config() or {}
    shape = build_config.get("input_shape")
    if (
        not isinstance(shape, tuple | list)
        or not shape
        or isinstance(shape[0], tuple | list)
    ):
        return None
    return keras.KerasTensor(tuple(shape), dtype=model.compute_dtype)


def _specs_of(sample: Nested) -> Nested:
    """Symbolic tensors of batch one, in the structure of a sample."""

    def spec_of(array: Tensor) -> keras.KerasTensor:
        dtype = keras.backend.standardize_dtype(array.dtype)
        return keras.KerasTensor((1, *array.shape[1:]), dtype=dtype)

    return keras.tree.map_structure(spec_of, sample)


@functools.singledispatch
def kernel_positions(
    layer: keras.layers.Layer,
    inputs: Tensor,
    outputs: Tensor,
) -> int | None:
    """Counts the positions of a sample at which a layer applies its kernels; `None` if unknown.

    Dispatches on the class of `layer`, subclasses included; `inputs` and `outputs` are the first
    tensors of a call with a batch of one. Register custom layers:
    `kernel_positions.register(MyLayer, lambda layer, inputs, outputs: ...)`.
    """
    if is_table(layer):
        return 0  # it is looked up, or added
    if are_experts(layer):
        # Experts get all tokens of a batch, (tokens, features).
        return int(inputs.shape[0])
    return None


def pixels(layer: keras.layers.Layer, shape: Sequence[int]) -> int:
    """Pixels of a tensor `(batch, *pixels, channels)`, or with the channels first."""
    if getattr(layer, "data_format", "channels_last") == "channels_first":
        return math.prod(shape[2:])
    return math.prod(shape[1:-1])


def last_axis_positions(
    layer: keras.layers.Layer,
    inputs: Tensor,
    outputs: Tensor,
) -> int:
    """The positions of a layer whose kernels multiply the last axis of its inputs."""
    return math.prod(inputs.shape[1:-1])
