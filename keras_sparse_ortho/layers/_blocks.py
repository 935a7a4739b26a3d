"""Live blocks: which ones of a kernel (`BlockGrid`), their sharding, and products with them."""

import dataclasses
import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._checks import check_density, check_integer
from keras_sparse_ortho._gathers import (
    divisor_near,
    gather,
    made_once,
    map_chunks,
    with_gradient,
)
from keras_sparse_ortho._keras_internals import (
    Axes,
    DeferredVariables,
    axes_at,
    mesh_size,
    value_in_scope,
)
from keras_sparse_ortho.errors import DensityError, LayoutError
from keras_sparse_ortho.kernels import KernelLayout
from keras_sparse_ortho.orthogonal import (
    Block,
    RegularBlocks,
    block_count,
    check_regular,
    fan_step,
    from_blocks,
    regular_pattern,
    slots_of,
    to_blocks,
    whole_blocks,
)

ops = keras.ops

# A density is met as well as the grid allows, if that is not off by more than this part of it.
_FURTHEST = 0.25
# Sides, and live entries, are numbered by int32.
LARGEST = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class BlockGrid:
    """A kernel `(*taps, inputs, outputs)` of live blocks that are regular both ways.

    The `(inputs, outputs)` matrix is cut into `I x J` blocks of `rows x cols`. Each of the `J`
    output blocks has exactly `fan_in` live blocks, `inputs_of[j]`, and each of the `I` input blocks
    is used by exactly `fan_out = J fan_in / I` of them. A live block is so at all taps.
    """

    inputs: int
    outputs: int
    rows: int
    cols: int
    fan_in: int
    taps: tuple[int, ...] = ()

    @classmethod
    def for_density(
        cls,
        inputs: int,
        outputs: int,
        block: tuple[int, int],
        density: float,
        taps: Sequence[int] = (),
    ) -> "BlockGrid":
        """The grid nearest to a density; DensityError if it is off by more than a quarter."""
        density = check_density(density)
        dense = cls(inputs, outputs, *block, fan_in=block_count(inputs, block[0]), taps=(*taps,))
        dense.check_sides()
        blocks, step = dense.in_blocks, dense.fan_in_step
        fan_in = max(round(density * blocks / step) * step, step)
        if abs(fan_in / blocks - density) > _FURTHEST * density:
            below = math.floor(density * blocks / step) * step
            near = [k / blocks for k in (below, below + step) if k]
            raise DensityError(
                f"Blocks of {block[0]} x {block[1]} in a kernel of {inputs} inputs x {outputs} "
                f"outputs are regular both ways at multiples of the density {step / blocks:.6g}: "
                f"the nearest {'ones are' if len(near) > 1 else 'one is'} "
                f"{' and '.join(f'{value:.6g}' for value in near)}. Smaller blocks allow more. "
                f"Received: density={density!r}"
            )
        return dataclasses.replace(dense, fan_in=fan_in)

    def check_sides(self) -> None:
        """Refuses sides that the block does not divide, and those that no memory could hold."""
        if max(self.inputs, self.outputs, *self.taps) > LARGEST:
            raise LayoutError(
                f"Each side of a kernel has at most {LARGEST} entries. Received: {self.shape}"
            )
        if not Block(self.rows, self.cols, regular=True).divides(self.shape):
            _check_side("inputs", self.inputs, self.rows)
            _check_side("outputs", self.outputs, self.cols)

    @property
    def in_blocks(self) -> int:
        """`I`."""
        return block_count(self.inputs, self.rows)

    @property
    def out_blocks(self) -> int:
        """`J`."""
        return block_count(self.outputs, self.cols)

    @property
    def fan_out(self) -> int:
        """Output blocks that use an input block."""
        return self.out_blocks * self.fan_in // self.in_blocks

    @property
    def fan_in_step(self) -> int:
        """`fan_in` must be a multiple of this, or `fan_out` is no integer."""
        return fan_step(self.in_blocks, self.out_blocks)

    @property
    def density(self) -> float:
        """Live fraction, exactly."""
        return self.fan_in / self.in_blocks

    @property
    def live(self) -> int:
        """Live entries."""
        return math.prod(self.shape) * self.fan_in // self.in_blocks

    @property
    def padded(self) -> tuple[int, int]:
        """Inputs and outputs with the padding of blocks that have one less."""
        return self.in_blocks * self.rows, self.out_blocks * self.cols

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the kernel."""
        return (*self.taps, self.inputs, self.outputs)

    @property
    def blocks_shape(self) -> tuple[int, ...]:
        """`(J, fan_in, *taps, rows, cols)`: the live blocks of each output block."""
        return (self.out_blocks, self.fan_in, *self.taps, self.rows, self.cols)

    @property
    def columns_shape(self) -> tuple[int, ...]:
        """`(*taps, fan_in rows, outputs)`: the live entries of each output in a column."""
        return (*self.taps, self.fan_in * self.rows, self.padded[1])

    def columns_order(self) -> tuple[int, ...]:
        """The axes of `blocks_shape` in the order of `columns_shape`."""
        taps = range(2, 2 + len(self.taps))
        return (*taps, 1, len(self.taps) + 2, 0, len(self.taps) + 3)

    def side_by_side(self, drawn: RegularBlocks) -> tuple[np.ndarray, np.ndarray]:
        """Blocks `(J, k, *taps, r, c)` and `inputs_of` of a draw, whose gates follow each other."""
        blocks, inputs_of = drawn.with_taps()[0], drawn.inputs_of[0]
        return blocks.reshape(self.blocks_shape), inputs_of.reshape(-1, self.fan_in)

    def draw_pattern(self, seed: int) -> np.ndarray:
        """A random `inputs_of`."""
        rng = np.random.default_rng(seed)
        return regular_pattern(self.in_blocks, self.out_blocks, self.fan_in, rng)

    def check_pattern(self, inputs_of: Any) -> np.ndarray:
        """`inputs_of` as an int32 array; ValueError if it is not one for this grid."""
        pattern = np.asarray(inputs_of)
        if pattern.shape != (self.out_blocks, self.fan_in):
            raise ValueError(
                f"`inputs_of` must have the shape {(self.out_blocks, self.fan_in)}: {self.fan_in} "
                f"input blocks for each output block. Received: shape {pattern.shape}"
            )
        check_regular(pattern, self.in_blocks)
        return pattern.astype(np.int32)

    def whole(self, blocks: np.ndarray, inputs_of: np.ndarray) -> np.ndarray:
        """All blocks `(J, I, *taps, rows, cols)`, zero but for the live ones."""
        dense = np.zeros(
            (self.out_blocks, self.in_blocks, *self.taps, self.rows, self.cols), blocks.dtype
        )
        dense[np.arange(self.out_blocks)[:, None], inputs_of] = blocks
        return dense

    def kernel(self, blocks: np.ndarray, inputs_of: np.ndarray) -> np.ndarray:
        """The kernel with these live blocks, zero elsewhere."""
        dense = self.whole(blocks, inputs_of).transpose(self.columns_order())
        return from_blocks(dense, self.inputs, self.outputs)

    def mask(self, inputs_of: np.ndarray) -> np.ndarray:
        """Which entries of the kernel are live."""
        return self.kernel(np.ones(self.blocks_shape, dtype=bool), inputs_of)

    def blocks(self, kernel: np.ndarray, inputs_of: np.ndarray) -> np.ndarray:
        """The live blocks of a kernel."""
        split = to_blocks(kernel, self.rows, self.cols)
        ordered = split.transpose(np.argsort(self.columns_order()))
        return ordered[np.arange(self.out_blocks)[:, None], inputs_of]


def pattern_of(mask: np.ndarray, block: tuple[int, int]) -> tuple[BlockGrid, np.ndarray]:
    """The grid and `inputs_of` of a mask; LayoutError unless it is one of whole regular blocks."""
    *taps, inputs, outputs = mask.shape
    BlockGrid(inputs, outputs, *block, fan_in=1).check_sides()
    inside = (*range(len(taps)), len(taps) + 1, len(taps) + 3)
    live = to_blocks(mask, *block, fill=True).all(axis=inside)
    in_part = int((live != to_blocks(mask, *block, fill=False).any(axis=inside)).sum())
    if in_part:
        raise LayoutError(
            f"The mask is not one of whole blocks of {block[0]} x {block[1]} that are live at all "
            f"taps. Received: {in_part} blocks that are live in part"
        )
    fan_in, fan_out = live.sum(axis=0), live.sum(axis=1)
    if len({*fan_in.tolist()}) > 1 or len({*fan_out.tolist()}) > 1 or not fan_in.any():
        raise LayoutError(
            f"Blocks of {block[0]} x {block[1]} must be as many in every line of blocks, both ways"
            f". Received: from {fan_in.min()} to {fan_in.max()} for an output block, from "
            f"{fan_out.min()} to {fan_out.max()} for an input block"
        )
    grid = BlockGrid(inputs, outputs, *block, fan_in=int(fan_in[0]), taps=tuple(taps))
    return grid, np.nonzero(live.T)[1].reshape(grid.out_blocks, grid.fan_in).astype(np.int32)


def check_mask(mask: np.ndarray, block: tuple[int, int], layout: KernelLayout | None) -> None:
    """Raises LayoutError unless a mask is of whole regular blocks, as many in all matrices."""
    canonical = (layout or KernelLayout.convolution()).to_canonical(mask)
    matrices = canonical.reshape(-1, *canonical.shape[2:])
    fans = sorted({pattern_of(matrix, block)[0].fan_in for matrix in matrices})
    if len(fans) > 1:
        raise LayoutError(
            "Each matrix of a kernel must have as many live blocks in a line. "
            f"Received: {fans[0]} to {fans[-1]}"
        )


def check_block(block: Any) -> tuple[int, int]:
    """`block` as `(rows, cols)`: a positive integer for both, or a pair of them."""
    pair = tuple(block) if isinstance(block, tuple | list) else (block, block)
    if len(pair) != 2:
        raise ValueError(
            f"`block` must be an integer or a pair (rows, cols). Received: block={block!r}"
        )
    return check_integer("block", pair[0]), check_integer("block", pair[1])


def _check_side(side: str, size: int, step: int) -> None:
    if size % step:
        below = size // step * step
        near = " and ".join(str(value) for value in (below, below + step) if value)
        divisors = ", ".join(str(k) for k in range(2, min(size, 257)) if size % k == 0)
        raise LayoutError(
            f"Blocks need {side} that {step} divides: {near} are nearest. "
            f"{f'Or take blocks of one of {divisors}.' if divisors else ''} "
            f"Received: {size} {side}"
        )


@dataclasses.dataclass(frozen=True)
class BlockOperands:
    """Blocks `(J, k, *taps, r, c)`, and where they stand: `(J, k)` and `(I, J k / I)` integers."""

    grid: BlockGrid
    blocks: Any
    inputs_of: Any
    slots_of: Any


class WholeKernel:
    """A placeholder for the kernel with all its blocks, without an array.

    Inside a scope that has a value for `variable`, the layer computes with a kernel whose blocks
    are all live, which gives the gradient of dead blocks. Elsewhere there are no such operands.
    """

    def __init__(self) -> None:
        self._variable: Any = None

    def variable(self, grid: BlockGrid, dtype: str) -> Any:
        """The Keras variable, `(J, I, *taps, r, c)`, without a value."""
        if self._variable is None:
            with DeferredVariables().creating():
                self._variable = keras.Variable(
                    "zeros", shape=_whole(grid).blocks_shape, dtype=dtype, name="whole_kernel"
                )
        return self._variable

    def operands(self, grid: BlockGrid, dtype: str) -> BlockOperands | None:
        """All blocks, if the enclosing scope has them."""
        given = None if self._variable is None else value_in_scope(self._variable)
        if given is None:
            return None
        whole = _whole(grid)
        pattern = np.tile(np.arange(grid.in_blocks, dtype=np.int32), (grid.out_blocks, 1))
        places = (pattern, slots_of(pattern, grid.in_blocks))
        return BlockOperands(whole, ops.cast(given, dtype), *map(ops.convert_to_tensor, places))


def _whole(grid: BlockGrid) -> BlockGrid:
    return dataclasses.replace(grid, fan_in=grid.in_blocks)


@dataclasses.dataclass(frozen=True)
class BlockAxes:
    """The mesh axes along which blocks and their indices are sharded; `None` without a layout.

    A `LayoutMap` entry for the kernel of the replaced layer, `"hidden/kernel"`, also applies to its
    blocks: they are sharded by output blocks along the same mesh axis. An entry for
    `"hidden/blocks"`, `(J, k, *taps, r, c)`, takes precedence.
    """

    blocks: Axes | None = None
    inputs_of: Axes | None = None
    slots_of: Axes | None = None

    @classmethod
    def at(cls, path: str, grid: BlockGrid) -> "BlockAxes":
        """Those of the layer at a path; LayoutError where the devices do not divide the blocks."""
        rank = len(grid.blocks_shape)
        given, whole = axes_at(f"{path}/blocks"), axes_at(path)
        # The path of gates is that of their kernel, whose entry also matches what is below it.
        if given is None or given == whole:
            kernel = whole or axes_at(f"{path}/kernel")
            if kernel is None:
                return cls()
            used = [axis for axis in reversed(kernel) if axis is not None]
            given = (used[0] if used else None,)
        axis = given[0] if given else None
        if axis is not None and grid.out_blocks % mesh_size(axis):
            raise LayoutError(
                f"The blocks of '{path}' are sharded by output blocks, whose number must be "
                f"a multiple of the {mesh_size(axis)} devices along '{axis}'. To replicate them, "
                f"give '{path}/blocks' an entry in the LayoutMap, such as {(None,) * rank}. "
                f"Received: {grid.out_blocks} output blocks"
            )
        whole = given + (None,) * (rank - len(given))
        return cls(whole, (axis, None), (None, None))


# --- products -------------------------------------------------------------------------------------

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
    batched product of gathered blocks, which are never kept: they are gathered once more for `dW`.
    `x` is `(I, r, n)`, `blocks` `(J, k, r, c)`, the result `(J, c, n)`. On JAX there are
    derivatives of any order, but none in forward mode.
    """
    return with_gradient(_product, _gradient, [x, blocks], [inputs_of, slots_of])


