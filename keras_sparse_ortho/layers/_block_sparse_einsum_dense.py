"""`BlockSparseEinsumDense`: an EinsumDense layer that holds and computes live blocks only."""

import re
from collections.abc import Sequence
from typing import Any

import keras

from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.kernels import KernelLayout
from keras_sparse_ortho.layers._block_sparse_layer import BlockSparseLayer
from keras_sparse_ortho.layers._features_first import (
    is_elementwise,
    product_features_first,
    product_of,
)

ops = keras.ops


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class BlockSparseEinsumDense(BlockSparseLayer):
    """A `keras.layers.EinsumDense` whose kernel consists of live blocks, and of nothing else.

        y = activation(einsum(equation, x, K) + b)

    for equations in which the kernel is one matrix: the axes that it shares with the input are
    summed over, and are the inputs of the matrix, flattened in the kernel's order; its others are
    the outputs. So are the kernels of dense layers on sequences, `"abc,cd->abd"`, and those of
    attention, `"abc,cde->abde"` and `"abde,dec->abc"`. See `BlockSparseDense` for the rest.

    Args:
        equation: As for EinsumDense.
        output_shape: As for EinsumDense.
        activation: As for EinsumDense.
        bias_axes: As for EinsumDense.
        **kwargs: As for `BlockSparseDense`: `density`, `block`, `inputs_of`, `kernel_initializer`,
            `gain`, `seed`, and what EinsumDense takes.

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
        self._letters = _letters(equation)

    def build(self, input_shape: Sequence[int | None]) -> None:
        """Draws blocks and makes the weights."""
        output_shape = self.compute_output_shape(input_shape)
        data, kernel, output = self._axes(len(input_shape))
        sizes = {**dict(zip(output, output_shape, strict=True))}
        sizes.update(zip(data, input_shape, strict=True))
        shape = tuple(int(sizes[letter] or 0) for letter in kernel)
        self._add_kernel(shape, KernelLayout.einsum(self.equation), self._bias_shape(output, sizes))
        self.input_spec = keras.layers.InputSpec(ndim=len(input_shape))
        self.built = True

    def _axes(self, rank: int) -> tuple[list[str], list[str], list[str]]:
        """The letters of input, kernel and output; digits stand for the axes of an ellipsis."""
        data, kernel, output = self._letters
        more = [str(k) for k in range(rank - len(data.replace("...", "")))]

        def spelled(letters: str) -> list[str]:
            head, dots, tail = letters.partition("...")
            return [*head, *(more if dots else ()), *tail]

        return spelled(data), [*kernel], spelled(output)

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
        """The product features first, and the epilogue before the axes are in their order."""
        data, kernel, output = self._axes(len(inputs.shape))
        summed = [letter for letter in kernel if letter in data]
        free = [letter for letter in data if letter not in summed]
        made = [letter for letter in kernel if letter not in data]
        sizes = dict(zip(data, ops.shape(inputs), strict=True))
        sizes.update(zip(kernel, self._kernel_shape, strict=True))
        x = ops.transpose(inputs, [data.index(letter) for letter in (*summed, *free)])
        x = ops.reshape(x, (self.grid.inputs, product_of([sizes[k] for k in free])))
        x = product_features_first(x, self.operands())
        x = ops.reshape(x, [sizes[letter] for letter in (*made, *free)])
        now = [*made, *free]
        if self.bias is not None:
            full = (1,) * (len(output) - len(self.bias.shape)) + tuple(self.bias.shape)
            bias = ops.reshape(self.bias, full)
            # Not ops.add: see BlockSparseDense.
            x = x + ops.transpose(bias, [output.index(letter) for letter in now])
        early = is_elementwise(self.activation)
        x = ops.transpose(
            self.activation(x) if early else x, [now.index(letter) for letter in output]
        )
        return x if early else self.activation(x)

    def compute_output_shape(self, input_shape: Sequence[int | None]) -> tuple[int | None, ...]:
        """That of EinsumDense."""
        plain = keras.layers.EinsumDense(self.equation, self.partial_output_shape)
        return tuple(plain.compute_output_shape(tuple(input_shape)))

    def get_config(self) -> dict[str, Any]:
        """Everything needed to make the layer anew."""
        return {
            **super().get_config(),
            "equation": self.equation,
            "output_shape": self.partial_output_shape,
            "bias_axes": self.bias_axes,
        }


def _letters(equation: str) -> tuple[str, str, str]:
    """The axes of input, kernel and output, of an equation whose kernel is one matrix."""
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
