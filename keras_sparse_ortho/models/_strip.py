"""`strip`: the plain Keras model, with the effective weights in its layers."""

from typing import Any

import keras

from keras_sparse_ortho._keras_internals import maps_one_tensor
from keras_sparse_ortho._values import assign
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.initializers import SparseInitializer
from keras_sparse_ortho.kernels import is_sparse_layer, storages_of, walk
from keras_sparse_ortho.layers import PrunableLayer, ScannedStack
from keras_sparse_ortho.models._at_density import warn_unless_at_density
from keras_sparse_ortho.models._copying import Copy, copy_names, unbuilt_copy
from keras_sparse_ortho.models._prunable_weights import check_built
from keras_sparse_ortho.models._rewrite import rewrite
from keras_sparse_ortho.models._rewriter import Replacement
from keras_sparse_ortho.models._same_function import SameFunction
from keras_sparse_ortho.parametrizations import LowRankSoftThreshold

L = keras.layers


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
        A new, uncompiled model; a subclassed model is changed in place, and returned, and is to be
        compiled again.

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
    if _stack_in(model) is not None:
        return _unrolled(model)
    if is_sparse_layer(model):
        return _strip_layer(model)
    same = SameFunction(model)

    def complete(plain: Any) -> Any:
        same.check(plain)
        return plain

    return rewrite(model, _unwrap, _without_own_initializers, complete)


def _refuse_unfinished(model: Any) -> None:
    for layer, path in walk(model, ""):
        for key, storage in storages_of(layer).items():
            if (reason := storage.unfinished()) is not None:
                raise NotPrunableError(
                    f"The weight '{path}/{key}' cannot be stripped: {reason}. "
                    f"Received: {type(storage).__name__}"
                )


def _unwrap(layer: Any, path: str, copy: Copy) -> Replacement | None:
    if _stack_in(layer) is not None:
        return Replacement(_unrolled(layer), lambda: None)
    if not is_sparse_layer(layer):
        return None
    dense = dense_form(layer, copy)
    thin = _thin(layer, dense.layer, copy)
    if thin is not None:
        return thin

    def finish() -> None:
        dense.finish()
        _reset_initializers(dense.layer)

    return Replacement(dense.layer, finish)


def dense_form(layer: Any, copy: Copy) -> Replacement:
    """The plain layer in place of a sparse one, with its effective weights."""
    plain, inside = layer.dense_layer(copy), getattr(layer, "layer", None)

    def finish() -> None:
        if plain is inside:
            layer.release()
            return
        if inside is not None:
            copy_names(inside, plain)
        layer.fill_dense_layer(plain, own=copy.own)

    return Replacement(plain, finish)


def _stack_in(layer: Any) -> ScannedStack | None:
    """A stack, or the one that a layer wraps."""
    inside = getattr(layer, "layer", None) if is_sparse_layer(layer) else layer
    return inside if isinstance(inside, ScannedStack) else None


def _unrolled(layer: Any) -> Any:
    """The plain layers of a stack, in a Sequential model of its name."""
    stack = _stack_in(layer)
    assert stack is not None
    held = [] if layer is stack else layer.parametrizations.values()
    return strip(stack.unrolled((own.layer_variable, own.current()) for own in held))


def _strip_layer(layer: Any) -> Any:
    plain = layer.dense_layer(lambda inside: unbuilt_copy(inside, _without_own_initializers))
    layer.fill_dense_layer(plain)
    return plain


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


def _thin(wrapper: Any, clone: Any, copy: Copy) -> Replacement | None:
    """`Sequential([Dense(k), layer])` for a layer with the kernel `(m, k) @ (k, n)`.

    For Dense, and for LSTM, GRU and SimpleRNN, whose kernel is the one on the inputs. `None` where
    there is nothing to gain: the kernel has no factors, they are not smaller than their product, or
    the layer is called with a mask or states, or returns states, which a Sequential model cannot
    pass on.
    """
    layer: Any = getattr(wrapper, "layer", None)
    if clone is layer:
        return None
    if type(layer) is L.Dense:
        key = "kernel"
    elif type(layer) in (L.LSTM, L.GRU, L.SimpleRNN):
        if layer.return_state or layer.stateful:
            return None
        key = f"{layer.cell.name}/kernel"
    else:
        return None
    low_rank = storages_of(wrapper).get(key)
    if not isinstance(low_rank, LowRankSoftThreshold) or not maps_one_tensor(wrapper):
        return None
    left, right = low_rank.factors()
    if not 0 < left.size + right.size < low_rank.weight.size:
        return None
    thin = L.Dense(
        left.shape[1], use_bias=False, name=f"{layer.name}_thin", dtype=layer.dtype_policy
    )
    both = keras.Sequential([thin, clone], name=layer.name)

    def finish() -> None:
        kernel = getattr(clone, "cell", clone).kernel

        def set_weight(variable: Any, value: Any) -> None:
            assign(variable, right if variable is kernel else value)

        assign(thin.kernel, left)
        wrapper.fill_dense_layer(clone, set_weight, own=copy.own)

    return Replacement(both, finish)
