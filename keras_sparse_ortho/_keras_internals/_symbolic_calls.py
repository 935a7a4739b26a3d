"""The calls inside a layer's own `call`, watched on symbolic tensors of Keras or the backend."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import keras
from keras.src.layers import layer as layer_module
from keras.src.ops import operation as operation_module

from keras_sparse_ortho._interception import (
    intercepted,
    observe,
    without_dispatchers,
)
from keras_sparse_ortho._keras_internals._layers import GraphCall
from keras_sparse_ortho._types import Nested, Tensor


def symbolic_calls(
    layer: keras.layers.Layer,
    args: tuple[Nested, ...],
    kwargs: Mapping[str, Nested],
) -> tuple[list[GraphCall], list[keras.KerasTensor]]:
    """The calls of layers and operations in `layer.call(*args, **kwargs)`, and its outputs.

    The layer, those inside it and the tensors are afterwards as before: no call becomes part of a
    graph, and attributes that `call` sets are put back. Raises what `call` raises.

    Args:
        layer: Layer or model, built.
        args: Arguments with KerasTensors in the place of tensors.
        kwargs: The same, by keyword.
    """
    calls: list[GraphCall] = []

    def note(
        node: type,
        operation: keras.Operation,
        call_args: tuple[Nested, ...] = (),
        call_kwargs: Mapping[str, Nested] | None = None,
        outputs: Nested = None,
    ) -> None:
        """Stands in the place of `Node`, which would join the call to the graph of its tensors."""
        call_kwargs = call_kwargs or {}
        calls.append(
            GraphCall(
                operation,
                _tensors([*call_args, *call_kwargs.values()]),
                _tensors(outputs),
                [*call_args[1:], *call_kwargs.values()],
                tuple(call_args),
                call_kwargs,
            )
        )

    with contextlib.ExitStack() as stack:
        for module in (layer_module, operation_module):
            if hasattr(module, "Node"):  # by version of Keras
                stack.enter_context(intercepted(module, "Node", note))
        stack.enter_context(_attributes_put_back(layer))
        stack.enter_context(keras.StatelessScope())
        outputs = layer.call(*args, **kwargs)
    return calls, _tensors(outputs)


class BackendCalls(NamedTuple):
    """Calls of layers with tensors of the backend, and the inputs and outputs around them.

    `inputs` are pairs of a KerasTensor and the tensor of the backend that stands for it.
    """

    calls: list[GraphCall]
    inputs: list[tuple[keras.KerasTensor, Tensor]]
    outputs: list[Tensor]


def backend_calls(
    layer: keras.layers.Layer,
    args: tuple[Nested, ...],
    kwargs: Mapping[str, Nested],
    observed: Iterable[keras.Operation],
) -> BackendCalls:
    """The calls of some layers and operations in a layer's `call`, traced by the backend.

    For a `call` that takes no KerasTensors. Functions of the backend between the calls are not
    seen. The rest is as in `symbolic_calls`.
    """
    arguments = keras.tree.flatten((args, dict(kwargs)))
    symbols = _tensors(arguments)
    result = BackendCalls([], [], [])

    def note(
        operation: keras.Operation,
        call: Callable[..., Nested],
        *call_args: Nested,
        **call_kwargs: Nested,
    ) -> Nested:
        outputs = call(*call_args, **call_kwargs)
        inputs = keras.tree.flatten([*call_args, *call_kwargs.values()])
        result.calls.append(
            GraphCall(
                operation,
                [value for value in inputs if keras.ops.is_tensor(value)],
                keras.tree.flatten(outputs),
                [],
            )
        )
        return outputs

    def run(tensors: list[Tensor]) -> Nested:
        for values in result:  # JAX traces twice where dimensions are open
            values.clear()
        result.inputs.extend(zip(symbols, tensors, strict=True))
        waiting = iter(tensors)
        values = [
            next(waiting) if isinstance(value, keras.KerasTensor) else value
            for value in arguments
        ]
        call_args, call_kwargs = keras.tree.pack_sequence_as(
            (args, dict(kwargs)), values
        )
        outputs = layer.call(*call_args, **call_kwargs)
        result.outputs.extend(keras.tree.flatten(outputs))
        return outputs

    with _attributes_put_back(layer), observe(observed, note):
        _Traced(run).compute_output_spec(symbols)
    return result


class _Traced(keras.layers.Layer):
    """A layer that computes a function, whose symbolic call traces it."""

    def __init__(self, function: Callable[..., Nested]) -> None:
        super().__init__()
        self._function = function

    def call(self, tensors: list[Tensor]) -> Nested:
        return self._function(tensors)


@contextlib.contextmanager
def _attributes_put_back(layer: keras.layers.Layer) -> Iterator[None]:
    """Puts back the attributes that layers set in their calls, such as attention weights."""
    before = [
        (vars(inner), without_dispatchers(vars(inner)))
        for inner in layer._flatten_layers()
    ]
    try:
        yield
    finally:
        # Bypass `__setattr__`: Keras would track the values.
        for attributes, values in before:
            _put_back(attributes, values)


def _put_back(attributes: dict[str, Any], values: Mapping[str, Any]) -> None:
    for name, value in without_dispatchers(attributes).items():
        if name not in values:
            del attributes[name]
        elif value is not values[name]:
            attributes[name] = values[name]


def _tensors(nested: Nested) -> list[keras.KerasTensor]:
    return [
        value
        for value in keras.tree.flatten(nested)
        if isinstance(value, keras.KerasTensor)
    ]
