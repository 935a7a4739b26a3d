"""`jacobian_singular_values`: the spectrum of the input-output Jacobian."""

import math
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._backend import compiled, value_and_gradients
from keras_sparse_ortho._checked_data import check_inputs
from keras_sparse_ortho._checks import other_keywords
from keras_sparse_ortho._keras_internals import VariableOverrides, from_zero_states
from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.models import check_built

_LARGEST_BATCH = 2**24  # entries in one batch of products: 64 MiB in float32 fill the cores


@other_keywords
def jacobian_singular_values(model: Any, x: Any) -> np.ndarray:
    """Singular values of `J = d output / d input` for every sample, in inference.

    All rows of `J` come from products with unit vectors; then a dense SVD. All singular values near
    1 is called dynamical isometry. Returns an array `(samples, min(inputs, outputs))`, descending.

    Args:
        model: A built Keras model or layer with one input and one output.
        x: float array `(samples, ...)`.

    Raises:
        NotPrunableError: A model that is not built, or has several inputs or outputs.
        ValueError: Integer inputs, no samples.

    Limits: products are in `keras.config.floatx()`; in float32 values below about 1e-6 of the
    largest are rounding. Samples must not affect each other. Time grows with the outputs.

    Examples:
        >>> import keras, numpy as np
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, use_bias=False)])
        >>> model.layers[0].set_weights([np.array([[3.0, 0.0], [0.0, 2.0], [0.0, 0.0]])])
        >>> jacobian_singular_values(model, np.ones((1, 3))).round(6).tolist()
        [[3.0, 2.0]]

    Reference: Pennington et al. (NeurIPS 2017), arXiv 1711.04735
    """
    x = _samples(model, x)
    states = [v for v in model.variables if keras.backend.is_float_dtype(v.dtype)]
    xla = keras.backend.backend() == "jax"  # on TensorFlow it takes longer than the products

    def outputs(values: list[Any], x: Any) -> Any:
        pairs = zip(states, map(keras.ops.stop_gradient, values), strict=True)
        # The outer scope catches and drops updates, of seed states for instance.
        with keras.StatelessScope(), VariableOverrides(pairs), from_zero_states(model):
            found = keras.tree.flatten(model(x, training=False))
        if len(found) != 1:
            raise NotPrunableError(
                f"Jacobians are computed for models with one output. Received: {len(found)} outputs"
            )
        return keras.ops.cast(found[0], x.dtype)

    def transpose_times(values: list[Any], x: Any, v: Any) -> Any:
        """`J^T v`: the gradient of `<f(x), v>` with respect to `x`."""
        _, (product,) = value_and_gradients(
            lambda inputs: keras.ops.sum(outputs(values, inputs[0]) * v), [x]
        )
        return product

    def run(function: Any, *arrays: np.ndarray) -> np.ndarray:
        values = [variable.value for variable in states]
        return to_numpy(function(values, *map(keras.ops.convert_to_tensor, arrays)))

    shape = run(compiled(outputs, xla=xla), x[:1]).shape[1:]
    step, unit = compiled(transpose_times, xla=xla), np.eye(math.prod(shape))
    # Chunks of equal size: at most two programs are compiled.
    at_once = max(1, _LARGEST_BATCH // max(x.size, len(x) * len(unit)))
    rows = []
    for start in range(0, len(unit), at_once):
        chunk = unit[start : start + at_once]
        v = np.tile(chunk, (len(x), 1)).reshape(-1, *shape).astype(x.dtype)
        products = run(step, np.repeat(x, len(chunk), axis=0), v)
        rows.append(products.reshape(len(x), len(chunk), -1))
    return np.linalg.svd(np.concatenate(rows, axis=1).astype("float64"), compute_uv=False)


def _samples(model: Any, x: Any) -> np.ndarray:
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
    check_inputs(model, x, "x")
    return x.astype(keras.config.floatx())
