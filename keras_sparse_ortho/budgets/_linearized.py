"""The linear network of positive weights that SynFlow looks at."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import keras

from keras_sparse_ortho.kernels import walk

L = keras.layers

# Identity on what flows through a network of positive weights, or constant scaling of data.
_IDENTITIES = (
    L.Activation,
    L.ReLU,
    L.LeakyReLU,
    L.PReLU,
    L.ELU,
    L.Softmax,
    L.Rescaling,
    L.Normalization,
    L.UnitNormalization,
)
_BY_INPUT = tuple(
    getattr(L, name)
    for name in ("LayerNormalization", "GroupNormalization", "RMSNormalization")
    if hasattr(L, name)  # RMSNormalization is younger than the oldest Keras that we support
)


@contextlib.contextmanager
def linearized(model: Any, dtype: str) -> Iterator[None]:
    """Inside, the layers of a model compute in `dtype` and without activations.

    - activation functions, and layers that are one, are the identity (softmax included);
    - normalizations by statistics of the input keep their scale and offset and divide by nothing;
    - an Embedding is the product with a vector of ones, in the place of one-hot vectors.

    Recurrent gates, attention weights and operations that are no layers stay as they are.
    """
    with contextlib.ExitStack() as stack:
        for layer, _ in walk(model, ""):
            policy = layer.dtype_policy
            if getattr(layer, "quantization_mode", None) is None and policy.name != dtype:
                stack.callback(setattr, layer, "dtype_policy", policy)
                layer.dtype_policy = dtype
            call = _replacement(layer)
            if call is not None:
                stack.enter_context(mock.patch.object(layer, "call", call))
            activation = getattr(layer, "activation", None)
            if callable(activation) and not isinstance(activation, L.Layer):
                # Of cells too, whose recurrent_activation, the gates, stays.
                stack.enter_context(mock.patch.object(layer, "activation", _same))
        yield


def statistics_of(model: Any) -> dict[int, Any]:
    """The moving means of a model by `id`: in the linear network they are zero."""
    means = {}
    for layer, _ in walk(model, ""):
        mean = getattr(layer, "moving_mean", None)
        if isinstance(mean, keras.Variable):
            means[id(mean)] = mean
    return means


def _same(x: Any, *args: Any, **kwargs: Any) -> Any:
    return x


def _replacement(layer: Any) -> Callable[..., Any] | None:
    if isinstance(layer, _IDENTITIES):
        return _same
    if isinstance(layer, L.Embedding):
        return functools.partial(_embed_ones, layer)
    if isinstance(layer, _BY_INPUT):
        return functools.partial(_scale_and_shift, layer)
    return None


def _embed_ones(layer: Any, inputs: Any) -> Any:
    row = keras.ops.sum(keras.ops.convert_to_tensor(layer.embeddings), axis=0)
    return keras.ops.broadcast_to(row, (*inputs.shape, *row.shape))


def _scale_and_shift(layer: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    axis = layer.axis
    axes = [a % len(inputs.shape) for a in (axis if isinstance(axis, list | tuple) else [axis])]
    shape = [size if k in axes else 1 for k, size in enumerate(inputs.shape)]
    for name in ("gamma", "scale"):
        value = getattr(layer, name, None)
        if isinstance(value, keras.Variable):
            inputs = inputs * keras.ops.reshape(value.value, shape)
    beta = getattr(layer, "beta", None)
    if isinstance(beta, keras.Variable):
        inputs = inputs + keras.ops.reshape(beta.value, shape)
    return inputs
