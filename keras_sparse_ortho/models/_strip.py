"""`strip`: a sparse model as plain Keras layers."""

from collections.abc import Iterator

import keras

from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.initializers import SparseInitializer
from keras_sparse_ortho.kernels import Storage, storages_of, walk
from keras_sparse_ortho.models._apply import carry_out
from keras_sparse_ortho.models._at_density import warn_unless_at_density
from keras_sparse_ortho.models._plan import LayerChange, Plan
from keras_sparse_ortho.models._prunable_weights import (
    check_built,
    prunable_weights,
)
from keras_sparse_ortho.models._saved_layers import lists_its_layers
from keras_sparse_ortho.models._verb import verb
from keras_sparse_ortho.storages import (
    Target,
    factored_kernel,
    forget_sparse_initializers,
)


def plan_strip(model: keras.Model) -> Plan:
    """Plans `strip`."""
    check_built(model)
    storages = _finished_storages(model)
    # Fixed masks have their density.
    if not all(storage.movable for storage in storages):
        warn_unless_at_density(model)
    thin_variables = _variables_of_thin_layers(model)
    weights = [
        weight
        for weight in prunable_weights(model, unregistered=True)
        if weight.storage is not None
    ]
    targets = {
        weight.path: Target(
            "thin" if id(weight.variable) in thin_variables else "dense"
        )
        for weight in weights
    }
    layer_changes: dict[keras.layers.Layer, LayerChange] = {
        layer: _WithoutSparseInitializers()
        for layer, _ in walk(model, "")
        if any(
            isinstance(value, SparseInitializer)
            for value in vars(layer).values()
        )
    }
    return Plan(weights, targets, layer_changes, keeps_function=True)


@verb(plan_strip)
def strip(model: keras.Model) -> keras.Model:
    """Removes every wrapper: a plain Keras model with effective weights and equal outputs.

    Each wrapped weight `w` becomes its effective weight `w_e`, whose dead entries are exactly 0,
    each layer of live blocks the dense layer of Keras whose place it took. A product of two thin
    factors (`parametrizations.LowRankSoftThreshold`) becomes two layers, in a Sequential model of
    the layer's name, where these are smaller. Sparse initializers become Keras' default. The result
    is not compiled, and loads without this package. `strip.in_place` changes the model itself.

    Args:
        model: Model, built, with or without wrapped layers.

    Raises NotPrunableError for a model that is not built; for a weight whose mask was never set,
    because `callbacks.UpdateMasks` was not among the callbacks; for a result with other weights, or
    (compared on one sample, where layers are not Keras' own) other outputs. The model is then as it
    was. A DensityWarning says if training has left another density than the one asked for.

    Limits: the masks are gone, so training the result makes it dense. Train the wrapped model.

    Examples:
        >>> import keras, numpy as np, keras_sparse_ortho as kso
        >>> dense = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        >>> plain = strip(kso.sparsify(dense, 0.25, seed=0))
        >>> type(plain.layers[0]).__name__, int(np.count_nonzero(plain.layers[0].get_weights()[0]))
        ('Dense', 8)
    """
    return carry_out(model, plan_strip(model))


class _WithoutSparseInitializers:
    """Puts Keras' default initializer into a layer that has one of ours."""

    def change(
        self, layer: keras.layers.Layer, formed: keras.layers.Layer | None
    ) -> keras.layers.Layer | None:
        forget_sparse_initializers(layer if formed is None else formed)
        return formed


def _finished_storages(model: keras.Model) -> list[Storage]:
    """All storages of a model; refuses one whose mask was never set."""
    storages = []
    for layer, path in walk(model, ""):
        for name, storage in storages_of(layer).items():
            reason = storage.unfinished()
            if reason is not None:
                raise NotPrunableError(
                    f"The weight '{path}/{name}' cannot be stripped: {reason}. "
                    f"Received: {type(storage).__name__}"
                )
            storages.append(storage)
    return storages


def _variables_of_thin_layers(model: keras.Model) -> set[int]:
    """The variables, by `id`, of layers that become two thin ones.

    These layers stand in functional or Sequential models, where a Sequential model can take their
    place.
    """
    return {
        id(storage.weight.variable)
        for layer in _layers_of_graphs(model)
        if factored_kernel(layer) is not None
        for storage in storages_of(layer).values()
    }


def _layers_of_graphs(
    model: keras.layers.Layer,
) -> Iterator[keras.layers.Layer]:
    """The layers that functional and Sequential models hold, whose classes do not make them."""
    if not isinstance(model, keras.Model) or not lists_its_layers(model):
        return
    for layer in model.layers:
        yield layer
        if isinstance(layer, keras.Model):
            yield from _layers_of_graphs(layer)
