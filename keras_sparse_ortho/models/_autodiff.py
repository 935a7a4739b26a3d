"""Gradients of functions of tensors, the same on TensorFlow, JAX and torch, and nestable."""

from collections.abc import Callable, Sequence
from typing import Any

import keras

ScalarFunction = Callable[[list[Any]], Any]
"""From a list of tensors to a scalar tensor, in operations of Keras or of the backend."""


def value_and_gradients(function: ScalarFunction, values: Sequence[Any]) -> tuple[Any, list[Any]]:
    """`f(v)` and `df/dv_i` at `v = values`, with zeros where `f` does not depend on `v_i`.

    It can be nested, for second derivatives, and be traced by `tf.function` and `jax.jit`.

    Args:
        function: The function `f`.
        values: Float tensors of the backend.

    Returns:
        The scalar, and a list of tensors with the shapes and dtypes of `values`.
    """
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        return jax.value_and_grad(function)(list(values))
    if backend == "tensorflow":
        import tensorflow as tf

        values = list(values)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(values)
            result = function(values)
        found = tape.gradient(result, values, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        # Embeddings have sparse gradients.
        return result, [tf.convert_to_tensor(gradient) for gradient in found]
    if backend == "torch":
        import torch

        # Inside another gradient the values hang on its graph, which must go on.
        nested = any(value.requires_grad for value in values)
        with torch.enable_grad():
            values = [v if v.requires_grad else v.detach().requires_grad_() for v in values]
            result = function(values)
            if not result.requires_grad:  # it depends on none of them
                return result, [torch.zeros_like(value) for value in values]
            found = torch.autograd.grad(result, values, create_graph=nested, allow_unused=True)
        pairs = zip(found, values, strict=True)
        return result, [torch.zeros_like(v) if g is None else g for g, v in pairs]
    raise NotImplementedError(
        f"Gradients need TensorFlow, JAX or torch. Received: Keras backend {backend!r}"
    )


def hessian_vector_product(
    function: ScalarFunction, values: Sequence[Any], vectors: Sequence[Any]
) -> list[Any]:
    """`H u`, where `H` is the Hessian of `f` at `values` over all of them and `u = vectors`.

    As the gradient of `<df/dv, u>` (reverse mode twice), which no backend lacks an operation for.

    Args:
        function: The function `f`.
        values: Float tensors of the backend.
        vectors: Tensors of the same shapes.

    Returns:
        A list of tensors with the shapes of `values`.
    """

    def along(inner: list[Any]) -> Any:
        _, found = value_and_gradients(function, inner)
        products = [keras.ops.sum(g * u) for g, u in zip(found, vectors, strict=True)]
        return sum(products[1:], products[0])

    return value_and_gradients(along, values)[1]
