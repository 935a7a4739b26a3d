"""Kernels that `Layer.quantize` has packed: two integers of 4 bits in one byte."""

from typing import Any

import keras
import numpy as np


def packed_shape(layer: Any, variable: Any) -> tuple[int, ...] | None:
    """Returns the shape of a kernel whose variable holds packed bytes; None for other variables."""
    if getattr(layer, "quantization_mode", None) != "int4":
        return None
    if variable.name == "embeddings":
        return int(variable.shape[0]), int(layer.output_dim)
    if variable.name == "reverse_embeddings":
        return int(layer.output_dim), int(variable.shape[1])
    if variable.name != "kernel":
        return None
    if isinstance(layer, keras.layers.EinsumDense):
        return tuple(int(size) for size in layer.original_kernel_shape)
    return int(variable.shape[0]), int(layer.units)


def unpacked_value(layer: Any, variable: Any) -> np.ndarray | None:
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
    of_columns = variable.name != "reverse_embeddings"  # the axis along which pairs are packed
    stored = keras.ops.convert_to_numpy(variable.value).view(np.uint8)
    matrix = _unpacked(stored if of_columns else stored.T)
    zeros = _zero_points(layer, variable.name)
    if not of_columns:
        matrix = matrix[:, : shape[0]].T
    elif len(shape) == 2:
        matrix = matrix[:, : shape[1]]
    else:
        matrix = matrix[:, : int(np.prod(shape)) // len(matrix)]
    if zeros is not None:
        matrix = matrix - zeros
    return matrix.reshape(shape).astype(np.float32)


def _unpacked(stored: np.ndarray) -> np.ndarray:
    """Two signed integers of each byte, side by side; the first is in the lower bits."""
    pairs = np.stack([stored & 15, stored >> 4], axis=-1).astype(np.int16)
    return np.where(pairs > 7, pairs - 16, pairs).reshape(len(stored), -1)


def _zero_points(layer: Any, name: str) -> np.ndarray | None:
    """The zero point of each entry, along the axis of the groups; None if all of them are 0."""
    zeros = getattr(layer, f"{name}_zero", None)
    if zeros is None:
        return None
    points = np.rint(keras.ops.convert_to_numpy(zeros.value))
    groups = keras.ops.convert_to_numpy(layer.g_idx.value).astype(int)
    # A table has groups of its columns; matrices have groups of their rows.
    return points[:, groups] if name == "embeddings" else points[groups]
