"""`jacobian_singular_values`: the spectrum of the input-output Jacobian."""

import math

import keras
import numpy as np

from keras_sparse_ortho._backend import compiled, value_and_gradients
from keras_sparse_ortho._checked_data import check_inputs
from keras_sparse_ortho._checks import other_keywords
from keras_sparse_ortho._keras_internals import (
    VariableOverrides,
    from_zero_states,
)
from keras_sparse_ortho._types import Tensor, TensorLike
from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.models import check_built

# Entries in one batch of products: 64 MiB in float32 fill the cores.
_LARGEST_BATCH = 2**24


@other_keywords
def jacobian_singular_values(
    model: keras.layers.Layer, x: TensorLike
) -> np.ndarray:
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
    samples = _samples(model, x)
    products = _Products(model, samples.dtype)
    output_shape = products.outputs(samples[:1]).shape[1:]
    unit_vectors = np.eye(math.prod(output_shape), dtype=samples.dtype)
    # Chunks of equal size: at most two programs are compiled.
    largest_array = max(samples.size, len(samples) * len(unit_vectors))
    chunk_size = max(1, _LARGEST_BATCH // largest_array)
    rows = []
    for start in range(0, len(unit_vectors), chunk_size):
        chunk = unit_vectors[start : start + chunk_size]
        repeated = np.repeat(samples, len(chunk), axis=0)
        vectors = np.tile(chunk, (len(samples), 1)).reshape(-1, *output_shape)
        products_of_chunk = products.transpose_times(repeated, vectors)
        rows.append(products_of_chunk.reshape(len(samples), len(chunk), -1))
    jacobians = np.concatenate(rows, axis=1).astype("float64")
    return np.linalg.svd(jacobians, compute_uv=False)


class _Products:
    """Outputs of a model in inference, and products with the transpose of its Jacobian.

    Args:
        model: Model or layer with one output.
        dtype: Type of its inputs.
    """

    def __init__(
        self,
        model: keras.layers.Layer,
        dtype: np.dtype,
    ) -> None:
        self._model = model
        self._dtype = dtype.name
        self._states = [
            variable
            for variable in model.variables
            if keras.backend.is_float_dtype(variable.dtype)
        ]
        # On TensorFlow it takes longer than the products.
        xla = keras.backend.backend() == "jax"
        self._compiled_outputs = compiled(self._outputs, xla=xla)
        self._compiled_products = compiled(self._transpose_times, xla=xla)

    def outputs(self, x: np.ndarray) -> np.ndarray:
        """The outputs for samples."""
        return to_numpy(
            self._compiled_outputs(
                self._values(), keras.ops.convert_to_tensor(x)
            )
        )

    def transpose_times(
        self,
        x: np.ndarray,
        vectors: np.ndarray,
    ) -> np.ndarray:
        """`J^T v` for each sample and its vector: the gradient of `<f(x), v>` at `x`."""
        arrays = [keras.ops.convert_to_tensor(array) for array in (x, vectors)]
        return to_numpy(self._compiled_products(self._values(), *arrays))

    def _values(self) -> list[Tensor]:
        return [variable.value for variable in self._states]

    def _outputs(
        self,
        values: list[Tensor],
        x: Tensor,
    ) -> Tensor:
        """The outputs in inference, which gradients reach through the inputs alone."""
        constants = [keras.ops.stop_gradient(value) for value in values]
        pairs = zip(self._states, constants, strict=True)
        model = self._model
        # The outer scope catches and drops updates, of seed states for instance.
        with (
            keras.StatelessScope(),
            VariableOverrides(pairs),
            from_zero_states(model),
        ):
            outputs = keras.tree.flatten(model(x, training=False))
        if len(outputs) != 1:
            raise NotPrunableError(
                "Jacobians are computed for models with one output. "
                f"Received: {len(outputs)} outputs"
            )
        return keras.ops.cast(outputs[0], self._dtype)

    def _transpose_times(
        self,
        values: list[Tensor],
        x: Tensor,
        vectors: Tensor,
    ) -> Tensor:
        def product(inputs: list[Tensor]) -> Tensor:
            return keras.ops.sum(self._outputs(values, inputs[0]) * vectors)

        _, (gradient,) = value_and_gradients(product, [x])
        return gradient


def _samples(model: keras.layers.Layer, x: TensorLike) -> np.ndarray:
    """The samples as a float array of Keras' default type."""
    check_built(model)
    inputs = keras.tree.flatten(x)
    if len(inputs) != 1:
        raise NotPrunableError(
            f"Jacobians are computed for models with one input. Received: {len(inputs)} inputs"
        )
    (samples,) = inputs
    # of which the backend may narrow the dtype
    if not isinstance(samples, np.ndarray):
        samples = to_numpy(samples)
    is_float = np.issubdtype(samples.dtype, np.floating)
    if samples.ndim < 1 or len(samples) == 0 or not is_float:
        raise ValueError(
            "`x` must hold float inputs, at least one sample; integers have no derivative "
            "(pass the part of the model after the embedding). "
            f"Received: x of shape {samples.shape} and dtype {samples.dtype}"
        )
    check_inputs(model, samples, "x")
    return samples.astype(keras.config.floatx())
