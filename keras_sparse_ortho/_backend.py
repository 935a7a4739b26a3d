"""Differences between TensorFlow, JAX and torch: compilation, gradients, float64."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from keras_sparse_ortho._interception import intercepted
from keras_sparse_ortho._keras_internals import float64_not_narrowed
from keras_sparse_ortho._types import Tensor

ScalarFunction = Callable[[list[Any]], Any]
"""From a list of tensors to a scalar tensor, in operations of Keras or of the backend."""


def compiled(function: Callable[..., Any], *, xla: bool) -> Callable[..., Any]:
    """A pure function by `tf.function`, or with XLA by `jax.jit`; else as it is."""
    backend = keras.backend.backend()
    if backend == "tensorflow":
        import tensorflow as tf

        return tf.function(function, jit_compile=xla, autograph=False)
    if backend == "jax" and xla:
        import jax

        return jax.jit(function)
    return function


def global_generators() -> list[str]:
    """States of the generators that layers draw from past Keras' seeds: torch's, for `Dropout`."""
    if keras.backend.backend() != "torch":
        return []
    import torch

    states = [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]
    return [bytes(state.cpu().numpy()).hex() for state in states]


def set_global_generators(states: Sequence[str]) -> None:
    """Sets the states that `global_generators` gave; those of devices that are gone are left."""
    if not states:
        return
    import torch

    own, *devices = [torch.frombuffer(bytearray.fromhex(s), dtype=torch.uint8) for s in states]
    torch.set_rng_state(own)
    torch.cuda.set_rng_state_all(devices[: torch.cuda.device_count()])


def scatter_sorted(values: Any, indices: Any, size: int, after: Any = None) -> Any:
    """A vector of zeros but for `values` at strictly increasing `indices`; its gradient gathers."""
    # Made once the first tensor in `after` is there. XLA would make what depends on variables alone
    # at the beginning of a step: all kernels of a model, in memory together.
    backend = keras.backend.backend()
    if backend == "jax":
        import jax
        import jax.numpy as jnp

        return (
            jnp.full(size, _zero(values.dtype, indices, after, jax.Array))
            .at[indices]
            .set(values, indices_are_sorted=True, unique_indices=True, mode="promise_in_bounds")
        )
    if backend == "tensorflow":
        import tensorflow as tf

        zeros = tf.fill([size], _zero(values.dtype, indices, after, tf.Tensor))
        return tf.tensor_scatter_nd_update(zeros, indices[:, None], values)
    return values.new_zeros(size).scatter(0, indices.long(), values)


def _zero(dtype: Any, indices: Any, after: Any, tensor: Tensor) -> Any:
    """0, which XLA cannot know: it makes vectors of known zeros once, and copies them."""
    zero = keras.ops.any(indices[:1] < 0)
    tensors = (x for x in keras.tree.flatten(after) if isinstance(x, tensor))
    first = next((x for x in tensors if x.shape is not None and len(x.shape)), None)
    # Over several devices the one that has the corner would have to tell the others.
    if first is not None and keras.distribution.distribution() is None:
        corner = first[tuple(slice(0, 1) for _ in first.shape)]  # a batch may be empty
        zero = keras.ops.logical_and(zero, keras.ops.any(keras.ops.cast(corner, "bool")))
    return keras.ops.cast(zero, dtype)


@contextlib.contextmanager
def float64_operations() -> Iterator[None]:
    """Lets `keras.ops` compute in float64 on JAX and torch, too, in one thread."""
    with contextlib.ExitStack() as stack:
        if keras.backend.backend() == "jax":
            import jax.experimental

            # It has moved out of `jax.experimental`.
            owner = jax if hasattr(jax, "enable_x64") else jax.experimental
            stack.enter_context(owner.enable_x64(True))
        stack.enter_context(float64_not_narrowed())
        yield


def value_and_gradients(function: ScalarFunction, values: Sequence[Any]) -> tuple[Any, list[Any]]:
    """`f(v)` and `df/dv_i` at `v = values`, zeros where there is none; nests, and can be traced."""
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


def hessian_vector_product(
    function: ScalarFunction, values: Sequence[Any], vectors: Sequence[Any]
) -> list[Any]:
    """`H u`, where `H` is the Hessian of `f` at `values` over all of them and `u = vectors`."""

    def along(inner: list[Any]) -> Any:
        _, found = value_and_gradients(function, inner)
        products = [keras.ops.sum(g * u) for g, u in zip(found, vectors, strict=True)]
        return sum(products[1:], products[0])

    with second_derivatives():
        return value_and_gradients(along, values)[1]


def second_derivatives() -> contextlib.AbstractContextManager[None]:
    """Replaces operations that can be differentiated only once. Call the model inside.

    `tf.nn.moments` stops the gradient of the mean in the variance; flash attention has no second
    derivative. Outputs and first derivatives stay the same, up to rounding. Other threads go on
    with the operations of the backend.
    """
    return intercepted(*_differentiable_twice())


def _differentiable_twice() -> tuple[Any, str, Callable[..., Any]]:
    """The function of the backend to replace, as its module and name, and the replacement."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.nn, "moments", _whole_moments
    if keras.backend.backend() == "jax":
        import jax

        return jax.nn, "dot_product_attention", _attention_by_xla
    import torch

    return torch.nn.functional, "scaled_dot_product_attention", _attention_by_products


def _attention_by_xla(original: Callable[..., Any], *args: Any, **settings: Any) -> Any:
    return original(*args, **{**settings, "implementation": "xla"})


_choice_of_attention = threading.Lock()  # torch has one for all threads


def _attention_by_products(original: Callable[..., Any], *args: Any, **settings: Any) -> Any:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with _choice_of_attention, sdpa_kernel(SDPBackend.MATH):
        return original(*args, **settings)


def _whole_moments(
    original: Callable[..., Any],
    x: Tensor,
    axes: Sequence[int],
    shift: Any = None,
    keepdims: bool = False,
    name: Any = None,
) -> tuple[Any, Any]:
    """`tf.nn.moments`, whose variance passes gradients through the mean, too."""
    import tensorflow as tf

    x = tf.convert_to_tensor(x)
    wide = tf.cast(x, tf.float32) if x.dtype == tf.float16 else x
    mean = tf.reduce_mean(wide, axes, keepdims=True)
    variance = tf.reduce_mean(tf.math.squared_difference(wide, mean), axes, keepdims=True)
    if not keepdims:
        mean, variance = tf.squeeze(mean, axes), tf.squeeze(variance, axes)
    return tf.cast(mean, x.dtype), tf.cast(variance, x.dtype)
