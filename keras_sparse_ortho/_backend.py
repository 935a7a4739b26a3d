"""Differences between TensorFlow, JAX and torch: compilation, gradients, float64."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import keras

from keras_sparse_ortho._interception import intercepted
from keras_sparse_ortho._keras_internals import float64_not_narrowed
from keras_sparse_ortho._types import Nested, Tensor

Operation = Callable[..., Any]

ScalarFunction = Callable[[list[Tensor]], Tensor]
"""From a list of tensors to a scalar tensor, in operations of Keras or of the backend."""


def compiled(function: Operation, *, xla: bool) -> Operation:
    """A pure function by `tf.function`, or with XLA by `jax.jit`; else as it is."""
    backend = keras.backend.backend()
    if backend == "tensorflow":
        import tensorflow as tf

        return tf.function(function, jit_compile=xla, autograph=False)
    if backend == "jax" and xla:
        import jax

        return jax.jit(function)
    return function


def device_kind() -> str:
    """The kind of the device that the backend computes on: `"cpu"`, `"gpu"` or `"tpu"`."""
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        return jax.default_backend()
    if backend == "tensorflow":
        import tensorflow as tf

        has_gpu = bool(tf.config.list_physical_devices("GPU"))
    else:
        import torch

        has_gpu = torch.cuda.is_available()
    return "gpu" if has_gpu else "cpu"


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

    host_state, *devices = [
        torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8)
        for state in states
    ]
    torch.set_rng_state(host_state)
    torch.cuda.set_rng_state_all(devices[: torch.cuda.device_count()])


def scatter_sorted(
    values: Tensor,
    indices: Tensor,
    size: int,
    after: Nested = None,
) -> Tensor:
    """A vector of zeros but for `values` at strictly increasing `indices`; its gradient gathers.

    It is made once the first tensor in `after` is there. XLA would make the values that depend on
    variables alone at the beginning of a step: all kernels of a model, in memory together.
    """
    backend = keras.backend.backend()
    if backend == "jax":
        import jax
        import jax.numpy as jnp

        zeros = jnp.full(size, _zero(values.dtype, indices, after, jax.Array))
        return zeros.at[indices].set(
            values,
            indices_are_sorted=True,
            unique_indices=True,
            mode="promise_in_bounds",
        )
    if backend == "tensorflow":
        import tensorflow as tf

        zeros = tf.fill([size], _zero(values.dtype, indices, after, tf.Tensor))
        return tf.tensor_scatter_nd_update(zeros, indices[:, None], values)
    return values.new_zeros(size).scatter(0, indices.long(), values)


def _zero(
    dtype: str,
    indices: Tensor,
    after: Nested,
    tensor_class: type,
) -> Tensor:
    """0, which XLA cannot know: it makes vectors of known zeros once, and copies them."""
    is_one = keras.ops.any(indices[:1] < 0)
    tensor = _first_tensor(after, tensor_class)
    # Over several devices the one that has the corner would have to tell the others.
    if tensor is not None and keras.distribution.distribution() is None:
        # A batch may be empty.
        corner = tensor[(slice(0, 1),) * len(tensor.shape)]
        is_nonzero = keras.ops.any(keras.ops.cast(corner, "bool"))
        is_one = keras.ops.logical_and(is_one, is_nonzero)
    return keras.ops.cast(is_one, dtype)


def _first_tensor(structure: Nested, tensor_class: type) -> Tensor | None:
    """The first tensor in a structure that is no scalar; `None` without one."""
    for leaf in keras.tree.flatten(structure):
        if not isinstance(leaf, tensor_class):
            continue
        shape = getattr(leaf, "shape", None)
        if shape is not None and len(shape) > 0:
            return leaf
    return None


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


def value_and_gradients(
    function: ScalarFunction, values: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """`f(v)` and `df/dv_i` at `v = values`, zeros where there is none; nests, and can be traced."""
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        return jax.value_and_grad(function)(list(values))
    if backend == "tensorflow":
        return _value_and_gradients_on_tensorflow(function, list(values))
    return _value_and_gradients_on_torch(function, list(values))


def _value_and_gradients_on_tensorflow(
    function: ScalarFunction, values: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    import tensorflow as tf

    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(values)
        result = function(values)
    zeros = tf.UnconnectedGradients.ZERO
    gradients = tape.gradient(result, values, unconnected_gradients=zeros)
    # Embeddings have sparse gradients.
    return result, [tf.convert_to_tensor(gradient) for gradient in gradients]


def _value_and_gradients_on_torch(
    function: ScalarFunction, values: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """The value of a function and its gradients, by autograd."""
    import torch

    # Inside another gradient the values hang on its graph, which must go on.
    is_nested = any(value.requires_grad for value in values)
    with torch.enable_grad():
        leaves = []
        for value in values:
            if not value.requires_grad:
                value = value.detach().requires_grad_()
            leaves.append(value)
        result = function(leaves)
        if not result.requires_grad:  # it depends on none of them
            return result, [torch.zeros_like(leaf) for leaf in leaves]
        gradients = torch.autograd.grad(
            result, leaves, create_graph=is_nested, allow_unused=True
        )
    filled = []
    for gradient, leaf in zip(gradients, leaves, strict=True):
        if gradient is None:
            gradient = torch.zeros_like(leaf)
        filled.append(gradient)
    return result, filled


def hessian_vector_product(
    function: ScalarFunction,
    values: Sequence[Tensor],
    vectors: Sequence[Tensor],
) -> list[Tensor]:
    """`H u`, where `H` is the Hessian of `f` at `values` over all of them and `u = vectors`."""

    def slope_along_vectors(inner_values: list[Tensor]) -> Tensor:
        _, gradients = value_and_gradients(function, inner_values)
        products = [
            keras.ops.sum(gradient * vector)
            for gradient, vector in zip(gradients, vectors, strict=True)
        ]
        return sum(products[1:], products[0])

    with second_derivatives():
        _, products = value_and_gradients(slope_along_vectors, values)
    return products


def hessian_times_gradient(
    function: ScalarFunction, values: Sequence[Tensor]
) -> list[Tensor]:
    """`H g` with the gradient `g` of `f` at `values`: the gradient of `|g|^2 / 2`."""

    def half_square(inner_values: list[Tensor]) -> Tensor:
        _, gradients = value_and_gradients(function, inner_values)
        squares = [
            keras.ops.sum(keras.ops.square(gradient)) for gradient in gradients
        ]
        return sum(squares[1:], squares[0]) / 2

    with second_derivatives():
        _, products = value_and_gradients(half_square, values)
    return products


def second_derivatives() -> contextlib.AbstractContextManager[None]:
    """Replaces operations that can be differentiated only once. Call the model inside.

    `tf.nn.moments` stops the gradient of the mean in the variance; flash attention has no second
    derivative. Outputs and first derivatives stay the same, up to rounding. Other threads go on
    with the operations of the backend.
    """
    return intercepted(*_differentiable_twice())


def _differentiable_twice() -> tuple[ModuleType, str, Operation]:
    """The function of the backend to replace, as its module and name, and the replacement."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.nn, "moments", _whole_moments
    if keras.backend.backend() == "jax":
        import jax

        return jax.nn, "dot_product_attention", _attention_by_xla
    import torch

    return (
        torch.nn.functional,
        "scaled_dot_product_attention",
        _attention_by_products,
    )


