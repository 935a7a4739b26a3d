"""`gain="auto"`: chosen for each kernel by the layers behind its own."""

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._keras_internals import (
    GraphCall,
    computes_its_graph,
    graph_calls,
    warn_user,
)
from keras_sparse_ortho._types import Tensor
from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.initializers import (
    ExactOrthogonal,
    SparseInitializer,
    activation_gain,
    layout_for,
)
from keras_sparse_ortho.kernels import PrunableWeight, find_kernels
from keras_sparse_ortho.layers import CircularPadding
from keras_sparse_ortho.orthogonal import least_count

L = keras.layers
_NORMALIZATIONS = (
    L.BatchNormalization,
    L.GroupNormalization,
    L.LayerNormalization,
    L.RMSNormalization,
)
# Layers without weights that change the scale, or may do anything.
_RESCALING = (L.Attention, L.Dot, L.Lambda, L.Multiply, L.Rescaling, L.UnitNormalization)
# Class names of layers, and of operations of keras.ops, whose classes are not public.
_SUMS = {"Add", "Subtract", "Average"}
_PASSED_OPERATIONS = _SUMS | {"Concatenate", "Reshape", "Transpose", "Mean", "Max"}
_ACTIVATIONS = {name.replace("_", "") for name in dir(keras.activations)} - {"linear"}
_linear = keras.activations.linear


@dataclasses.dataclass(frozen=True)
class _Following:
    """The operations that the outputs of a layer reach before the next kernel."""

    activations: list[Any]  # the first one, or the identity, on each path to another kernel
    normalized: bool = False  # whether every path leads to normalization
    unknown: str | None = None  # why only the layer's own is known


class AutoGains:
    """Chooses gains by the operations behind the layers of weights."""

    def __init__(self, model: keras.Model, weights: list[PrunableWeight]) -> None:
        self._model, self._weights = model, weights
        self._of_keras = isinstance(model, keras.layers.Layer)
        self._gains: dict[tuple[int, float], float] = {}

    @functools.cached_property
    def _following(self) -> dict[str, _Following]:
        model = self._model
        graph = _Graph(model) if computes_its_graph(model) else None
        return {
            weight.path: graph.following(weight.owner)
            if graph is not None
            else _own_activation(weight.owner, "the model is subclassed")
            for weight in self._weights
        }

    def before_normalization(
        self, patterns: dict[str, SparseInitializer], by_name: bool
    ) -> dict[str, ExactOrthogonal]:
        """Patterns of kernels before normalization, with the gain "auto"."""
        found = {}
        for weight in self._weights:
            own = patterns[weight.path]
            if not isinstance(own, ExactOrthogonal) or not (by_name or own.gain == "auto"):
                continue
            if not self._following[weight.path].normalized:
                continue
            if own.gain == "auto" or _is_norm(_mean_square(weight)):
                taps = own.taps or ("all" if own.structure is None else None)
                found[weight.path] = own.but_with(gain="auto", taps=taps)
        return found

    def with_gain(
        self, weight: PrunableWeight, pattern: ExactOrthogonal, live: int
    ) -> SparseInitializer:
        """The pattern with the `default_gain`, or that of the activation behind it."""
        if not self._of_keras:
            raise ValueError(
                'gain="auto" needs a Keras 3 model, to find what follows a layer: give a number. '
                f"Received: initializer={pattern!r}"
            )
        following = self._following[weight.path]
        if following.normalized:
            return pattern.but_with(gain=default_gain(weight, pattern, live))
        gains = [self._gain(weight, activation) for activation in following.activations] or [1.0]
        if max(gains) - min(gains) > 1e-6:
            raise ValueError(
                f"The output of {weight.path!r} goes to activations that need different gains. "
                'Give it a number, in a call of its own with `include`. Received: gain="auto", '
                f"gains {sorted({round(gain, 4) for gain in gains})}"
            )
        return pattern.but_with(gain=gains[0])

    def warn_of_guesses(self, draws: dict[str, Any], auto: set[str]) -> None:
        """Warns of `auto` gains that rely on their layer's own activation alone."""
        lines = [
            f"{path!r} ({why}): gain={draws[path].initializer.gain:.6g}"
            for path in draws
            if path in auto and (why := self._following[path].unknown) is not None
        ]
        if lines:
            warn_user(
                "It is not known what follows these layers, so gains were chosen by their own "
                "activations. To set them, make these kernels sparse in a call of their own with "
                f"`include`. Received: {'; '.join(lines)}"
            )

    def _gain(self, weight: PrunableWeight, activation: Any) -> float:
        if activation is _linear:
            return 1.0
        bias = getattr(weight.owner, "bias_initializer", None)
        bias_std = 0.0
        if isinstance(bias, keras.initializers.RandomNormal) and weight.owner.bias is not None:
            bias_std = float(bias.stddev)
        key = (id(activation), bias_std)
        if key not in self._gains:
            try:
                self._gains[key] = activation_gain(activation, bias_std)
            except ValueError as error:
                raise ValueError(
                    f"gain='auto' is not possible for the weight {weight.path!r}: {error}"
                ) from None
        return self._gains[key]


