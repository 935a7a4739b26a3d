"""`gain="auto"`: chosen for each kernel by the layers behind its own."""

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

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
    AnyDraw,
    ExactOrthogonal,
    SparseInitializer,
    activation_gain,
    layout_for,
    mirrored_gain,
)
from keras_sparse_ortho.kernels import PrunableWeight, find_kernels
from keras_sparse_ortho.layers import CircularPadding
from keras_sparse_ortho.orthogonal import Mirrored, least_count

Activation = Callable[..., Tensor]
_NORMALIZATIONS = (
    keras.layers.BatchNormalization,
    keras.layers.GroupNormalization,
    keras.layers.LayerNormalization,
    keras.layers.RMSNormalization,
)
# Layers without weights that change the scale, or may do anything.
_RESCALING = (
    keras.layers.Attention,
    keras.layers.Dot,
    keras.layers.Lambda,
    keras.layers.Multiply,
    keras.layers.Rescaling,
    keras.layers.UnitNormalization,
)
# Class names of layers, and of operations of keras.ops, whose classes are not public.
_SUMS = {"Add", "Subtract", "Average"}
_PASSED_OPERATIONS = _SUMS | {
    "Concatenate",
    "Reshape",
    "Transpose",
    "Mean",
    "Max",
}
_ACTIVATIONS = {name.replace("_", "") for name in dir(keras.activations)} - {
    "linear"
}
_linear = keras.activations.linear


@dataclasses.dataclass(frozen=True)
class _Following:
    """The operations that the outputs of a layer reach before the next kernel."""

    activations: list[Activation]
    """The first one, or the identity, on each path to another kernel."""

    normalized: bool = False
    """Whether every path leads to normalization."""

    unknown: str | None = None
    """Why only the layer's own activation is known."""


class _End(NamedTuple):
    """The end of a path from a layer's output: `"kernel"`, `"normalization"`, `"output"`, ..."""

    kind: str
    activation: Activation | None = None  # in front of a kernel
    unknown_name: str = ""  # of an operation


class AutoGains:
    """Chooses gains by the operations behind the layers of weights."""

    def __init__(
        self, model: keras.Model, weights: list[PrunableWeight]
    ) -> None:
        self._model = model
        self._weights = weights
        self._of_keras = isinstance(model, keras.layers.Layer)
        self._gains: dict[tuple[int, float, bool], float] = {}

    @functools.cached_property
    def _following(self) -> dict[str, _Following]:
        owners = {weight.path: weight.owner for weight in self._weights}
        if not computes_its_graph(self._model):
            reason = "the model is subclassed"
            return {
                path: _own_activation(owner, reason)
                for path, owner in owners.items()
            }
        graph = _Graph(self._model)
        return {path: graph.following(owner) for path, owner in owners.items()}

    def before_normalization(
        self, patterns: dict[str, SparseInitializer], by_name: bool
    ) -> dict[str, ExactOrthogonal]:
        """Patterns of kernels before normalization, with the gain "auto"."""
        normalized = {}
        for weight in self._weights:
            pattern = patterns[weight.path]
            if not isinstance(pattern, ExactOrthogonal):
                continue
            is_auto = pattern.gain == "auto"
            if (
                not (by_name or is_auto)
                or not self._following[weight.path].normalized
            ):
                continue
            if is_auto or _is_norm(_mean_square(weight)):
                taps = pattern.taps
                if not taps and pattern.structure is None:
                    taps = "all"
                normalized[weight.path] = pattern.but_with(
                    gain="auto", taps=taps
                )
        return normalized

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
        is_mirrored = pattern.mirrored in (True, "outputs")
        gains = [
            self._gain(weight, activation, is_mirrored)
            for activation in following.activations
        ]
        if not gains:
            gains = [1.0]
        if max(gains) - min(gains) > 1e-6:
            raise ValueError(
                f"The output of {weight.path!r} goes to activations that need different gains. "
                'Give it a number, in a call of its own with `include`. Received: gain="auto", '
                f"gains {sorted({round(gain, 4) for gain in gains})}"
            )
        return pattern.but_with(gain=gains[0])

    def warn_of_guesses(
        self, draws: Mapping[str, AnyDraw], auto: set[str]
    ) -> None:
        """Warns of `auto` gains that rely on their layer's own activation alone."""
        lines = []
        for path, kernel_draw in draws.items():
            if path not in auto:
                continue
            reason = self._following[path].unknown
            if reason is not None:
                assert isinstance(kernel_draw.initializer, ExactOrthogonal)
                lines.append(
                    f"{path!r} ({reason}): gain={kernel_draw.initializer.gain:.6g}"
                )
        if lines:
            warn_user(
                "It is not known what follows these layers, so gains were chosen by their own "
                "activations. To set them, make these kernels sparse in a call of their own with "
                f"`include`. Received: {'; '.join(lines)}"
            )

    def _gain(
        self,
        weight: PrunableWeight,
        activation: Activation,
        is_mirrored: bool,
    ) -> float:
        """The gain of a kernel before an activation, also for mirrored outputs `(u, -u)`."""
        if activation is _linear and not is_mirrored:
            return 1.0
        bias = getattr(weight.owner, "bias_initializer", None)
        bias_std = 0.0
        if (
            isinstance(bias, keras.initializers.RandomNormal)
            and weight.owner.bias is not None
        ):
            bias_std = float(bias.stddev)
        key = (id(activation), bias_std, is_mirrored)
        if key not in self._gains:
            try:
                if is_mirrored:
                    gain = mirrored_gain(activation, bias_std)
                else:
                    gain = activation_gain(activation, bias_std)
            except ValueError as error:
                raise ValueError(
                    f"gain='auto' is not possible for the weight {weight.path!r}: {error}"
                ) from None
            self._gains[key] = gain
        return self._gains[key]


