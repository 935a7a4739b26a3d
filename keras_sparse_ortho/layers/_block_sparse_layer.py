"""`BlockSparseLayer`: what the layers that compute on live blocks have in common."""

from typing import Any, ClassVar

import keras

from keras_sparse_ortho._values import assign, to_numpy
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.kernels import KernelLayout
from keras_sparse_ortho.layers._block_kernel import BlockKernel

ops = keras.ops
_OWN = ("density", "block", "inputs_of", "gain", "seed")


class BlockSparseLayer(BlockKernel):
    """Base of the layers that hold, and compute with, the live blocks of a kernel only.

    The kernel, seen as a matrix of inputs x outputs, is cut into blocks of `r x c`: `I` input by
    `J` output blocks. Each output block has `k` live ones, each input block is used `J k / I`
    times. The layer has three variables for it: `blocks` `(J, k, *taps, r, c)`, which are trained,
    and `inputs_of` `(J, k)` and `slots_of` `(I, J k / I)`, the two lists of where they stand.

    Subclasses name the Keras layer whose place they take (`namesake`), call `_add_kernel` in
    `build`, and implement `call`.

    Args:
        density: Live fraction, `k / I`. The nearest that is possible is taken, and is then the
            layer's `density`. `None` with `inputs_of`.
        block: `(r, c)`, or one integer for both.
        inputs_of: `(J, k)` integers, the live input blocks of each output block; `None` draws them.
        kernel_initializer: `"exact_orthogonal"`, or an initializer of Keras. `VarianceScaling` and
            its kin take the live inputs and outputs as fans.
        gain: Scale of the exactly orthogonal kernel.
        seed: Of the blocks' places and of the exactly orthogonal values. `None` draws one from
            Python's `random`, as Keras does.
        kernel_regularizer: Of the live kernel, as `(*taps, k r, outputs)`, a column an output.
        kernel_constraint: Of the same.
        **kwargs: As for the namesake.
    """

    namesake: ClassVar[Any]

    def __init__(
        self,
        *,
        density: float | None = None,
        block: int | tuple[int, int] = 32,
        inputs_of: Any = None,
        activation: Any = None,
        kernel_initializer: Any = "exact_orthogonal",
        bias_initializer: Any = "zeros",
        kernel_regularizer: Any = None,
        bias_regularizer: Any = None,
        activity_regularizer: Any = None,
        kernel_constraint: Any = None,
        bias_constraint: Any = None,
        gain: float = 1.0,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            density=density,
            block=block,
            inputs_of=inputs_of,
            kernel_initializer=kernel_initializer,
            kernel_regularizer=kernel_regularizer,
            kernel_constraint=kernel_constraint,
            gain=gain,
            seed=seed,
            activity_regularizer=activity_regularizer,
            **kwargs,
        )
        if getattr(self.dtype_policy, "quantization_mode", None) is not None:
            raise NotPrunableError(
                f"The layer '{self.name}' cannot be quantized: {_QUANTIZATION}. "
                f"Received: dtype={self.dtype_policy.name!r}"
            )
        self.activation = keras.activations.get(activation)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.bias_regularizer = keras.regularizers.get(bias_regularizer)
        self.bias_constraint = keras.constraints.get(bias_constraint)
        self.bias: Any = None

    def _add_kernel(
        self, shape: tuple[int, ...], layout: KernelLayout, bias_shape: tuple[int, ...] | None
    ) -> None:
        """Makes the variables for a kernel of the namesake's shape, and a bias."""
        self._add_blocks(shape, layout)
        if bias_shape is not None:
            self.bias = self.add_weight(
                name="bias",
                shape=bias_shape,
                initializer=self.bias_initializer,
                regularizer=self.bias_regularizer,
                constraint=self.bias_constraint,
            )

    # --- the namesake ----------------------------------------------------------------------------

    def dense_layer(self) -> keras.layers.Layer:
        """The namesake with the same settings, not built; `fill_dense_layer` gives it weights."""
        config = {key: value for key, value in self.get_config().items() if key not in _OWN}
        if self.kernel_initializer == "exact_orthogonal":
            del config["kernel_initializer"]
        return self.namesake.from_config(config)

    def fill_dense_layer(self, plain: keras.layers.Layer) -> None:
        """Sets the weights of a layer from `dense_layer`, which is built if need be."""
        if not plain.built:
            plain.build(self.get_build_config()["input_shape"])
        weights = {variable.name: variable for variable in plain.weights}
        assign(weights["kernel"], self.kernel_value())
        if self.bias is not None:
            assign(weights["bias"], to_numpy(ops.cast(self.bias, "float32")))

    def to_dense_layer(self) -> keras.layers.Layer:
        """A plain Keras layer, built, with equal outputs; its kernel is zero outside the blocks."""
        plain = self.dense_layer()
        self.fill_dense_layer(plain)
        return plain

    # --- Keras -----------------------------------------------------------------------------------

    def quantize(self, *args: Any, **kwargs: Any) -> None:
        """Refused."""
        # Keras' own type: `Model.quantize` warns of such layers, and leaves them as they are.
        raise NotImplementedError(
            f"The layer '{self.name}' cannot be quantized: {_QUANTIZATION}. "
            f"Received: quantize of {type(self).__name__}"
        )

    def enable_lora(self, *args: Any, **kwargs: Any) -> None:
        """Refused."""
        raise NotPrunableError(
            f"LoRA cannot be enabled on '{self.name}': its update of the kernel is dense, and the "
            "layer has no dense kernel. Strip the model first (keras_sparse_ortho.strip), and "
            f"enable it on the plain layer. Received: enable_lora of {type(self).__name__}"
        )

    def get_config(self) -> dict[str, Any]:
        """Everything needed to make the layer anew."""
        config = {
            **super().get_config(),
            "activation": keras.activations.serialize(self.activation),
            "bias_initializer": keras.initializers.serialize(self.bias_initializer),
            "bias_regularizer": keras.regularizers.serialize(self.bias_regularizer),
            "bias_constraint": keras.constraints.serialize(self.bias_constraint),
        }
        regularizer = keras.regularizers.serialize(self.activity_regularizer)
        return {**config, "activity_regularizer": regularizer}


_QUANTIZATION = (
    "Keras' quantization needs a dense kernel. Strip the model first (keras_sparse_ortho.strip), "
    "and quantize the plain one"
)
