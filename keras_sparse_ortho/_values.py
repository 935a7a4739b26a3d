"""How weights are read and written, wherever their arrays are: one device, several, other hosts.

Everything in the package that brings a weight to NumPy, or sets one, goes through here.
"""

import hashlib
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._keras_internals import awaits_value, give_value, layout_of
from keras_sparse_ortho.errors import WorkerError


def to_numpy(value: Any, *, copy: bool = True) -> np.ndarray:
    """A tensor or variable of the backend as a NumPy array, bfloat16 as float32.

    Of an array on JAX that other processes hold parts of, the parts are gathered: then all of them
    must call this, in the same order.

    Args:
        value: The tensor or variable.
        copy: `False` where the array is only read, and not kept: it may be the tensor's memory.
    """
    value = keras.ops.convert_to_tensor(value)
    if keras.backend.standardize_dtype(value.dtype) == "bfloat16":
        value = keras.ops.cast(value, "float32")  # torch cannot hand bfloat16 to NumPy
    if _is_held_elsewhere(value):
        from jax.experimental import multihost_utils

        return np.array(multihost_utils.process_allgather(value, tiled=True))
    return keras.ops.convert_to_numpy(value) if copy else _seen(value)


def _seen(value: Any) -> np.ndarray:
    """A tensor as an array, which may be its memory."""
    return np.asarray(value.detach().cpu() if keras.backend.backend() == "torch" else value)


def assign(variable: Any, value: Any) -> None:
    """Sets a variable to an array, number or tensor of its shape; its layout stays what it is."""
    waits = awaits_value(variable)
    if layout_of(variable) is not None and not _is_on_devices(value):
        value = placed(np.asarray(value), variable)
    if waits:
        give_value(variable, value)
    else:
        variable.assign(value)


def placed(array: Any, like: Any) -> Any:
    """An array as a tensor that is laid out on devices as a variable of its shape is.

    On JAX every device takes its own part from the host's array; nothing goes through the memory of
    a first device. Where several processes hold the variable, all of them must have the same array:
    its digests are compared.

    Args:
        array: Of any dtype; it gets that of the variable, unless it is a mask. A tensor stays as it
            is.
        like: The variable.

    Raises:
        WorkerError: On all processes, if they have other arrays.
    """
    if keras.ops.is_tensor(array):
        return array
    dtype = "bool" if array.dtype == bool else like.dtype
    layout = layout_of(like)
    if layout is None and array.size > 1 and not any(array.strides):  # one number: not carried
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
            f"All processes that hold '{variable.path}' must write the same values to it: give "
            "them the same seeds, models and masks. "
            f"Received: other values in the processes {other} than in the first"
        )


def _is_on_devices(value: Any) -> bool:
    return isinstance(value, keras.Variable) or keras.ops.is_tensor(value)


def _is_held_elsewhere(value: Any) -> bool:
    if keras.backend.backend() != "jax":
        return False
    import jax

    return (
        isinstance(value, jax.Array)
        and not value.is_fully_addressable
        and not value.is_fully_replicated
    )
