"""The layers behind a layer: normalization, an activation, the next kernel."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import keras

from keras_sparse_ortho._types import AnyLayer, Tensor
from keras_sparse_ortho.kernels import find_kernels
from keras_sparse_ortho.layers import CircularPadding
from keras_sparse_ortho.pruning._watched_calls import watch_calls

Activation = Callable[..., Tensor]
IDENTITY = keras.activations.linear

_NORMALIZATIONS = {
    "BatchNormalization",
    "GroupNormalization",
    "LayerNormalization",
    "RMSNormalization",
    "SyncBatchNormalization",
}
# Nonlinear in several inputs: normalization behind them leaves the scale in front to matter.
_MIXING = {
    "AdditiveAttention",
    "Attention",
    "Dot",
    "DotProductAttention",
    "Einsum",
    "Matmul",
}
# Layers without weights that change the scale, or may do anything.
_RESCALING = {
    "Lambda",
    "Multiply",
    "Rescaling",
    "UnitNormalization",
}
# Class names of layers, and of operations of keras.ops, whose classes are not public.
_SUMS = {"Add", "Subtract", "Average"}
_PASSED_OPERATIONS = _SUMS | {
    "Cast",
    "Concatenate",
    "Reshape",
    "Transpose",
    "Mean",
    "Max",
}
_ACTIVATIONS = {name.replace("_", "") for name in dir(keras.activations)} - {
    "linear"
}


class Role(NamedTuple):
    """The effect of a layer or operation on the signals that pass it.

    `kind` is `"normalization"`, `"kernel"`, `"passed"` (they keep their scale, or it is an
    activation), `"mixed"` (the layers behind it say nothing) or `"unknown"`.
    """

    kind: str
    activation: Activation | None = None


@functools.singledispatch
def role(operation: AnyLayer) -> Role:
    """The `Role` of a layer or operation; dispatches on its class."""
    return role_by_name(type(operation).__name__, operation)


@role.register
def _(layer: keras.layers.Layer) -> Role:
    if isinstance(layer, CircularPadding):
        return Role("passed")
    is_kerass = type(layer).__module__.startswith("keras.")
    return role_of_layer(
        layer,
        holds_kernels=bool(find_kernels(layer, "")),
        is_plain=is_kerass and not layer.weights,
    )


def role_of_layer(
    layer: AnyLayer, *, holds_kernels: bool, is_plain: bool
) -> Role:
    """The role of a layer.

    Args:
        layer: Layer.
        holds_kernels: bool. Whether it, or a layer inside, has kernels.
        is_plain: bool. Whether the layer is Keras' and has no weights.
    """
    kinds = _kinds(layer)
    if kinds & _NORMALIZATIONS:
        return Role("normalization")
    if holds_kernels:
        return Role("kernel")
    if kinds & _MIXING:
        return Role("mixed")
    if not is_plain or kinds & _RESCALING:
        return Role("unknown")
    name = type(layer).__name__
    if name == "Activation":
        activation: Activation | None = activation_of(layer)
        if activation is IDENTITY:
            activation = None
        return Role("passed", activation)
    return Role("passed", _activation_by_name(name, layer))


def _kinds(layer: AnyLayer) -> set[str]:
    """The names of the classes of a layer."""
    return {kind.__name__ for kind in type(layer).__mro__}


def role_by_name(name: str, operation: Activation) -> Role:
    """The role of an operation by the name of its class in `keras.ops`."""
    activation = _activation_by_name(name, operation)
    if name in _PASSED_OPERATIONS or activation is not None:
        return Role("passed", activation)
    if name in _MIXING:
        return Role("mixed")
    return Role("unknown")


def _activation_by_name(name: str, operation: Activation) -> Activation | None:
    """The activation that an operation is, or `None`; the identity for residual sums."""
    if name in _SUMS:
        return IDENTITY
    if name.lower() in _ACTIVATIONS:
        return operation
    return None


def activation_of(layer: AnyLayer) -> Activation:
    """The activation of a layer, a function of Keras 3 where it is one of tf_keras."""
    activation = getattr(layer, "activation", None) or IDENTITY
    if str(getattr(activation, "__module__", "")).startswith("tf_keras."):
        name = getattr(activation, "__name__", "")
        activation = getattr(keras.activations, name, activation)
    return activation


@dataclasses.dataclass(frozen=True)
class Following:
    """The operations that the outputs of a layer reach before the next kernel."""

    activations: list[Activation]
    """The first one, or the identity, on each path to another kernel."""

    normalized: bool = False
    """Whether every path leads to normalization; or, where no path is known, the model has any."""

    unknown: str | None = None
    """Why only the layer's own activation is known."""


class _End(NamedTuple):
    """The end of a path from a layer's output: `"kernel"`, `"normalization"`, `"output"`, ..."""

    kind: str
    activation: Activation | None = None  # in front of a kernel
    unknown_name: str = ""  # of an operation on the way


class WhatFollows:
    """Answers what follows the layers of a model.

    Args:
        model: A model that `watch_calls` knows; nothing is known of others.
    """

    def __init__(self, model: AnyLayer) -> None:
        self._watched = watch_calls(model)

    def layer(self, layer: AnyLayer) -> Following:
        """The functions behind a layer, as far as calls show them."""
        calls = self._watched.of_layer.get(id(layer))
        own_activation = activation_of(layer)
        if not calls:
            reason = self._watched.unwatched.get(id(layer))
            return Following(
                [own_activation],
                normalized=reason is not None and self._has_normalization,
                unknown=reason or "it is inside another layer",
            )
        activation: Activation | None = own_activation
        if activation is IDENTITY:
            activation = None
        seen: set[tuple[int, int, str]] = set()
        ends: list[_End] = []
        for call in calls:
            for tensor in call.outputs:
                ends += self._ends(tensor, activation, "", seen)
        is_normalized = bool(ends)
        for end in ends:
            if end.kind == "normalization":
                continue
            is_normalized = False
            if end.unknown_name:
                return Following(
                    [own_activation],
                    end.kind == "loose" and self._has_normalization,
                    f"its output goes to {end.unknown_name}",
                )
        activations = [
            end.activation for end in ends if end.activation is not None
        ]
        return Following(activations, is_normalized)

    @functools.cached_property
    def _has_normalization(self) -> bool:
        return any(
            _kinds(layer) & _NORMALIZATIONS for layer in self._watched.layers
        )

    def _ends(
        self,
        tensor: Tensor,
        activation: Activation | None,
        unknown_name: str,
        seen: set[tuple[int, int, str]],
    ) -> Iterator[_End]:
        """The ends of all paths from a tensor, with the first activation and unknown operation."""
        place = (id(tensor), id(activation), unknown_name)
        if place in seen:
            return
        seen.add(place)
        if id(tensor) in self._watched.loose:
            yield _End("loose", unknown_name="where calls cannot be watched")
        if id(tensor) in self._watched.outputs:
            yield _End("output", unknown_name=unknown_name)
        for alias in self._watched.aliases.get(id(tensor), ()):
            yield from self._ends(alias, activation, unknown_name, seen)
        for call in self._watched.consumers.get(id(tensor), ()):
            consumer = role(call.operation)
            name = unknown_name
            if consumer.kind in ("unknown", "mixed") and not name:
                name = repr(call.operation.name)
            if consumer.kind == "kernel":
                yield _End("kernel", activation or IDENTITY, name)
            elif consumer.kind in ("normalization", "mixed"):
                yield _End(consumer.kind, unknown_name=name)
            else:
                next_activation = activation or consumer.activation
                for output in call.outputs:
                    yield from self._ends(output, next_activation, name, seen)
