"""Gathers with custom gradients, and products in chunks, on TensorFlow, JAX and torch."""

import functools
import importlib
from collections.abc import Callable, Sequence
from types import ModuleType

import keras
import numpy as np

from keras_sparse_ortho._types import Tensor, TensorLike

Function = Callable[..., Tensor]

Gradient = Callable[..., tuple[Tensor, ...]]
"""`(*floats, *integers, upstream) -> gradients of the floats`."""

# On torch those of Keras take 20 to 50 us each before they call torch's, and a GPU waits.
_ON_TORCH = keras.backend.backend() == "torch"
_OPERATIONS = keras.ops
if _ON_TORCH:
    _OPERATIONS = importlib.import_module("torch")
reshape: Function = _OPERATIONS.reshape
matmul: Function = _OPERATIONS.matmul
concatenate: Function = _OPERATIONS.concatenate
transpose: Function = _OPERATIONS.transpose
if _ON_TORCH:
    transpose = _OPERATIONS.permute


def gather(
    values: TensorLike,
    indices: TensorLike,
    axis: int = 0,
) -> Tensor:
    """Returns `values` at integer `indices` along an axis, all of which must be in range.

    For indices out of range, `keras.ops.take` has a select for each entry.
    """
    if keras.backend.backend() == "jax":
        return _jax().numpy.take(values, indices, axis=axis, mode="clip")
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.gather(values, indices, axis=axis)
    import torch

    if not torch.is_tensor(values):
        values = keras.ops.convert_to_tensor(values)
    if not torch.is_tensor(indices):
        indices = keras.ops.convert_to_tensor(indices)
    before = values.shape[:axis]
    behind = values.shape[axis + 1 :]
    gathered = torch.index_select(values, axis, indices.reshape(-1))
    return gathered.reshape((*before, *indices.shape, *behind))


def inverse_permutation(order: Tensor) -> Tensor:
    """Returns where each of `0 .. n - 1` stands in `order`, a vector of all of them."""
    # TensorFlow's argsort has a dynamic size for XLA, which then draws the random numbers of every
    # dropout in the program ten times as slowly.
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.math.invert_permutation(order)
    return keras.ops.cast(keras.ops.argsort(order), "int32")


def made_once(value: Tensor) -> Tensor:
    """Returns `value`, computed once by compiled programs on JAX, however often it is gathered.

    XLA fuses an activation into a gather of its results, and computes it again for each entry.
    """
    if keras.backend.backend() == "jax":
        return _jax().lax.optimization_barrier(value)
    return value


def written(value: Tensor, places: Tensor) -> Tensor:
    """Returns `value`, written to memory in the order of its axes by XLA on CPUs.

    XLA fuses what is read into transpositions, these into gathers, and computes it again there. It
    drops barriers, but not a condition that it cannot know: no index of `places` is negative.

    Args:
        value: Tensor of floats.
        places: Tensor of integers, none of which is negative.
    """
    if keras.backend.backend() not in ("jax", "tensorflow"):
        return value

    def stored(value: Tensor, places: Tensor) -> Tensor:
        origin = (0,) * len(places.shape)
        is_true = places[origin] >= 0
        if keras.backend.backend() == "tensorflow":
            # Read the value here: TensorFlow moves what one branch needs there, and XLA fuses it.
            corner = (slice(1),) * len(value.shape)
            corner_sum = keras.ops.sum(value[corner])
            is_true = keras.ops.logical_or(is_true, corner_sum > 0)
        return keras.ops.cond(
            is_true, lambda: value, lambda: keras.ops.zeros_like(value)
        )

    return if_compiled_for_cpus(stored, lambda value, _: value, value, places)


def written_both_ways(value: Tensor, places: Tensor) -> Tensor:
    """Returns `value`, `written`, with a gradient that is `written`, too."""

    def gradient(
        _: Tensor,
        places: Tensor,
        upstream: Tensor,
    ) -> tuple[Tensor]:
        return (written(upstream, places),)

    return with_gradient(written, gradient, [value], [places])


def if_compiled_for_cpus(
    function: Function, otherwise: Function, *values: Tensor
) -> Tensor:
    """Calls `function` in programs compiled for CPUs, else the equal `otherwise`."""
    backend = keras.backend.backend()
    # Decided when it is compiled, which may be for another device.
    if backend == "jax":
        return _jax().lax.platform_dependent(
            *values, cpu=function, default=otherwise
        )
    if backend == "tensorflow":
        import tensorflow as tf

        if not (
            tf.executing_eagerly() or tf.config.list_logical_devices("GPU")
        ):
            return function(*values)
    return otherwise(*values)


