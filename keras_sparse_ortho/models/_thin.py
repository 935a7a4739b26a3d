"""Plain Keras layers for a wrapped one whose kernel is a product of two thin factors."""

from typing import Any

import keras

from keras_sparse_ortho._keras_internals import maps_one_tensor
from keras_sparse_ortho._values import assign
from keras_sparse_ortho.layers import PrunableLayer
from keras_sparse_ortho.parametrizations import LowRankSoftThreshold

L = keras.layers


def thin_layers(wrapper: PrunableLayer) -> Any:
    """`Sequential([Dense(k), layer])`, built, for a layer with the kernel `(m, k) @ (k, n)`.

    For Dense, and for LSTM, GRU and SimpleRNN, whose kernel is the one on the inputs. The layer is
    a copy of the wrapped one.

    Returns:
        `None` where there is nothing to gain: the kernel has no factors, they are not smaller than
        their product, or the layer is called with a mask or states, or returns states, which a
        Sequential model cannot pass on.
    """
    layer = wrapper.layer
    if not maps_one_tensor(wrapper):
        return None
    if type(layer) is L.Dense:
        key = "kernel"
    elif type(layer) in (L.LSTM, L.GRU, L.SimpleRNN):
        if layer.return_state or layer.stateful:
            return None
        key = f"{layer.cell.name}/kernel"
    else:
        return None
    low_rank = wrapper.parametrizations.get(key)
    if not isinstance(low_rank, LowRankSoftThreshold):
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
