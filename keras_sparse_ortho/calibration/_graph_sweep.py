"""One pass of all batches over the graph of a model, which waits at each layer that is asked for.

A batch waits as the tensors that later calls of the graph read. The others are freed. So a sweep
over all layers costs one pass, and not one for each layer.
"""

import contextlib
import itertools
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_sparse_ortho._interception import Enough, observe
from keras_sparse_ortho._keras_internals import (
    GraphCall,
    computes_its_graph,
    graph_calls,
    graph_ends,
    instead_of_graph,
)
from keras_sparse_ortho._types import Nested, Tensor
from keras_sparse_ortho._values import is_traced, to_numpy

MOST_ENTRIES = 2**27
"""Entries of waiting tensors in memory at once: half a gigabyte in float32. Others are on disk."""

_HEADS = 16  # of attention, at most

Scope = Callable[[], contextlib.AbstractContextManager[Any]]
"""Makes a context that gives the model the values of a stream."""

OperationCall = Callable[[Any], Callable[..., Any]]
"""From a layer or operation of a graph to the function to call."""

Values = dict[int, Any]
"""Tensors of one batch by slot, or a `_File` for those on disk."""


def largest_tensor(model: keras.Model) -> int | None:
    """The entries of the largest tensor of a model's graph for one sample; `None` if unknown.

    Attention over `L` positions has scores of `L^2` pairs in each of its heads, which are no
    tensors of the graph: outputs `(L, features)` count as if they had 16.
    """
    if not computes_its_graph(model):
        return None
    entries = [1]
    for call in graph_calls(model):
        if computes_its_graph(call.operation):
            inner_entries = largest_tensor(call.operation)
            if inner_entries is None:
                return None
            entries.append(inner_entries)
        for tensor in keras.tree.flatten(call.outputs):
            sizes = tensor.shape[1:]
            if None in sizes:
                return None
            entries.append(math.prod(sizes))
            if len(sizes) == 2:
                entries.append(_HEADS * sizes[0] ** 2)
    return max(entries)


class LayerCall(NamedTuple):
    """The arguments of one call of a layer."""

    inputs: Any
    options: dict[str, Any]


