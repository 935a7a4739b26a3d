"""`BlockSparseDense` and `BlockSparseEinsumDense`, which hold and compute live blocks only."""

import re
from collections.abc import Sequence
from typing import Any

import keras

from keras_sparse_ortho._checks import check_integer
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.kernels import KernelLayout
from keras_sparse_ortho.layers._activations import is_elementwise
from keras_sparse_ortho.layers._block_products import (
    product_by_token,
    product_features_first,
    product_of,
)
from keras_sparse_ortho.layers._block_sparse_layer import BlockSparseLayer

ops = keras.ops


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class BlockSparseDense(BlockSparseLayer):
    """A `keras.layers.Dense` whose kernel consists of live blocks, and of nothing else.

        y = activation(x K + b),    K[i, j] = blocks[j, l] where i = inputs_of[j, l], else 0

    The kernel, `(inputs, units)`, is cut into blocks of `r x c`; every output block has `k` live
    ones, and every input block is used equally often. Forward and backward pass, optimizer, file
    and memory deal with live blocks only, so that a step takes little more than `density` of the
    time of a dense one where the layer is wide. Outputs and gradients are those of the dense
    layer with that kernel.

    Args:
        units: Outputs, a multiple of `c`.
        density: Live fraction, `k / I` for `I` input blocks. `k` is a multiple of
            `I / gcd(I, J)` for `J` output blocks; the nearest possible density is taken, and is
            then `layer.density`. One that is off by more than a quarter is refused.
        block: `(r, c)`, or one integer for both. 32 is a good choice for training on processors,
            64 and 128 are faster; on GPUs 64 and more.
        inputs_of: Instead of a density: where the live blocks stand, `(J, k)` integers.
        kernel_initializer: `"exact_orthogonal"`: `K^T K = gain^2 I` (or `K K^T`). Or an
            initializer of Keras, the live inputs and outputs being its fans.
        kernel_regularizer: For the live kernel as `(k r, units)`, one column per output; as is
            `kernel_constraint`.
        gain: Scale of the exactly orthogonal kernel.
        seed: Seed of the places and the exactly orthogonal values. The same integer gives the
            same kernel on every backend.
        quantizer: Rounds the live blocks, e.g. `FakeQuantization("int8")`; see `quantize_aware`.
        **kwargs: As for Dense.

    Raises:
        LayoutError: Inputs that `r`, or units that `c`, does not divide (when it is built).
        DensityError: A density that regular blocks cannot have, with the nearest two.
        ValueError: `inputs_of` that is not regular both ways.

    Limits: no LoRA and no quantization; make it plain first (`to_dense_layer`,
    `keras_sparse_ortho.strip`). For single vectors, an activation that Keras does not have, and
    softmax, cost one more transposition. On JAX there are derivatives of any order, but none
    in forward mode.

    Example:

    >>> import keras
    >>> layer = BlockSparseDense(256, "relu", density=0.1, block=16, seed=0)
    >>> model = keras.Sequential([keras.Input((256,)), layer])
    >>> tuple(layer.blocks.shape), layer.density
    ((16, 2, 16, 16), 0.125)
    >>> layer.kernel_value().shape
    (256, 256)

    Reference:

    - Gray, Radford and Kingma, "GPU kernels for block-sparse weights" (2017)
    """

    namesake = keras.layers.Dense

    def __init__(
        self, units: int, activation: Any = None, use_bias: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(activation=activation, **kwargs)
        self.units = check_integer("units", units)
        self.use_bias = use_bias
        self.supports_masking = True
        self.input_spec = keras.layers.InputSpec(min_ndim=2)

    def build(self, input_shape: Sequence[int | None]) -> None:
        inputs = self._features(input_shape, -1)
        bias = (self.units,) if self.use_bias else None
        self._add_kernel((inputs, self.units), KernelLayout.dense(), bias)
        self.input_spec = keras.layers.InputSpec(min_ndim=2, axes={-1: inputs})
        self.built = True

    def call(self, inputs: Any) -> Any:
        """By token, or for single vectors with features first, which saves transpositions."""
        lead = ops.shape(inputs)[:-1]
        if len(lead) > 1:
            x = ops.reshape(inputs, (product_of(lead), self.grid.inputs))
            x = ops.reshape(product_by_token(x, self.operands()), (*lead, self.units))
            return self.activation(x if self.bias is None else x + self.bias)
        x = product_features_first(ops.transpose(inputs), self.operands())
        if self.bias is not None:
            # Not ops.add, which on TensorFlow takes a column for a row where both have one length.
            x = x + ops.expand_dims(self.bias, 1)
        # One layer's second transposition cancels the next one's first, with what is between.
        early = is_elementwise(self.activation)
        outputs = ops.transpose(self.activation(x) if early else x)
        return outputs if early else self.activation(outputs)

    def compute_output_shape(self, input_shape: Sequence[int | None]) -> tuple[int | None, ...]:
        return (*input_shape[:-1], self.units)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "units": self.units, "use_bias": self.use_bias}


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class BlockSparseEinsumDense(BlockSparseLayer):
    """A `keras.layers.EinsumDense` whose kernel consists of live blocks, and of nothing else.

        y = activation(einsum(equation, x, K) + b)

    for equations in which the kernel is one matrix: the axes that it shares with the input are
    summed over, and are the inputs of the matrix, flattened in the kernel's order; its others are
    the outputs. So are the kernels of dense layers on sequences, `"abc,cd->abd"`, and those of
    attention, `"abc,cde->abde"` and `"abde,dec->abc"`. See `BlockSparseDense` for the rest.

    Args:
        equation: As for EinsumDense, and so are `output_shape`, `activation` and `bias_axes`.
        **kwargs: As for `BlockSparseDense` and EinsumDense.

    Raises:
        NotPrunableError: An equation in which the kernel is several matrices (an axis that input,
            kernel and output share), or that sums over an axis without the kernel.
        LayoutError, DensityError, ValueError: As for `BlockSparseDense`.

    Limits: as for `BlockSparseDense`.

    Example:

    >>> import keras
    >>> layer = BlockSparseEinsumDense(
    ...     "abc,cde->abde", (None, 4, 16), bias_axes="de", density=0.25, block=16, seed=0)
    >>> tuple(layer(keras.ops.ones((2, 5, 64))).shape)
    (2, 5, 4, 16)
    >>> layer.kernel_value().shape, layer.density
    ((64, 4, 16), 0.25)
    """

    namesake = keras.layers.EinsumDense

    def __init__(
        self,
        equation: str,
        output_shape: int | Sequence[int | None],
        activation: Any = None,
        bias_axes: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(activation=activation, **kwargs)
        self.equation = equation
        self.partial_output_shape = (
            (output_shape,) if isinstance(output_shape, int) else tuple(output_shape)
        )
        self.bias_axes = bias_axes
        letters_of(equation)  # refuses one whose kernel is several matrices

    def build(self, input_shape: Sequence[int | None]) -> None:
        output_shape = self.compute_output_shape(input_shape)
        data, kernel, output = axes_of(self.equation, len(input_shape))
        sizes = {**dict(zip(output, output_shape, strict=True))}
        sizes.update(zip(data, input_shape, strict=True))
        shape = tuple(int(sizes[letter] or 0) for letter in kernel)
        self._add_kernel(shape, KernelLayout.einsum(self.equation), self._bias_shape(output, sizes))
        self.input_spec = keras.layers.InputSpec(ndim=len(input_shape))
        self.built = True

    def _bias_shape(self, output: list[str], sizes: dict[str, Any]) -> tuple[int, ...] | None:
        """As EinsumDense has it: from the first axis with a bias on, 1 where there is none."""
        if not self.bias_axes:
            return None
        unknown = [letter for letter in self.bias_axes if letter not in output]
        if unknown:
            raise ValueError(
                f"`bias_axes` must be axes of the output of '{self.equation}'. "
                f"Received: bias_axes={self.bias_axes!r}"
            )
        first = min(output.index(letter) for letter in self.bias_axes)
        return tuple(sizes[k] if k in self.bias_axes else 1 for k in output[first:])

    def call(self, inputs: Any) -> Any:
        """The product by token: all axes that are not summed, one after the other."""
        data, kernel, output = axes_of(self.equation, len(inputs.shape))
        summed = [letter for letter in kernel if letter in data]
        free = [letter for letter in data if letter not in summed]
        made = [letter for letter in kernel if letter not in data]
        sizes = dict(zip(data, ops.shape(inputs), strict=True))
        sizes.update(zip(kernel, self._kernel_shape, strict=True))
        x = ops.transpose(inputs, [data.index(letter) for letter in (*free, *summed)])
        x = ops.reshape(x, (product_of([sizes[k] for k in free]), self.grid.inputs))
        x = product_by_token(x, self.operands())
        now = [*free, *made]
        x = ops.reshape(x, [sizes[letter] for letter in now])
        x = ops.transpose(x, [now.index(letter) for letter in output])
        return self.activation(x if self.bias is None else x + self.bias)

    def compute_output_shape(self, input_shape: Sequence[int | None]) -> tuple[int | None, ...]:
        plain = keras.layers.EinsumDense(self.equation, self.partial_output_shape)
        return tuple(plain.compute_output_shape(tuple(input_shape)))

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "equation": self.equation,
            "output_shape": self.partial_output_shape,
            "bias_axes": self.bias_axes,
        }


