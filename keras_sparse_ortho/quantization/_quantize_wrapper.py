"""`QuantizeWrapper`: a layer with rounded inputs and outputs."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np

from keras_sparse_ortho._checks import (
    as_text,
    check_config,
    check_integer,
)
from keras_sparse_ortho._interception import (
    intercepted,
    with_settings,
)
from keras_sparse_ortho._keras_internals import (
    WrapperBuiltByCalls,
    restored,
)
from keras_sparse_ortho._types import Config, Nested, Tensor
from keras_sparse_ortho.kernels import LayerWrapper
from keras_sparse_ortho.quantization._fake_quantize import (
    FakeQuantize,
)

ops = keras.ops
Activation: TypeAlias = Callable[[Tensor], Tensor]
"""A function such as `keras.activations.relu`."""

# LiteRT computes these in one operation with the product before them.
FUSED = (
    keras.activations.linear,
    keras.activations.relu,
    keras.activations.relu6,
)

_SEPARABLE = keras.layers.SeparableConv1D | keras.layers.SeparableConv2D
_MOST_INPUTS = (
    64  # each has variables: a damaged file must not ask for millions
)


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class QuantizeWrapper(LayerWrapper, WrapperBuiltByCalls):
    """Rounds the inputs and the output of a layer by `FakeQuantize`.

        y = q_out(layer(q_in(x)))

    An activation that LiteRT does not fuse with the product before it (all but linear, ReLU and
    ReLU6) gets rounded inputs, too; so does the pointwise half of a separable convolution, which
    LiteRT computes as two operations. The output of an LSTM has a range around zero, as LiteRT's
    operator for LSTMs asks for. `inputs` is 0, or the number of the layer's input tensors, and
    `rounded` has the numbers of those to round, where others were rounded before; `None` is all.
    """

    momentum = 0.99  # its own, also around a BatchNormalization

    def __init__(
        self,
        layer: keras.layers.Layer,
        inputs: int = 0,
        output: bool = True,
        momentum: float = 0.99,
        rounded: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(layer, keras.layers.Layer):
            raise ValueError(
                f"`layer` of a QuantizeWrapper must be a Keras layer. Received: {layer!r:.200}"
            )
        if check_integer("inputs", inputs, 0) > _MOST_INPUTS:
            raise ValueError(
                f"`inputs` must be {_MOST_INPUTS} at most. Received: {as_text(inputs)}"
            )
        # A wrapper inside leaves casts to its layer, whose policy counts.
        policy = innermost(layer).dtype_policy
        settings = {
            "name": layer.name,
            "dtype": policy,
            "trainable": layer.trainable,
            **kwargs,
        }
        super().__init__(layer, **settings)
        self.momentum = momentum

        def rounding(name: str) -> FakeQuantize:
            return FakeQuantize(momentum, name=name, dtype=policy)

        self.input_count = inputs
        self.rounded_numbers = _checked_numbers(rounded, inputs)
        self.of_inputs = [
            rounding(f"input_{number}") for number in self.rounded_numbers
        ]
        self.of_output = None
        if output:
            self.of_output = FakeQuantize(
                momentum,
                symmetric=is_lstm(layer),
                name="output",
                dtype=policy,
            )
        is_apart = activation_of(layer) not in (None, *FUSED)
        self.of_activation = rounding("activation") if is_apart else None
        self.of_between = rounding("between") if is_separable(layer) else None

    def build(self, input_shape: Any = None) -> None:
        with self.building():
            super().build(input_shape)
        for rounding in self._ranges():
            if not rounding.built:
                rounding.build()

    def _ranges(self) -> list[FakeQuantize]:
        """All layers that round."""
        ranges = list(self.of_inputs)
        for rounding in (
            self.of_activation,
            self.of_between,
            self.of_output,
        ):
            if rounding is not None:
                ranges.append(rounding)
        return ranges

    def call(self, *args: Nested, **kwargs: Nested) -> Nested:
        if self.of_inputs:
            args, kwargs = self._rounded_inputs(args, kwargs)
        with self._roundings_inside():
            result = self.layer(*args, **kwargs)
        if self.of_output is None:
            return result
        return self.of_output(result)

    def _rounded_inputs(
        self, args: tuple[Nested, ...], kwargs: dict[str, Nested]
    ) -> tuple[tuple[Nested, ...], dict[str, Nested]]:
        """The arguments of a call with their tensors of floats rounded, each in its range."""
        count = sum(map(_is_float, keras.tree.flatten((args, kwargs))))
        if count != self.input_count:
            raise ValueError(
                f"The layer {self.name!r} has ranges for {self.input_count} input tensors. "
                f"Received: {count}"
            )
        ranges = dict(zip(self.rounded_numbers, self.of_inputs, strict=True))
        numbers = itertools.count()

        def rounded(x: Nested) -> Nested:
            if not _is_float(x):
                return x
            rounding = ranges.get(next(numbers))
            return x if rounding is None else rounding(x)

        arguments: tuple[tuple[Nested, ...], dict[str, Nested]] = (
            keras.tree.map_structure(rounded, (args, kwargs))
        )
        return arguments

    @contextlib.contextmanager
    def _roundings_inside(self) -> Iterator[None]:
        """Inside, the layer rounds what goes into its activation, and into its second half."""
        layer = innermost(self.layer)
        of_activation = self.of_activation
        of_between = self.of_between
        activation = getattr(layer, "activation", None)
        with contextlib.ExitStack() as stack:
            if of_activation is not None and activation is not None:
                activation = _after(of_activation, activation)
                stack.enter_context(with_settings(layer, activation=activation))
            if of_between is not None:
                halves = functools.partial(
                    _in_halves, layer, activation, of_between
                )
                stack.enter_context(
                    intercepted(
                        layer,
                        "call",
                        lambda _, inputs: halves(inputs),
                    )
                )
            yield

    def __getattr__(self, name: str) -> Any:
        """Attributes of the layer inside."""
        # Where torch has submodules.
        inherited = getattr(super(), "__getattr__", None)
        if inherited is not None:
            with contextlib.suppress(AttributeError):
                return inherited(name)
        if (
            name.startswith("_")
            or name == "layer"
            or "momentum" not in vars(self)
        ):
            raise AttributeError(
                f"'{type(self).__name__}' object has no attribute {name!r}"
            )
        return getattr(self.layer, name)

    @property
    def prunable_weights(self) -> list[Any]:
        return getattr(self.layer, "prunable_weights", [])

    def wrapper_config(self) -> Config:
        return {
            **keras.layers.Layer.get_config(self),
            "inputs": self.input_count,
            "output": self.of_output is not None,
            "momentum": self.momentum,
            "rounded": [*self.rounded_numbers],
        }

    # Keras would pass over ranges of a file that the configuration does not have.
    def save_own_variables(self, store: Any) -> None:
        store["ranges"] = np.array(len(self._ranges()))

    def load_own_variables(self, store: Any) -> None:
        count = len(self._ranges())
        saved = int(store["ranges"][()]) if "ranges" in store else count
        if saved != count:
            raise ValueError(
                f"The file has the ranges of {saved} tensors for layer {self.name!r}; its "
                f"configuration must have as many. Received: {count}"
            )

    @classmethod
    def from_config(
        cls, config: Config, custom_objects: Any = None
    ) -> "QuantizeWrapper":
        check_config("QuantizeWrapper", config, "layer")
        layer = config["layer"]
        if not isinstance(layer, keras.layers.Layer):
            layer = restored(layer, custom_objects)
        return cls(**{**config, "layer": layer})


def _checked_numbers(
    rounded: Sequence[int] | None, inputs: int
) -> tuple[int, ...]:
    """The numbers of the input tensors to round, out of so many; `None` is all of them."""
    if rounded is None:
        return tuple(range(inputs))
    is_list = isinstance(rounded, list | tuple)
    numbers = list(rounded) if is_list else []
    are_inputs = all(
        type(number) is int and 0 <= number < inputs for number in numbers
    )
    if not is_list or not are_inputs or numbers != sorted(set(numbers)):
        raise ValueError(
            "`rounded` must have numbers of input tensors, from 0 to `inputs` - 1 and in order. "
            f"Received: rounded={as_text(rounded)}, inputs={inputs}"
        )
    return tuple(numbers)


def innermost(layer: Any) -> Any:
    """The layer inside of all wrappers; another operation itself."""
    while isinstance(layer, LayerWrapper):
        layer = layer.layer
    return layer


def activation_of(layer: keras.layers.Layer) -> Activation | None:
    """The activation that a layer with kernels applies itself, or `None`."""
    inner = innermost(layer)
    if isinstance(inner, keras.layers.Activation) or not inner.weights:
        return None
    return vars(inner).get("activation")


def is_lstm(layer: keras.layers.Layer) -> bool:
    """Whether a layer is an LSTM, one way or `Bidirectional`."""
    inner = innermost(layer)
    if isinstance(inner, keras.layers.Bidirectional):
        inner = innermost(inner.forward_layer)
    return isinstance(inner, keras.layers.LSTM)


def is_separable(layer: keras.layers.Layer) -> bool:
    """Whether a layer is a depthwise and a pointwise convolution, one behind the other."""
    return isinstance(innermost(layer), _SEPARABLE)


def _after(rounding: FakeQuantize, activation: Activation) -> Activation:
    return lambda x: activation(rounding(x))


def _in_halves(
    layer: keras.layers.Layer,
    activation: Activation | None,
    of_between: FakeQuantize,
    inputs: Tensor,
) -> Tensor:
    """A separable convolution that rounds the tensor between its two halves.

    Args:
        layer: The convolution.
        activation: callable. Its activation.
        of_between: `FakeQuantize`. The rounding of that tensor.
        inputs: Tensor. Images or sequences.
    """
    x = ops.depthwise_conv(
        inputs,
        layer.depthwise_kernel,
        layer.strides,
        layer.padding,
        data_format=layer.data_format,
        dilation_rate=layer.dilation_rate,
    )
    x = ops.conv(
        of_between(x),
        layer.pointwise_kernel,
        data_format=layer.data_format,
    )
    if layer.use_bias:
        singles = (1,) * layer.rank
        shape = (1, *singles, layer.filters)
        if layer.data_format == "channels_first":
            shape = (1, layer.filters, *singles)
        x = ops.add(x, ops.reshape(layer.bias, shape))
    if activation is None:
        return x
    return activation(x)


def _is_float(x: Nested) -> bool:
    """Whether an argument is a tensor of floats."""
    if not hasattr(x, "dtype"):
        return False
    dtype = keras.backend.standardize_dtype(x.dtype)
    return bool(keras.backend.is_float_dtype(dtype))
