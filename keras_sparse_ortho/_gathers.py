"""Gathers with custom gradients, and products in chunks, on TensorFlow, JAX and torch."""

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

# On torch those of Keras take 20 to 50 us each before they call torch's, and a GPU waits.
_ON_TORCH = keras.backend.backend() == "torch"
_OPS: Any = importlib.import_module("torch" if _ON_TORCH else "keras.ops")
reshape, matmul, concatenate = _OPS.reshape, _OPS.matmul, _OPS.concatenate
transpose = _OPS.permute if _ON_TORCH else _OPS.transpose

Gradient = Callable[..., tuple[Any, ...]]
"""`(*floats, *integers, upstream) -> gradients of the floats`."""


def gather(values: Any, indices: Any, axis: int = 0) -> Any:
    """`values` at integer `indices` along an axis, all of which must be in range."""
    # For others `keras.ops.take` has a select for each entry.
    if keras.backend.backend() == "jax":
        return _jax().numpy.take(values, indices, axis=axis, mode="clip")
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.gather(values, indices, axis=axis)
    values, indices = (
        x if _OPS.is_tensor(x) else keras.ops.convert_to_tensor(x) for x in (values, indices)
    )
    shape = (*values.shape[:axis], *indices.shape, *values.shape[axis + 1 :])
    return _OPS.index_select(values, axis, indices.reshape(-1)).reshape(shape)


def inverse_permutation(order: Any) -> Any:
    """Where each of `0 .. n - 1` stands in `order`, a vector of all of them in some order."""
    # TensorFlow's argsort has a dynamic size for XLA, which then draws the random numbers of every
    # dropout in the program ten times as slowly.
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.math.invert_permutation(order)
    return keras.ops.cast(keras.ops.argsort(order), "int32")


def made_once(value: Any) -> Any:
    """`value`, computed once by compiled programs on JAX, however often it is gathered from."""
    # XLA fuses an activation into a gather of its results, and computes it again for each entry.
    return _jax().lax.optimization_barrier(value) if keras.backend.backend() == "jax" else value


def written(value: Any, places: Any) -> Any:
    """`value`, written to memory in the order of its axes by XLA on CPUs."""
    # It fuses what is read into transpositions, these into gathers, and computes it again there. It
    # drops barriers, but not a condition that it cannot know: no index of `places` is negative.
    if keras.backend.backend() not in ("jax", "tensorflow"):
        return value

    def stored(value: Any, places: Any) -> Any:
        holds = places[(0,) * len(places.shape)] >= 0
        if keras.backend.backend() == "tensorflow":
            # Read the value here: TensorFlow moves what one branch needs there, and XLA fuses it.
            corner = keras.ops.sum(value[tuple(slice(1) for _ in value.shape)])
            holds = keras.ops.logical_or(holds, corner > 0)
        return keras.ops.cond(holds, lambda: value, lambda: keras.ops.zeros_like(value))

    return if_compiled_for_cpus(stored, lambda value, _: value, value, places)


def kept(value: Any, places: Any) -> Any:
    """`value`, `written`, and its gradient, too."""

    def gradient(_: Any, places: Any, upstream: Any) -> tuple[Any]:
        return (written(upstream, places),)

    return with_gradient(written, gradient, [value], [places])


def if_compiled_for_cpus(
    function: Callable[..., Any], otherwise: Callable[..., Any], *values: Any
) -> Any:
    """`function(*values)` in programs compiled for CPUs, else the equal `otherwise(*values)`."""
    backend = keras.backend.backend()
    if backend == "jax":  # decided when it is compiled, which may be for another device
        return _jax().lax.platform_dependent(*values, cpu=function, default=otherwise)
    if backend == "tensorflow":
        import tensorflow as tf

        if not (tf.executing_eagerly() or tf.config.list_logical_devices("GPU")):
            return function(*values)
    return otherwise(*values)


