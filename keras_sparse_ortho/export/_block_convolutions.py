"""Layers that gather live blocks of their inputs for grouped convolutions."""

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._types import Tensor
from keras_sparse_ortho._values import assign, to_numpy
from keras_sparse_ortho.export._zero_blocks import (
    ZeroBlocks,
)
from keras_sparse_ortho.kernels import kernel_layouts
from keras_sparse_ortho.layers import (
    drop_padding,
    is_elementwise,
    pad_blocks,
)
from keras_sparse_ortho.orthogonal import (
    einsum_axes,
    to_blocks,
)

ops = keras.ops
# Axes of size 1 around a gather. XNNPACK's reshapes, up to six axes, copy: a sixth of an encoder's
# time. With seven LiteRT reshapes, in no time.
_SINGLE = (1, 1, 1, 1)
_AXIS_OF_BLOCKS = 1 + len(_SINGLE)


def canonical_kernel(
    layer: keras.layers.Layer,
) -> np.ndarray:
    """The kernel of a layer as `(*taps, inputs, outputs)`."""
    layout = kernel_layouts(layer)["kernel"]
    assert layout is not None
    kernel: np.ndarray = layout.to_canonical(
        np.asarray(to_numpy(layer.kernel))
    )[0, 0]
    return kernel


def grouped_kernels(kernel: np.ndarray, blocks: ZeroBlocks) -> list[np.ndarray]:
    """The kernels `(h, w, inputs of a group, outputs)` of the grouped convolutions.

    Args:
        kernel: Array `(*taps, inputs, outputs)`.
        blocks: `ZeroBlocks`. Its blocks. Each count of live blocks is a convolution of its own.
    """
    grid = blocks.grid
    # (*taps, rows, cols).
    size_of_block = grid.blocks_shape[-len(grid.taps) - 2 :]
    values = grid.blocks(kernel, blocks.inputs_of).reshape(-1, *size_of_block)
    taps = (*grid.taps, 1, 1)[:2]
    kernels = []
    for outputs, slots in zip(
        grid.of_outputs.groups,
        grid.of_outputs.spans,
        strict=True,
    ):
        # (m, k, *taps, r, c) to (h, w, k r, m c)
        group = values[slots].reshape(len(outputs), -1, *size_of_block)
        group = group.transpose(grid.columns_order())
        kernels.append(group.reshape(*taps, -1, len(outputs) * grid.cols))
    return kernels


class _BlockConvolution(keras.layers.Layer):
    """The blocks of a plain layer, gathered and multiplied by one grouped convolution per count.

        y[.., j] = activation(conv([x[.., inputs_of[j, 0]], ..., x[.., inputs_of[j, k - 1]]],
                                   kernel[.., j]) + b[j])

    No shape depends on the batch, so a file's input can be resized.

    Args:
        layer: The plain layer.
        blocks: `ZeroBlocks`. The blocks of its kernel.
        rows_apart: bool. Whether each row of a batch is an image, which is quantized by itself.
        of_columns: bool. Whether the bias has an entry for each column of the kernel.
    """

    def __init__(
        self,
        layer: keras.layers.Layer,
        blocks: ZeroBlocks,
        rows_apart: bool,
        of_columns: bool = True,
    ) -> None:
        super().__init__(
            name=layer.name,
            dtype=layer.dtype_policy,
            trainable=layer.trainable,
        )
        self.supports_masking = layer.supports_masking
        self.blocks = blocks
        self.rows_apart = rows_apart
        self.activation = layer.activation
        self.late_bias = None
        columns = None
        if layer.bias is not None:
            values = np.asarray(to_numpy(layer.bias))
            if of_columns:
                columns = to_blocks(
                    values.reshape(1, -1),
                    1,
                    blocks.grid.cols,
                )[0, 0]
            else:
                self.late_bias = self._weight("bias", values)
        # LiteRT fuses an activation that comes before the axes are restored.
        self._is_early = self.late_bias is None and is_elementwise(
            layer.activation
        )
        self.kernels = []
        self.biases: list[keras.Variable | None] = []
        self.places = []
        lines = blocks.grid.of_outputs
        inputs_of = blocks.inputs_of.ravel()
        kernels = grouped_kernels(canonical_kernel(layer), blocks)
        for kernel, outputs, slots in zip(
            kernels, lines.groups, lines.spans, strict=True
        ):
            self.kernels.append(self._weight("kernel", kernel))
            self.places.append(inputs_of[slots])
            if columns is None:
                self.biases.append(None)
            else:
                bias = columns[outputs].ravel()
                self.biases.append(self._weight("bias", bias))
        self.built = True

    def _weight(self, name: str, value: np.ndarray) -> keras.Variable:
        weight = self.add_weight(name=name, shape=value.shape)
        assign(weight, value)
        return weight

    def _product(
        self,
        x: Tensor,
        images: Sequence[int],
        *options: Any,
    ) -> Tensor:
        """The columns of the product, with bias and early activation.

        Args:
            x: Tensor. Rows of all inputs of the kernel.
            images: The shape of `x` as images, without the channels.
            options: Arguments of `keras.ops.conv` behind the kernel.
        """
        grid = self.blocks.grid
        if grid.padded[0] > grid.inputs:
            x = ops.reshape(x, (-1, grid.inputs))
            x = pad_blocks(x, 1, grid.inputs, grid.rows)
        products = []
        for kernel, bias, places in zip(
            self.kernels,
            self.biases,
            self.places,
            strict=True,
        ):
            product = _blocks_at(places, x, grid.in_blocks, grid.rows)
            product = ops.reshape(product, (*images, places.size * grid.rows))
            product = ops.conv(product, kernel, *options)
            if bias is not None:
                product = product + bias
            if self._is_early:
                product = self.activation(product)
            products.append(product)
        if len(products) == 1:
            return products[0]
        return self._in_order(ops.concatenate(products, axis=-1), images)

    def _in_order(self, x: Tensor, images: Sequence[int]) -> Tensor:
        """The output blocks of several convolutions side by side, in the order of the kernel."""
        grid = self.blocks.grid
        size = images if images[0] == 1 else (-1, *x.shape[1:-1])
        order = grid.of_outputs.place
        x = _blocks_at(order, x, grid.out_blocks, grid.cols)
        return ops.reshape(x, (*size, grid.padded[1]))

    def _without_padding(self, x: Tensor) -> Tensor:
        grid = self.blocks.grid
        if grid.padded[1] == grid.outputs:
            return x
        x = ops.reshape(x, (-1, grid.padded[1]))
        return drop_padding(x, 1, grid.outputs, grid.cols)


