"""The base of all rules about channels, and what rules have in common."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import keras
import numpy as np

from keras_sparse_ortho._values import to_numpy

Mask = np.ndarray
"""One bool for each channel."""
Constants = np.ndarray
"""One float64 for each channel of a tensor: its value where that is the same for every input, at
every position, and NaN where it varies."""
Shape = tuple[int | None, ...]

_TINY = 1e-9  # of a kernel's largest entry: weight decay leaves rows of 1e-37


class ChannelTensor(NamedTuple):
    """A tensor of a graph, with the axis of its channels."""

    shape: Shape
    axis: int

    @property
    def size(self) -> int:
        """Number of channels; 0 for a tensor without channels, or where it is not known."""
        if len(self.shape) < 2:
            return 0
        return int(self.shape[self.axis] or 0)


@dataclasses.dataclass(frozen=True)
class ChannelCall:
    """A call of a layer or an operation in a graph, for which a rule is made.

    Args:
        layer: Layer or Operation.
        inputs: tuple of ChannelTensor. All input tensors, in order.
        output_shapes: tuple of shapes.
        args: tuple. Positional arguments, tensors included.
        kwargs: dict. Other arguments.
        exact: bool. Whether outputs must stay equal when channels go.
    """

    layer: Any
    inputs: tuple[ChannelTensor, ...]
    output_shapes: tuple[Shape, ...]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    exact: bool = True

    @property
    def output_shape(self) -> Shape:
        return self.output_shapes[0]


class SmallerLayer(NamedTuple):
    """A layer without the channels that go: its configuration, and its weights in their order."""

    config: dict[str, Any]
    weights: list[np.ndarray]


class SmallerOperation(NamedTuple):
    """A function that takes the place and the arguments of an operation."""

    call: Callable[..., Any]


class Tracer(Protocol):
    """Follows the channels of a model, each with a number, to find which go together."""

    def make(
        self,
        name: str,
        count: int,
    ) -> np.ndarray:
        """Numbers of new channels, which the layer of this name makes."""

    def join(self, columns: np.ndarray) -> None:
        """Notes that the channels in each column go together."""

    def read(
        self,
        variable: Any,
        channels: np.ndarray,
        rows: np.ndarray,
    ) -> None:
        """Notes that a kernel reads channels: `rows` are its rows, a line for each channel."""

    def hold(
        self,
        channels: np.ndarray,
        layer: Any,
        reason: str,
    ) -> None:
        """Notes that channels cannot go."""


class Scales(Protocol):
    """Gives numbers to the channels of a model, to find which can have a factor."""

    def make(self, count: int) -> np.ndarray:
        """Numbers of new channels, each with a factor of its own."""

    def join(self, columns: np.ndarray) -> None:
        """Notes that the channels in each column have one factor."""

    def hold(self, channels: np.ndarray) -> None:
        """Notes that channels have the factor 1."""


class ChannelRule:
    """The rule for the channels of a layer: override all methods, but for those about factors.

    Masks and constants are those of all inputs, one after the other, and of all outputs.

    Args:
        layer: Layer or Operation.
        axis: int. The axis of the channels in the outputs.
    """

    has_kernel = False
    """Whether the layer makes channels out of a kernel, and may so have dead ones."""

    shrinks_inside = False
    """Whether the layer may shrink where all its inputs and outputs stay, as heads do."""

    def __init__(
        self,
        layer: Any,
        axis: int = -1,
    ) -> None:
        self.layer = layer
        self.axis = axis

    def constants(self, inputs: Constants) -> Constants:
        """The constant channels of the outputs, given those of the inputs."""
        raise NotImplementedError

    def needed(
        self,
        constants: Constants,
        read: Mask,
        live: Mask,
    ) -> tuple[Mask, Mask]:
        """Which channels of the inputs and outputs must be there.

        Args:
            constants: Constants of the inputs.
            read: bool array. Input channels that are needed already.
            live: bool array. Output channels that are needed.
        """
        raise NotImplementedError

    def smaller(
        self, constants: Constants, read: Mask, live: Mask
    ) -> SmallerLayer | SmallerOperation | None:
        """The layer between tensors of these channels, or `None` if it need not change."""
        raise NotImplementedError

    def dead_inside(self) -> dict[str, int]:
        """How many channels inside the layer are dead and stay, by the path of their kernel."""
        return {}

    def trace(
        self,
        tracer: Tracer,
        inputs: np.ndarray,
    ) -> np.ndarray:
        """Tells the tracer what the layer does; returns the numbers of the output channels."""
        raise NotImplementedError

    def limit(self) -> float | None:
        """The largest output up to which positive factors pass: f(s x) = s f(x); None: nowhere."""
        return None

    def scale(
        self,
        scales: Scales,
        inputs: np.ndarray,
        outputs: int,
    ) -> np.ndarray:
        """Tells which channels can have a factor; returns the numbers of the output channels.

        Args:
            scales: Scales.
            inputs: int array. The numbers of the input channels.
            outputs: int. The number of output channels. All are held if the `limit` is `None`.
        """
        scales.hold(inputs)
        return scales.make(outputs)

    def rescaled(
        self,
        inputs: np.ndarray,
        outputs: np.ndarray,
    ) -> list[np.ndarray]:
        """The weights of the layer where all channels have these factors, in their order."""
        return []

    def inside(self, inputs: keras.KerasTensor) -> keras.KerasTensor | None:
        """The tensor between two kernels of the layer, channels last; None where there is none."""
        return None

    def rescaled_inside(self, factors: np.ndarray) -> list[np.ndarray]:
        """The layer's weights where channels of the tensor inside have these factors."""
        raise NotImplementedError


