"""Layers whose zeros leave whole blocks, as a gather of these and grouped convolutions.

LiteRT cannot multiply blocks, but XNNPACK has fast grouped convolutions, in float32 and int8. Each
output block is a group of its live input blocks; blocks with other counts are other convolutions.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_sparse_ortho._values import assign, to_numpy
from keras_sparse_ortho.kernels import kernel_layouts, walk
from keras_sparse_ortho.layers import (
    BlockGrid,
    drop_padding,
    is_elementwise,
    pad_blocks,
    why_no_block_form,
)
from keras_sparse_ortho.models import rewrite
from keras_sparse_ortho.orthogonal import block_count, einsum_axes, to_blocks, whole_blocks

ops = keras.ops
L = keras.layers
_ONE_PRODUCT = L.Dense | L.EinsumDense | L.Conv1D | L.Conv2D
# Axes of size 1 around a gather. XNNPACK's reshapes, up to six axes, copy: a sixth of an encoder's
# time. With seven LiteRT reshapes, in no time.
_SINGLE = (1, 1, 1, 1)

# Sides of blocks: smaller gathers cost what the product saves; few kernels have larger zero blocks.
_LEAST, _MOST = 8, 256
_PADDED = 1.05  # a padded side relative to the side
_STORED = 0.7  # the share of a kernel's entries that may be left: less is no gain
_NEAR = 1.05  # entries of a cut over those of the cut with the fewest
# Counts of live blocks are raised to so many different ones, each a convolution of its own; to just
# one if that stores at most a tenth more.
_MOST_COUNTS, _FEWER = 4, 1.1


class ZeroBlocks(NamedTuple):
    """The blocks of a kernel that hold all nonzero entries, and some zeros, to few counts."""

    grid: BlockGrid
    inputs_of: np.ndarray  # the input block of each, by slot

    @property
    def stored(self) -> int:
        grid = self.grid
        return math.prod((self.inputs_of.size, grid.rows, grid.cols, *grid.taps))


def zero_blocks(kernel: np.ndarray) -> ZeroBlocks | str:
    """The blocks of a kernel `(*taps, inputs, outputs)`, or the reason that there are none."""
    *taps, inputs, outputs = kernel.shape
    live = np.asarray(kernel.any(axis=tuple(range(len(taps)))))
    cuts: list[tuple[int, BlockGrid]] = []
    for rows in _widths(inputs):
        lines = np.any(to_blocks(live, rows, 1)[..., 0], axis=1)  # (I, outputs)
        for cols in _widths(outputs):
            fans = np.maximum(to_blocks(lines, 1, cols).any(axis=(1, 3)).sum(axis=0), 1)
            grid = BlockGrid(inputs, outputs, rows, cols, taps=tuple(taps))
            cuts.append((int(fans.sum()) * rows * cols, grid))
    if not cuts:
        return (
            f"a side of its kernel of {inputs} x {outputs} cannot be cut into blocks of "
            f"{_LEAST} to {_MOST}"
        )
    fewest = min(stored for stored, _ in cuts)
    if fewest > _STORED * live.size:
        return (
            f"its zeros are not in whole blocks of {_LEAST} x {_LEAST} or more: in the best cut "
            f"the blocks with other values are {fewest / live.size:.0%} of the kernel"
        )
    grid = max(  # the largest are the fastest
        (grid for stored, grid in cuts if stored <= _NEAR * fewest),
        key=lambda one: (min(one.rows, one.cols), one.rows * one.cols),
    )
    table = to_blocks(live, grid.rows, grid.cols).any(axis=(1, 3))
    fans = np.maximum(table.sum(axis=0), 1)
    parts = 1 if fans.max() <= _FEWER * fans.mean() else _MOST_COUNTS
    for lines in np.array_split(np.argsort(fans, kind="stable"), parts):
        fans[lines] = fans[lines].max(initial=0)
    rank = np.argsort(np.argsort(~table, axis=0, kind="stable"), axis=0)
    table = rank < fans  # live ones come first
    if (fans == fans[0]).all():
        grid = dataclasses.replace(grid, fan_in=int(fans[0]))
    else:
        counts = tuple(fans.tolist()), tuple(table.sum(axis=1).tolist())
        grid = dataclasses.replace(grid, counts=counts)
    return ZeroBlocks(grid, grid.pattern(table))


def _widths(side: int) -> list[int]:
    """The sizes of blocks that cut a side into two or more, with at most little padding."""
    powers = [2**k for k in range(3, 9)]
    divisors = [width for width in range(_LEAST, _MOST + 1) if side % width == 0]
    return [
        width
        for width in sorted({*powers, *divisors})
        if width < side
        and whole_blocks(side, width) > 0
        and block_count(side, width) * width <= _PADDED * side
    ]


class BlockPlan(NamedTuple):
    """Which kernels of a plain model become grouped convolutions, and why the others do not."""

    found: dict[str, ZeroBlocks]
    kept: dict[str, str]


def plan_of(model: keras.Model) -> BlockPlan:
    """Which kernels of a plain model have zeros that leave whole blocks."""
    plan = BlockPlan({}, {})
    for layer, _ in walk(model, ""):
        kernel = getattr(layer, "kernel", None)
        if isinstance(kernel, keras.Variable):
            blocks = _blocks_of(layer)
            kind: Any = plan.kept if isinstance(blocks, str) else plan.found
            kind[kernel.path] = blocks
    for path in plan.found:  # a wrapper has the kernel of its layer
        plan.kept.pop(path, None)
    return plan


def as_convolutions(model: keras.Model, rows_apart: bool) -> keras.Model:
    """A copy of a plain model in which the layers of its plan are grouped convolutions.

    With `rows_apart` each row of the batch is an image that is quantized by itself. Else rows of
    Dense layers are pixels of one image: a fifth of the time at batch 64.
    """

    def replace(layer: Any, path: str, own: Any) -> Any:
        blocks = _blocks_of(layer)
        if isinstance(blocks, str):
            return None
        kind = ConvAsConvolution if isinstance(layer, L.Conv1D | L.Conv2D) else DenseAsConvolution
        return kind(own, blocks, rows_apart)

    return rewrite(model, replace)


def _blocks_of(layer: Any) -> ZeroBlocks | str:
    """The blocks of a plain layer, or why it has no form as a grouped convolution."""
    if isinstance(layer, L.Conv3D):
        return "LiteRT has no grouped convolutions of volumes"
    if not isinstance(layer, _ONE_PRODUCT):
        return f"a {type(layer).__name__} is not one product"
    if not layer.built:
        return "it was never called"
    if getattr(layer, "data_format", None) == "channels_first":
        return "its channels come first"
    if getattr(layer, "groups", 1) != 1:
        return f"it has groups={layer.groups}"
    if isinstance(layer, L.EinsumDense):
        data, _, output = einsum_axes(layer.equation, layer.input_spec.ndim)
        if output[0] != data[0]:
            return f"in {layer.equation!r} the first axis of input and output differ"
    found = zero_blocks(_canonical(layer))
    return found if isinstance(found, str) else why_no_block_form(layer) or found


def _canonical(layer: Any) -> np.ndarray:
    layout = kernel_layouts(layer)["kernel"]
    assert layout is not None
    found: np.ndarray = layout.to_canonical(np.asarray(to_numpy(layer.kernel)))[0, 0]
    return found


class _BlockConvolution(keras.layers.Layer):
    """The blocks of a plain layer, gathered and multiplied by one grouped convolution per count.

        y[.., j] = activation(conv([x[.., inputs_of[j, 0]], ..., x[.., inputs_of[j, k - 1]]],
                                   kernel[.., j]) + b[j])

    No shape depends on the batch, so a file's input can be resized. With `of_columns` the bias has
    an entry for each column of the kernel.
    """

    def __init__(
        self, layer: Any, blocks: ZeroBlocks, rows_apart: bool, of_columns: bool = True
    ) -> None:
        super().__init__(name=layer.name, dtype=layer.dtype_policy, trainable=layer.trainable)
        self.supports_masking = layer.supports_masking
        self.blocks, self.rows_apart = blocks, rows_apart
        self.activation = layer.activation
        grid = blocks.grid
        self.late_bias = columns = None
        if layer.bias is not None and of_columns:
            columns = to_blocks(np.asarray(to_numpy(layer.bias)).reshape(1, -1), 1, grid.cols)[0, 0]
        elif layer.bias is not None:
            self.late_bias = self._weight("bias", np.asarray(to_numpy(layer.bias)))
        values = grid.blocks(_canonical(layer), blocks.inputs_of)
        values = values.reshape(-1, *grid.blocks_shape[-len(grid.taps) - 2 :])
        self.kernels, self.biases, self.places = [], [], []
        lines = grid.of_outputs
        for own, span in zip(lines.groups, lines.spans, strict=True):
            # (m, k, *taps, r, c) to (h, w, k r, m c)
            kernel = values[span].reshape(len(own), -1, *values.shape[1:])
            kernel = kernel.transpose(grid.columns_order())
            shape = (*(*grid.taps, 1, 1)[:2], -1, len(own) * grid.cols)
            self.kernels.append(self._weight("kernel", kernel.reshape(shape)))
            bias = None if columns is None else self._weight("bias", columns[own].ravel())
            self.biases.append(bias)
            self.places.append(blocks.inputs_of.ravel()[span])
        # LiteRT fuses an activation that comes before the axes are restored.
        self._is_early = self.late_bias is None and is_elementwise(layer.activation)
        self.built = True

    def _weight(self, name: str, value: np.ndarray) -> Any:
        weight = self.add_weight(name=name, shape=value.shape)
        assign(weight, value)
        return weight

    def _product(self, x: Any, images: Sequence[int], *options: Any) -> Any:
        """The columns of `x`, rows of all inputs, as images; with bias and early activation."""
        grid = self.blocks.grid
        if grid.padded[0] > grid.inputs:
            x = pad_blocks(ops.reshape(x, (-1, grid.inputs)), 1, grid.inputs, grid.rows)
        x, parts = ops.reshape(x, (-1, *_SINGLE, grid.in_blocks, grid.rows)), []
        for kernel, bias, places in zip(self.kernels, self.biases, self.places, strict=True):
            own = ops.take(x, places, axis=1 + len(_SINGLE))
            own = ops.conv(ops.reshape(own, (*images, places.size * grid.rows)), kernel, *options)
            own = own if bias is None else own + bias
            parts.append(self.activation(own) if self._is_early else own)
        if len(parts) == 1:
            return parts[0]
        x = ops.concatenate(parts, axis=-1)
        size = images if images[0] == 1 else (-1, *x.shape[1:-1])
        x = ops.reshape(x, (-1, *_SINGLE, grid.out_blocks, grid.cols))
        x = ops.take(x, grid.of_outputs.place, axis=1 + len(_SINGLE))
        return ops.reshape(x, (*size, grid.padded[1]))

    def _columns(self, x: Any) -> Any:
        grid = self.blocks.grid
        if grid.padded[1] == grid.outputs:
            return x
        return drop_padding(ops.reshape(x, (-1, grid.padded[1])), 1, grid.outputs, grid.cols)


class DenseAsConvolution(_BlockConvolution):
    """A `Dense`, or an `EinsumDense` of a single matrix, as a convolution of one tap."""

    def __init__(self, layer: Any, blocks: ZeroBlocks, rows_apart: bool) -> None:
        equation = getattr(layer, "equation", "...a,ab->...b")
        data, kernel, output = einsum_axes(equation, layer.input_spec.ndim or 2)
        made = [letter for letter in kernel if letter not in data]
        axes = getattr(layer, "bias_axes", made) or ()
        of_columns = output[-len(made) :] == made and {*axes} == {*made}
        super().__init__(layer, blocks, rows_apart, of_columns)
        self._equation, self._sizes = equation, tuple(layer.kernel.shape)

    def call(self, inputs: Any) -> Any:
        """The product, between the orders of axes in the equation."""
        data, kernel, output = einsum_axes(self._equation, len(inputs.shape))
        free = [letter for letter in data if letter not in kernel]
        made = [letter for letter in kernel if letter not in data]
        sizes = dict(zip((*data, *kernel), (*inputs.shape, *self._sizes), strict=True))
        lengths = [sizes[letter] for letter in free[1:]]
        images = (-1, math.prod(lengths), 1) if self.rows_apart else (1, -1, 1)
        x = _transposed(inputs, data, [*free, *(letter for letter in kernel if letter in data)])
        x = self._columns(self._product(x, images))
        x = ops.reshape(x, (-1, *lengths, *(sizes[letter] for letter in made)))
        x = _transposed(x, [*free, *made], output)
        if self.late_bias is not None:
            x = x + self.late_bias
        return x if self._is_early else self.activation(x)


class ConvAsConvolution(_BlockConvolution):
    """A `Conv1D` or `Conv2D` as a grouped convolution of images, sequences being 1 wide."""

    def __init__(self, layer: Any, blocks: ZeroBlocks, rows_apart: bool) -> None:
        super().__init__(layer, blocks, rows_apart)
        self._rank, self._padding = layer.rank, layer.padding
        self._strides = (*layer.strides, 1)[:2]
        self._dilation_rate = (*layer.dilation_rate, 1)[:2]

    def call(self, inputs: Any) -> Any:
        padding, taps = self._padding, self.kernels[0].shape[:2]
        if padding == "causal":
            before = self._dilation_rate[0] * (taps[0] - 1)
            inputs, padding = ops.pad(inputs, [[0, 0], [before, 0], [0, 0]]), "valid"
        size = (*inputs.shape[1:-1], 1)[:2]
        single = not self.rows_apart and {*taps, *self._strides} == {1}
        options = self._strides, padding, "channels_last", self._dilation_rate
        x = self._product(inputs, (1, -1, 1) if single else (-1, *size), *options)
        size = (size if single else x.shape[1:-1])[: self._rank]
        x = ops.reshape(self._columns(x), (-1, *size, self.blocks.grid.outputs))
        return x if self._is_early else self.activation(x)


def _transposed(x: Any, before: list[str], after: list[str]) -> Any:
    return x if before == after else ops.transpose(x, [before.index(letter) for letter in after])
