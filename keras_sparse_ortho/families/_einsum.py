"""EinsumDense: products along the axes that an equation names."""

import math

import keras
import numpy as np

from keras_sparse_ortho._types import Tensor
from keras_sparse_ortho.families._register_layer import register_layer
from keras_sparse_ortho.kernels import KernelLayout, Layouts, Rows
from keras_sparse_ortho.orthogonal import einsum_axes

L = keras.layers


class EinsumRows(Rows):
    """The inputs with their batch axes first, and the summed ones last."""

    def __init__(self, layer: keras.layers.Layer) -> None:
        self._equation = layer.equation

    def __call__(
        self,
        x: np.ndarray,
        chosen: np.ndarray | None = None,
    ) -> np.ndarray:
        data, kernel, output = einsum_axes(self._equation, x.ndim)
        batch = [name for name in kernel if name in data and name in output]
        summed = [
            name for name in kernel if name in data and name not in output
        ]
        free = [name for name in data if name in output and name not in kernel]
        order = [data.index(name) for name in (*batch, *free, *summed)]
        ordered = np.einsum(x, range(x.ndim), order)
        matrices = ordered.shape[: len(batch)]
        inputs = ordered.shape[ordered.ndim - len(summed) :]
        return ordered.reshape(math.prod(matrices), -1, math.prod(inputs))


def _layouts(layer: keras.layers.Layer) -> Layouts:
    return {"kernel": KernelLayout.einsum(layer.equation)}


def einsum_positions(
    layer: keras.layers.Layer,
    inputs: Tensor,
    outputs: Tensor,
) -> int:
    """Every input axis that the kernel does not have repeats it; the batch is one."""
    letters, kernel_letters, _ = einsum_axes(layer.equation, len(inputs.shape))
    positions = 1
    for letter, size in zip(letters, inputs.shape, strict=True):
        if letter not in kernel_letters:
            positions *= size
    return positions


def _rows(layer: keras.layers.Layer) -> Rows | None:
    data, kernel, output = einsum_axes(layer.equation)
    if any(name not in data and name not in output for name in kernel):
        return None  # the kernel alone is summed along an axis
    return EinsumRows(layer)


register_layer(
    L.EinsumDense,
    _layouts,
    positions=einsum_positions,
    rows={"kernel": _rows},
    rounding="by output",
)