MakeRule = Callable[[ChannelCall], "ChannelRule | str"]
"""Makes the rule for a call, or returns the reason why there is none."""


def for_single_inputs(make: MakeRule) -> MakeRule:
    """Makes rules where one tensor goes in, whose channels are where the layer has them."""

    @functools.wraps(make)
    def checked(call: ChannelCall) -> ChannelRule | str:
        if len(call.inputs) != 1:
            return f"it is called on {len(call.inputs)} tensors"
        [tensor] = call.inputs
        if not tensor.size:
            return "the number of its channels is not known"
        if not reads_axis(call.layer, tensor):
            return (
                f"it does not read axis {tensor.axis}, where the channels are"
            )
        return make(call)

    return checked


def reads_axis(layer: Any, tensor: ChannelTensor) -> bool:
    """Whether the channels of a tensor are where a layer's `data_format` has them."""
    data_format = getattr(layer, "data_format", None)
    if data_format is None:
        return True
    return tensor.axis == (
        1 if data_format == "channels_first" else len(tensor.shape) - 1
    )


def smaller_layer(
    layer: Any,
    settings: Mapping[str, Any],
    weights: Sequence[np.ndarray | None],
) -> SmallerLayer:
    """A layer with some settings and weights changed, and no initializers of the old shape."""
    config = layer.get_config()
    for name, initializer in _INITIALIZERS.items():
        if f"{name}_initializer" in config:
            config[f"{name}_initializer"] = initializer
    config.update(settings)
    arrays = [
        np.asarray(weight, np.float32)
        for weight in weights
        if weight is not None
    ]
    return SmallerLayer(config, arrays)


_INITIALIZERS = {
    "kernel": "glorot_uniform",
    "depthwise": "glorot_uniform",
    "pointwise": "glorot_uniform",
    "recurrent": "glorot_uniform",
    "embeddings": "uniform",
    "bias": "zeros",
    "alpha": "zeros",
}


def value_of(variable: Any) -> np.ndarray:
    return np.asarray(to_numpy(variable), np.float64)


def without_tiny(kernel: np.ndarray) -> np.ndarray:
    """A kernel with 0 for entries that are 0 but for rounding."""
    size = np.abs(kernel)
    return np.where(size < _TINY * size.max(initial=0.0), 0.0, kernel)


def bias_of(layer: keras.layers.Layer, count: int) -> np.ndarray:
    """The bias of a layer, 0 where it has none."""
    if has_bias(layer):
        return value_of(layer.bias)
    return np.zeros(count)


def has_bias(layer: keras.layers.Layer) -> bool:
    """Whether a layer adds a bias."""
    return getattr(layer, "bias", None) is not None


def activation_of(
    layer: keras.layers.Layer,
) -> Callable[..., Any] | None:
    """The activation that a layer applies itself, or `None`."""
    return getattr(layer, "activation", None)


def size_name(layer: keras.layers.Layer) -> str:
    """The name of the setting that says how many channels a layer makes."""
    if "units" in layer.get_config():
        return "units"
    return "filters"


def activated(function: Any, constants: np.ndarray) -> np.ndarray:
    """The constants after an activation, as the backend computes it in float32."""
    if function is None:
        return constants
    tensor = keras.ops.convert_to_tensor(
        np.nan_to_num(constants)[None], dtype="float32"
    )
    results = to_numpy(function(tensor))[0].astype(np.float64)
    return np.where(np.isnan(constants), np.nan, results)


def limit_of(
    function: Callable[..., object] | keras.Operation | None,
) -> float | None:
    """The `limit` of an activation, as a function, a layer or an operation of Keras."""
    if function is None:
        return math.inf
    if isinstance(function, keras.layers.Activation):
        return limit_of(function.activation)
    if isinstance(function, keras.Operation):
        name = type(function).__name__
        if name != "ReLU":
            return _LIMITS.get(name)
        if function.threshold:
            return None
        if function.max_value is None:
            return math.inf
        return float(function.max_value)
    for name, limit in _LIMITS.items():
        if function is getattr(keras.activations, name, ""):
            return limit
    return None


_LIMITS = {
    "linear": math.inf,
    "relu": math.inf,
    "relu6": 6.0,
    "leaky_relu": math.inf,
    "Relu": math.inf,
    "Relu6": 6.0,
    "LeakyRelu": math.inf,
    "LeakyReLU": math.inf,
}


def has_borders(layer: keras.layers.Layer) -> bool:
    """Whether a convolution adds zeros at the border, where a constant ends."""
    size = getattr(layer, "kernel_size", ())
    return getattr(layer, "padding", "valid") != "valid" and math.prod(size) > 1


def count_of(mask: Mask) -> int:
    return int(np.count_nonzero(mask))
