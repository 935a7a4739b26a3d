"""`jacobian_singular_values`: the spectrum of the input-output Jacobian."""

import math
from collections.abc import Callable
from typing import Any, cast

import keras
import numpy as np

from keras_sparse_ortho._backend import compiled, second_derivatives, value_and_gradients
from keras_sparse_ortho._keras_internals import VariableOverrides, from_zero_states
from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.models import check_built

# Entries in one batch of products: enough to fill the cores, about 64 MiB in float32.
_LARGEST_BATCH = 2**24


def jacobian_singular_values(model: Any, x: Any) -> np.ndarray:
    """Singular values of `J = d output / d input` for every sample, in inference.

    All rows of `J`, or columns if there are fewer, come from products with unit vectors; then a
    dense SVD. All singular values near 1 is called dynamical isometry.

    Args:
        model: A built Keras model or layer with one input and one output.
        x: Float inputs of shape `(samples, ...)`.

    Returns:
        An array `(samples, min(inputs, outputs))`, descending.

    Raises:
        NotPrunableError: A model that is not built, or has several inputs or outputs.
        ValueError: Integer inputs, no samples.

    Limits: products are computed in float32 (`keras.config.floatx()`), so values below about 1e-6
    of the largest are rounding. Samples must not affect each other (no batch statistics). The time
    grows with the smaller of inputs and outputs.

    Example:

    >>> import keras, numpy as np
    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, use_bias=False)])
    >>> model.layers[0].set_weights([np.array([[3.0, 0.0], [0.0, 2.0], [0.0, 0.0]])])
    >>> jacobian_singular_values(model, np.ones((1, 3))).round(6).tolist()
    [[3.0, 2.0]]

    Reference:

    - Pennington, Schoenholz and Ganguli, "Resurrecting the sigmoid in deep learning through
      dynamical isometry" (NeurIPS 2017), arXiv 1711.04735
    """
    return np.linalg.svd(_JacobianProducts(model, x).matrices(), compute_uv=False)


class _JacobianProducts:
    """`J u` and `J^T v` for every sample of `x`, with inputs and outputs flattened."""

    def __init__(self, model: Any, x: Any) -> None:
        check_built(model)
        inputs = keras.tree.flatten(x)
        if len(inputs) != 1:
            raise NotPrunableError(
                f"Jacobians are computed for models with one input. Received: {len(inputs)} inputs"
            )
        (x,) = inputs
        x = x if isinstance(x, np.ndarray) else to_numpy(x)  # the backend may narrow its dtype
        if x.ndim < 1 or len(x) == 0 or not np.issubdtype(x.dtype, np.floating):
            raise ValueError(
                "`x` must hold float inputs, at least one sample; integers have no derivative "
                "(pass the part of the model after the embedding). "
                f"Received: x of shape {x.shape} and dtype {x.dtype}"
            )
        self._model = model
        self._x = x.astype(keras.config.floatx())
        self._states = [v for v in model.variables if keras.backend.is_float_dtype(v.dtype)]
        self._output_shape = self._compiled(self._outputs)(self._x[:1]).shape[1:]

    def matrices(self) -> np.ndarray:
        """`J`, or `J^T` if that has fewer rows, for every sample."""
        shape, product = self._output_shape, cast(Any, self._transpose_times)
        inputs, outputs = (math.prod(sizes) for sizes in (self._x.shape[1:], shape))
        if inputs < outputs:
            shape, product = self._x.shape[1:], self._jacobian_times
        step, unit, samples = self._compiled(product), np.eye(math.prod(shape)), len(self._x)
        # Chunks of equal size, so that at most two programs are compiled.
        at_once = max(1, _LARGEST_BATCH // (samples * max(inputs, outputs)))
        parts = []
        for start in range(0, len(unit), at_once):
            chunk = unit[start : start + at_once]
            x = np.repeat(self._x, len(chunk), axis=0)
            u = np.tile(chunk, (samples, 1)).reshape(-1, *shape).astype(x.dtype)
            parts.append(step(x, u).reshape(samples, len(chunk), -1))
        return np.concatenate(parts, axis=1).astype("float64")

    def _compiled(self, function: Any) -> Callable[..., np.ndarray]:
        """A function of arrays from one of the states and tensors."""
        xla = keras.backend.backend() == "jax"  # on TensorFlow it takes longer than the products
        step = compiled(function, xla=xla)
        states = [variable.value for variable in self._states]
        return lambda *arrays: to_numpy(step(states, *map(keras.ops.convert_to_tensor, arrays)))

    def _outputs(self, states: list[Any], x: Any) -> Any:
        states = [keras.ops.stop_gradient(state) for state in states]
        pairs = zip(self._states, states, strict=True)
        # The outer scope catches and drops updates, of seed states for instance.
        with keras.StatelessScope(), VariableOverrides(pairs), from_zero_states(self._model):
            found = keras.tree.flatten(self._model(x, training=False))
        if len(found) != 1:
            raise NotPrunableError(
                f"Jacobians are computed for models with one output. Received: {len(found)} outputs"
            )
        return keras.ops.cast(found[0], x.dtype)

    def _transpose_times(self, states: list[Any], x: Any, v: Any) -> Any:
        """`J^T v`: the gradient of `<f(x), v>` with respect to `x`."""
        # And to `v`: torch keeps the graph only for values that another gradient hangs on.
        _, (product, _) = value_and_gradients(
            lambda pair: keras.ops.sum(self._outputs(states, pair[0]) * pair[1]), [x, v]
        )
        return product

    def _jacobian_times(self, states: list[Any], x: Any, u: Any) -> Any:
        # `J^T v` is linear in v, so the gradient of <J^T v, u> is J u. This needs no forward-mode
        # rules, which some functions lack (live blocks).
        v = keras.ops.zeros((x.shape[0], *self._output_shape), dtype=x.dtype)
        with second_derivatives():
            _, (product,) = value_and_gradients(
                lambda values: keras.ops.sum(self._transpose_times(states, x, values[0]) * u), [v]
            )
        return product
