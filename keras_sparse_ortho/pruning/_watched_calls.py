"""The calls of layers and operations in a model, functional or written as a class."""

import abc
import collections
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import keras

from keras_sparse_ortho._keras_internals import (
    GraphCall,
    backend_calls,
    computes_its_graph,
    graph_calls,
    graph_ends,
    is_graph,
    sublayers,
    symbolic_calls,
)
from keras_sparse_ortho._types import AnyLayer, Nested, Tensor
from keras_sparse_ortho.kernels import (
    WholeLayer,
    find_kernels,
    is_sparse_layer,
    is_wrapper,
    walk,
)

_MOST_TRIES = 16  # of shapes and types of inputs that a model does not say


@dataclasses.dataclass
class WatchedCalls:
    """The calls in a model, those inside nested models and layers included.

    Args:
        of_layer: The calls of each layer, by its `id`.
        consumers: The calls that take a tensor, by its `id`; of the layers inside where those are
            known, in the place of the layer around them.
        aliases: By `id` of a tensor, the same one outside or inside of a nested layer.
        outputs: `id` of each output of the model.
        loose: `id` of each tensor that goes to unknown places.
        unwatched: Why the calls around a layer are not known, by its `id`.
        layers: All layers of the model.
    """

    of_layer: dict[int, list[GraphCall]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(list)
    )
    consumers: dict[int, list[GraphCall]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(list)
    )
    aliases: dict[int, list[Tensor]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(list)
    )
    outputs: set[int] = dataclasses.field(default_factory=set)
    loose: set[int] = dataclasses.field(default_factory=set)
    unwatched: dict[int, str] = dataclasses.field(default_factory=dict)
    layers: list[AnyLayer] = dataclasses.field(default_factory=list)

    def add_leaf(self, call: GraphCall) -> None:
        """Adds the call of a layer or operation that is not looked into."""
        self.add_around(call)
        for tensor in call.inputs:
            self.consumers[id(tensor)].append(call)

    def add_around(self, call: GraphCall) -> None:
        """Adds the call of a layer whose inner calls are added, too."""
        self.of_layer[id(call.operation)].append(call)

    def alias(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Notes that the first tensor of each pair goes on as the second."""
        for tensor, same in pairs:
            if tensor is not same:
                self.aliases[id(tensor)].append(same)


@functools.singledispatch
def watch_calls(model: object) -> WatchedCalls:
    """The calls in a model, found in its graph or by watching a symbolic call.

    Dispatches on the class of the model; no calls are known of other objects.
    """
    return WatchedCalls()


class Inside(NamedTuple):
    """The calls inside a layer, and its tensors there.

    `inputs` are pairs of a tensor outside and the same one inside, where these differ. `is_partial`
    says that functions between the calls were not seen.
    """

    calls: Sequence[GraphCall]
    inputs: Sequence[tuple[Tensor, Tensor]]
    outputs: Sequence[Tensor]
    is_partial: bool = False


class CallWatch(abc.ABC):
    """Collects the calls in a model; a subclass knows the layers of one Keras."""

    def __init__(self, model: AnyLayer) -> None:
        self.calls = WatchedCalls()
        # Tensors are known by their `id`: none may be freed.
        self._tensors: list[Sequence[Tensor]] = []
        self._entered: set[int] = set()
        self.calls.layers = self.layers_in(model)
        last_tensors = self._add_alone(model)
        self.calls.outputs |= {id(tensor) for tensor in last_tensors}

    @abc.abstractmethod
    def layers_in(self, layer: AnyLayer) -> list[AnyLayer]:
        """A layer and all layers inside it, the outer first."""

    @abc.abstractmethod
    def is_opened(self, layer: AnyLayer) -> bool:
        """Whether the calls inside a layer stand for its own."""

    @abc.abstractmethod
    def graph(
        self, layer: AnyLayer, inputs: Sequence[Tensor] = ()
    ) -> Inside | None:
        """The calls inside a layer that computes a graph, called on tensors; `None` for others."""

    @abc.abstractmethod
    def inside(self, call: GraphCall) -> Inside:
        """The calls in the `call` of a layer; raises what that raises."""

    @abc.abstractmethod
    def alone(self, model: AnyLayer) -> Inside:
        """The same of a model that nothing calls; ValueError if that is not possible."""

    def _add_alone(self, model: AnyLayer) -> Sequence[Tensor]:
        """Adds the calls of a model that nothing calls; returns its outputs."""
        try:
            inside = self.graph(model) or self.alone(model)
        except ValueError as error:
            self._miss(model, str(error))
            return []
        self._add_inside(inside)
        return inside.outputs

    def _add_inside(self, inside: Inside) -> None:
        self._tensors.append(inside.outputs)
        self._add_calls(inside.calls)
        if not inside.is_partial:
            return
        ends = {id(tensor) for tensor in inside.outputs}
        for call in inside.calls:
            ends |= {id(tensor) for tensor in call.inputs}
        for call in inside.calls:
            outputs = {id(tensor) for tensor in call.outputs}
            self.calls.loose |= outputs - ends

    def _add_calls(self, calls: Sequence[GraphCall]) -> None:
        for call in calls:
            self._tensors.append([*call.inputs, *call.outputs])
            if self.is_opened(call.operation):
                self._enter(call)
                continue
            self.calls.add_leaf(call)
            if type(call.operation).__name__ == "TimeDistributed":
                self.calls.of_layer[id(call.operation.layer)].append(call)

    def _enter(self, call: GraphCall) -> None:
        """Adds the calls inside a layer in the place of its own."""
        layer = call.operation
        graph = self.graph(layer, call.inputs)
        try:
            inside = graph or self.inside(call)
        except Exception as error:  # of the layer's code
            self.calls.add_leaf(call)
            self._miss(layer, type(error).__name__)
            return
        self.calls.alias(inside.inputs)
        self.calls.alias(zip(inside.outputs, call.outputs, strict=False))
        self.calls.add_around(call)
        if graph is None or id(layer) not in self._entered:
            self._entered.add(id(layer))
            self._add_inside(inside)

    def _miss(self, model: AnyLayer, error: str) -> None:
        """Notes that the calls in a layer are unknown; those in the layers inside may be known."""
        _, *layers = self.layers_in(model)
        reason = f"the call of {model.name!r} cannot be watched: {error}"
        for layer in layers:
            if id(layer) in self.calls.unwatched:
                continue
            self.calls.unwatched[id(layer)] = reason
            if self.is_opened(layer):
                last_tensors = self._add_alone(layer)
                self.calls.loose |= {id(tensor) for tensor in last_tensors}


class _Watch(CallWatch):
    """Collects the calls in a Keras 3 model."""

    def layers_in(self, layer: keras.layers.Layer) -> list[keras.layers.Layer]:
        return [inner for inner, _ in walk(layer, "")]

    def is_opened(self, layer: keras.Operation) -> bool:
        if not isinstance(layer, keras.layers.Layer):
            return False
        if is_graph(layer):
            return computes_its_graph(layer)
        is_leaf = (
            is_wrapper(layer)
            or is_sparse_layer(layer)
            or isinstance(layer, WholeLayer)
            or not sublayers(layer)
        )
        is_of_keras = type(layer).__module__.startswith("keras.")
        if is_leaf or (is_of_keras and not isinstance(layer, keras.Model)):
            return False
        kernels = find_kernels(layer, "", unregistered=True)
        return all(kernel.owner is not layer for kernel in kernels)

    def graph(
        self, layer: keras.layers.Layer, inputs: Sequence[Tensor] = ()
    ) -> Inside | None:
        if not computes_its_graph(layer):
            return None
        inner_inputs, outputs = map(keras.tree.flatten, graph_ends(layer))
        pairs = list(zip(inputs, inner_inputs, strict=False))
        return Inside(graph_calls(layer), pairs, outputs)

    def inside(self, call: GraphCall) -> Inside:
        return self._watched(call.operation, call.args, call.kwargs)

    def _watched(
        self,
        layer: keras.layers.Layer,
        args: tuple[Nested, ...],
        kwargs: Mapping[str, Nested],
    ) -> Inside:
        try:
            calls, outputs = symbolic_calls(layer, args, kwargs)
            return Inside(calls, [], outputs)
        # The layer's code may need tensors of the backend.
        except Exception:
            traced = backend_calls(layer, args, kwargs, self._leaves(layer))
            return Inside(*traced, is_partial=True)

    def _leaves(self, layer: keras.layers.Layer) -> Iterator[keras.Operation]:
        """The layers and operations inside a layer that are not looked into."""
        children: list[keras.Operation] = sublayers(layer)
        if computes_its_graph(layer):
            children = [call.operation for call in graph_calls(layer)]
        for child in children:
            if self.is_opened(child):
                yield from self._leaves(child)
            else:
                yield child

    def alone(self, model: keras.layers.Layer) -> Inside:
        reason = "its inputs are not known"
        for arguments in itertools.islice(_arguments(model), _MOST_TRIES):
            try:
                inside = self._watched(model, (), arguments)
            # The model's code on inputs that it has not chosen.
            except Exception as error:
                reason = type(error).__name__
            else:
                self._tensors.append(keras.tree.flatten(arguments))
                return inside
        raise ValueError(reason)


@watch_calls.register
def _(model: keras.layers.Layer) -> WatchedCalls:
    return _Watch(model).calls


def _arguments(layer: keras.layers.Layer) -> Iterator[dict[str, Nested]]:
    """Symbolic arguments for the `call` of a layer: of the shapes for which it was built.

    Arguments of unknown shape are tried with the shapes of the inputs of the layers inside.
    """
    if is_graph(layer):
        inputs, _ = graph_ends(layer)
        name = next(iter(inspect.signature(layer.call).parameters))
        yield {name: inputs}
        return
    shapes_of_build = _build_shapes(layer)
    inner_shapes: list[Nested] = []
    for inner, _ in walk(layer, ""):
        for shape in _build_shapes(inner).values():
            if shape is not None and shape not in inner_shapes:
                inner_shapes.append(shape)
    choices: dict[str, list[Nested]] = {}
    for name, parameter in inspect.signature(layer.call).parameters.items():
        shape = shapes_of_build.get(f"{name}_shape")
        if not choices and shape is None:
            shape = shapes_of_build.get("input_shape")
        is_named = parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        )
        if shape is not None:
            choices[name] = [shape]
        elif name == "training":
            continue
        elif is_named and parameter.default is parameter.empty:
            choices[name] = inner_shapes
    if not choices:  # a class without a `call` of its own
        return
    for dtype in (layer.compute_dtype, "int32"):
        symbol = functools.partial(keras.KerasTensor, dtype=dtype)
        for shapes in itertools.product(*choices.values()):
            tensors = keras.tree.map_shape_structure(symbol, list(shapes))
            arguments = dict(zip(choices, tensors, strict=True))
            if "training" in inspect.signature(layer.call).parameters:
                arguments["training"] = False
            yield arguments


def _build_shapes(layer: keras.layers.Layer) -> dict[str, Nested]:
    """The shapes for which a layer was built, as arguments of its `build`."""
    config = layer.get_build_config() or {}
    return {**config, **config.get("shapes_dict", {})}