class DenseAsConvolution(_BlockConvolution):
    """A `Dense`, or an `EinsumDense` of a single matrix, as a convolution of one tap."""

    def __init__(
        self,
        layer: keras.layers.Layer,
        blocks: ZeroBlocks,
        rows_apart: bool,
    ) -> None:
        equation = getattr(layer, "equation", "...a,ab->...b")
        data, kernel, output = einsum_axes(equation, layer.input_spec.ndim or 2)
        columns = [letter for letter in kernel if letter not in data]
        bias_axes = getattr(layer, "bias_axes", columns) or ()
        are_last = output[-len(columns) :] == columns
        super().__init__(
            layer,
            blocks,
            rows_apart,
            are_last and {*bias_axes} == {*columns},
        )
        self._equation = equation
        self._kernel_shape = tuple(layer.kernel.shape)

    def call(self, inputs: Tensor) -> Tensor:
        """The product, between the orders of axes in the equation."""
        data, kernel, output = einsum_axes(self._equation, len(inputs.shape))
        free = [letter for letter in data if letter not in kernel]
        summed = [letter for letter in kernel if letter in data]
        columns = [letter for letter in kernel if letter not in data]
        sizes = dict(zip(data, inputs.shape, strict=True))
        sizes.update(zip(kernel, self._kernel_shape, strict=True))
        lengths = [sizes[letter] for letter in free[1:]]
        images = (1, -1, 1)
        if self.rows_apart:
            images = (-1, math.prod(lengths), 1)
        x = _transposed(inputs, data, [*free, *summed])
        x = self._without_padding(self._product(x, images))
        x = ops.reshape(
            x,
            (
                -1,
                *lengths,
                *(sizes[letter] for letter in columns),
            ),
        )
        x = _transposed(x, [*free, *columns], output)
        if self.late_bias is not None:
            x = x + self.late_bias
        return x if self._is_early else self.activation(x)


class ConvAsConvolution(_BlockConvolution):
    """A `Conv1D` or `Conv2D` as a grouped convolution of images, sequences being 1 wide."""

    def __init__(
        self,
        layer: keras.layers.Layer,
        blocks: ZeroBlocks,
        rows_apart: bool,
    ) -> None:
        super().__init__(layer, blocks, rows_apart)
        self._rank = layer.rank
        self._padding = layer.padding
        self._strides = (*layer.strides, 1)[:2]
        self._dilation_rate = (*layer.dilation_rate, 1)[:2]

    def call(self, inputs: Tensor) -> Tensor:
        """The convolution as products with live blocks, and their sum."""
        padding = self._padding
        taps = self.kernels[0].shape[:2]
        if padding == "causal":
            before = self._dilation_rate[0] * (taps[0] - 1)
            inputs = ops.pad(inputs, [[0, 0], [before, 0], [0, 0]])
            padding = "valid"
        options = (
            self._strides,
            padding,
            "channels_last",
            self._dilation_rate,
        )
        size = (*inputs.shape[1:-1], 1)[:2]
        if {*taps, *self._strides} == {1} and not self.rows_apart:
            x = self._product(inputs, (1, -1, 1), *options)
        else:
            x = self._product(inputs, (-1, *size), *options)
            size = x.shape[1:-1]
        shape = (
            -1,
            *size[: self._rank],
            self.blocks.grid.outputs,
        )
        x = ops.reshape(self._without_padding(x), shape)
        return x if self._is_early else self.activation(x)


def _blocks_at(places: np.ndarray, x: Tensor, count: int, width: int) -> Tensor:
    """The blocks at some places of rows that have `count` blocks of a width."""
    first_place = int(places[0])
    if np.array_equal(
        places, np.arange(first_place, first_place + places.size)
    ):
        # litert-converter makes a slice of such a gather, which has six axes at most.
        rows = ops.reshape(x, (-1, count * width))
        end = first_place + places.size
        return rows[:, first_place * width : end * width]
    blocks = ops.reshape(x, (-1, *_SINGLE, count, width))
    return ops.take(blocks, places, axis=_AXIS_OF_BLOCKS)


def _transposed(x: Tensor, before: list[str], after: list[str]) -> Tensor:
    if before == after:
        return x
    return ops.transpose(x, [before.index(letter) for letter in after])
