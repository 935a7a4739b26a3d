"""`BlockSparseConv1D`, `2D` and `3D`: convolutions with live blocks of channels."""

from collections.abc import Sequence
from typing import Any

import keras

from keras_sparse_ortho._checks import check_integer
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.kernels import KernelLayout
from keras_sparse_ortho.layers._block_products import (
    BlockOperands,
    padded_blocks,
    spread_blocks,
    without_padding,
)
from keras_sparse_ortho.layers._block_sparse_layer import BlockSparseLayer

ops = keras.ops
_SETTINGS = (
    *("filters", "kernel_size", "strides", "padding"),
    *("data_format", "dilation_rate", "use_bias"),
)


class BlockSparseConv(BlockSparseLayer):
    """Base of the three; arguments are those of the namesake and of `BlockSparseLayer`."""

    def __init__(
        self,
        filters: int,
        kernel_size: Any,
        strides: Any = 1,
        padding: str = "valid",
        data_format: str | None = None,
        dilation_rate: Any = 1,
        groups: int = 1,
        activation: Any = None,
        use_bias: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(activation=activation, **kwargs)
        if groups != 1:
            raise NotPrunableError(
                f"The layer '{self.name}' takes no `groups`: its live blocks say which channels "
                "are connected to which filters, and `density` how many. Leave `groups` out, or "
                "mask a grouped convolution with keras_sparse_ortho.PrunableLayer. "
                f"Received: groups={groups!r}"
            )
        check_integer("filters", filters)
        # Not tracked; it checks the other arguments and knows the shapes.
        plain = self.namesake(
            filters, kernel_size, strides, padding, data_format, dilation_rate, use_bias=use_bias
        )
        self._output_shape = plain.compute_output_shape
        for name in ("rank", *_SETTINGS):
            setattr(self, name, getattr(plain, name))
        self.input_spec = keras.layers.InputSpec(min_ndim=self.rank + 2)

    @property
    def _channel_axis(self) -> int:
        return 1 if self.data_format == "channels_first" else self.rank + 1

    def build(self, input_shape: Sequence[int | None]) -> None:
        channels = self._features(input_shape, self._channel_axis)
        self.compute_output_shape(input_shape)  # refuses a window that does not fit
        shape = (*self.kernel_size, channels, self.filters)
        bias = (self.filters,) if self.use_bias else None
        self._add_kernel(shape, KernelLayout.convolution(), bias)
        axis = -1 if self._channel_axis > 1 else 1
        self.input_spec = keras.layers.InputSpec(min_ndim=self.rank + 2, axes={axis: channels})
        self.built = True

    def call(self, inputs: Any) -> Any:
        """A small convolution for each output block, over the channels that it reads."""
        kernel, axis = self.operands(), self._channel_axis
        grid = kernel.grid
        padding = self.padding
        if padding == "causal":
            first = self.dilation_rate[0] * (self.kernel_size[0] - 1)
            ends = [[0, 0] for _ in range(3)]
            ends[2 if axis == 1 else 1] = [first, 0]
            inputs, padding = ops.pad(inputs, ends), "valid"
        inputs = padded_blocks(inputs, axis, grid.inputs, grid.rows)
        sizes = list(ops.shape(inputs))
        x = ops.reshape(inputs, (*sizes[:axis], grid.in_blocks, grid.rows, *sizes[axis + 1 :]))
        x = spread_blocks(x, kernel.inputs_of, kernel.slots_of, axis)
        sizes[axis] = grid.out_blocks * grid.fan_in * grid.rows
        parts = ops.split(ops.reshape(x, sizes), grid.out_blocks, axis=axis)
        outputs = [
            ops.conv(
                part,
                taps,
                strides=list(self.strides),
                padding=padding,
                dilation_rate=self.dilation_rate,
                data_format=self.data_format,
            )
            for part, taps in zip(parts, self._kernels(kernel), strict=True)
        ]
        result = outputs[0] if len(outputs) == 1 else ops.concatenate(outputs, axis=axis)
        result = without_padding(result, axis, grid.outputs, grid.cols)
        if self.bias is not None:
            shape = [1] * (self.rank + 2)
            shape[axis] = self.filters
            # Not ops.add, which on TensorFlow takes channels for columns where they are as many.
            result = result + ops.reshape(self.bias, shape)
        return self.activation(result)

    def _kernels(self, kernel: BlockOperands) -> list[Any]:
        """`(*taps, k r, c)` for each output block."""
        grid, rank = kernel.grid, self.rank
        # (J, k, *taps, r, c) to (J, *taps, k, r, c)
        order = (0, *range(2, 2 + rank), 1, rank + 2, rank + 3)
        blocks = ops.transpose(ops.convert_to_tensor(kernel.blocks), order)
        shape = (*grid.taps, grid.fan_in * grid.rows, grid.cols)
        parts = ops.split(blocks, grid.out_blocks, axis=0)
        return [ops.reshape(part, shape) for part in parts]

    def compute_output_shape(self, input_shape: Sequence[int | None]) -> tuple[int | None, ...]:
        return tuple(self._output_shape(tuple(input_shape)))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **{name: getattr(self, name) for name in _SETTINGS}}


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class BlockSparseConv1D(BlockSparseConv):
    """A `keras.layers.Conv1D` that connects blocks of channels with blocks of filters.

        y[.., j] = activation(sum_l conv(x[.., inputs_of[j, l]], blocks[j, l]) + b[j])

    over the `k` live blocks of output block `j`, `r` channels by `c` filters, each live at all
    taps. For each output block there is one small convolution over the channels that it reads. See
    `BlockSparseDense` for how blocks are chosen and what is gained.

    Args:
        filters: Output channels, a multiple of `c`.
        kernel_size: As for Conv1D, and so are `strides`, `padding`, `data_format`, `dilation_rate`,
            `activation` and `use_bias`.
        groups: Must be 1: blocks are connections of their own.
        **kwargs: As for `BlockSparseDense` and Conv1D. An exactly orthogonal kernel stands at the
            center tap; the live entries at other taps begin with zeros.

    Raises:
        NotPrunableError: `groups` other than 1.
        LayoutError, DensityError, ValueError: As for `BlockSparseDense`.

    Limits: as for `BlockSparseDense`. The graph has a convolution for each output block, so blocks
    of few filters compile slowly.

    Example:

    >>> import keras
    >>> layer = BlockSparseConv1D(64, 3, density=0.25, block=16, seed=0)
    >>> layer.build((None, 20, 64))
    >>> tuple(layer.blocks.shape), layer.density
    ((4, 1, 3, 16, 16), 0.25)
    """

    namesake = keras.layers.Conv1D


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class BlockSparseConv2D(BlockSparseConv):
    """A `keras.layers.Conv2D` that connects blocks of channels with blocks of filters.

    See `BlockSparseConv1D`.
    """

    namesake = keras.layers.Conv2D


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class BlockSparseConv3D(BlockSparseConv):
    """A `keras.layers.Conv3D` that connects blocks of channels with blocks of filters.

    See `BlockSparseConv1D`.
    """

    namesake = keras.layers.Conv3D
