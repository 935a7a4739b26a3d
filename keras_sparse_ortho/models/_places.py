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
            kernels = find_kernels(layer, "", unregistered=True)
            names_below[id(layer)] = {
                id(kernel.variable): kernel.path for kernel in kernels
            }
        name = names_below[id(layer)][id(weight.variable)]
        places.setdefault(id(layer), {})[name] = weight.path
    paths = [weight.path for weight in weights]
    place_count = sum(len(names) for names in places.values())
    if place_count != len(set(paths)) or len(set(paths)) != len(paths):
        raise NotPrunableError(
            "Two weights have the same path; give their layers different names. "
            f"Received: {sorted({path for path in paths if paths.count(path) > 1})}"
        )
    return places


class _Holders:
    """Which layers of a model hold each variable, and which read the weights of others."""

    def __init__(self, model: keras.layers.Layer) -> None:
        self._model = model
        self._layers: Layers = [layer for layer, _ in walk(model, "")]
        self._owners: dict[int, Layers] = {}
        # The outermost one around each layer, as `walk` comes from above.
        self._readers: dict[int, keras.layers.Layer] = {}
        for layer in self._layers:
            for variable in own_variables(layer):
                self._owners.setdefault(id(variable), []).append(layer)
            if isinstance(layer, _READING_INSIDE):
                for inner, _ in walk(layer, ""):
                    self._readers.setdefault(id(inner), layer)

    def layer_of(self, weight: PrunableWeight) -> keras.layers.Layer:
        """The layer with which a weight is wrapped; NotPrunableError if there is none."""
        owners = self._owners.get(id(weight.variable)) or [weight.owner]
        reader = self._readers.get(id(owners[0]))
        layer: keras.layers.Layer | None = owners[0]
        if reader is not None:
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
            inner_ids = {id(inner) for inner, _ in walk(layer, "")}
            if isinstance(layer, keras.Model) or not owner_ids <= inner_ids:
                continue
            if owner_ids.isdisjoint(self._reached_without(layer)):
                return layer
        return None

    def _reached_without(self, layer: keras.layers.Layer) -> set[int]:
        """The layers, by `id`, that are reached from the model without going through one."""
        reached = {id(layer)}
        waiting = [self._model]
        while waiting:
            current = waiting.pop()
            if id(current) not in reached:
                reached.add(id(current))
                waiting += sublayers(current)
        return reached - {id(layer)}
