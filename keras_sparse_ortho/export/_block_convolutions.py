"""Layers whose zeros leave whole blocks, as a gather of these and one grouped convolution.

LiteRT has no kernel that multiplies blocks, but XNNPACK has fast grouped convolutions, in float32
and int8. With the live input blocks of each output block gathered side by side, the product of a
layer is the convolution with one group for each output block.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_sparse_ortho._values import assign, to_numpy
from keras_sparse_ortho.export._zero_blocks import ZeroBlocks, zero_blocks
from keras_sparse_ortho.kernels import KernelLayout, kernel_layouts, walk
from keras_sparse_ortho.layers import axes_of, is_elementwise, why_no_block_form
from keras_sparse_ortho.models import rewrite
from keras_sparse_ortho.orthogonal import to_blocks, whole_blocks

ops = keras.ops
L = keras.layers
_ONE_PRODUCT = L.Dense | L.EinsumDense | L.Conv1D | L.Conv2D | L.Conv3D
# Axes of size 1 around a gather. With seven axes XNNPACK leaves the reshapes before and after it to
# LiteRT, whose own take no time: XNNPACK's, of up to six, copy, which takes a sixth of an encoder.
_SINGLE = (1, 1, 1, 1)


class Plan(NamedTuple):
    """What of a plain model becomes grouped convolutions.

    Args:
        found: The blocks of each kernel that does, by the path of its variable.
        kept: Why the others do not.
    """

    found: dict[str, ZeroBlocks]
    kept: dict[str, str]


def plan(model: keras.Model) -> Plan:
    """Which kernels of a plain model have zeros that leave whole blocks."""
    found: dict[str, ZeroBlocks] = {}
    kept: dict[str, str] = {}
    for layer, _ in walk(model, ""):
        kernel = getattr(layer, "kernel", None)
        if isinstance(kernel, keras.Variable):
            blocks = _blocks_of(layer)
            kind: Any = kept if isinstance(blocks, str) else found
            kind[kernel.path] = blocks
    return Plan(found, kept)


def as_convolutions(model: keras.Model, rows_apart: bool) -> keras.Model:
    """A copy of a plain model in which the layers of `plan` are grouped convolutions.

    Its outputs are equal but for the order of summation. It is for inference, and to be traced in
    this process: it cannot be saved.

    Args:
        model: A built model of Keras' layers, or a subclassed one with such layers in it.
        rows_apart: Whether a row of the batch is an image of its own. Where convolutions quantize
            each image on the fly, a row must not depend on the others. Otherwise the rows of Dense
            layers are the pixels of one image, which takes a fifth of the time at batch 64.
    """

    def replace(layer: Any, path: str, own: Any) -> Any:
        blocks = _blocks_of(layer)
        if isinstance(blocks, str):
            return None
        kind = ConvAsConvolution if isinstance(layer, L.Conv1D | L.Conv2D) else DenseAsConvolution
        return kind(own, blocks, rows_apart)

    return rewrite(model, replace)


def columns_of(kernel: Any, layout: KernelLayout | None, blocks: ZeroBlocks) -> np.ndarray:
    """A kernel, or an array of its shape, as that of the grouped convolution `(h, w, k r, J c)`."""
    grid = blocks.grid
    assert layout is not None
    canonical = layout.to_canonical(np.asarray(kernel))[0, 0]
    columns = grid.blocks(canonical, blocks.inputs_of).transpose(grid.columns_order())
    return columns.reshape(*(*grid.taps, 1, 1)[:2], *grid.columns_shape[-2:])


def _blocks_of(layer: Any) -> ZeroBlocks | str:
    """The blocks of a plain layer, or why it has no form as a grouped convolution."""
    reason = why_no_block_form(layer)
    if reason is None and not isinstance(layer, _ONE_PRODUCT):
        reason = f"a {type(layer).__name__} is not one product"
    if reason is None and not layer.built:
        reason = "it was never called"
    if reason is None and isinstance(layer, L.Conv3D):
        reason = "LiteRT has no grouped convolutions of volumes"
    if reason is None and getattr(layer, "data_format", None) == "channels_first":
        reason = "its channels come first"
    if reason is None and isinstance(layer, L.EinsumDense):
        data, _, output = axes_of(layer.equation, layer.input_spec.ndim)
        if output[0] != data[0]:
            reason = f"in '{layer.equation}' the first axis of input and output differ"
    if reason is not None:
        return reason
    layout = kernel_layouts(layer)["kernel"]
    assert layout is not None
    return zero_blocks(layout.to_canonical(np.asarray(to_numpy(layer.kernel)))[0, 0])


class _BlockConvolution(keras.layers.Layer):
    """The blocks of a plain layer, gathered and multiplied.

        y[.., j] = activation(conv([x[.., inputs_of[j, 0]], ..., x[.., inputs_of[j, k - 1]]],
                                   kernel[.., j]) + b[j])

    No shape in it depends on the batch, so that the input of a file can be resized.

    Args:
        layer: The plain layer.
        blocks: The blocks of its kernel.
        rows_apart: See `as_convolutions`.
    """

    def __init__(self, layer: Any, blocks: ZeroBlocks, rows_apart: bool) -> None:
        super().__init__(name=layer.name, dtype=layer.dtype_policy, trainable=layer.trainable)
        self.supports_masking = layer.supports_masking
        self.blocks, self.rows_apart = blocks, rows_apart
        self.activation = layer.activation
        layout = kernel_layouts(layer)["kernel"]
        self.kernel = self._weight("kernel", columns_of(to_numpy(layer.kernel), layout, blocks))
        self.bias: Any = None
        self.built = True

    def _weight(self, name: str, value: np.ndarray) -> Any:
        weight = self.add_weight(name=name, shape=value.shape)
        assign(weight, value)
        return weight

    def _column_bias(self, value: Any) -> Any:
        """The bias of the columns of the kernel, with padding."""
        flat = np.asarray(to_numpy(value)).reshape(1, -1)
        return self._weight("bias", to_blocks(flat, 1, self.blocks.grid.cols).ravel())

    def _gathered(self, x: Any, images: Sequence[int]) -> Any:
        """`(*images, J k r)` of `x`, whose entries in order are rows of all inputs."""
        grid = self.blocks.grid
        whole = whole_blocks(grid.inputs, grid.rows)
        if whole < grid.in_blocks:  # the last blocks have one entry less, and get a zero
            x = ops.reshape(x, (-1, grid.inputs))
            first, rest = x[:, : whole * grid.rows], x[:, whole * grid.rows :]
            rest = ops.reshape(rest, (-1, grid.in_blocks - whole, grid.rows - 1))
            rest = ops.pad(rest, [[0, 0], [0, 0], [0, 1]])
            x = ops.concatenate([ops.reshape(first, (-1, whole, grid.rows)), rest], axis=1)
        x = ops.reshape(x, (-1, *_SINGLE, grid.in_blocks, grid.rows))
        x = ops.take(x, self.blocks.inputs_of.ravel(), axis=1 + len(_SINGLE))
        return ops.reshape(x, (*images, self.blocks.inputs_of.size * grid.rows))

    def _columns(self, x: Any) -> Any:
        """Bias and, where it may come now, activation of the columns; then those of no padding."""
        grid = self.blocks.grid
        whole = whole_blocks(grid.outputs, grid.cols)
        if self.bias is not None:
            x = x + self.bias
        if self._is_early():
            x = self.activation(x)
        if whole == grid.out_blocks:
            return x
        x = ops.reshape(x, (-1, grid.out_blocks, grid.cols))
        first = ops.reshape(x[:, :whole], (-1, whole * grid.cols))
        rest = x[:, whole:, : grid.cols - 1]
        rest = ops.reshape(rest, (-1, (grid.out_blocks - whole) * (grid.cols - 1)))
        return ops.concatenate([first, rest], axis=1)

    def _is_early(self) -> bool:
        """Whether the activation may come before the axes are restored: LiteRT fuses it then."""
        return is_elementwise(self.activation)


class DenseAsConvolution(_BlockConvolution):
    """A `Dense`, or an `EinsumDense` of a single matrix, as a convolution of one tap."""

    def __init__(self, layer: Any, blocks: ZeroBlocks, rows_apart: bool) -> None:
        super().__init__(layer, blocks, rows_apart)
        # The axes of the input with the summed ones last; those of the output from free and made.
        self._order_in: list[int] | None = None
        self._order_out: list[int] | None = None
        self._summed, self._made = 1, tuple(layer.kernel.shape[1:])
        self._late_bias: Any = None
        of_columns = True
        if isinstance(layer, L.EinsumDense):
            data, kernel, output = axes_of(layer.equation, layer.input_spec.ndim)
            summed = [letter for letter in kernel if letter in data]
            free = [letter for letter in data if letter not in summed]
            made = [letter for letter in kernel if letter not in data]
            self._summed = len(summed)
            self._order_in = [data.index(letter) for letter in (*free, *summed)]
            self._order_out = [(*free, *made).index(letter) for letter in output]
            sizes = dict(zip(kernel, layer.kernel.shape, strict=True))
            self._made = tuple(sizes[letter] for letter in made)
            ends = output[len(free) :] == made
            of_columns = ends and {*(layer.bias_axes or ())} == {*made}
        if layer.bias is not None and of_columns:
            self.bias = self._column_bias(layer.bias)
        elif layer.bias is not None:
            self._late_bias = self._weight("bias", np.asarray(to_numpy(layer.bias)))

    def call(self, inputs: Any) -> Any:
        """The product, between the orders of axes that the equation asks for."""
        x = _transposed(inputs, self._order_in)
        free = x.shape[1 : len(x.shape) - self._summed]
        images = (-1, math.prod(free), 1) if self.rows_apart else (1, -1, 1)
        x = self._columns(ops.conv(self._gathered(x, images), self.kernel))
        x = _transposed(ops.reshape(x, (-1, *free, *self._made)), self._order_out)
        if self._late_bias is not None:
            x = x + self._late_bias
        return x if self._is_early() else self.activation(x)

    def _is_early(self) -> bool:
        return self._late_bias is None and super()._is_early()


class ConvAsConvolution(_BlockConvolution):
    """A `Conv1D` or `Conv2D` as a grouped convolution of images, sequences being 1 wide."""

    def __init__(self, layer: Any, blocks: ZeroBlocks, rows_apart: bool) -> None:
        super().__init__(layer, blocks, rows_apart)
        self._rank, self._padding = layer.rank, layer.padding
        self._strides = (*layer.strides, 1)[:2]
        self._dilation_rate = (*layer.dilation_rate, 1)[:2]
        if layer.bias is not None:
            self.bias = self._column_bias(layer.bias)

    def call(self, inputs: Any) -> Any:
        """The taps slide over all gathered channels."""
        padding = self._padding
        if padding == "causal":
            before = self._dilation_rate[0] * (self.kernel.shape[0] - 1)
            inputs, padding = ops.pad(inputs, [[0, 0], [before, 0], [0, 0]]), "valid"
        size = (*inputs.shape[1:-1], 1)[:2]
        single = not self.rows_apart and {*self.kernel.shape[:2], *self._strides} == {1}
        x = self._gathered(inputs, (1, -1, 1) if single else (-1, *size))
        x = ops.conv(x, self.kernel, self._strides, padding, "channels_last", self._dilation_rate)
        size = (size if single else x.shape[1:-1])[: self._rank]
        x = ops.reshape(self._columns(x), (-1, *size, self.blocks.grid.outputs))
        return x if self._is_early() else self.activation(x)


def _transposed(x: Any, order: list[int] | None) -> Any:
    return x if order is None or order == sorted(order) else ops.transpose(x, order)
