"""`strip`: the plain Keras model, with the effective weights in its layers."""

from collections.abc import Callable, Iterator
from typing import Any

import keras

from keras_sparse_ortho._keras_internals import maps_one_tensor
from keras_sparse_ortho._values import assign
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.initializers import SparseInitializer
from keras_sparse_ortho.kernels import storages_of, walk
from keras_sparse_ortho.layers import plain_layer
from keras_sparse_ortho.models._apply import Plan, Target, verb
from keras_sparse_ortho.models._at_density import warn_unless_at_density
from keras_sparse_ortho.models._prunable_weights import check_built, prunable_weights
from keras_sparse_ortho.models._saved_layers import lists_its_layers
from keras_sparse_ortho.parametrizations import LowRankSoftThreshold

L = keras.layers


@verb
def strip(model: keras.Model) -> Plan:
    """Removes every wrapper: a plain Keras model with effective weights and equal outputs.

    Each wrapped weight `w` is replaced by its effective weight `w_e`, whose dead entries are
    exactly 0. A layer that computes on live blocks becomes the dense layer of Keras whose place it
    took. A product of two thin factors (`parametrizations.LowRankSoftThreshold`) becomes two
    layers, in a Sequential model of the layer's name, where these are smaller. Nothing of this
    package remains in the model: it can be saved, and loaded where the package is not installed.
    (Initializers of ours in the configuration, which have done their work, become Keras' default.)

    Args:
        model: A built Keras model, with or without wrapped layers.

    Returns:
        A new model, not compiled. The given one stays as it was; `strip.in_place` changes the model
        itself.

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
    in_graphs = {id(layer) for layer in _layers_of_graphs(model)}  # a layer alone is in none

    def around(layer: Any, own: Any, make: Callable[[], Any]) -> Any:
        new = _thin_layers(own) if id(layer) in in_graphs else None
        if new is None:
            new = plain_layer(own)  # not `make`: of two kernels of one path the plan has one
            _reset_initializers(own if new is None else new)
        return new

    weights = [w for w in prunable_weights(model, unregistered=True) if w.storage is not None]
    targets = {weight.path: Target("dense") for weight in weights}
    return Plan(weights, targets, keeps_function=True, around=around)


def _layers_of_graphs(model: Any) -> Iterator[Any]:
    """The layers that functional and Sequential models hold, whose classes do not make them."""
    for layer in model.layers if isinstance(model, keras.Model) and lists_its_layers(model) else []:
        yield layer
        if isinstance(layer, keras.Model):
            yield from _layers_of_graphs(layer)


def _refuse_unfinished(model: Any) -> None:
    for layer, path in walk(model, ""):
        for key, storage in storages_of(layer).items():
            if (reason := storage.unfinished()) is not None:
                raise NotPrunableError(
                    f"The weight '{path}/{key}' cannot be stripped: {reason}. "
                    f"Received: {type(storage).__name__}"
                )


def _reset_initializers(layer: Any) -> None:
    """Puts Keras' default in the place of our initializers, which have done their work."""
    for name, value in list(vars(layer).items()):
        if isinstance(value, SparseInitializer):
            setattr(layer, name, keras.initializers.GlorotUniform())


def _thin_layers(wrapper: Any) -> Any:
    """`Sequential([Dense(k), layer])`, built, for a layer with the kernel `(m, k) @ (k, n)`.

    For Dense, and for LSTM, GRU and SimpleRNN, whose kernel is the one on the inputs. The layer is
    a copy of the wrapped one.

    Returns:
        `None` where there is nothing to gain: the kernel has no factors, they are not smaller than
        their product, or the layer is called with a mask or states, or returns states, which a
        Sequential model cannot pass on.
    """
    layer: Any = getattr(wrapper, "layer", None)
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
    second = type(layer).from_config(layer.get_config())
    shape = layer.get_build_config()["input_shape"]
    both = keras.Sequential([thin, second], name=layer.name)
    both.build(shape)
    assign(thin.kernel, left)
    effective = {id(p.layer_variable): p.current() for p in wrapper.parametrizations.values()}
    effective[id(low_rank.weight.variable)] = right
    for old, new in zip(wrapper.layer_weights, second.weights, strict=True):
        # A copy: on JAX `fit` frees the arrays of its model.
        assign(new, keras.ops.copy(effective.get(id(old), old.value)))
    return both
