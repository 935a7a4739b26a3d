"""Names the constants of a LiteRT file that hold kernels by the kernels' paths.

Converters name them after operations, or by numbers, and combine and split some. So they are found
by their values.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from keras_sparse_ortho.export._flatbuffer import (
    ModelT,
    TensorT,
)
from keras_sparse_ortho.export._weight_zeros import (
    stored_weights,
)

_SAMPLED_ROWS, _SAMPLED_COLUMNS = 32, 1024
# The cosine of a stored kernel and Keras' own. That of int4 is 0.98, that of other kernels small.
_SAME_KERNEL = 0.9


class _Matrix(NamedTuple):
    """Samples of the rows, one for each output, of a matrix of some shape."""

    shape: tuple[int, ...]
    rows: np.ndarray


class _Constant(NamedTuple):
    """A constant of the file, as the matrices that it may be."""

    tensor: TensorT
    matrices: list[_Matrix]


def name_kernels(
    model: ModelT,
    kernels: Mapping[str, Sequence[np.ndarray]],
) -> None:
    """Gives each constant that holds a kernel its path as a name; others keep theirs.

    The scale of a channel does not matter: converters fold normalizations into kernels.

    Args:
        model: The file. Constants in a sparse encoding keep their names.
        kernels: Arrays by path of a kernel: its value, or one for each part of it that the file
            has as a constant of its own.
    """
    unnamed = _constants(model)
    for path, parts in kernels.items():
        for number, part in enumerate(parts, start=1):
            holder = _holder_of(part, unnamed)
            if holder is None:
                continue
            name = path
            if len(parts) > 1:
                name = f"{path} ({number} of {len(parts)})"
            holder.tensor.name = name.encode()
            unnamed = [
                constant for constant in unnamed if constant is not holder
            ]


def _constants(model: ModelT) -> list[_Constant]:
    constants = []
    for weight in stored_weights(model):
        if weight.is_sparse:
            continue
        values = weight.values()
        by_first_axis = values.reshape(len(values), -1)
        # of depthwise kernels, embeddings
        by_last_axis = values.reshape(-1, values.shape[-1]).T
        matrices = [
            _sampled(by_first_axis),
            _sampled(by_last_axis),
        ]
        constants.append(_Constant(weight.tensor, matrices))
    return constants


def _holder_of(
    kernel: np.ndarray, constants: Iterable[_Constant]
) -> _Constant | None:
    """The constant that holds a kernel, if there is one."""
    matrices = []
    for axis in range(1, kernel.ndim):  # the first one that may be of outputs
        inputs = math.prod(kernel.shape[:axis])
        matrices.append(_sampled(kernel.reshape(inputs, -1).T))
    holder = None
    highest = _SAME_KERNEL
    for constant in constants:
        for stored in constant.matrices:
            for matrix in matrices:
                if matrix.shape != stored.shape:
                    continue
                cosine = _mean_cosine(matrix.rows, stored.rows)
                if cosine > highest:
                    holder = constant
                    highest = cosine
    return holder


def _sampled(matrix: np.ndarray) -> _Matrix:
    if matrix.shape[1] == 1:  # the cosine of two numbers is 1
        matrix = matrix.T
    height, width = matrix.shape
    rows = np.linspace(0, height - 1, min(height, _SAMPLED_ROWS)).astype(int)
    columns = np.linspace(0, width - 1, min(width, _SAMPLED_COLUMNS)).astype(
        int
    )
    return _Matrix(
        matrix.shape,
        matrix[np.ix_(rows, columns)].astype(np.float64),
    )


def _mean_cosine(one: np.ndarray, other: np.ndarray) -> float:
    """The mean size of the cosines of some rows that are finite, and not zero."""
    # In float16 weights beyond 65,504 are infinite.
    is_finite = np.isfinite(one).all(axis=1) & np.isfinite(other).all(axis=1)
    values = one[is_finite]
    expected = other[is_finite]
    products = np.abs(np.sum(values * expected, axis=1))
    norms = np.linalg.norm(values, axis=1) * np.linalg.norm(expected, axis=1)
    is_live = norms > 0
    if not is_live.any():
        return 0.0
    return float(np.mean(products[is_live] / norms[is_live]))
