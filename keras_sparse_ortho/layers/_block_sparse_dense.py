"""`BlockSparseDense`, `BlockSparseEinsumDense`, and convolutions with live blocks of channels."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import keras

from keras_sparse_ortho._checks import check_integer
from keras_sparse_ortho._types import Config, Tensor
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.layers._block_grid import BlockGrid
from keras_sparse_ortho.layers._block_operands import (
    BlockOperands,
    drop_padding,
    pad_blocks,
)
from keras_sparse_ortho.layers._block_products import product_features_first
from keras_sparse_ortho.layers._block_sparse_layer import BlockSparseLayer
from keras_sparse_ortho.layers._fused_products import takes_kernels
from keras_sparse_ortho.layers._row_products import spread_blocks
from keras_sparse_ortho.layers._token_products import product_by_token
from keras_sparse_ortho.orthogonal import einsum_axes

ops = keras.ops

Activation: TypeAlias = str | Callable[[Tensor], Tensor] | None
_ELEMENTWISE = (  # without softmax, log_softmax, sparsemax and glu, which mix channels
    *(
        "celu",
        "elu",
        "exponential",
        "gelu",
        "hard_shrink",
        "hard_sigmoid",
        "hard_silu",
    ),
    *(
        "hard_swish",
        "hard_tanh",
        "leaky_relu",
        "linear",
        "log_sigmoid",
        "mish",
        "relu",
        "relu6",
    ),
    *(
        "selu",
        "sigmoid",
        "silu",
        "soft_shrink",
        "softplus",
        "softsign",
        "sparse_plus",
    ),
    *(
        "sparse_sigmoid",
        "squareplus",
        "swish",
        "tanh",
        "tanh_shrink",
        "threshold",
    ),
)


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class BlockSparseDense(BlockSparseLayer):
    """A `keras.layers.Dense` whose kernel consists of live blocks, and of nothing else.

        y = activation(x K + b),    K[i, j] = blocks[j, l] where i = inputs_of[j, l], else 0

    The kernel, `(inputs, units)`, is cut into blocks of `r x c`; every output block has `k` live
    ones, and every input block is used equally often, unless `counts` say otherwise. Both passes,
    optimizer, file and memory have live blocks only; results are those of the dense layer.

    Args:
        units: int. Outputs, a multiple of `c`.
        density: float. Live fraction, `k / I` for `I` input blocks; `k` is a multiple of
            `I / gcd(I, J)` for `J` output blocks. `layer.density` is the nearest possible one,
            which may be off by a quarter.
        block: int or `(r, c)`. 32 suits training on processors, 64 and 128 are faster; on GPUs 64
            and more.
        counts: The live blocks of each of the `J` output blocks, and of each of the `I` input
            blocks, for a pattern that is not regular. Up to 6 different counts on a side make a
            step little slower, and compile in seconds: lines of equal counts are one product.
        kernel_initializer: `"exact_orthogonal"`: `K^T K = gain^2 I` (or `K K^T`); with `counts`
            each block is orthogonal, scaled by the count of its output block. Or an initializer of
            Keras, whose fans are the live inputs and outputs.
        kernel_regularizer: L1 or L2; and `kernel_constraint`: `NonNeg`. They act on live entries.
        gain: float. Scale of the exactly orthogonal kernel.
        seed: int. Seed of the places and the exactly orthogonal values.
        quantizer: Rounds the live blocks, e.g. `FakeQuantization("int8")`; see `quantize_aware`.
        **kwargs: As for Dense.

    Raises:
        LayoutError: Inputs that `r`, or units that `c`, does not divide (when it is built).
        DensityError: A density that regular blocks cannot have, with the nearest two.
        NotPrunableError: Another regularizer or constraint.

    Limits: no LoRA and no quantization; `strip` or `to_dense_layer` first. For single vectors,
    softmax and activations that Keras lacks cost one more transposition. On JAX there are
    derivatives of any order, but none in forward mode.

    Examples:
        >>> import keras
        >>> layer = BlockSparseDense(256, "relu", density=0.1, block=16, seed=0)
        >>> model = keras.Sequential([keras.Input((256,)), layer])
        >>> tuple(layer.blocks.shape), layer.density
        ((16, 2, 16, 16), 0.125)
        >>> layer.kernel_value().shape
        (256, 256)

    Reference: Gray, Radford and Kingma, "GPU kernels for block-sparse weights" (2017)
    """

    namesake = keras.layers.Dense
    settings = ("units", "use_bias")

    def __init__(
        self,
        units: int,
        activation: Activation = None,
        use_bias: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(activation=activation, **kwargs)
        self.units = check_integer("units", units)
        self.use_bias = use_bias
        self.supports_masking = True
        self.input_spec = keras.layers.InputSpec(min_ndim=2)

    def call(self, inputs: Tensor) -> Tensor:
        leading_shape = ops.shape(inputs)[:-1]
        if len(leading_shape) > 1 or takes_kernels(inputs):
            return self._by_token(inputs, leading_shape)
        # Single vectors go features first, which saves transpositions.
        x = product_features_first(ops.transpose(inputs), self.operands())
        if self.bias is not None:
            # TensorFlow's ops.add would take a column for a row where both have one length.
            x = x + ops.expand_dims(self.bias, 1)
        if is_elementwise(self.activation):
            # One layer's second transposition then cancels the next one's first.
            return ops.transpose(self.activation(x))
        return self.activation(ops.transpose(x))

    def _by_token(self, inputs: Tensor, leading_shape: Sequence[int]) -> Tensor:
        """The outputs at all positions of sequences or images."""
        x = ops.reshape(inputs, (math.prod(leading_shape), self.grid.inputs))
        x = product_by_token(x, self.operands())
        x = ops.reshape(x, (*leading_shape, self.units))
        if self.bias is not None:
            x = x + self.bias
        return self.activation(x)


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class BlockSparseEinsumDense(BlockSparseLayer):
    """A `keras.layers.EinsumDense` whose kernel consists of live blocks, and of nothing else.

        y = activation(einsum(equation, x, K) + b)

    The kernel is one matrix, from the axes that it shares with the input to its others, as in
    `"abc,cd->abd"`, or in attention `"abc,cde->abde"` and `"abde,dec->abc"`.

    Args:
        equation: str. As for EinsumDense, like `output_shape`, `activation` and `bias_axes`.
        **kwargs: As for `BlockSparseDense` and EinsumDense.

    Raises:
        NotPrunableError: An equation with several matrices (an axis of input, kernel and output),
            or that sums over an axis without the kernel.
        LayoutError, DensityError: As for `BlockSparseDense`, and so are the limits.

    Examples:
        >>> import keras
        >>> layer = BlockSparseEinsumDense(
        ...     "abc,cde->abde", (None, 4, 16), bias_axes="de", density=0.25, block=16, seed=0)
        >>> tuple(layer(keras.ops.ones((2, 5, 64))).shape)
        (2, 5, 4, 16)
        >>> layer.kernel_value().shape, layer.density
        ((64, 4, 16), 0.25)
    """

    namesake = keras.layers.EinsumDense
    settings = ("equation", "bias_axes")
    _checks_features = False

    def __init__(
        self,
        equation: str,
        output_shape: int | Sequence[int | None],
        activation: Activation = None,
        bias_axes: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(activation=activation, **kwargs)
        self.equation = equation
        sizes = (
            (output_shape,) if isinstance(output_shape, int) else output_shape
        )
        self.partial_output_shape = tuple(sizes)
        self.bias_axes = bias_axes
        reason = why_no_matrix(equation)
        if reason is not None:
            raise NotPrunableError(
                "Blocks lie in one matrix from summed axes to new ones, as in 'abc,cd->abd', "
                f"'abc,cde->abde' and 'abde,dec->abc': {reason}. Use a plain EinsumDense, whose "
                f"kernel keras_sparse_ortho.PrunableLayer can mask. Received: {equation=}"
            )

    def call(self, inputs: Tensor) -> Tensor:
        """The product by token: the axes that are not summed, one after the other."""
        data, kernel, output = einsum_axes(self.equation, len(inputs.shape))
        summed = [letter for letter in kernel if letter in data]
        positions = [letter for letter in data if letter not in summed]
        features = [letter for letter in kernel if letter not in data]
        sizes = dict(zip(data, ops.shape(inputs), strict=True))
        sizes.update(zip(kernel, self.kernel_shape, strict=True))
        x = ops.transpose(
            inputs, [data.index(letter) for letter in (*positions, *summed)]
        )
        position_count = math.prod(sizes[letter] for letter in positions)
        x = ops.reshape(x, (position_count, self.grid.inputs))
        x = product_by_token(x, self.operands())
        product_axes = [*positions, *features]
        x = ops.reshape(x, [sizes[letter] for letter in product_axes])
        x = ops.transpose(x, [product_axes.index(letter) for letter in output])
        if self.bias is not None:
            x = x + self.bias
        return self.activation(x)

    def get_config(self) -> Config:
        return {
            **super().get_config(),
            "output_shape": self.partial_output_shape,
        }


class BlockSparseConv(BlockSparseLayer):
    """Base of the three; arguments are those of the namesake and of `BlockSparseLayer`."""

    settings = (
        *("filters", "kernel_size", "strides", "padding"),
        *("data_format", "dilation_rate", "use_bias"),
    )

    def __init__(
        self,
        filters: int,
        kernel_size: Any,
        strides: Any = 1,
        padding: str = "valid",
        data_format: str | None = None,
        dilation_rate: Any = 1,
        groups: int = 1,
        activation: Activation = None,
        use_bias: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(activation=activation, **kwargs)
        if groups != 1:
            raise NotPrunableError(
                f"The layer {self.name!r} takes no `groups`: its live blocks say which channels "
                "are connected to which filters, and `density` how many. Leave `groups` out, or "
                "mask a grouped convolution with keras_sparse_ortho.PrunableLayer. "
                f"Received: groups={groups!r}"
            )
        check_integer("filters", filters)
        plain = self.namesake(  # checks the other arguments
            filters,
            kernel_size,
            strides,
            padding,
            data_format,
            dilation_rate,
            use_bias=use_bias,
        )
        for name in ("rank", "input_spec", *self.settings):
            setattr(self, name, getattr(plain, name))
        is_channels_first = self.data_format == "channels_first"
        self._features_axis = 1 if is_channels_first else self.rank + 1

    def call(self, inputs: Tensor) -> Tensor:
        """A small convolution for each output block, over its live channels."""
        operands = self.operands()
        grid = operands.grid
        axis = self._features_axis
        padding = self.padding
        if padding == "causal":
            inputs = self._pad_causally(inputs)
            padding = "valid"
        channels = self._live_channels(inputs, operands)
        outputs = [
            ops.conv(
                part,
                kernel,
                strides=list(self.strides),
                padding=padding,
                dilation_rate=self.dilation_rate,
                data_format=self.data_format,
            )
            for part, kernel in zip(
                self._channels_by_line(channels, grid),
                self._kernels(operands),
                strict=True,
            )
        ]
        # of lines without live blocks
        outputs.append(ops.zeros_like(outputs[0]))
        outputs = [outputs[place] for place in grid.of_outputs.place]
        result = (
            outputs[0]
            if len(outputs) == 1
            else ops.concatenate(outputs, axis=axis)
        )
        result = drop_padding(result, axis, grid.outputs, grid.cols)
        if self.bias is not None:
            # TensorFlow's ops.add would take channels for columns where they are as many.
            spatial_axes = [1] * self.rank if axis == 1 else []
            result = result + ops.reshape(self.bias, [-1, *spatial_axes])
        return self.activation(result)

    def _pad_causally(self, inputs: Tensor) -> Tensor:
        """Sequences with zeros before them, as many as the window reaches back."""
        reach = self.dilation_rate[0] * (self.kernel_size[0] - 1)
        time_axis = 2 if self._features_axis == 1 else 1
        ends = [[0, 0] for _ in range(3)]
        ends[time_axis] = [reach, 0]
        return ops.pad(inputs, ends)

    def _live_channels(self, inputs: Tensor, operands: BlockOperands) -> Tensor:
        """The channels of all live blocks, by slot."""
        grid = operands.grid
        axis = self._features_axis
        places, slots = operands.places_by_slot
        inputs = pad_blocks(inputs, axis, grid.inputs, grid.rows)
        sizes = list(ops.shape(inputs))
        x = ops.reshape(
            inputs,
            (*sizes[:axis], grid.in_blocks, grid.rows, *sizes[axis + 1 :]),
        )
        x = spread_blocks(x, places, slots, grid.of_inputs, axis)
        sizes[axis] = grid.live_blocks * grid.rows
        return ops.reshape(x, sizes)

    def _channels_by_line(
        self, channels: Tensor, grid: BlockGrid
    ) -> list[Tensor]:
        """The live channels of each output block, in the order of the groups of lines."""
        lines = grid.of_outputs
        axis = self._features_axis
        channels_by_line = []
        for group, span in zip(lines.groups, lines.spans, strict=True):
            # A slice for each line would have gradients as large as all of them.
            group_channels = channels
            if not lines.are_regular:
                group_span = slice(
                    span.start * grid.rows, span.stop * grid.rows
                )
                group_channels = channels[(*(slice(None),) * axis, group_span)]
            channels_by_line += ops.split(group_channels, len(group), axis=axis)
        return channels_by_line

    def _kernels(self, operands: BlockOperands) -> list[Tensor]:
        """The kernel of each output block, `(*taps, channels, filters)`."""
        grid = operands.grid
        rank = self.rank
        kernels = []
        for piece in grid.of_outputs.pieces(operands.blocks_by_slot):
            line_count, fan_in = piece.shape[:2]
            # From (m, k, *taps, r, c) to (m, *taps, k, r, c).
            piece = ops.transpose(
                piece, (0, *range(2, 2 + rank), 1, rank + 2, rank + 3)
            )
            shape = (*grid.taps, fan_in * grid.rows, grid.cols)
            kernels += [
                ops.reshape(line, shape)
                for line in ops.split(piece, line_count, axis=0)
            ]
        return kernels


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class BlockSparseConv1D(BlockSparseConv):
    """A `keras.layers.Conv1D` that connects blocks of channels with blocks of filters.

        y[.., j] = activation(sum_l conv(x[.., inputs_of[j, l]], blocks[j, l]) + b[j])

    Output block `j` is a small convolution over its `k` live blocks, `r` channels by `c` filters,
    each live at all taps.

    Args:
        filters: int. Output channels, a multiple of `c`.
        kernel_size: As for Conv1D, like `strides`, `padding`, `data_format`, `dilation_rate`,
            `activation` and `use_bias`.
        groups: int. Must be 1, or NotPrunableError: live blocks say what is connected.
        **kwargs: As for `BlockSparseDense` and Conv1D. Exactly orthogonal kernels are at the center
            tap; the live entries of others begin with zeros.

    Limits: as for `BlockSparseDense`, like the errors; blocks of few filters compile slowly.

    Examples:
        >>> import keras
        >>> layer = BlockSparseConv1D(64, 3, density=0.25, block=16, seed=0)
        >>> layer.build((None, 20, 64))
        >>> tuple(layer.blocks.shape), layer.density
        ((4, 1, 3, 16, 16), 0.25)
    """

    namesake = keras.layers.Conv1D


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class BlockSparseConv2D(BlockSparseConv):
    """A `keras.layers.Conv2D` that connects blocks of channels and filters: `BlockSparseConv1D`."""

    namesake = keras.layers.Conv2D


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class BlockSparseConv3D(BlockSparseConv):
    """A `keras.layers.Conv3D` that connects blocks of channels and filters: `BlockSparseConv1D`."""

    namesake = keras.layers.Conv3D


def why_no_matrix(equation: str) -> str | None:
    """Says why the kernel of an einsum equation is not one matrix; `None` if it is."""
    dots = r"((?:\.\.\.)?[a-zA-Z]*(?:\.\.\.)?)"
    match = re.fullmatch(
        rf"{dots},([a-zA-Z]+)->{dots}", equation.replace(" ", "")
    )
    if match is None:
        return "it must have the form 'input,kernel->output'"
    data, kernel, output = match.groups()
    inputs = set(data) - {"."}
    batch = sorted(inputs & set(kernel) & set(output))
    if batch:
        return f"the kernel has a matrix of its own for each {', '.join(batch)}"
    lost = sorted(inputs - set(kernel) - set(output))
    if lost:
        return f"it sums over {', '.join(lost)} without the kernel"
    if not (inputs & set(kernel) and set(kernel) - inputs):
        return "the kernel must have an axis to sum over, and one of its own"
    return None


def is_elementwise(activation: Activation | keras.Operation) -> bool:
    """Whether an activation (or `None`), or an operation of Keras, maps each entry alone."""
    if activation is None:
        return True
    is_operation = isinstance(activation, keras.Operation)
    if is_operation and type(activation).__module__.startswith("keras."):
        class_names = {name.replace("_", "") for name in _ELEMENTWISE}
        return type(activation).__name__.lower() in class_names
    # Some activations are newer than the oldest Keras.
    functions = [
        getattr(keras.activations, name, None) for name in _ELEMENTWISE
    ]
    return any(activation is function for function in functions)
