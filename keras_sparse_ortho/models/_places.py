"""`places_to_wrap`: which layers have to change for the kernels of a model to change."""

import keras

from keras_sparse_ortho._keras_internals import own_variables, sublayers
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.kernels import PrunableWeight, find_kernels, walk

Layers = list[keras.layers.Layer]

# They read or assign the weights of layers inside them, not only call these.
_READING_INSIDE = (keras.layers.RNN, keras.layers.SpectralNormalization)


def places_to_wrap(
    model: keras.layers.Layer, weights: list[PrunableWeight]
) -> dict[int, dict[str, str]]:
    """Finds the layers to wrap.

    A weight is wrapped with its owner. Where a layer reads weights inside another (a recurrent
    layer those of its cell), or several hold the variable, it is wrapped with the one that holds
    them all.

    Args:
        model: Model of the weights.
        weights: list of `PrunableWeight` in plain layers.

    Returns:
        dict from the `id` of a layer to the paths of its weights by their names below it.

    Raises NotPrunableError for a variable that no layer holds alone, and for two weights of one
    path.
    """
    places: dict[int, dict[str, str]] = {}
    names_below: dict[int, dict[int, str]] = {}
    holders = _Holders(model)
    for weight in weights:
        layer = holders.layer_of(weight)
        if id(layer) not in names_below:
            names_below[id(layer)] = _names_by_variable(layer)
        names = names_below[id(layer)]
        name = names[id(weight.variable)]
        paths_by_name = places.setdefault(id(layer), {})
        paths_by_name[name] = weight.path
    place_count = sum(len(names) for names in places.values())
    _require_distinct_paths(weights, place_count)
    return places


def _require_distinct_paths(
    weights: list[PrunableWeight], place_count: int
) -> None:
    """Raises NotPrunableError for two weights of one path, or of one place."""
    paths = [weight.path for weight in weights]
    if place_count == len(paths) == len(set(paths)):
        return
    shared_paths = set()
    for path in paths:
        if paths.count(path) > 1:
            shared_paths.add(path)
    raise NotPrunableError(
        "Two weights have the same path; give their layers different names. "
        f"Received: {sorted(shared_paths)}"
    )


def _names_by_variable(layer: keras.layers.Layer) -> dict[int, str]:
    """The names below a layer of all its kernels, by the `id` of their variables."""
    names = {}
    for kernel in find_kernels(layer, "", unregistered=True):
        names[id(kernel.variable)] = kernel.path
    return names


class _Holders:
    """Which layers of a model hold each variable, and which read the weights of others."""

    def __init__(self, model: keras.layers.Layer) -> None:
        self._model = model
        self._layers = _layers_inside(model)
        self._owners: dict[int, Layers] = {}
        # The outermost one around each layer, as `walk` comes from above.
        self._readers: dict[int, keras.layers.Layer] = {}
        for layer in self._layers:
            self._add(layer)

    def _add(self, layer: keras.layers.Layer) -> None:
        for variable in own_variables(layer):
            owners = self._owners.setdefault(id(variable), [])
            owners.append(layer)
        if isinstance(layer, _READING_INSIDE):
            for inner in _layers_inside(layer):
                self._readers.setdefault(id(inner), layer)

    def layer_of(self, weight: PrunableWeight) -> keras.layers.Layer:
        """The layer with which a weight is wrapped; NotPrunableError if there is none."""
        owners = self._owners.get(id(weight.variable))
        if not owners:
            owners = [weight.owner]
        owner = owners[0]
        layer: keras.layers.Layer | None = owner
        if id(owner) in self._readers:
            reader = self._readers[id(owner)]
            layer = self._innermost_around([reader], owners)
        elif len(owners) > 1:
            layer = self._innermost_around(self._layers, owners)
        if layer is None or isinstance(layer, keras.Model):
            raise NotPrunableError(
                f"The variable of the weight {weight.path!r} is used by several layers, and no "
                "layer holds all of them, or by a model itself, so that a mask would not be "
                "applied everywhere. Hand the layer that owns it to the others instead of its "
                f"variable, or `exclude` it. Received: {[owner.name for owner in owners]}"
            )
        return layer

    def _innermost_around(
        self, candidates: Layers, owners: Layers
    ) -> keras.layers.Layer | None:
        """The innermost layer, no model, through which every way to some layers leads."""
        owner_ids = {id(owner) for owner in owners}
        for layer in reversed(candidates):
            if isinstance(layer, keras.Model):
                continue
            inner_ids = {id(inner) for inner in _layers_inside(layer)}
            if not owner_ids <= inner_ids:
                continue
            ids_around = self._reached_without(layer)
            if owner_ids.isdisjoint(ids_around):
                return layer
        return None

    def _reached_without(self, layer: keras.layers.Layer) -> set[int]:
        """The layers, by `id`, that are reached from the model without going through one."""
        closed = id(layer)
        reached = {closed}
        waiting = [self._model]
        while waiting:
            current = waiting.pop()
            if id(current) not in reached:
                reached.add(id(current))
                waiting += sublayers(current)
        reached.remove(closed)
        return reached


def _layers_inside(layer: keras.layers.Layer) -> Layers:
    """A layer and all layers below it, from above."""
    return [inner for inner, _ in walk(layer, "")]
