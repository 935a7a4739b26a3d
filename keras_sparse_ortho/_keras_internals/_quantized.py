"""Kernels that `Layer.quantize` has packed: two integers of 4 bits in one byte."""

import math

import keras
import numpy as np


def packed_shape(
    layer: keras.layers.Layer,
    variable: keras.Variable,
) -> tuple[int, ...] | None:
    """Returns the shape of a kernel whose variable holds packed bytes; None for other variables."""
    if getattr(layer, "quantization_mode", None) != "int4":
        return None
    packed = variable.shape
    if variable.name == "embeddings":
        shape = (packed[0], layer.output_dim)
    elif variable.name == "reverse_embeddings":
        shape = (layer.output_dim, packed[1])
    elif variable.name != "kernel":
        return None
    elif isinstance(layer, keras.layers.EinsumDense):
        shape = layer.original_kernel_shape
    else:
        shape = (packed[0], layer.units)
    return tuple(map(int, shape))


def unpacked_value(
    layer: keras.layers.Layer,
    variable: keras.Variable,
) -> np.ndarray | None:
    """Returns the integers of a packed kernel less their zero points; None for other variables.

    Pruned entries are 0 there. With a block size Keras quantizes asymmetrically, and what was 0 is
    the zero point of its group.

    Args:
        layer: Layer that owns the variable.
        variable: Variable of packed bytes.
    """
    shape = packed_shape(layer, variable)
    if shape is None:
        return None
    value = keras.ops.convert_to_numpy(variable.value)
    packed = value.view(np.uint8)
    is_table_by_columns = variable.name == "reverse_embeddings"
    if is_table_by_columns:  # pairs are packed along the first axis
        packed = packed.T
    matrix = _unpacked(packed)
    length = math.prod(shape) // len(matrix)
    matrix = matrix[:, :length]
    if is_table_by_columns:
        matrix = matrix.T
    zeros = _zero_points(layer, variable.name)
    if zeros is not None:
        matrix = matrix - zeros
    return matrix.reshape(shape).astype(np.float32)


def _unpacked(stored: np.ndarray) -> np.ndarray:
    """Two signed integers of each byte, side by side; the first is in the lower bits."""
    lower = stored & 15
    upper = stored >> 4
    pairs = np.stack([lower, upper], axis=-1).astype(np.int16)
    integers = np.where(pairs > 7, pairs - 16, pairs)
    return integers.reshape(len(stored), -1)


def _zero_points(layer: keras.layers.Layer, name: str) -> np.ndarray | None:
    """The zero point of each entry, along the axis of the groups; None if all of them are 0."""
    zeros = getattr(layer, f"{name}_zero", None)
    if zeros is None:
        return None
    values = keras.ops.convert_to_numpy(zeros.value)
    points = np.rint(values)
    indices = keras.ops.convert_to_numpy(layer.g_idx.value)
    groups = indices.astype(int)
    if name == "embeddings":  # a table has groups of its columns
        return points[:, groups]
    return points[groups]