class _Graph:
    """The calls of a functional or Sequential model, and of the models nested in it."""

    def __init__(self, model: keras.Model) -> None:
        self._calls: defaultdict[int, list[GraphCall]] = defaultdict(list)
        self._consumers: defaultdict[int, list[GraphCall]] = defaultdict(list)
        # Tensors outside and inside a nested model that are the same.
        self._same: defaultdict[int, list[Any]] = defaultdict(list)
        self._outputs = {id(tensor) for tensor in model.outputs}
        self._add(model)

    def _add(self, model: keras.Model) -> None:
        for call in graph_calls(model):
            layer = call.operation
            if computes_its_graph(layer):
                for inside, outside in zip(layer.inputs, call.inputs, strict=False):
                    self._same[id(outside)].append(inside)
                for inside, outside in zip(layer.outputs, call.outputs, strict=True):
                    self._same[id(inside)].append(outside)
                if id(layer) not in self._calls:
                    self._add(layer)
            else:
                for tensor in call.inputs:
                    self._consumers[id(tensor)].append(call)
            self._calls[id(layer)].append(call)
            if isinstance(layer, L.TimeDistributed):
                self._calls[id(layer.layer)].append(call)

    def following(self, layer: keras.layers.Layer) -> _Following:
        calls = self._calls.get(id(layer))
        if not calls:
            return _own_activation(layer, "it is inside another layer")
        own = getattr(layer, "activation", None)
        own = None if own is _linear else own
        seen: set[tuple[int, int]] = set()
        ends = [e for c in calls for tensor in c.outputs for e in self._ends(tensor, own, seen)]
        for kind, found in ends:
            if kind == "unknown":
                return _own_activation(layer, f"its output goes to {found!r}")
        return _Following(
            activations=[found for kind, found in ends if kind == "kernel"],
            normalized=bool(ends) and all(kind == "normalization" for kind, _ in ends),
        )

    def _ends(
        self, tensor: Tensor, activation: Any, seen: set[tuple[int, int]]
    ) -> Iterator[tuple[str, Any]]:
        """The ends of all paths from a tensor, with the first activation or an unknown layer."""
        if (id(tensor), id(activation)) in seen:
            return
        seen.add((id(tensor), id(activation)))
        if id(tensor) in self._outputs:
            yield "output", None
        for same in self._same.get(id(tensor), ()):
            yield from self._ends(same, activation, seen)
        for call in self._consumers.get(id(tensor), ()):
            operation = call.operation
            if isinstance(operation, _NORMALIZATIONS):
                yield "normalization", None
            elif isinstance(operation, L.Layer) and find_kernels(operation, ""):
                yield "kernel", _linear if activation is None else activation
            elif not _is_passed(operation):
                yield "unknown", operation.name
            else:
                first = _activation_of(operation) if activation is None else activation
                for output in call.outputs:
                    yield from self._ends(output, first, seen)


def _own_activation(layer: keras.layers.Layer, why: str) -> _Following:
    return _Following([getattr(layer, "activation", None) or _linear], unknown=why)


def _is_passed(operation: Any) -> bool:
    """Whether signals keep their scale through an operation, or it is an activation."""
    name = type(operation).__name__
    if not isinstance(operation, L.Layer):
        return name in _PASSED_OPERATIONS or name.lower() in _ACTIVATIONS
    if isinstance(operation, CircularPadding):
        return True
    of_keras = type(operation).__module__.startswith("keras.")
    return of_keras and not operation.weights and not isinstance(operation, _RESCALING)


def _activation_of(operation: Any) -> Any:
    """The activation that an operation is, or `None`; the identity for residual sums."""
    name = type(operation).__name__
    if name in _SUMS:
        return _linear
    if isinstance(operation, L.Activation):
        return None if operation.activation is _linear else operation.activation
    return operation if name.lower() in _ACTIVATIONS else None


def default_gain(weight: PrunableWeight, pattern: ExactOrthogonal, live: int) -> float:
    """The gain that gives a kernel the expected norm of its default one under the same mask.

    With `n` singular values, all `gain`, and the mean square `v` of the layer's own initializer,
    `gain^2 n = live v`: for Glorot's `gain^2 = 2 density in out / ((in + out) n)`.
    """
    layout = layout_for(weight, pattern)
    singular_values = least_count(weight.shape, layout, pattern.taps or "center")
    mean = _mean_square(weight)
    if not _is_norm(mean):
        raise ValueError(
            f"gain='auto' is not possible for the weight {weight.path!r}: its layer's initializer "
            f"gives no norm to keep. Received: initializer={default_initializer(weight)!r}, "
            f"mean square {mean}"
        )
    return math.sqrt(live * mean / singular_values)


def default_initializer(weight: PrunableWeight) -> Any:
    own = weight.initializer
    if own is None or isinstance(own, SparseInitializer):
        return keras.initializers.GlorotUniform(seed=0)
    return own


def _mean_square(weight: PrunableWeight) -> float:
    """The mean square of the default initializer: from its variance, if known, or from a draw."""
    default = default_initializer(weight)
    if isinstance(default, keras.initializers.VarianceScaling):
        shape: tuple[int, ...] = weight.shape
        if weight.layout is not None and isinstance(weight.owner, L.EinsumDense):
            # Its fans are those of the equation, not of a convolution's kernel.
            shape = weight.layout.canonical_shape(shape)[2:]
        *taps, rows, columns = shape
        window = math.prod(taps)
        fans = {"fan_in": rows * window, "fan_out": columns * window}
        fan = fans.get(default.mode, sum(fans.values()) / 2)
        return float(default.scale) / max(1.0, fan)
    if isinstance(default, keras.initializers.RandomNormal):
        return float(default.mean**2 + default.stddev**2)
    if isinstance(default, keras.initializers.RandomUniform):
        low, high = default.minval, default.maxval
        return float(low**2 + low * high + high**2) / 3
    drawn = to_numpy(default(weight.shape, dtype="float32"))
    return float(np.mean(np.square(drawn, dtype=np.float64)))


def _is_norm(mean_square: float) -> bool:
    return math.isfinite(mean_square) and mean_square > 0
