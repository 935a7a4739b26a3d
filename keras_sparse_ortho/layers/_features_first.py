"""What the layers of a single product share: features first, then bias and activation."""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import keras

from keras_sparse_ortho.layers._block_operands import BlockOperands
from keras_sparse_ortho.layers._block_product import block_product

ops = keras.ops

_NOT_ELEMENTWISE = ("softmax", "log_softmax", "sparsemax", "glu")
# Those of Keras that treat every entry alike, so that the axes may stand in any order.
_ELEMENTWISE = {
    id(function)
    for name, function in vars(keras.activations).items()
    if callable(function)
    and name not in (*_NOT_ELEMENTWISE, "get", "serialize", "deserialize")
    and not isinstance(function, type)
}


def is_elementwise(activation: Any) -> bool:
    """Whether it is known that an activation treats every entry alike."""
    return id(activation) in _ELEMENTWISE


def product_features_first(x: Any, kernel: BlockOperands) -> Any:
    """`K^T x` for `x` of shape `(inputs, n)`."""
    grid = kernel.grid
    columns = x.shape[1] if x.shape[1] is not None else ops.shape(x)[1]
    outputs = block_product(
        ops.reshape(x, (grid.in_blocks, grid.rows, columns)),
        kernel.blocks,
        kernel.inputs_of,
        kernel.slots_of,
    )
    return ops.reshape(outputs, (grid.outputs, columns))


def product_of(sizes: Sequence[Any]) -> Any:
    """The product of sizes, of which some may be tensors; 1 for none."""
    return functools.reduce(operator.mul, sizes, 1)
