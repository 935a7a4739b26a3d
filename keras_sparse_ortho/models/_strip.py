"""`strip`: the plain Keras model, with the effective weights in its layers."""

from collections.abc import Iterator
from typing import Any

import keras

from keras_sparse_ortho._keras_internals import copy_objects
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.initializers import SparseInitializer
from keras_sparse_ortho.kernels import walk
from keras_sparse_ortho.layers import BlockSparseLayer, PrunableLayer, ScannedStack
from keras_sparse_ortho.models._at_density import warn_unless_at_density
from keras_sparse_ortho.models._kinds import lists_its_layers
from keras_sparse_ortho.models._prunable_weights import check_built
from keras_sparse_ortho.models._rewrite import rewrite
from keras_sparse_ortho.models._same_function import SameFunction
from keras_sparse_ortho.models._thin import thin_layers


def strip(model: keras.Model) -> keras.Model:
    """Removes every wrapper: a plain Keras model with effective weights and equal outputs.

    Each wrapped weight `w` is replaced by its effective weight `w_e`, whose dead entries are
    exactly 0. A layer that computes on live blocks becomes the dense layer of Keras whose place it
    took. A product of two thin factors (`parametrizations.LowRankSoftThreshold`) becomes two
    layers, in a Sequential model of the layer's name, where these are smaller; a `ScannedStack`
    becomes its layers, in such a model. Nothing of this
    package remains in the model: it can be saved, and loaded where the package is not installed.
    (Initializers of ours in the configuration, which have done their work, become Keras' default.)

    Args:
        model: A built Keras model, with or without wrapped layers.

    Returns:
        A new, uncompiled model; a model written as a class is changed in place, and returned, and
        is to be compiled again.

    Raises:
        NotPrunableError: A model that is not built; a weight whose mask was never set, because
            `callbacks.UpdateMasks` was not among the callbacks; a result that would have other
            weights, or (compared on one sample, where layers are not Keras' own) other outputs.
            The model is as it was then.

    Warns:
        DensityWarning: A model that training has left at another density than the one asked for.

    Limits: the masks are gone with the wrappers, so training the result makes it dense. Keep the
    wrapped model to train on.

    Example:

    >>> import keras, numpy as np
    >>> import keras_sparse_ortho as kso
    >>> dense = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    >>> sparse = kso.sparsify(dense, 0.25, seed=0)
    >>> plain = strip(sparse)
    >>> type(plain.layers[0]).__name__, int(np.count_nonzero(plain.layers[0].get_weights()[0]))
    ('Dense', 8)
    """
    check_built(model)
    _refuse_unfinished(model)
    warn_unless_at_density(model)
    if isinstance(model, PrunableLayer):
        return _strip_layer(model)
    if isinstance(model, BlockSparseLayer):
        return model.to_dense_layer()
    if isinstance(model, ScannedStack):
        return _unrolled(model)
    same = SameFunction(model)
    in_graphs = {id(layer) for layer in _layers_of_graphs(model)}

    def unwrap(layer: Any, path: str, own: Any) -> Any:
        if isinstance(own, BlockSparseLayer):
            return own.to_dense_layer()
        inner = own.layer if isinstance(own, PrunableLayer) else own
        if isinstance(inner, ScannedStack):
            return _unrolled(own)
        if not isinstance(own, PrunableLayer):
            _reset_initializers(own)
            return None
        thin = thin_layers(own) if id(layer) in in_graphs else None
        own.release()
        _reset_initializers(inner)
        return inner if thin is None else thin

    def complete(plain: Any) -> Any:
        same.check(plain)
        return plain

    return rewrite(model, unwrap, complete)


def _layers_of_graphs(model: Any) -> Iterator[Any]:
    """The layers that functional and Sequential models hold, whose classes do not make them."""
    for layer in model.layers if lists_its_layers(model) else []:
        yield layer
        if isinstance(layer, keras.Model):
            yield from _layers_of_graphs(layer)


def _refuse_unfinished(model: Any) -> None:
    for layer, path in walk(model, ""):
        made = layer.parametrizations if isinstance(layer, PrunableLayer) else {}
        for key, parametrization in made.items():
            if (reason := parametrization.unfinished()) is not None:
                raise NotPrunableError(
                    f"The weight '{path}/{key}' cannot be stripped: {reason}. "
                    f"Received: {type(parametrization).__name__}"
                )


def _unrolled(layer: PrunableLayer | ScannedStack) -> Any:
    """The plain layers of a stack, in a Sequential model of its name."""
    if isinstance(layer, ScannedStack):
        return strip(layer.unrolled())
    held = layer.parametrizations.values()
    return strip(layer.layer.unrolled((own.layer_variable, own.current()) for own in held))


def _strip_layer(wrapper: PrunableLayer) -> Any:
    own, _ = copy_objects(wrapper)
    if isinstance(own.layer, ScannedStack):
        return _unrolled(own)
    own.release()
    _reset_initializers(own.layer)
    return own.layer


def _reset_initializers(layer: Any) -> None:
    """Puts Keras' default in the place of our initializers, which have done their work."""
    for name, value in list(vars(layer).items()):
        if isinstance(value, SparseInitializer):
            setattr(layer, name, keras.initializers.GlorotUniform())