def _attention_by_xla(
    original: Operation, *args: Any, **settings: Any
) -> Tensor:
    return original(*args, **{**settings, "implementation": "xla"})


_choice_of_attention = threading.Lock()  # torch has one for all threads


def _attention_by_products(
    original: Operation, *args: Any, **settings: Any
) -> Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with _choice_of_attention, sdpa_kernel(SDPBackend.MATH):
        return original(*args, **settings)


def _whole_moments(
    original: Callable[..., Any],
    x: Tensor,
    axes: Sequence[int],
    shift: Tensor | None = None,
    keepdims: bool = False,
    name: str | None = None,
) -> tuple[Tensor, Tensor]:
    """`tf.nn.moments`, whose variance passes gradients through the mean, too."""
    import tensorflow as tf

    x = tf.convert_to_tensor(x)
    wide = x
    if x.dtype == tf.float16:
        wide = tf.cast(x, tf.float32)
    mean = tf.reduce_mean(wide, axes, keepdims=True)
    squares = tf.math.squared_difference(wide, mean)
    variance = tf.reduce_mean(squares, axes, keepdims=True)
    if not keepdims:
        mean = tf.squeeze(mean, axes)
        variance = tf.squeeze(variance, axes)
    return tf.cast(mean, x.dtype), tf.cast(variance, x.dtype)
