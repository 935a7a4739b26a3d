"""`strip`: the plain Keras model, with the effective weights in its layers."""

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import keras

from keras_sparse_ortho._values import assign
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.initializers import SparseInitializer
from keras_sparse_ortho.kernels import walk
from keras_sparse_ortho.layers import BlockSparseLayer, PrunableLayer, ScannedStack
from keras_sparse_ortho.models._at_density import warn_unless_at_density
from keras_sparse_ortho.models._copying import Copy, copy_names, unbuilt_copy
from keras_sparse_ortho.models._prunable_weights import check_built
from keras_sparse_ortho.models._rewrite import rewrite
from keras_sparse_ortho.models._rewriter import Replacement
from keras_sparse_ortho.models._same_function import SameFunction
from keras_sparse_ortho.models._thin import thin_replacement


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

    def complete(plain: Any) -> Any:
        same.check(plain)
        return plain

    return rewrite(model, _unwrap, _without_own_initializers, complete)


def _refuse_unfinished(model: Any) -> None:
    for layer, path in walk(model, ""):
        made = layer.parametrizations if isinstance(layer, PrunableLayer) else {}
        for key, parametrization in made.items():
            if (reason := parametrization.unfinished()) is not None:
                raise NotPrunableError(
                    f"The weight '{path}/{key}' cannot be stripped: {reason}. "
                    f"Received: {type(parametrization).__name__}"
                )


def in_dense_form(layer: BlockSparseLayer) -> Replacement:
    """The namesake of a layer of live blocks in its place, with its kernel."""
    dense = layer.dense_layer()
    return Replacement(dense, lambda: layer.fill_dense_layer(dense))


def _unwrap(layer: Any, path: str, copy: Copy) -> Replacement | None:
    if isinstance(layer, BlockSparseLayer):
        return in_dense_form(layer)
    if isinstance(layer.layer if isinstance(layer, PrunableLayer) else layer, ScannedStack):
        return Replacement(_unrolled(layer), lambda: None)
    if not isinstance(layer, PrunableLayer):
        return None
    plain = copy(layer.layer)
    fill = functools.partial(_copy_effective, own=copy.own)
    if plain is not layer.layer:
        thin = thin_replacement(layer, plain, fill)
        if thin is not None:
            return thin

    def finish() -> None:
        if plain is layer.layer:
            layer.release()
            _reset_initializers(plain)
        else:
            copy_names(layer.layer, plain)
            fill(layer, plain)

    return Replacement(plain, finish)


def _unrolled(layer: PrunableLayer | ScannedStack) -> Any:
    """The plain layers of a stack, in a Sequential model of its name."""
    if isinstance(layer, ScannedStack):
        return strip(layer.unrolled())
    held = layer.parametrizations.values()
    return strip(layer.layer.unrolled((own.layer_variable, own.current()) for own in held))


def _strip_layer(wrapper: PrunableLayer) -> Any:
    inner = wrapper.layer
    if isinstance(inner, ScannedStack):
        return _unrolled(wrapper)
    plain = unbuilt_copy(inner, _without_own_initializers)
    plain.build_from_config(inner.get_build_config())
    _copy_effective(wrapper, plain)
    return plain


def _copy_effective(
    wrapper: PrunableLayer,
    plain: Any,
    other: Mapping[int, Any] = types.MappingProxyType({}),
    own: Callable[[list[Any]], list[Any]] = list,
) -> None:
    """Sets the weights of `plain` to those that the wrapped layer computes with.

    Where `other` has a value, by `id` of the wrapped layer's variable, to that one. Of the weights
    of both only those that `own` leaves.
    """
    effective = {id(p.layer_variable): p for p in wrapper.parametrizations.values()}
    for old, new in zip(own(wrapper.layer_weights), own(plain.weights), strict=True):
        if id(old) in other:
            assign(new, other[id(old)])
            continue
        value = effective[id(old)].current() if id(old) in effective else old.value
        assign(new, keras.ops.copy(value))  # on JAX `fit` frees the arrays of its model


def _without_own_initializers(config: Any) -> Any:
    """Puts Keras' default in the place of our initializers, everywhere in a configuration."""
    if isinstance(config, dict):
        known = keras.saving.get_registered_object(config.get("registered_name"))
        if isinstance(known, type) and issubclass(known, SparseInitializer):
            return keras.initializers.serialize(keras.initializers.GlorotUniform())
        if known is PrunableLayer:  # inside a block; it is unwrapped, and reset, in place
            return config
        return {key: _without_own_initializers(value) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return type(config)(_without_own_initializers(value) for value in config)
    return config


def _reset_initializers(layer: Any) -> None:
    for inner, _ in walk(layer, ""):
        for name, value in list(vars(inner).items()):
            if isinstance(value, SparseInitializer):
                setattr(inner, name, keras.initializers.GlorotUniform())