class _Graph:
    """The calls of a functional or Sequential model, and of the models nested in it."""

    def __init__(self, model: keras.Model) -> None:
        self._calls: defaultdict[int, list[GraphCall]] = defaultdict(list)
        self._consumers: defaultdict[int, list[GraphCall]] = defaultdict(list)
        # Tensors outside and inside a nested model that are the same.
        self._aliases: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._outputs = {id(tensor) for tensor in model.outputs}
        self._add(model)

    def _add(self, model: keras.Model) -> None:
        """Adds the calls of a graph, and of those nested in it."""
        for call in graph_calls(model):
            layer = call.operation
            if computes_its_graph(layer):
                for inside, outside in zip(
                    layer.inputs, call.inputs, strict=False
                ):
                    self._aliases[id(outside)].append(inside)
                for inside, outside in zip(
                    layer.outputs, call.outputs, strict=True
                ):
                    self._aliases[id(inside)].append(outside)
                if id(layer) not in self._calls:
                    self._add(layer)
            else:
                for tensor in call.inputs:
                    self._consumers[id(tensor)].append(call)
            self._calls[id(layer)].append(call)
            if isinstance(layer, keras.layers.TimeDistributed):
                self._calls[id(layer.layer)].append(call)

    def following(self, layer: keras.layers.Layer) -> _Following:
        """The functions behind a layer, as far as the graph shows them."""
        calls = self._calls.get(id(layer))
        if not calls:
            return _own_activation(layer, "it is inside another layer")
        activation = getattr(layer, "activation", None)
        if activation is _linear:
            activation = None
        seen: set[tuple[int, int]] = set()
        ends: list[_End] = []
        for call in calls:
            for tensor in call.outputs:
                ends += self._ends(tensor, activation, seen)
        for end in ends:
            if end.kind == "unknown":
                return _own_activation(
                    layer, f"its output goes to {end.unknown_name!r}"
                )
        activations = [
            end.activation for end in ends if end.activation is not None
        ]
        is_normalized = bool(ends) and all(
            end.kind == "normalization" for end in ends
        )
        return _Following(activations, is_normalized)

    def _ends(
        self,
        tensor: Tensor,
        activation: Activation | None,
        seen: set[tuple[int, int]],
    ) -> Iterator[_End]:
        """The ends of all paths from a tensor, with the first activation or an unknown layer."""
        if (id(tensor), id(activation)) in seen:
            return
        seen.add((id(tensor), id(activation)))
        if id(tensor) in self._outputs:
            yield _End("output")
        for alias in self._aliases.get(id(tensor), ()):
            yield from self._ends(alias, activation, seen)
        for call in self._consumers.get(id(tensor), ()):
            operation = call.operation
            if isinstance(operation, _NORMALIZATIONS):
                yield _End("normalization")
            elif isinstance(operation, keras.layers.Layer) and find_kernels(
                operation, ""
            ):
                yield _End(
                    "kernel", _linear if activation is None else activation
                )
            elif not _is_passed(operation):
                yield _End("unknown", unknown_name=operation.name)
            else:
                next_activation = activation
                if activation is None:
                    next_activation = _activation_of(operation)
                for output in call.outputs:
                    yield from self._ends(output, next_activation, seen)


