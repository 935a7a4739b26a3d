"""Products with live blocks: the inputs are gathered, and so are the gradients."""

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import keras

from keras_sparse_ortho._gathers import divisor_near, gather, map_chunks, with_gradient
from keras_sparse_ortho.layers._block_grid import BlockOperands

ops = keras.ops

# Gathered inputs in a chunk: they fit a core's cache beside weights and results.
_CHUNK_BYTES = 3 * 2**19
# Columns assumed where their number is not known when the call is traced.
_USUAL_COLUMNS = 128


def block_product(x: Any, blocks: Any, inputs_of: Any, slots_of: Any) -> Any:
    """Each output block from its `k` live input blocks, features first.

        Y[j] = sum_l W[j, l]^T X[inputs_of[j, l]]

    and the gradients, without a scatter,

        dW[j, l] = X[inputs_of[j, l]] dY[j]^T,    dX[i] = sum_s W[s] dY[s // k]

    over the slots `s = slots_of[i, .]` of input block `i`. Both products with the weights are one
    batched product of gathered blocks; what is gathered is `k c / r` times as large as the inputs
    of `J` blocks, and is never kept: it is gathered once more for `dW`.

    Args:
        x: `(I, r, n)`: `I` input blocks of `r` features, for `n` columns (samples, positions).
        blocks: `(J, k, r, c)`: the `k` live blocks of each of `J` output blocks of `c` features.
        inputs_of: `(J, k)` integers: the input block that each of them reads.
        slots_of: `(I, J k / I)` integers: the slots `j k + l` of each input block.

    Returns:
        `(J, c, n)`.

    Limits: on JAX derivatives of any order, but none in forward mode (`jax.jvp`).
    """
    return with_gradient(_product, _gradient, [x, blocks], [inputs_of, slots_of])


def _product(x: Any, blocks: Any, inputs_of: Any, slots_of: Any) -> Any:
    # Transposed chunk by chunk, so that there is no second copy of all blocks.
    return map_chunks(
        lambda w, found: ops.matmul(ops.transpose(_lines(w), (0, 2, 1)), _gathered(x, found)),
        [blocks, inputs_of],
        _chunks(x, inputs_of),
        x,
    )


def _gradient(x: Any, blocks: Any, inputs_of: Any, slots_of: Any, upstream: Any) -> tuple[Any, Any]:
    count, fan_in, rows, cols = blocks.shape
    of_blocks = map_chunks(
        lambda dy, found: ops.matmul(_gathered(x, found), ops.transpose(dy, (0, 2, 1))),
        [upstream, inputs_of],
        _chunks(x, inputs_of),
        upstream,
    )
    slots = ops.reshape(blocks, (count * fan_in, rows, cols))

    def of_inputs(found: Any) -> Any:
        several = found.shape
        weights = ops.reshape(gather(slots, ops.reshape(found, (-1,))), (*several, rows, cols))
        weights = ops.transpose(weights, (0, 2, 1, 3))
        weights = ops.reshape(weights, (several[0], rows, several[1] * cols))
        return ops.matmul(weights, _gathered(upstream, found // fan_in))

    of_x = map_chunks(of_inputs, [slots_of], _chunks(upstream, slots_of), upstream)
    return of_x, ops.reshape(of_blocks, blocks.shape)


def _lines(blocks: Any) -> Any:
    """`(J, k, r, c)` as `(J, k r, c)`."""
    count, fan_in, rows, cols = blocks.shape
    return ops.reshape(blocks, (count, fan_in * rows, cols))


def _gathered(x: Any, found: Any) -> Any:
    """`(m, k r, n)`: the blocks of `x`, `(I, r, n)`, that each of `(m, k)` rows names."""
    rows, several = x.shape[1], found.shape
    return ops.reshape(
        gather(x, ops.reshape(found, (-1,))), (several[0], several[1] * rows, ops.shape(x)[2])
    )


def _chunks(x: Any, found: Any) -> int:
    """The number of chunks of the first axis of `found`."""
    rows, columns = x.shape[1], x.shape[2] or _USUAL_COLUMNS
    of_one = found.shape[1] * rows * columns * _item_bytes(x)
    # A batched product of a single matrix would be one product for all cores.
    most = max(1, found.shape[0] // 2)
    wanted = min(math.ceil(found.shape[0] * of_one / _CHUNK_BYTES), most)
    return divisor_near(found.shape[0], wanted)


def spread_blocks(x: Any, inputs_of: Any, slots_of: Any, axis: int) -> Any:
    """The blocks of `x` along an axis that `inputs_of` names, its gradient gathered by `slots_of`.

        Y[.., s, ..] = X[.., inputs_of[s], ..],    dX[.., i, ..] = sum_s dY[.., s, ..]

    over the slots `s = slots_of[i, .]`. For layers that do not multiply the gathered blocks by a
    matrix, such as convolutions.

    Args:
        x: A tensor with `I` blocks along `axis`.
        inputs_of: `(J, k)` integers: a block for each of the slots `j k + l`.
        slots_of: `(I, J k / I)` integers: the slots of each block.
        axis: Which one.

    Returns:
        A tensor with `J k` blocks along `axis`.
    """

    def spread(x: Any, inputs_of: Any, slots_of: Any) -> Any:
        return gather(x, ops.reshape(inputs_of, (-1,)), axis)

    def collect(x: Any, inputs_of: Any, slots_of: Any, upstream: Any) -> tuple[Any]:
        total = gather(upstream, slots_of[:, 0], axis)
        for slot in range(1, slots_of.shape[1]):
            total = total + gather(upstream, slots_of[:, slot], axis)
        return (total,)

    return with_gradient(spread, collect, [x], [inputs_of, slots_of])


def _item_bytes(x: Any) -> int:
    return 2 if keras.backend.standardize_dtype(x.dtype).endswith("float16") else 4


# --- layers of a single product: features first, then bias and activation -------------------------

_NOT_ELEMENTWISE = ("softmax", "log_softmax", "sparsemax", "glu")
# Keras' own elementwise activations, for which the order of the axes does not matter.
_ELEMENTWISE = {
    id(function)
    for name, function in vars(keras.activations).items()
    if callable(function)
    and name not in (*_NOT_ELEMENTWISE, "get", "serialize", "deserialize")
    and not isinstance(function, type)
}


def is_elementwise(activation: Any) -> bool:
    """Whether an activation is known to be elementwise."""
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
    """The product of sizes, some of which may be tensors; 1 for none."""
    return functools.reduce(operator.mul, sizes, 1)
