"""What stands around a layer in its model: what its outputs meet before the next kernel."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import keras

from keras_sparse_ortho._keras_internals import GraphCall, computes_its_graph, graph_calls
from keras_sparse_ortho.kernels import PrunableWeight, find_kernels
from keras_sparse_ortho.layers import CircularPadding

L = keras.layers
_NORMALIZATIONS = (
    L.BatchNormalization,
    L.GroupNormalization,
    L.LayerNormalization,
    L.RMSNormalization,
)
_PASSED = (
    *(L.Dropout, L.AlphaDropout, L.GaussianDropout, L.GaussianNoise, L.ActivityRegularization),
    *(L.SpatialDropout1D, L.SpatialDropout2D, L.SpatialDropout3D, L.Identity, L.Masking),
    *(L.AveragePooling1D, L.AveragePooling2D, L.AveragePooling3D),
    *(L.MaxPooling1D, L.MaxPooling2D, L.MaxPooling3D),
    *(L.GlobalAveragePooling1D, L.GlobalAveragePooling2D, L.GlobalAveragePooling3D),
    *(L.GlobalMaxPooling1D, L.GlobalMaxPooling2D, L.GlobalMaxPooling3D),
    *(L.ZeroPadding1D, L.ZeroPadding2D, L.ZeroPadding3D, CircularPadding),
    *(L.Cropping1D, L.Cropping2D, L.Cropping3D, L.UpSampling1D, L.UpSampling2D, L.UpSampling3D),
    *(L.Flatten, L.Reshape, L.Permute, L.RepeatVector),
    *(L.Add, L.Subtract, L.Average, L.Concatenate, L.Maximum, L.Minimum),
)
_ACTIVATIONS = (L.ReLU, L.LeakyReLU, L.ELU)
_SUMS = (L.Add, L.Subtract, L.Average)
# Of keras.ops, whose classes are not public.
_SUM_OPERATIONS = ("Add", "Subtract")
_PASSED_OPERATIONS = (*_SUM_OPERATIONS, "Concatenate", "Reshape", "Transpose", "Mean", "Max")
_ACTIVATION_OPERATIONS = ("Relu", "Relu6", "LeakyRelu", "Elu", "Selu", "Gelu", "Silu", "Tanh")


_IN_A_SUM = object()


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """What the outputs of a layer meet on their ways to the next kernels, or out of the model.

    Args:
        normalized: Whether it is normalization, on all ways.
        activations: The activations on the ways without normalization to another kernel; `None` is
            none at all, or one of a sum of which the output is only a part (a residual branch).
            Empty if there is no such way: the layer is a head of the model.
        circular: Whether its input is padded circularly, and it pads by nothing itself.
        unknown: Why the above is not known, `None` if it is.
    """

    normalized: bool = False
    activations: tuple[Any, ...] = ()
    circular: bool = False
    unknown: str | None = None


@dataclasses.dataclass(frozen=True)
class _End:
    """Where a way ends: at a `"kernel"`, at `"normalization"`, as `"output"`, or `"unknown"`."""

    kind: str
    activation: Any = None
    name: str = ""


def surroundings_of(model: Any, weights: list[PrunableWeight]) -> dict[str, Surroundings]:
    """The surroundings of the layers that own weights, by path of the weight.

    Known are the layers of functional and Sequential models, nested ones included.
    """
    if not (isinstance(model, keras.Model) and computes_its_graph(model)):
        unknown = Surroundings(unknown="the model is written as a class")
        return {weight.path: unknown for weight in weights}
    graphs = _Graphs(model)
    return {weight.path: graphs.around(weight.owner) for weight in weights}


class _Graphs:
    """The calls of a model, and of the models that are called in it."""

    def __init__(self, model: Any) -> None:
        self._consumers: dict[int, list[GraphCall]] = {}
        self._producers: dict[int, GraphCall] = {}
        self._calls: dict[int, list[GraphCall]] = {}
        # Of an output of a nested model, the tensors that the calls of the model return for it.
        self._returned: dict[int, list[Any]] = {}
        self._outputs = {id(tensor) for tensor in model.outputs}
        self._add(model)

    def _add(self, model: Any) -> None:
        for call in graph_calls(model):
            layer = call.operation
            if isinstance(layer, L.TimeDistributed):
                self._calls.setdefault(id(layer.layer), []).append(call)
            first = id(layer) not in self._calls
            self._calls.setdefault(id(layer), []).append(call)
            for tensor in call.inputs:
                self._consumers.setdefault(id(tensor), []).append(call)
            self._producers |= {id(tensor): call for tensor in call.outputs}
            if _is_model(layer):
                for inner, outer in zip(layer.outputs, call.outputs, strict=True):
                    self._returned.setdefault(id(inner), []).append(outer)
                if first:
                    self._add(layer)

    def around(self, layer: Any) -> Surroundings:
        calls = self._calls.get(id(layer))
        if not calls:
            return Surroundings(unknown="it stands inside another layer")
        own = getattr(layer, "activation", None)
        seen: set[tuple[int, int]] = set()
        ends = [
            end
            for call in calls
            for tensor in call.outputs
            for end in self._ends(tensor, None if _is_linear(own) else own, seen)
        ]
        unknown = [end.name for end in ends if end.kind == "unknown"]
        if unknown:
            return Surroundings(unknown=f"its output goes to '{unknown[0]}'")
        open_ends = [end.activation for end in ends if end.kind == "kernel"]
        return Surroundings(
            normalized=bool(ends) and all(end.kind == "normalization" for end in ends),
            activations=tuple({id(activation): activation for activation in open_ends}.values()),
            circular=getattr(layer, "padding", None) == "valid" and all(map(self._circular, calls)),
        )

    def _circular(self, call: GraphCall) -> bool:
        producer = self._producers.get(id(call.inputs[0]))
        return producer is not None and isinstance(producer.operation, CircularPadding)

    def _ends(self, tensor: Any, activation: Any, seen: set[tuple[int, int]]) -> Iterator[_End]:
        """Where the ways from a tensor end; `activation` is the first that was met."""
        if (id(tensor), id(activation)) in seen:
            return
        seen.add((id(tensor), id(activation)))
        if id(tensor) in self._outputs:
            yield _End("output")
        for outer in self._returned.get(id(tensor), ()):
            yield from self._ends(outer, activation, seen)
        for call in self._consumers.get(id(tensor), ()):
            operation = call.operation
            if _is_model(operation):
                for inner, given in zip(operation.inputs, call.inputs, strict=False):
                    if given is tensor:
                        yield from self._ends(inner, activation, seen)
                continue
            end = _end_at(operation, activation)
            if end is not None:
                yield end
                continue
            met = _activation_of(operation) if activation is None else activation
            for output in call.outputs:
                yield from self._ends(output, met, seen)


def _end_at(operation: Any, activation: Any) -> _End | None:
    """The end that an operation is of a way, `None` if the way goes on."""
    if isinstance(operation, _NORMALIZATIONS):
        return _End("normalization")
    if not isinstance(operation, keras.layers.Layer):
        kind = type(operation).__name__
        known = kind in (*_PASSED_OPERATIONS, *_ACTIVATION_OPERATIONS)
        return None if known else _End("unknown", name=operation.name)
    if isinstance(operation, (*_PASSED, *_ACTIVATIONS, L.Activation, L.Softmax)):
        return None
    if find_kernels(operation, ""):
        return _End("kernel", None if activation is _IN_A_SUM else activation)
    return _End("unknown", name=operation.name)


def _activation_of(operation: Any) -> Any:
    """The activation that an operation is, `_IN_A_SUM` for a sum, `None` for others."""
    if isinstance(operation, _SUMS) or type(operation).__name__ in _SUM_OPERATIONS:
        return _IN_A_SUM
    if isinstance(operation, L.Activation):
        return None if _is_linear(operation.activation) else operation.activation
    is_one = isinstance(operation, (*_ACTIVATIONS, L.Softmax))
    return operation if is_one or type(operation).__name__ in _ACTIVATION_OPERATIONS else None


def _is_linear(activation: Any) -> bool:
    return activation is None or activation is keras.activations.linear


def _is_model(operation: Any) -> bool:
    return isinstance(operation, keras.Model) and computes_its_graph(operation)
