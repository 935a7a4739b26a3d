"""Who holds whom in a model: where a weight can be wrapped so that all its uses are inside."""

from collections.abc import Iterator
from typing import Any

import keras

from keras_sparse_ortho._keras_internals import (
    layers_in_attributes,
    own_variables,
    sublayers,
)
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.kernels import PrunableWeight, find_kernels, find_unregistered, walk
from keras_sparse_ortho.layers import PrunableLayer
from keras_sparse_ortho.models._kinds import is_graph_of_class


class Holders:
    """The layers of a model as a graph, from every layer to those that it holds.

    A layer that two others hold (an embedding handed to an encoder and to a decoder) is reached in
    two ways. What is done to it for one of them must hold for the other. So a layer is *inside*
    another, for the purposes here, only if every way from the model to it leads through that one
    (it is dominated by it, as compilers say).

    Args:
        model: The model.
    """

    def __init__(self, model: Any) -> None:
        self._root = model
        self._children: dict[int, list[Any]] = {}
        self._ways: dict[int, list[Any]] = {id(model): []}  # the first way to each layer
        holders: dict[int, set[int]] = {}
        for parent in self._visit(model):
            for child in self._children_of(parent):
                holders.setdefault(id(child), set()).add(id(parent))
                self._ways.setdefault(id(child), [*self._ways[id(parent)], child])
        self._shared = any(len(parents) > 1 for parents in holders.values())
        owners: dict[int, list[Any]] = {}
        for layer in self._visit(model):
            for variable in own_variables(layer):
                owners.setdefault(id(variable), []).append(layer)
        self._owners = owners

    def _visit(self, start: Any, without: Any = None) -> Iterator[Any]:
        """`start` and all layers below it, each once, but for those reached by `without` only."""
        seen, waiting = {id(start)}, [start]
        while waiting:
            layer = waiting.pop()
            yield layer
            for child in reversed(self._children_of(layer)):
                if id(child) not in seen and child is not without:
                    seen.add(id(child))
                    waiting.append(child)

    def _children_of(self, layer: Any) -> list[Any]:
        if id(layer) not in self._children:
            children = sublayers(layer)
            if is_graph_of_class(layer):
                # Its methods may call what stands in the graph only inside other layers.
                children += layers_in_attributes(layer)
            self._children[id(layer)] = children
        return self._children[id(layer)]

    def is_inside(self, layer: Any, outer: Any) -> bool:
        """Whether every way from the model to a layer leads through another (or it is that one)."""
        if layer is outer or outer is self._root:
            return True
        if not self._shared:  # there is one way to each
            return any(passed is outer for passed in self._ways[id(layer)])
        return all(reached is not layer for reached in self._visit(self._root, without=outer))

    def owners(self, weight: PrunableWeight) -> list[Any]:
        """The layers that track the variable of a weight as their own."""
        return self._owners.get(id(weight.variable)) or [weight.owner]

    def outermost(self, weight: PrunableWeight) -> Any:
        """The outermost layer, no model, inside which all uses of a weight are.

        Raises:
            NotPrunableError: There is none: layers that hold the variable itself, and not the
                layer that created it.
        """
        owners = self.owners(weight)
        for layer in self._ways[id(owners[0])]:
            if not isinstance(layer, keras.Model) and all(
                self.is_inside(owner, layer) for owner in owners
            ):
                return layer
        raise NotPrunableError(
            f"The variable of the weight '{weight.path}' is used by several layers, and no layer "
            "holds all of them, so that a mask would not be applied everywhere. Hand the layer "
            "that owns it to the others instead of its variable, or `exclude` it. Received: "
            f"{[layer.name for layer in owners]}"
        )


def uncovered_weights(model: Any) -> list[str]:
    """The paths of wrapped weights that some layer uses without the wrapper."""
    holders = Holders(model)
    return [
        f"{path}/{weight.variable.name}"
        for layer, path in walk(model, "")
        if isinstance(layer, PrunableLayer)
        for weight in layer.prunable_weights
        if not all(holders.is_inside(owner, layer) for owner in holders.owners(weight))
    ]


def places_to_wrap(model: Any, weights: list[PrunableWeight]) -> dict[int, dict[str, str]]:
    """Which layers to wrap: by `id`, the paths of their weights by the names below the layer.

    Each weight is wrapped once, with the outermost layer that all its uses go through, so that it
    is masked wherever it is used.

    Raises:
        NotPrunableError: A weight that no layer holds alone; two weights of one path.
    """
    holders = Holders(model)
    places: dict[int, dict[str, str]] = {}
    names: dict[int, dict[int, str]] = {}
    for weight in weights:
        layer = holders.outermost(weight)
        if id(layer) not in names:
            kernels = find_kernels(layer, "")
            kernels += find_unregistered(layer, "", kernels)
            names[id(layer)] = {id(w.variable): w.path for w in kernels}
        places.setdefault(id(layer), {})[names[id(layer)][id(weight.variable)]] = weight.path
    if sum(map(len, places.values())) != len({weight.path for weight in weights}) or len(
        {weight.path for weight in weights}
    ) != len(weights):
        paths = [weight.path for weight in weights]
        raise NotPrunableError(
            "Two weights have the same path, so that nothing can be said of one of them; give "
            "their layers different names. "
            f"Received: {sorted({path for path in paths if paths.count(path) > 1})}"
        )
    return places
