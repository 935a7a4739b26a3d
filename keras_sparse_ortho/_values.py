"""The values of weights: read and written on one device, on several, or over processes."""

import contextlib

import keras
import numpy as np

from keras_sparse_ortho._keras_internals import (
    awaits_value,
    give_value,
    layout_of,
)
from keras_sparse_ortho._types import Tensor, TensorLike
from keras_sparse_ortho._workers import digest_of as digest_of
from keras_sparse_ortho._workers import workers_of


def to_numpy(value: TensorLike, *, copy: bool = True) -> np.ndarray:
    """A tensor or variable of the backend as a NumPy array, bfloat16 as float32.

    JAX gathers shards over processes: all must call this, in one order. Without `copy` it may be
    the tensor's memory: do not change or keep it.
    """
    value = keras.ops.convert_to_tensor(value)
    if keras.backend.standardize_dtype(value.dtype) == "bfloat16":
        value = keras.ops.cast(value, "float32")  # torch cannot convert it
    if keras.backend.backend() == "jax":
        import jax

        if isinstance(value, jax.core.Tracer):
            raise ValueError(
                "A weight's values are needed while JAX traces the model, where it has none: build "
                "the model first, with a keras.Input or model.build(shape). "
                f"Received: a tracer of shape {value.shape}"
            )
        if not (value.is_fully_addressable or value.is_fully_replicated):
            from jax.experimental import multihost_utils

            return np.array(
                multihost_utils.process_allgather(value, tiled=True)
            )
    if copy:
        return keras.ops.convert_to_numpy(value)
    if keras.backend.backend() == "torch":
        value = value.detach().cpu()
    return np.asarray(value)


def without_gradients() -> contextlib.AbstractContextManager[None]:
    """Inside, no graph of gradients is kept, as TensorFlow and JAX keep none by themselves."""
    if keras.backend.backend() != "torch":
        return contextlib.nullcontext()
    import torch

    return torch.no_grad()


def is_traced(value: Tensor) -> bool:
    """Whether a tensor has no values yet, because a function is being compiled or mapped."""
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        return isinstance(value, jax.core.Tracer)
    return backend == "tensorflow" and not hasattr(value, "numpy")


def assign(variable: keras.Variable, value: TensorLike) -> None:
    """Sets a variable to an array, number or tensor of its shape; its layout does not change."""
    waits = awaits_value(variable)
    on_devices = isinstance(value, keras.Variable) or keras.ops.is_tensor(value)
    if layout_of(variable) is not None and not on_devices:
        value = placed(np.asarray(value), variable)
    if waits:
        give_value(variable, value)
    else:
        variable.assign(value)


def placed(array: TensorLike, like: keras.Variable) -> Tensor:
    """An array as a tensor of a variable's dtype (or bool) and device layout.

    JAX' devices take their shards of it. Processes with other arrays all raise a WorkerError.
    """
    if keras.ops.is_tensor(array):
        return array
    dtype = like.dtype
    if array.dtype == bool:
        dtype = "bool"
    layout = layout_of(like)
    if layout is None:
        is_broadcast_number = array.size > 1 and not any(array.strides)
        if is_broadcast_number:
            return keras.ops.full(
                array.shape, array.flat[0].item(), dtype=dtype
            )
        return keras.ops.convert_to_tensor(array, dtype=dtype)
    import jax

    array = array.astype(jax.numpy.dtype(dtype), copy=False)
    if not layout.is_fully_addressable:
        workers_of().compare(
            "in the values of a weight", {like.path: digest_of(array)}
        )
    return jax.make_array_from_callback(
        array.shape, layout, lambda index: array[index]
    )