def _product(x: Any, blocks: Any, inputs_of: Any, slots_of: Any) -> Any:
    x = made_once(x)
    # Transposed chunk by chunk, so that there is no second copy of all blocks.
    return map_chunks(
        lambda w, found: ops.matmul(ops.transpose(_lines(w), (0, 2, 1)), _gathered(x, found)),
        [blocks, inputs_of],
        _chunks(x, inputs_of),
        x,
    )


def _gradient(x: Any, blocks: Any, inputs_of: Any, slots_of: Any, upstream: Any) -> tuple[Any, Any]:
    count, fan_in, rows, cols = blocks.shape
    x, upstream = made_once(x), made_once(upstream)
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
    rows, columns = x.shape[1:3]
    if not (isinstance(columns, int) and columns):  # None, or a symbol of jax.export
        columns = _USUAL_COLUMNS
    of_one = found.shape[1] * rows * columns * _item_bytes(x)
    # A batched product of a single matrix would be one product for all cores.
    most = max(1, found.shape[0] // 2)
    wanted = min(math.ceil(found.shape[0] * of_one / _CHUNK_BYTES), most)
    return divisor_near(found.shape[0], wanted)


def spread_blocks(x: Any, inputs_of: Any, slots_of: Any, axis: int) -> Any:
    """The blocks of `x` along an axis that `inputs_of` names, its gradient gathered by `slots_of`.

        Y[.., s, ..] = X[.., inputs_of[s], ..],    dX[.., i, ..] = sum_s dY[.., s, ..]

    over the slots `s = slots_of[i, .]`, for layers such as convolutions. `x` has `I` blocks along
    the axis, the result `J k`.
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
    x = padded_blocks(x, 0, grid.inputs, grid.rows)
    outputs = block_product(
        ops.reshape(x, (grid.in_blocks, grid.rows, columns)),
        kernel.blocks,
        kernel.inputs_of,
        kernel.slots_of,
    )
    outputs = ops.reshape(outputs, (grid.padded[1], columns))
    return without_padding(outputs, 0, grid.outputs, grid.cols)


def padded_blocks(x: Any, axis: int, side: int, width: int) -> Any:
    """`x` with zeros at the end of each block of an axis that has one entry less than `width`."""
    count, whole = block_count(side, width), whole_blocks(side, width)
    if whole == count:
        return x
    first, rest = ops.split(x, [whole * width], axis=axis)
    shape = list(ops.shape(rest))
    rest = ops.reshape(rest, [*shape[:axis], count - whole, width - 1, *shape[axis + 1 :]])
    ends = [[0, 0] for _ in rest.shape]
    ends[axis + 1][1] = 1
    shape[axis] = (count - whole) * width
    return ops.concatenate([first, ops.reshape(ops.pad(rest, ends), shape)], axis=axis)


def without_padding(x: Any, axis: int, side: int, width: int) -> Any:
    """The inverse of `padded_blocks`."""
    count, whole = block_count(side, width), whole_blocks(side, width)
    if whole == count:
        return x
    first, rest = ops.split(x, [whole * width], axis=axis)
    shape = list(ops.shape(rest))
    rest = ops.reshape(rest, [*shape[:axis], count - whole, width, *shape[axis + 1 :]])
    rest, _ = ops.split(rest, [width - 1], axis=axis + 1)
    shape[axis] = (count - whole) * (width - 1)
    return ops.concatenate([first, ops.reshape(rest, shape)], axis=axis)


def product_of(sizes: Sequence[Any]) -> Any:
    """The product of sizes, some of which may be tensors; 1 for none."""
    return functools.reduce(operator.mul, sizes, 1)