def letters_of(equation: str) -> tuple[str, str, str]:
    """The axes of input, kernel and output of an equation whose kernel is one matrix."""
    dots = r"((?:\.\.\.)?[a-zA-Z]*(?:\.\.\.)?)"
    parts = re.fullmatch(rf"{dots},([a-zA-Z]+)->{dots}", equation.replace(" ", ""))
    reason = None
    if parts is None:
        reason = "it must have the form 'input,kernel->output'"
    else:
        data, kernel, output = parts.groups()
        inside = set(data) - {"."}
        batch = sorted(inside & set(kernel) & set(output))
        lost = sorted(inside - set(kernel) - set(output))
        if batch:
            reason = f"the kernel has a matrix of its own for each {', '.join(batch)}"
        elif lost:
            reason = f"it sums over {', '.join(lost)} without the kernel"
        elif not inside & set(kernel) or not set(kernel) - inside:
            reason = "the kernel must have an axis to sum over, and one of its own"
    if parts is None or reason is not None:
        raise NotPrunableError(
            "Blocks lie in one matrix from summed axes to new ones, as in 'abc,cd->abd', "
            f"'abc,cde->abde' and 'abde,dec->abc': {reason}. Use a plain EinsumDense, whose kernel "
            f"keras_sparse_ortho.PrunableLayer can mask. Received: equation={equation!r}"
        )
    return data, kernel, output


def axes_of(equation: str, rank: int) -> tuple[list[str], list[str], list[str]]:
    """The letters of input, kernel and output, digits standing for the axes of an ellipsis.

    Args:
        equation: As for `letters_of`.
        rank: Axes of the input.
    """
    data, kernel, output = letters_of(equation)
    more = [str(k) for k in range(rank - len(data.replace("...", "")))]

    def spelled(letters: str) -> list[str]:
        head, dots, tail = letters.partition("...")
        return [*head, *(more if dots else ()), *tail]

    return spelled(data), [*kernel], spelled(output)
