"""`BlockSparseDense`: a Dense layer that holds and computes live blocks only."""

from collections.abc import Sequence
from typing import Any

import keras

from keras_sparse_ortho._checks import check_integer
from keras_sparse_ortho.kernels import KernelLayout
from keras_sparse_ortho.layers._block_sparse_layer import BlockSparseLayer
from keras_sparse_ortho.layers._features_first import (
    is_elementwise,
    product_features_first,
    product_of,
)

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
        activation: As for Dense.
        use_bias: As for Dense.
        density: Live fraction, `k / I` for `I` input blocks. `k` is a multiple of
            `I / gcd(I, J)` for `J` output blocks; the nearest possible density is taken, and is
            then `layer.density`. One that is off by more than a quarter is refused.
        block: `(r, c)`, or one integer for both. 32 is a good choice for training on processors,
            64 and 128 are faster; on GPUs 64 and more.
        inputs_of: Instead of a density: where the live blocks stand, `(J, k)` integers.
        kernel_initializer: `"exact_orthogonal"`: `K^T K = gain^2 I` (or `K K^T`). Or an
            initializer of Keras, the live inputs and outputs being its fans.
        bias_initializer: As for Dense.
        kernel_regularizer: Of the live kernel as `(k r, units)`, a column an output.
        bias_regularizer: As for Dense.
        activity_regularizer: As for Dense.
        kernel_constraint: Of the same as `kernel_regularizer`.
        bias_constraint: As for Dense.
        gain: Scale of the exactly orthogonal kernel.
        seed: Of the places and the exactly orthogonal values. The same integer gives the same
            kernel on every backend.
        **kwargs: As for `keras.layers.Layer`.

    Raises:
        LayoutError: Inputs that `r`, or units that `c`, does not divide (when it is built).
        DensityError: A density that regular blocks cannot have, with the nearest two.
        ValueError: `inputs_of` that is not regular both ways.

    Limits: no LoRA and no quantization; make it plain first (`to_dense_layer`,
    `keras_sparse_ortho.strip`). An activation that Keras does not have, and softmax, costs a
    transposition more. On JAX there are derivatives of any order, but none in forward mode.

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
        """Draws blocks and makes the weights."""
        inputs = input_shape[-1]
        assert inputs is not None
        bias = (self.units,) if self.use_bias else None
        self._add_kernel((inputs, self.units), KernelLayout.dense(), bias)
        self.input_spec = keras.layers.InputSpec(min_ndim=2, axes={-1: inputs})
        self.built = True

    def call(self, inputs: Any) -> Any:
        """The product features first, and the epilogue before they are last again."""
        lead = ops.shape(inputs)[:-1]
        if len(lead) > 1:
            inputs = ops.reshape(inputs, (product_of(lead), self.grid.inputs))
        x = product_features_first(ops.transpose(inputs), self.operands())
        if self.bias is not None:
            # Not ops.add, which on TensorFlow takes a column for a row where both have one length.
            x = x + ops.expand_dims(self.bias, 1)
        early = is_elementwise(self.activation)
        outputs = ops.transpose(self.activation(x) if early else x)
        if len(lead) > 1:
            outputs = ops.reshape(outputs, (*lead, self.units))
        return outputs if early else self.activation(outputs)

    def compute_output_shape(self, input_shape: Sequence[int | None]) -> tuple[int | None, ...]:
        """That of Dense."""
        return (*input_shape[:-1], self.units)

    def get_config(self) -> dict[str, Any]:
        """Everything needed to make the layer anew."""
        return {**super().get_config(), "units": self.units, "use_bias": self.use_bias}