def with_gradient(
    function: Callable[..., Any], gradient: Gradient, floats: Sequence[Any], integers: Sequence[Any]
) -> Any:
    """`function(*floats, *integers)`, which closes over no variable, with its `gradient`."""
    floats, integers = ([_tensor(value) for value in values] for values in (floats, integers))
    if keras.backend.backend() == "jax":
        # jax.custom_gradient has no second derivatives with respect to closed-over values.
        return _jax_rule(function, gradient, len(floats))(*floats, *integers)

    def with_rule(*values: Any) -> tuple[Any, Any]:
        def rule(*args: Any, upstream: Any = None) -> Any:
            upstream = args[0] if upstream is None else upstream  # TensorFlow's, torch's
            found = gradient(*values, *integers, upstream)
            return found if len(found) > 1 else found[0]

        return function(*values, *integers), rule

    return keras.ops.custom_gradient(with_rule)(*floats)


def _tensor(value: Any) -> Any:
    value = keras.ops.convert_to_tensor(value)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.convert_to_tensor(value)  # of a variable Keras gives TensorFlow's own
    return value


def _jax_rule(function: Callable[..., Any], gradient: Gradient, count: int) -> Any:
    def forward(*values: Any) -> tuple[Any, Any]:
        return function(*values), values

    def backward(values: Any, upstream: Any) -> tuple[Any, ...]:
        return (*gradient(*values, upstream), *[None] * (len(values) - count))

    ruled = _jax().custom_vjp(function)
    ruled.defvjp(forward, backward)
    return ruled


def map_chunks(function: Callable[..., Any], arrays: Sequence[Any], chunks: int, like: Any) -> Any:
    """`function(*arrays)`, computed in chunks of the first axis, whose entries are independent."""
    # On CPUs temporaries then stay in the cache; elsewhere it is called once. `like` is a tensor of
    # the result's dtype, best the one of `arrays` that is computed last.
    if chunks == 1:
        return function(*arrays)
    mapped = _map_on_jax if keras.backend.backend() == "jax" else _map_on_tensorflow
    chunked = functools.partial(mapped, function, chunks)
    return if_compiled_for_cpus(chunked, lambda _, *whole: function(*whole), like, *arrays)


def _map_on_tensorflow(function: Callable[..., Any], chunks: int, like: Any, *arrays: Any) -> Any:
    import tensorflow as tf

    shapes = [(chunks, a.shape[0] // chunks, *keras.ops.shape(a)[1:]) for a in arrays]
    mapped = tf.map_fn(
        lambda part: function(*part),
        tuple(map(tf.reshape, arrays, shapes)),
        fn_output_signature=like.dtype,
        parallel_iterations=1,
    )
    return tf.reshape(mapped, (arrays[0].shape[0], *keras.ops.shape(mapped)[2:]))


def _map_on_jax(function: Callable[..., Any], chunks: int, like: Any, *arrays: Any) -> Any:
    jax = _jax()
    parts = [a.reshape(chunks, a.shape[0] // chunks, *a.shape[1:]) for a in arrays]
    one = jax.eval_shape(lambda: function(*(part[0] for part in parts)))
    # lax.map starts from zeros, which XLA keeps for all loops of the program and copies for each.
    begun = jax.numpy.broadcast_to(like.ravel()[0], (chunks, *one.shape))

    def write(index: Any, found: Any) -> Any:
        part = function(*(jax.lax.dynamic_index_in_dim(p, index, 0, False) for p in parts))
        return jax.lax.dynamic_update_index_in_dim(found, part, index, 0)

    mapped = jax.lax.fori_loop(0, chunks, write, begun)
    return mapped.reshape(-1, *mapped.shape[2:])


def _jax() -> Any:
    import jax

    return jax


def divisor_near(number: int, wanted: float) -> int:
    """The divisor of `number` that is nearest to `wanted`, as a ratio."""
    divisors = [k for k in range(1, number + 1) if number % k == 0]
    return min(divisors, key=lambda k: abs(np.log(k / wanted)))