class CallRecorder:
    """Observes one layer, and ends the pass with the last call that is wanted.

    Args:
        count: int. How many calls are wanted.
    """

    def __init__(self, count: int) -> None:
        self.calls: list[LayerCall] = []
        self._count = count

    def __call__(
        self, layer: Any, call: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        inputs = args[0] if args else kwargs["inputs"]
        if not is_traced(inputs):
            options = {
                name: value
                for name, value in kwargs.items()
                if name != "inputs"
            }
            self.calls.append(LayerCall(inputs, options))
            if len(self.calls) == self._count:
                raise Enough
        return call(*args, **kwargs)


class _Step(NamedTuple):
    """One call of the graph, which reads and writes slots."""

    call: GraphCall
    slots: dict[int, int]  # of the tensors of its graph, by their ids
    outputs: list[int]
    enters: bool  # whether it only converts the inputs of a nested graph, whose steps follow

    @property
    def reads(self) -> list[int]:
        return [self.slots[id(tensor)] for tensor in self.call.inputs]

    def run(
        self,
        values: Values,
        operation_call: OperationCall,
    ) -> None:
        """Calls the layer or operation on the values of its slots, and adds its outputs."""

        def filled(argument: Any) -> Any:
            if not isinstance(argument, keras.KerasTensor):
                return argument
            value = values[self.slots[id(argument)]]
            return value.read() if isinstance(value, _File) else value

        args, kwargs = keras.tree.map_structure(
            filled, (self.call.args, self.call.kwargs)
        )
        function = operation_call(self.call.operation)
        if self.enters:
            outputs: list[Any] = []
            with instead_of_graph(
                self.call.operation, lambda inputs, _: outputs.extend(inputs)
            ):
                function(*args, **kwargs)
        else:
            outputs = keras.tree.flatten(function(*args, **kwargs))
        values.update(zip(self.outputs, outputs, strict=False))


class GraphWalk:
    """The steps of a model that computes its graph, with those of nested graphs in their places.

    Args:
        model: Model that `computes_its_graph`.
        batches: list of its inputs.
        folder: path of an empty folder for tensors that memory has no room for.
    """

    def __init__(
        self,
        model: Any,
        batches: Sequence[Any],
        folder: pathlib.Path,
    ) -> None:
        self.batches = batches
        self.shelf = _Shelf(folder)
        self._model = model
        self._numbers = itertools.count()
        self._steps: list[_Step] = []
        inputs, outputs = graph_ends(model)
        self._inputs = self._new_slots(inputs)
        slots = self._slots_of(inputs, self._inputs)
        self._add_steps(model, slots)
        self._outputs = [
            slots[id(tensor)] for tensor in keras.tree.flatten(outputs)
        ]
        self._last_reads = self._slots_by_last_read()
        self._steps_of_stops: dict[Any, list[int]] = {}

    def stream(self, scope: Scope) -> "GraphStream":
        """A pass of all batches that begins at the inputs."""
        return GraphStream(self, scope)

    def count_calls(
        self,
        stops: Sequence[Any],
        scope: Scope,
    ) -> dict[Any, int]:
        """How often the first batch calls each stop's layer, in the order of first calls."""
        position = 0

        def note(
            layer: Any, call: Callable[..., Any], *args: Any, **kwargs: Any
        ) -> Any:
            if not is_traced(args[0] if args else kwargs["inputs"]):
                for stop in stops:
                    if stop.layer is layer:
                        self._steps_of_stops.setdefault(stop, []).append(
                            position
                        )
            return call(*args, **kwargs)

        def run(
            inputs: list[Any],
            operation_call: OperationCall,
        ) -> None:
            nonlocal position
            values = self.values_of_inputs(inputs)
            for position in range(len(self._steps)):
                self.run_step(position, values, operation_call)

        with scope(), observe((stop.layer for stop in stops), note):
            self.in_model(self._one_sample(), run)
        return {
            stop: len(steps) for stop, steps in self._steps_of_stops.items()
        }

    def steps_of(self, stop: Any) -> tuple[int, int]:
        """The first and the last step that calls the layer of a stop."""
        steps = self._steps_of_stops[stop]
        return steps[0], steps[-1]

    def in_model(
        self,
        batch: Nested,
        function: Callable[[list[Any], OperationCall], None],
    ) -> None:
        """Calls a function where the model would run its graph for a batch."""
        with instead_of_graph(self._model, function):
            self._model(batch, training=False)

    def values_of_inputs(self, inputs: Sequence[Any]) -> Values:
        return dict(zip(self._inputs, inputs, strict=True))

    def run_step(
        self,
        position: int,
        values: Values,
        operation_call: OperationCall,
    ) -> None:
        """Runs a step, and frees what no later step reads."""
        self._steps[position].run(values, operation_call)
        for slot in self._last_reads[position]:
            value = values.pop(slot, None)
            if isinstance(value, _File):
                value.remove()

    def run_copy(
        self,
        first: int,
        last: int | None,
        values: Values,
        operation_call: OperationCall,
    ) -> list[Any]:
        """Runs steps on a copy of the values, which stay.

        Args:
            first: int. The first step.
            last: int or `None`. The last step; `None` for the end of the graph.
            values: dict of tensors by slot.
            operation_call: callable. From a layer or operation to the function to call.

        Returns:
            The outputs of the model if the graph ended, else an empty list.
        """
        copy = dict(values)
        steps = (
            self._steps[first:]
            if last is None
            else self._steps[first : last + 1]
        )
        for position, step in enumerate(steps, first):
            step.run(copy, operation_call)
            for slot in self._last_reads[position]:
                copy.pop(slot, None)
        return [copy[slot] for slot in self._outputs] if last is None else []

    def _one_sample(self) -> Nested:
        """The first sample; the first batch of a model that takes no other number of samples."""
        inputs, _ = graph_ends(self._model)
        shapes = [tensor.shape for tensor in keras.tree.flatten(inputs)]
        first_batch = self.batches[0]
        if any(shape[:1] != (None,) for shape in shapes):
            return first_batch
        return keras.tree.map_structure(_first_of, first_batch)

    def _new_slots(self, tensors: Any) -> list[int]:
        return [next(self._numbers) for _ in keras.tree.flatten(tensors)]

    def _slots_of(
        self,
        tensors: Any,
        slots: Sequence[int],
    ) -> dict[int, int]:
        return dict(
            zip(map(id, keras.tree.flatten(tensors)), slots, strict=True)
        )

    def _add_steps(
        self,
        model: Any,
        slots: dict[int, int],
    ) -> None:
        """Adds the steps of a graph, whose tensors get slots."""
        for call in graph_calls(model):
            is_input = isinstance(call.operation, keras.layers.InputLayer)
            if is_input or any(
                id(tensor) not in slots for tensor in call.inputs
            ):
                continue  # Keras leaves such calls out, too
            if computes_its_graph(call.operation):
                self._add_nested(call, slots)
                continue
            outputs = self._new_slots(call.outputs)
            self._steps.append(
                _Step(
                    call,
                    slots,
                    outputs,
                    enters=False,
                )
            )
            slots.update(self._slots_of(call.outputs, outputs))

    def _add_nested(
        self,
        call: GraphCall,
        slots: dict[int, int],
    ) -> None:
        """Adds the steps of a nested graph in the place of its call."""
        inputs, outputs = graph_ends(call.operation)
        inner_inputs = self._new_slots(inputs)
        inner_slots = self._slots_of(inputs, inner_inputs)
        self._steps.append(
            _Step(
                call,
                slots,
                inner_inputs,
                enters=True,
            )
        )
        self._add_steps(call.operation, inner_slots)
        results = [
            inner_slots[id(tensor)] for tensor in keras.tree.flatten(outputs)
        ]
        slots.update(self._slots_of(call.outputs, results))

    def _slots_by_last_read(self) -> list[list[int]]:
        """By step, the slots that no later step reads."""
        last: dict[int, int] = {}
        for position, step in enumerate(self._steps):
            for slot in (*step.reads, *step.outputs):
                last[slot] = position
        for slot in self._outputs:
            last.pop(slot, None)
        slots: list[list[int]] = [[] for _ in self._steps]
        for slot, position in last.items():
            slots[position].append(slot)
        return slots


def _first_of(values: Tensor | None) -> Tensor | None:
    """The first sample of an input, which may be optional."""
    if values is None:
        return None
    return values[:1]


class GraphStream:
    """A pass of all batches over the steps, with the values that the model has in a scope."""

    def __init__(
        self,
        walk: GraphWalk,
        scope: Scope,
    ) -> None:
        self._walk = walk
        self._scope = scope
        self._positions: list[int | None] = [None] * len(walk.batches)
        self._values: list[Values] = [{} for _ in walk.batches]

    def calls(
        self,
        stop: Any,
        count: int,
        number: int,
    ) -> list[LayerCall]:
        """The calls of a stop's layer for a batch, which goes on to the first of them.

        Args:
            stop: Stop that the first batch reaches, and no earlier one than in the last call.
            count: int. How many calls are wanted.
            number: int. Number of the batch.
        """
        recorder = CallRecorder(count)
        first, last = self._walk.steps_of(stop)

        def run(
            values: Values,
            operation_call: OperationCall,
        ) -> None:
            with observe([stop.layer], recorder):
                self._walk.run_copy(
                    first,
                    last,
                    values,
                    operation_call,
                )

        self._run_at(first, number, run)
        return recorder.calls

    def outputs(
        self,
        stop: Any,
        scope: Scope,
        number: int,
    ) -> list[Any]:
        """The model's outputs for a batch, with other values from the stop's layer on.

        Args:
            stop: Stop that the first batch reaches, and no earlier one than in the last call.
            scope: callable. Makes the context in which the layer has its other values.
            number: int. Number of the batch.
        """
        outputs: list[Any] = []
        first, _ = self._walk.steps_of(stop)

        def run(
            values: Values,
            operation_call: OperationCall,
        ) -> None:
            with scope():
                outputs.extend(
                    self._walk.run_copy(
                        first,
                        None,
                        values,
                        operation_call,
                    )
                )

        self._run_at(first, number, run)
        return outputs

    def _run_at(
        self,
        first: int,
        number: int,
        function: Callable[[Values, OperationCall], None],
    ) -> None:
        """Calls a function on the values of a batch, in front of a step."""
        values = self._values[number]
        entries = self._walk.shelf.entries(values)

        def run(
            inputs: list[Any],
            operation_call: OperationCall,
        ) -> None:
            start = self._positions[number]
            if start is None:
                start = 0
                values.update(self._walk.values_of_inputs(inputs))
            for position in range(start, first):
                self._walk.run_step(position, values, operation_call)
            self._positions[number] = first
            function(values, operation_call)

        with self._scope():
            self._walk.in_model(self._walk.batches[number], run)
        self._walk.shelf.put_away(values, entries)


class _File:
    """A tensor on disk."""

    def __init__(
        self,
        path: pathlib.Path,
        tensor: Any,
    ) -> None:
        self._path = path
        self._dtype = keras.backend.standardize_dtype(tensor.dtype)
        np.save(path, to_numpy(tensor, copy=False))

    def read(self) -> Any:
        return keras.ops.convert_to_tensor(
            np.load(self._path), dtype=self._dtype
        )

    def remove(self) -> None:
        self._path.unlink()


class _Shelf:
    """Counts the entries of waiting tensors, and writes those to disk that are too many."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._numbers = itertools.count()
        self._entries = 0
        # Sparse and ragged tensors have other types.
        self._dense = type(keras.ops.ones(1))

    def entries(self, values: Values) -> int:
        """How many entries of a batch's values are in memory."""
        tensors = [
            value for value in values.values() if isinstance(value, self._dense)
        ]
        return sum(math.prod(tensor.shape) for tensor in tensors)

    def put_away(
        self,
        values: Values,
        entries_before: int,
    ) -> None:
        """Takes in the values of a batch, which were here with so many entries before."""
        self._entries += self.entries(values) - entries_before
        for slot, value in values.items():
            if self._entries > MOST_ENTRIES and self._is_storable(value):
                self._entries -= math.prod(value.shape)
                values[slot] = _File(
                    self._folder / f"{next(self._numbers)}.npy", value
                )

    def _is_storable(self, value: Any) -> bool:
        """Whether a file has all of a tensor: a mask would be lost."""
        return isinstance(value, self._dense) and not hasattr(
            value, "_keras_mask"
        )