def with_gradient(
    function: Function,
    gradient: Gradient,
    floats: Sequence[TensorLike],
    integers: Sequence[TensorLike],
) -> Tensor:
    """Calls a function that has its own gradient.

    Args:
        function: callable `(*floats, *integers) -> tensor`. It closes over no variable.
        gradient: callable `(*floats, *integers, upstream) -> gradients of the floats`.
        floats: Tensors or variables that have gradients.
        integers: Tensors or variables without.
    """
    float_tensors = [_tensor(value) for value in floats]
    integer_tensors = [_tensor(value) for value in integers]
    if keras.backend.backend() == "jax":
        # jax.custom_gradient has no second derivatives with respect to closed-over values.
        function_with_rule = _jax_rule(function, gradient, len(float_tensors))
        return function_with_rule(*float_tensors, *integer_tensors)

    def with_rule(*values: Tensor) -> tuple[Tensor, Gradient]:
        def rule(*args: Tensor, upstream: Tensor = None) -> Tensor:
            # TensorFlow passes it by position, torch by name.
            if upstream is None:
                upstream = args[0]
            gradients = gradient(*values, *integer_tensors, upstream)
            if len(gradients) == 1:
                return gradients[0]
            return gradients

        return function(*values, *integer_tensors), rule

    return keras.ops.custom_gradient(with_rule)(*float_tensors)


def _tensor(value: TensorLike) -> Tensor:
    value = keras.ops.convert_to_tensor(value)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        # For a variable Keras returns TensorFlow's own.
        return tf.convert_to_tensor(value)
    return value


def _jax_rule(
    function: Function,
    gradient: Gradient,
    float_count: int,
) -> Function:
    """The function with its gradient as a rule of JAX; integers come after the floats."""

    def forward(*values: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        # With its rule, for second derivatives: a kernel of Pallas has no other.
        return function_with_rule(*values), values

    def backward(
        values: tuple[Tensor, ...], upstream: Tensor
    ) -> tuple[Tensor, ...]:
        no_gradients = [None] * (len(values) - float_count)
        return (*gradient(*values, upstream), *no_gradients)

    function_with_rule = _jax().custom_vjp(function)
    function_with_rule.defvjp(forward, backward)
    return function_with_rule


def map_chunks(
    function: Function,
    arrays: Sequence[Tensor],
    chunks: int,
    like: Tensor,
) -> Tensor:
    """Calls a function on chunks of the first axis, whose entries are independent.

    On CPUs temporaries then stay in the cache. Elsewhere it is called once.

    Args:
        function: callable `(*arrays) -> tensor`.
        arrays: Tensors with one length of the first axis.
        chunks: int. Number of chunks, which divides that length.
        like: Tensor of the result's dtype, best the one of `arrays` that is computed last.
    """
    if chunks == 1:
        return function(*arrays)
    map_on_backend = _map_on_tensorflow
    if keras.backend.backend() == "jax":
        map_on_backend = _map_on_jax
    in_chunks = functools.partial(map_on_backend, function, chunks)
    return if_compiled_for_cpus(
        in_chunks, lambda _, *whole: function(*whole), like, *arrays
    )


def _map_on_tensorflow(
    function: Function, chunks: int, like: Tensor, *arrays: Tensor
) -> Tensor:
    """A function of chunks one after the other, by `tf.map_fn`."""
    import tensorflow as tf

    length = arrays[0].shape[0]
    stacks = []
    for array in arrays:
        _, *entry_shape = keras.ops.shape(array)
        stacks.append(
            tf.reshape(array, (chunks, length // chunks, *entry_shape))
        )
    results = tf.map_fn(
        lambda chunk: function(*chunk),
        tuple(stacks),
        fn_output_signature=like.dtype,
        parallel_iterations=1,
    )
    _, _, *entry_shape = keras.ops.shape(results)
    return tf.reshape(results, (length, *entry_shape))


def _map_on_jax(
    function: Function, chunks: int, like: Tensor, *arrays: Tensor
) -> Tensor:
    """A function of chunks one after the other, in a loop of JAX."""
    jax = _jax()
    stacks = []
    for array in arrays:
        length, *entry_shape = array.shape
        stacks.append(array.reshape(chunks, length // chunks, *entry_shape))

    def result_of_chunk(index: Tensor) -> Tensor:
        chunk = [
            jax.lax.dynamic_index_in_dim(stack, index, 0, False)
            for stack in stacks
        ]
        return function(*chunk)

    def write(index: Tensor, results: Tensor) -> Tensor:
        result = result_of_chunk(index)
        return jax.lax.dynamic_update_index_in_dim(results, result, index, 0)

    result_shape = jax.eval_shape(result_of_chunk, 0).shape
    # lax.map starts from zeros, which XLA keeps for all loops of the program and copies for each.
    results = jax.numpy.broadcast_to(like.ravel()[0], (chunks, *result_shape))
    results = jax.lax.fori_loop(0, chunks, write, results)
    return results.reshape(-1, *results.shape[2:])


def _jax() -> ModuleType:
    return importlib.import_module("jax")


def divisor_near(number: int, target: float) -> int:
    """Returns the divisor of `number` whose ratio to `target` is nearest to 1."""
    divisors = [
        divisor for divisor in range(1, number + 1) if number % divisor == 0
    ]
    return min(divisors, key=lambda divisor: abs(np.log(divisor / target)))
