"""The layers of a `ScannedStack`: how they are drawn, called and taken out again."""

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._checks import is_integer
from keras_sparse_ortho._keras_internals import sublayers
from keras_sparse_ortho._values import assign, to_numpy
from keras_sparse_ortho.kernels import derived_seed, walk

ops = keras.ops


class LayersInStack:
    """One layer that stands for all, and the variables that hold the weights of all.

    Hides the layer from Keras' tracking: its variables are places that a call fills with the
    weights of one layer after the other.

    Args:
        layer: The layer.
        depth: How many there are.
    """

    def __init__(self, layer: Any, depth: int) -> None:
        self.layer = layer
        self.depth = depth
        self._pairs: list[tuple[Any, Any]] = []

    def add(self, variable: Any, stacked: Any) -> None:
        """Notes which variable of the stack holds a variable of all layers."""
        self._pairs.append((variable, stacked))

    def stacked(self) -> tuple[list[Any], list[Any]]:
        """The stack's variables that are trained, and those that a call may change."""
        trained, others = self._split()
        return [stacked for _, stacked in trained], [stacked for _, stacked in others]

    def _split(self) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        own = {id(variable) for variable in self.layer.trainable_variables}
        trained = [pair for pair in self._pairs if id(pair[0]) in own]
        return trained, [pair for pair in self._pairs if id(pair[0]) not in own]

    def call(
        self, inputs: Any, weights: list[Any], states: list[Any]
    ) -> tuple[Any, list[Any], list[Any]]:
        """Output, new states and losses of the layer that has these weights and states."""
        trained, others = self._split()
        places = [variable for variable, _ in (*trained, *others)]
        mapping = list(zip(places, (*weights, *states), strict=True))
        with keras.StatelessScope(state_mapping=mapping, collect_losses=True) as scope:
            outputs = self.layer(inputs)
            regularized = [v for v, _ in trained if v.regularizer is not None]
            losses = [*scope.losses, *(v.regularizer(v) for v in regularized)]
            states = [scope.get_current_value(variable) for variable, _ in others]
        return outputs, states, losses

    # --- one layer of them -----------------------------------------------------------------------

    def copy(self, k: int) -> Any:
        """Layer `k`, not built."""
        config = _reseeded(unbuilt_config(self.layer)["config"], k)
        return type(self.layer).from_config({**config, "name": f"{self.layer.name}_{k}"})

    def variables(
        self, input_shape: tuple[int | None, ...], draws: bool
    ) -> Iterator[tuple[str, Any, np.ndarray]]:
        """Builds the layer; its variables, with names and initial values for all layers, or 0."""
        self.layer.build(input_shape)
        first = self._built(0, input_shape)
        _name_steadily(self.layer, first)
        names = _names(self.layer)
        layers = (self._built(k, input_shape) if k else first for k in range(self.depth))
        drawn = [[to_numpy(v) for v in _variables(layer)] for layer in layers] if draws else []
        for k, variable in enumerate(_variables(self.layer)):
            zeros = np.zeros((self.depth, *variable.shape), "float32")
            initial = np.stack([values[k] for values in drawn]) if draws else zeros
            name = names.get(id(variable), variable.name)
            yield name.replace("/", "_"), variable, initial

    def _built(self, k: int, input_shape: tuple[int | None, ...]) -> Any:
        layer = self.copy(k)
        layer.build(input_shape)
        return layer

    def unrolled(self, input_shape: Any, values: dict[int, Any]) -> list[Any]:
        """All layers, built, with copies of their weights, or with other `values` by `id`."""
        rows = [to_numpy(values.get(id(stacked), stacked)) for _, stacked in self._pairs]
        layers = []
        for k in range(self.depth):
            layer = self._built(k, input_shape)
            for variable, row in zip(_variables(layer), rows, strict=True):
                assign(variable, row[k])
            layers.append(layer)
        return layers

    def at_each(self, read: Callable[[], Any]) -> list[Any]:
        """What `read` finds in the layer with the weights of each in turn."""
        rows = [(variable, to_numpy(stacked)) for variable, stacked in self._pairs]
        found = []
        for k in range(self.depth):
            for variable, row in rows:
                assign(variable, row[k])
            found.append(read())
        return found

    def constraint(self, variable: Any) -> Any:
        """The constraint of a variable, for each layer by itself."""
        own = variable.constraint
        return None if own is None else lambda stacked: ops.vectorized_map(own, stacked)

    def stacked_like(self, variable: Any) -> Any:
        """The variable of the stack that holds one of the layer."""
        return next(stacked for own, stacked in self._pairs if own is variable)


def _variables(layer: Any) -> list[Any]:
    """Weights and states of random generators."""
    return [*layer.trainable_variables, *layer.non_trainable_variables]


def _names(layer: Any) -> dict[int, str]:
    """By `id` the names of all variables: where they are in the layer."""
    return {
        id(variable): f"{path}/{variable.name}" if path else variable.name
        for inner, path in walk(layer, "")
        for variable in _variables(inner)
        if not any(variable is other for child in sublayers(inner) for other in _variables(child))
    }


def _name_steadily(layer: Any, other: Any) -> None:
    """Names layers inside that have no name: Keras numbers these anew in every instance.

    Args:
        layer: The layer.
        other: Another instance: what is called otherwise there has no name.
    """
    holders, others = ([inner for inner, _ in walk(one, "")] for one in (layer, other))
    for holder, its_twin in zip(holders, others, strict=False):
        pairs = [*zip(sublayers(holder), sublayers(its_twin), strict=False)]
        taken = {inner.name for inner, twin in pairs if inner.name == twin.name}
        for inner, twin in pairs:
            if inner.name == twin.name:
                continue
            usual = re.sub(r"_\d+$", "", inner.name)
            numbered = (f"{usual}_{k}" for k in itertools.count(1))
            inner.name = next(n for n in itertools.chain([usual], numbered) if n not in taken)
            taken.add(inner.name)


def unbuilt_config(layer: Any) -> dict[str, Any]:
    """What a layer without weights is made from, and Sequential models in it."""
    return _unbuilt(keras.saving.serialize_keras_object(layer))


def _unbuilt(config: Any) -> Any:
    if isinstance(config, list | tuple):
        return type(config)(map(_unbuilt, config))
    if not isinstance(config, dict):
        return config
    rest = {k: _unbuilt(v) for k, v in config.items() if k != "build_config"}
    if rest.get("class_name") == "Sequential" and isinstance(rest.get("config"), dict):
        # Its input layer was added when it was built.
        own = dict(rest["config"])
        own.pop("build_input_shape", None)
        own["layers"] = [at for at in own["layers"] if at["class_name"] != "InputLayer"]
        rest["config"] = own
    return rest


def _reseeded(config: Any, k: int) -> Any:
    """A configuration with seeds of its own, as Keras' initializers draw the same by the same."""
    if isinstance(config, dict):
        return {
            key: derived_seed(value, str(k))
            if key == "seed" and is_integer(value)
            else _reseeded(value, k)
            for key, value in config.items()
        }
    if isinstance(config, list | tuple):
        return type(config)(_reseeded(value, k) for value in config)
    return config