def _own_activation(layer: keras.layers.Layer, why: str) -> _Following:
    return _Following(
        [getattr(layer, "activation", None) or _linear], unknown=why
    )


def _is_passed(operation: keras.Operation) -> bool:
    """Whether signals keep their scale through an operation, or it is an activation."""
    name = type(operation).__name__
    if not isinstance(operation, keras.layers.Layer):
        return name in _PASSED_OPERATIONS or name.lower() in _ACTIVATIONS
    if isinstance(operation, CircularPadding):
        return True
    of_keras = type(operation).__module__.startswith("keras.")
    return (
        of_keras
        and not operation.weights
        and not isinstance(operation, _RESCALING)
    )


def _activation_of(operation: keras.Operation) -> Activation | None:
    """The activation that an operation is, or `None`; the identity for residual sums."""
    name = type(operation).__name__
    if name in _SUMS:
        return _linear
    if isinstance(operation, keras.layers.Activation):
        if operation.activation is _linear:
            return None
        return operation.activation
    if name.lower() in _ACTIVATIONS:
        return operation
    return None


def default_gain(
    weight: PrunableWeight, pattern: ExactOrthogonal, live: int
) -> float:
    """The gain that gives a kernel the expected norm of its default one under the same mask.

    With the squared norm `n` at gain 1, which is the number of singular values, and the mean square
    `v` of the layer's own initializer, `gain^2 n = live v`: for Glorot's
    `gain^2 = 2 density in out / ((in + out) n)`.
    """
    layout = layout_for(weight, pattern)
    squared_norm: float = least_count(
        weight.shape, layout, pattern.taps or "center"
    )
    structure = pattern.drawn_structure
    if isinstance(structure, Mirrored):
        canonical_shape = layout.canonical_shape(weight.shape)
        squared_norm = structure.squared_norm(canonical_shape)
    mean_square = _mean_square(weight)
    if not _is_norm(mean_square):
        raise ValueError(
            f"gain='auto' is not possible for the weight {weight.path!r}: its layer's initializer "
            f"gives no norm to keep. Received: initializer={default_initializer(weight)!r}, "
            f"mean square {mean_square}"
        )
    return math.sqrt(live * mean_square / squared_norm)


def default_initializer(
    weight: PrunableWeight,
) -> keras.initializers.Initializer:
    """The initializer of a kernel's layer, or Keras' default in place of a sparse one."""
    initializer = weight.initializer
    if initializer is None or isinstance(initializer, SparseInitializer):
        return keras.initializers.GlorotUniform(seed=0)
    return initializer


def _mean_square(weight: PrunableWeight) -> float:
    """The mean square of the default initializer: from its variance, if known, or from a draw."""
    default = default_initializer(weight)
    if isinstance(default, keras.initializers.VarianceScaling):
        shape: tuple[int, ...] = weight.shape
        if weight.layout is not None and isinstance(
            weight.owner, keras.layers.EinsumDense
        ):
            # Its fans are those of the equation, not of a convolution's kernel.
            shape = weight.layout.canonical_shape(shape)[2:]
        *taps, rows, columns = shape
        window = math.prod(taps)
        fan_in = rows * window
        fan_out = columns * window
        fans = {"fan_in": fan_in, "fan_out": fan_out}
        fan = fans.get(default.mode, (fan_in + fan_out) / 2)
        return float(default.scale) / max(1.0, fan)
    if isinstance(default, keras.initializers.RandomNormal):
        return float(default.mean**2 + default.stddev**2)
    if isinstance(default, keras.initializers.RandomUniform):
        low = default.minval
        high = default.maxval
        return float(low**2 + low * high + high**2) / 3
    kernel = to_numpy(default(weight.shape, dtype="float32"))
    squares = np.square(kernel, dtype=np.float64)
    return float(np.mean(squares))


def _is_norm(mean_square: float) -> bool:
    return math.isfinite(mean_square) and mean_square > 0
