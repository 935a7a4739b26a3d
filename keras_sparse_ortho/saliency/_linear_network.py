"""The linear network of positive weights that SynFlow looks at, and the gradient of its output."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import keras
import numpy as np

from keras_sparse_ortho._backend import compiled, float64_operations, value_and_gradients
from keras_sparse_ortho._keras_internals import VariableOverrides
from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.kernels import walk
from keras_sparse_ortho.layers import ScannedStack
from keras_sparse_ortho.models import input_specs

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


class SynapticFlow(contextlib.AbstractContextManager["SynapticFlow"]):
    """The gradient of the sum of outputs of a linearized model for an input of ones.

    To be used as a context, inside which the layers of the model are linearized (`linearized`).
    All float variables are their absolute values; moving means are zero, so that all stays
    positive.

    Args:
        model: A built model.
        variables: What to differentiate with respect to; `gradient` gets their values.
        dtype: The type that the network is computed in.
        input_shape: Shape of one sample, or a structure of them, where the model does not know it.
        jit_compile: Whether TensorFlow uses XLA.
    """

    def __init__(
        self,
        model: Any,
        variables: Sequence[Any],
        dtype: str,
        input_shape: Any = None,
        jit_compile: bool = False,
    ) -> None:
        self._model = model
        self._variables = list(variables)
        self._dtype = dtype
        self._jit = jit_compile
        self._stack = contextlib.ExitStack()
        self._ones = _ones(model, input_shape)
        self._step: Any = None

    def __enter__(self) -> "SynapticFlow":
        with contextlib.ExitStack() as stack:
            if self._dtype == "float64":
                stack.enter_context(float64_operations())
            stack.enter_context(linearized(self._model, self._dtype))
            given = {id(variable) for variable in self._variables}
            means = statistics_of(self._model)
            self._others = [
                (v, np.abs(to_numpy(v)) * (0.0 if id(v) in means else 1.0))
                for v in self._model.variables
                if id(v) not in given and keras.backend.is_float_dtype(v.dtype)
            ]
            self._rest = [self._tensor(value) for _, value in self._others]
            self._step = self._compiled()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._step = None
        self._stack.close()

    def gradient(self, values: Sequence[np.ndarray]) -> tuple[float, list[np.ndarray]]:
        """`R` and `dR/dv` for positive values of the variables."""
        total, gradients = self._step([self._tensor(value) for value in values], self._rest)
        return float(to_numpy(total)), [to_numpy(gradient) for gradient in gradients]

    def _tensor(self, value: np.ndarray) -> Any:
        return keras.ops.convert_to_tensor(value, dtype=self._dtype)

    def _compiled(self) -> Any:
        def pure(values: list[Any], rest: list[Any]) -> Any:
            def flow(inner: list[Any]) -> Any:
                pairs = [
                    *zip(self._variables, inner, strict=True),
                    *zip((v for v, _ in self._others), rest, strict=True),
                ]
                # The outer scope takes updates, of seed states for instance, and forgets them.
                with keras.StatelessScope(), VariableOverrides(pairs):
                    outputs = keras.tree.flatten(self._model(self._ones, training=False))
                    sums = [keras.ops.sum(keras.ops.cast(o, self._dtype)) for o in outputs]
                return sum(sums[1:], sums[0])

            return value_and_gradients(flow, values)

        # JAX would be slow without; on TensorFlow XLA is left to the user.
        return compiled(pure, xla=self._jit or keras.backend.backend() == "jax")


def _ones(model: Any, input_shape: Any) -> Any:
    """Ones for a batch of one, in the structure of the model's inputs."""
    if input_shape is None:
        specs = input_specs(model)
        if specs is None:
            raise NotPrunableError(
                "The shape of a sample is not known, or not fixed: give `input_shape`. "
                f"Received: the model '{model.name}', input_shape=None"
            )
        return keras.tree.map_structure(
            lambda spec: np.ones(spec.shape, dtype=_numpy_type(spec.dtype)), specs
        )
    if isinstance(input_shape, dict):
        return {key: _ones(model, shape) for key, shape in input_shape.items()}
    if input_shape and isinstance(input_shape[0], tuple | list):
        return [_ones(model, shape) for shape in input_shape]
    return np.ones((1, *input_shape), dtype="float32")


def _numpy_type(dtype: str) -> str:
    return "float32" if keras.backend.is_float_dtype(dtype) else str(dtype)


@contextlib.contextmanager
def linearized(model: Any, dtype: str) -> Iterator[None]:
    """Inside, the layers of a model compute in `dtype` and without activations.

    - activation functions, and layers that are one, are the identity (softmax included);
    - normalizations by statistics of the input keep their scale and offset and divide by nothing;
    - an Embedding is the product with a vector of ones, in the place of one-hot vectors.

    Recurrent gates, attention weights and operations that are no layers stay as they are.
    """
    with contextlib.ExitStack() as stack:
        for layer in _layers(model):
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
        found = [getattr(layer, "moving_mean", None)]
        if isinstance(layer, ScannedStack):
            found = [v for v in layer.weights if v.name.endswith("moving_mean")]
        means.update({id(mean): mean for mean in found if isinstance(mean, keras.Variable)})
    return means


def _layers(model: Any) -> Iterator[Any]:
    """All layers, and those that stand for the layers of a stack."""
    for layer, _ in walk(model, ""):
        yield layer
        if isinstance(layer, ScannedStack):
            yield from _layers(layer.layer)


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
