"""Plain Keras layers for a wrapped one whose kernel is a product of two thin factors."""

from collections.abc import Callable
from typing import Any

import keras

from keras_sparse_ortho._keras_internals import maps_one_tensor
from keras_sparse_ortho._values import assign
from keras_sparse_ortho.layers import PrunableLayer
from keras_sparse_ortho.models._rewriter import Replacement
from keras_sparse_ortho.parametrizations import LowRankSoftThreshold

L = keras.layers


def thin_replacement(
    wrapper: PrunableLayer, clone: Any, fill: Callable[[Any, Any, dict[int, Any]], None]
) -> Replacement | None:
    """`Sequential([Dense(k), layer])` for a layer with the kernel `(m, k) @ (k, n)`.

    For Dense, and for LSTM, GRU and SimpleRNN, whose kernel is the one on the inputs.

    Args:
        wrapper: The wrapped layer.
        clone: An unbuilt clone of the layer inside.
        fill: `fill(wrapper, clone, other)` sets the weights of the clone to the effective ones, but
            for those for which `other` has values, by `id` of the variable.

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
    both = keras.Sequential([thin, clone], name=layer.name)

    def finish() -> None:
        assign(thin.kernel, left)
        fill(wrapper, clone, {id(low_rank.weight.variable): right})

    return Replacement(both, finish)
