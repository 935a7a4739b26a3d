"""Reading and writing weights, whether their arrays are on one device, several, or other hosts.

Every conversion of a weight to NumPy, and every assignment, in the package uses this module.
"""

import hashlib
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._keras_internals import awaits_value, give_value, layout_of
from keras_sparse_ortho.errors import WorkerError


def to_numpy(value: Any, *, copy: bool = True) -> np.ndarray:
    """A tensor or variable of the backend as a NumPy array, bfloat16 as float32.

    A JAX array that is sharded over processes is gathered: all of them must call this, in the same
    order. Without `copy` the array may share the tensor's memory: it must not be changed or kept.
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

            return np.array(multihost_utils.process_allgather(value, tiled=True))
    if copy:
        return keras.ops.convert_to_numpy(value)
    return np.asarray(value.detach().cpu() if keras.backend.backend() == "torch" else value)


def assign(variable: Any, value: Any) -> None:
    """Sets a variable to an array, number or tensor of its shape; its layout does not change."""
    waits = awaits_value(variable)
    on_devices = isinstance(value, keras.Variable) or keras.ops.is_tensor(value)
    if layout_of(variable) is not None and not on_devices:
        value = placed(np.asarray(value), variable)
    if waits:
        give_value(variable, value)
    else:
        variable.assign(value)


def placed(array: Any, like: Any) -> Any:
    """An array as a tensor with the device layout of a variable of its shape.

    On JAX every device takes its own shard from the host's array; nothing passes through the memory
    of one device. If several processes hold the variable, all of them must have the same array, or
    all raise a WorkerError. The tensor has the dtype of the variable, or is bool as the array is.
    """
    if keras.ops.is_tensor(array):
        return array
    dtype = "bool" if array.dtype == bool else like.dtype
    layout = layout_of(like)
    if layout is None and array.size > 1 and not any(array.strides):  # a broadcast number
        return keras.ops.full(array.shape, array.flat[0].item(), dtype=dtype)
    if layout is None:
        return keras.ops.convert_to_tensor(array, dtype=dtype)
    import jax

    array = array.astype(jax.numpy.dtype(dtype), copy=False)
    if not layout.is_fully_addressable:
        _compare(array, like)
    return jax.make_array_from_callback(array.shape, layout, lambda index: array[index])


def _compare(array: np.ndarray, variable: Any) -> None:
    from jax.experimental import multihost_utils

    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    mark = np.frombuffer(hashlib.blake2b(data, digest_size=16).digest(), np.int32)
    marks = np.asarray(multihost_utils.process_allgather(mark))
    if (marks != marks[0]).any():
        other = np.flatnonzero((marks != marks[0]).any(axis=1)).tolist()
        raise WorkerError(
            f"All processes that hold '{variable.path}' must assign the same values to it: give "
            "them the same seeds, models and masks. "
            f"Received: different values in the processes {other} and in the first"
        )
